"""Begin, commit and undo of a save, in one process for all ranks. See [Note: One commit].

[Note: Asked again] Saves of all formats are committed in the same way:

1. The folder is marked. Files on their way to a final name are removed before the folder's state is read.
2. Files are written and synced, those too that the last step will rename.
3. Check again: does this save hold the lock, and do all files have the sizes that were written?
4. The steps after which it counts. One of them gives a file that is this save's alone its name. A save that has
   taken the folder over has removed that file in 1. The step fails then, and the other's files stay. A save that
   takes it over after the step finds this save committed.
5. Check again: is this save committed, and no other in its place?
6. Only then, and under this save's own mark, the older one is removed.

If one of these checks fails, nothing of the older save has been removed, and this save's changes to older files are
reverted as far as possible. A StorageError has the finding.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

from shardwise.errors import FormatError, StorageError
from shardwise.execution.locked_folder import LockedFolder
from shardwise.execution.rename_journal import finish, remove_empty, remove_unnamed, work_folder
from shardwise.execution.saving_lock import HeldLock, LockHolder, take_lock
from shardwise.formats.peft_adapter import ADAPTER_CONFIG, is_training_file, named_training
from shardwise.formats.safetensors_files import read_header
from shardwise.planning import commit_plan, fingerprints, save_plan
from shardwise.storage.contract import StorageWriter
from shardwise.storage.folders import FoldersWriter, remove_folder
from shardwise.storage.names import shown
from shardwise.storage.reading import open_storage

_BLOCK_BYTES = 8 << 20

# Any save


def commit_files(
    writer: StorageWriter, held: HeldLock, commit: commit_plan.Commit, beside: Mapping[str, bytes]
) -> list[str]:
    """Commit a written and synced save and remove the older one. Return the removed names.

    Args:
        writer: of the folder in which the files are.
        held: the mark, of this folder or of one around it.
        commit: the checks and changes to carry out.
        beside: small files that are put in place just before the commit, and reverted if it fails.

    Raises:
        StorageError: before the commit, the lock or the files were not as they had been left, or another save was
            committed instead. See [Note: Asked again].
    """
    for name, content in commit.ready.items():
        make_file(writer, name, content)
    held.require()
    _require_there(writer, {**commit.files, **{name: len(content) for name, content in commit.ready.items()}})
    with _put_back_if_in_vain(writer, held, commit, beside):
        for name, content in beside.items():
            if writer.read(name) != content:
                writer.replace(name, content)
        if beside:
            writer.sync_names()
            held.require()
        for step in commit.steps:
            if isinstance(step, commit_plan.Remove) or step in commit.aside:
                held.require()  # these concern the files of others, which nothing of this save's fences
            if isinstance(step, commit_plan.Remove):
                _require_there(writer, commit.then)
            _take(writer, step)
        if not counts(writer, commit):
            raise StorageError(
                f"{writer.root}: another save has taken this one's place while it was committed; nothing of the "
                "older one has been removed. Save to a directory of its own"
            )
    if held.whose() is not LockHolder.OURS:
        return []  # it counts. Whoever has the folder by now takes its place in turn, and removes what is older
    aside = {step.file: step.name for step in commit.aside}
    for name in {**dict.fromkeys(commit.obsolete), **aside}:
        writer.remove(aside.get(name, name))
    return list(commit.obsolete)


def publish(
    writer: StorageWriter,
    held: HeldLock,
    name: str,
    content: bytes,
    files: Mapping[str, int],
    beside: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Let files that are written and synced count by one small file, which is put in its place last.

    ``files`` have their names already. ``beside`` are small files that belong to them. Raises as
    :func:`commit_files` does.
    """
    ready = commit_plan.on_its_way(name, held.save_id)
    commit = commit_plan.Commit(
        files,
        steps=(commit_plan.Publish(ready, name),),
        then=files,
        ready={ready: content},
        says={**beside, name: content},
        without=frozenset({ready}),
    )
    commit_files(writer, held, commit, beside)


def counts(writer: StorageWriter, commit: commit_plan.Commit) -> bool:
    """Return whether it is this save that counts, whole."""
    sizes = writer.sizes()
    return (
        all(sizes.get(name) == nbytes for name, nbytes in commit.then.items())
        and not commit.without & sizes.keys()
        and all(
            writer.read(name) == content
            for name, content in commit.says.items()
            if name in sizes or name not in commit.carried_out
        )
    )


def make_file(writer: StorageWriter, name: str, content: bytes) -> None:
    """Write and sync a small file that nobody has a use for but this save."""
    if not writer.policy.has_random_writes:
        writer.replace(name, content)
        return
    writer.create(name, len(content))
    writer.write(name, 0, [memoryview(content)])
    writer.sync(name)


def _require_there(writer: StorageWriter, files: Mapping[str, int]) -> None:
    sizes = writer.sizes()
    for name, nbytes in files.items():
        if sizes.get(name) != nbytes:
            found = "is gone" if name not in sizes else f"has {sizes[name]} bytes"
            raise StorageError(
                f"{shown(name)} in {writer.root}: was written with {nbytes} bytes, and now it {found}; another "
                "save has been here, or ranks do not see one folder: save to a directory of its own that all share"
            )


def _take(writer: StorageWriter, step: commit_plan.CommitStep) -> None:
    match step:
        case commit_plan.Rename(file, name) | commit_plan.Publish(file, name):
            try:
                writer.rename(file, name) if isinstance(step, commit_plan.Rename) else writer.publish(file, name)
            except StorageError as error:
                if file in writer.list():
                    raise
                raise StorageError(
                    f"{shown(file)} in {writer.root}: another save has taken this folder over, and has removed "
                    f"what was to be {shown(name)}. What is theirs stays. Save to a directory of its own"
                ) from error
        case commit_plan.Remove(file):
            writer.remove(file)
            writer.sync_names()


@contextmanager
def _put_back_if_in_vain(
    writer: StorageWriter, held: HeldLock, commit: commit_plan.Commit, beside: Mapping[str, bytes]
) -> Iterator[None]:
    """If the block fails and this save is not committed, restore the files that it set aside or replaced."""
    before = {name: writer.read(name) for name in {**beside, **commit.says}}
    try:
        yield
    except BaseException:
        with contextlib.suppress(StorageError):
            if not counts(writer, commit):
                _put_back(writer, held, commit, beside, before)
        raise


def _put_back(
    writer: StorageWriter,
    held: HeldLock,
    commit: commit_plan.Commit,
    beside: Mapping[str, bytes],
    before: Mapping[str, bytes | None],
) -> None:
    """Small files are put back under this save's own mark only: else they may be another's by now."""
    there = writer.list()
    asides = [step for step in commit.aside if step.name in there]
    if any(step.file in there for step in asides):
        return  # somebody else's weights have the name
    if any(writer.read(name) not in (content, before[name]) for name, content in commit.says.items()):
        return  # somebody else's index, or config
    if held.whose() is LockHolder.OURS:
        for name, content in {**beside, **commit.says}.items():
            old = before[name]
            if old == content or writer.read(name) != content:
                continue
            if old is None:
                writer.remove(name)
                writer.sync_names()
            else:
                writer.replace(name, old)
    misread = any(writer.read(name) != content for name, content in before.items() if name in commit.says)
    for step in asides:
        if not (misread and step.file in commit.then):  # else they would lie beside a config that is not theirs
            writer.rename(step.name, step.file)


# Files of others


def write_again(writer: StorageWriter, file: str, save_id: str) -> None:
    """Put a synced copy in the place of a file that others wrote into a local folder. Memory: a block.

    Raises:
        StorageError: it cannot be read or written, or changes meanwhile.
    """
    folder, slash, name = file.rpartition("/")
    new = f"{folder}{slash}{commit_plan.on_its_way(name, save_id)}"
    copy_in(writer, os.path.join(writer.root, file), new)
    writer.rename(new, file)


def copy_in(writer: StorageWriter, source: str, file: str) -> int:
    """Write a local file into a folder under this name, and sync it. Return its bytes. Memory: a block.

    Raises:
        StorageError: it cannot be read or written, or changes meanwhile.
    """
    try:
        with open(source, "rb") as opened:
            nbytes = os.fstat(opened.fileno()).st_size
            writer.create(file, nbytes)
            position = 0
            while block := opened.read(_BLOCK_BYTES):
                writer.write(file, position, [memoryview(block)])
                position += len(block)
    except OSError as error:
        raise StorageError(f"{shown(source)}: reading it again failed, {error.strerror or error}") from error
    if position != nbytes:
        raise StorageError(f"{shown(source)}: was truncated while it was saved. Save again")
    writer.sync(file)
    return nbytes


# Saves in the hub's layout


@dataclass(frozen=True, slots=True)
class CommitState:
    """A save that holds the lock of its folder, the folder's state before it, and its records."""

    held: HeldLock
    standing: commit_plan.FolderState
    recorded: Sequence[fingerprints.RecordedSave]


def begin_save(writer: StorageWriter, plan: save_plan.SavePlan) -> CommitState:
    """Lock the folder, read its state, and remove the remains of saves that were never committed.

    Raises:
        StorageError: another save is writing there, or the folder cannot be written to.
    """
    held = take_lock(writer, plan.save_id)
    try:
        nothing: frozenset[str] = frozenset()
        remove_unnamed(
            writer, commit_plan.obsolete(plan, commit_plan.FolderState(frozenset(writer.list()), nothing))
        )
        standing = commit_plan.look_at_folder(writer.list(), writer.read(plan.index_file), plan.single_file)
        standing = replace(standing, named=standing.named | _trainings_named(writer, plan))
        recorded = fingerprints.from_bytes(writer.read(fingerprints.file_beside(plan.stem)))
        left = [
            name
            for name in commit_plan.obsolete(plan, commit_plan.FolderState(standing.files, nothing))
            if name != plan.index_file
        ]
        if standing.weights:
            writer.sync_names()  # what counts must last before weights that were set aside for it go
        kept = standing.weights | standing.named  # by whoever had the folder before, if it goes on after all
        for name in left:
            is_needed = (
                name.endswith(commit_plan.OLDER) and not standing.weights
            )  # the only weights until something counts
            if name not in kept and not is_needed:
                writer.remove(name)  # its space may be needed
    except BaseException:
        with contextlib.suppress(StorageError):
            held.release()
        raise
    return CommitState(held, standing, recorded)


def undo_save(writer: StorageWriter, plan: save_plan.SavePlan, begun: CommitState) -> None:
    """Remove the files of this save unless it is committed. The older save is unchanged."""
    with contextlib.suppress(StorageError):
        names = {name for name in writer.list() if commit_plan.is_on_its_way(name) and plan.save_id in name}
        if plan.index is None or writer.read(plan.index_file) != plan.index:
            names |= {file.name for file in plan.files} - _trainings_named(writer, plan)
        for name in names:
            writer.remove(name)
    with contextlib.suppress(StorageError):
        begun.held.release()
        writer.sync_names()


def _trainings_named(writer: StorageWriter, plan: save_plan.SavePlan) -> frozenset[str]:
    """Return the training files of the adapter that is valid or set aside, or all of them if that is unknown."""
    files = writer.list()
    there = frozenset(name for name in files if is_training_file(name))
    if plan.stem != save_plan.ADAPTER or not there:
        return frozenset()
    aside = [name for name in files if name.startswith(plan.stem) and name.endswith(commit_plan.OLDER)]
    try:
        with open_storage(writer.root).reader as reader:
            adapters = [plan.single_file] if plan.single_file in files else aside
            return there & {named_training(read_header(reader, name)) for name in adapters}
    except (FormatError, StorageError):
        return there


def commit_save(
    writer: StorageWriter,
    plan: save_plan.SavePlan,
    begun: CommitState,
    small_files: Mapping[str, bytes],
    sums: Mapping[str, int],
) -> list[str]:
    """Commit a written and synced save in one step, and remove the older one. Return the removed names.

    Args:
        writer: of the folder.
        plan: of the save.
        begun: the lock, and the folder's state before the save.
        small_files: small files that are saved with the weights, by name.
        sums: the fingerprint of every tensor, by key.

    Raises:
        StorageError: as of :func:`commit_files`.
    """
    sizes = {name: file.nbytes for name, file in zip(plan.names, plan.files, strict=True)}
    digests = {name: fingerprints.digest(content) for name, content in small_files.items()}
    headers = {name: fingerprints.digest(file.header) for name, file in zip(plan.names, plan.files, strict=True)}
    recorded = fingerprints.RecordedSave(sizes, sums, digests, headers)
    both = fingerprints.to_bytes([*begun.recorded, recorded])
    fingerprints_file = fingerprints.file_beside(plan.stem)
    bound = _bound(writer, plan, small_files)
    free = {name: content for name, content in small_files.items() if name not in bound}
    commit = commit_plan.commit_of(plan, begun.standing, can_rename=writer.policy.can_rename, bound=bound)
    removed = commit_files(writer, begun.held, commit, {**free, fingerprints_file: both})
    if begun.held.whose() is LockHolder.OURS:
        writer.replace(fingerprints_file, fingerprints.to_bytes([recorded]))
    begun.held.release()
    writer.sync_names()
    return removed


def _bound(writer: StorageWriter, plan: save_plan.SavePlan, small_files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the small files that would change the meaning of the older weights.

    An adapter's config that differs.
    """
    content = small_files.get(ADAPTER_CONFIG)
    if plan.stem != save_plan.ADAPTER or content is None or writer.read(ADAPTER_CONFIG) == content:
        return {}
    return {ADAPTER_CONFIG: content}


def commit_written(
    marked: LockedFolder,
    written: commit_plan.WrittenFiles,
    older: Sequence[str],
    beside: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Commit the files of a save, rename them, and remove the older ones. Then release the lock.

    ``beside`` are small files that are put in place just before.

    Raises:
        StorageError: as of :func:`~shardwise.execution.committing.commit_files`.
    """
    root = marked.writer.root
    renames = commit_plan.Renames(marked.save_id, tuple(written.named), tuple(older))
    folders = {name.rpartition("/")[0] for name in (*written.named, *written.beside, *older)} - {""}
    with FoldersWriter(root, folders) as writer:
        commit_files(writer, marked.held, renames.commit(written), beside)
    if (
        marked.held.whose() is not LockHolder.ANOTHERS
    ):  # who has the folder by now has found the list, and finishes it
        finish(root, renames.file, marked.held)
    remove_empty(root, folders)
    remove_folder(work_folder(root, marked.save_id))
    marked.release()


# Data of a DCP folder
