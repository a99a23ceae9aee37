"""Beginning a save, letting it count, and giving it up: what one process does for all; see [Note: One commit]."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import StorageError
from shardwise.execution.saving_lock import release_lock, require_lock, take_lock
from shardwise.formats.peft_adapter import ADAPTER_CONFIG
from shardwise.planning import fingerprints
from shardwise.planning.commit import (
    OLDER,
    Remove,
    Rename,
    Replace,
    Standing,
    Step,
    commit_steps,
    look_at_folder,
    obsolete,
    set_aside,
)
from shardwise.planning.save_plan import ADAPTER, SavePlan
from shardwise.storage import StorageWriter


@dataclass(frozen=True, slots=True)
class Before:
    """What was in the folder: the weights that count, and what saves have recorded of theirs."""

    standing: Standing
    recorded: Sequence[fingerprints.Recorded]


def begin_save(writer: StorageWriter, plan: SavePlan) -> Before:
    """Mark the folder, look at what is there, and remove what saves left behind that were never committed.

    Raises:
        StorageError: another save is writing there, or the folder cannot be written to.
    """
    take_lock(writer, plan.token)
    standing = look_at_folder(writer.list(), writer.read(plan.index_file), plan.single_file)
    recorded = fingerprints.from_bytes(writer.read(fingerprints.file_beside(plan.stem)))
    for name in obsolete(plan, Standing(standing.files, frozenset())):
        if name != plan.index_file and name not in standing.weights and not name.endswith(OLDER):
            writer.remove(name)  # its space may be needed; older weights may be the only ones until the commit
    return Before(standing, recorded)


def undo_save(writer: StorageWriter, plan: SavePlan) -> None:
    """Remove what was made, save for what counts by now; the older save is as it was."""
    with contextlib.suppress(StorageError):
        if plan.index is None or writer.read(plan.index_file) != plan.index:
            for file in plan.files:
                writer.remove(file.name)
    with contextlib.suppress(StorageError):
        release_lock(writer, plan.token)
        writer.sync_names()


def commit_save(
    writer: StorageWriter,
    plan: SavePlan,
    before: Before,
    small_files: Mapping[str, bytes],
    sums: Mapping[str, int],
) -> list[str]:
    """Make a written and synced save count, in one step, and remove the older one; the names of what was removed.

    Args:
        writer: of the folder.
        plan: of the save.
        before: what was there when it began.
        small_files: what lies beside the weights, by name.
        sums: the fingerprint of every tensor, by key.
    """
    require_lock(writer, plan.token)
    sizes = {name: file.nbytes for name, file in zip(plan.names, plan.files, strict=True)}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in small_files.items()}
    recorded = fingerprints.Recorded(sizes, sums, digests)
    both = fingerprints.to_bytes([*before.recorded, recorded])
    fingerprints_file = fingerprints.file_beside(plan.stem)
    bound = _bound(writer, plan, small_files)
    free = {name: content for name, content in small_files.items() if name not in bound}
    _put_beside(writer, {**free, fingerprints_file: both})
    steps = commit_steps(plan, before.standing, bound)
    aside = Rename(plan.single_file, set_aside(plan))
    older = {name: writer.read(name) for name in bound}
    try:
        for step in steps:
            _take(writer, step)
    except BaseException:
        if aside in steps:
            with contextlib.suppress(StorageError):
                _put_back(writer, aside, older)
        raise
    if aside in steps:
        writer.remove(aside.name)
    removed = obsolete(plan, before.standing)
    for name in removed:
        writer.remove(name)
    writer.replace(fingerprints_file, fingerprints.to_bytes([recorded]))
    release_lock(writer, plan.token)
    writer.sync_names()
    return removed


def _bound(writer: StorageWriter, plan: SavePlan, small_files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Small files that would have the older weights read as what they are not: an adapter's config that differs."""
    content = small_files.get(ADAPTER_CONFIG)
    if plan.stem != ADAPTER or content is None or writer.read(ADAPTER_CONFIG) == content:
        return {}
    return {ADAPTER_CONFIG: content}


def _take(writer: StorageWriter, step: Step) -> None:
    match step:
        case Rename(file, name):
            writer.rename(file, name)
        case Replace(file, content):
            writer.replace(file, content)
        case Remove(file):
            writer.remove(file)
            writer.sync_names()


def _put_back(writer: StorageWriter, aside: Rename, older: Mapping[str, bytes | None]) -> None:
    """Undo a commit that failed after the older weights were set aside, if they were."""
    if aside.name not in writer.list():
        return
    writer.remove(aside.file)
    writer.sync_names()
    for name, content in older.items():
        if content is None:
            writer.remove(name)
        else:
            writer.replace(name, content)
    writer.rename(aside.name, aside.file)


def _put_beside(writer: StorageWriter, files: Mapping[str, bytes]) -> None:
    """Put small files beside the older save's weights; when one cannot be, what was there is put back."""
    before = {name: writer.read(name) for name in files}
    try:
        for name, content in files.items():
            if before[name] != content:
                writer.replace(name, content)
        writer.sync_names()
    except BaseException:
        with contextlib.suppress(StorageError):
            for name, old in before.items():
                if old is None:
                    writer.remove(name)
                elif writer.read(name) != old:
                    writer.replace(name, old)
        raise
