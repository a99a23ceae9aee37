"""Begin, commit and undo of a save, in one process for all ranks. See [Note: One commit].

[Note: Checked twice] Saves of all formats are committed in the same way:

1. The folder is locked. Files with temporary names are removed before the folder's state is read.
2. Files are written and synced, also those that the last step will rename.
3. Check again: does this save hold the lock, and do all files have the sizes that were written?
4. The steps that commit. One of them renames a file that belongs to this save only. A save that has taken the
   folder over has removed that file in 1. The step fails then, and the other's files stay. A save that takes the
   folder over after the step finds this save committed.
5. Check again: is this save committed, and no other in its place?
6. Only then, and while the lock is held, the older save is removed.

If one of these checks fails, nothing of the older save has been removed, and this save's changes to older files are
reverted as far as possible. The StorageError names the finding.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

from shardwise.core.errors import FormatError, StorageError
from shardwise.files.folders import remove_folder
from shardwise.files.local_reader import open_storage
from shardwise.files.local_writer import LocalWriter
from shardwise.files.peft_adapter import ADAPTER_CONFIG, get_training_file, is_training_file
from shardwise.files.safetensors_files import read_header
from shardwise.files.storage import StorageWriter
from shardwise.files.urls import shown
from shardwise.saving import commit_plan
from shardwise.saving.commit_plan import OLDER, FolderState, Rename, Renames, WrittenFiles
from shardwise.saving.locked_folder import LockedFolder
from shardwise.saving.plan import ADAPTER, SavePlan
from shardwise.saving.rename_journal import finish, remove_empty, remove_pending, work_folder
from shardwise.transfer import fingerprints

_BLOCK_BYTES = 8 << 20

# Any save


def commit_files(
    writer: StorageWriter, locked: LockedFolder, commit: commit_plan.Commit, small_files: Mapping[str, bytes]
) -> list[str]:
    """Commit a written and synced save and remove the older one. Return the removed names.

    Args:
        writer: of the folder that contains the files.
        locked: this folder, or its parent.
        commit: the checks and changes to carry out.
        small_files: these are replaced just before the commit, and restored if it fails.

    Raises:
        StorageError: before the commit, the lock was lost or the files had changed, or another save was committed
            instead. See [Note: Checked twice].
    """
    for name, content in commit.ready.items():
        make_file(writer, name, content)
    locked.require()
    _require_files(writer, {**commit.files, **{name: len(content) for name, content in commit.ready.items()}})
    with _restoring(writer, locked, commit, small_files):
        for name, content in small_files.items():
            if writer.read(name) != content:
                writer.replace(name, content)
        if small_files:
            writer.sync_names()
            locked.require()
        for step in commit.steps:
            if step in commit.aside:
                locked.require()  # the step renames another save's file, so that save's clean-up does not fence it
            _execute(writer, step)
        if not is_committed(writer, commit):
            raise StorageError(
                f"{writer.root}: another save has replaced this one while it was committed; nothing of the older "
                "one has been removed. Save to a directory of its own"
            )
    if not locked.is_held():
        return []  # committed. The save that holds the lock now replaces this one, and removes what is older
    aside = {step.file: step.name for step in commit.aside}
    for name in {**dict.fromkeys(commit.obsolete), **aside}:
        writer.remove(aside.get(name, name))
    return list(commit.obsolete)


def publish(
    writer: StorageWriter,
    locked: LockedFolder,
    name: str,
    content: bytes,
    files: Mapping[str, int],
    small_files: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Commit files that are written and synced under their final names by one small file, which is renamed last.

    ``small_files`` belong to them. Raises as :func:`commit_files` does.
    """
    ready = commit_plan.pending_name(name, locked.save_id)
    commit = commit_plan.Commit(
        files,
        steps=(Rename(ready, name),),
        final_files=files,
        ready={ready: content},
        final_contents={**small_files, name: content},
        absent_files=frozenset({ready}),
    )
    commit_files(writer, locked, commit, small_files)


def is_committed(writer: StorageWriter, commit: commit_plan.Commit) -> bool:
    """Return True if this save is the committed one, and complete."""
    sizes = writer.sizes()
    return (
        all(sizes.get(name) == nbytes for name, nbytes in commit.final_files.items())
        and not commit.absent_files & sizes.keys()
        and all(
            writer.read(name) == content
            for name, content in commit.final_contents.items()
            if name in sizes or name not in commit.journals
        )
    )


def make_file(writer: StorageWriter, name: str, content: bytes) -> None:
    """Write and sync a small file of this save only."""
    writer.create(name, len(content))
    writer.write(name, 0, [memoryview(content)])
    writer.sync(name)


def _require_files(writer: StorageWriter, files: Mapping[str, int]) -> None:
    sizes = writer.sizes()
    for name, nbytes in files.items():
        if sizes.get(name) != nbytes:
            found = "is gone" if name not in sizes else f"has {sizes[name]} bytes"
            raise StorageError(
                f"{shown(name)} in {writer.root}: was written with {nbytes} bytes, and now it {found}. Another "
                "save has changed it, or ranks do not see one folder. Save to a directory of its own that all share"
            )


def _execute(writer: StorageWriter, step: Rename) -> None:
    try:
        writer.rename(step.file, step.name)
    except StorageError as error:
        if step.file in writer.list():
            raise
        raise StorageError(
            f"{shown(step.file)} in {writer.root}: another save has taken this folder over, and has removed the "
            f"file that was to become {shown(step.name)}. Its files stay. Save to a directory of its own"
        ) from error


@contextmanager
def _restoring(
    writer: StorageWriter, locked: LockedFolder, commit: commit_plan.Commit, small_files: Mapping[str, bytes]
) -> Iterator[None]:
    """If the block fails and this save is not committed, restore the files that it set aside or replaced."""
    before = {name: writer.read(name) for name in {**small_files, **commit.final_contents}}
    try:
        yield
    except BaseException:
        with contextlib.suppress(StorageError):
            if not is_committed(writer, commit):
                _restore(writer, locked, commit, small_files, before)
        raise


def _restore(
    writer: StorageWriter,
    locked: LockedFolder,
    commit: commit_plan.Commit,
    small_files: Mapping[str, bytes],
    before: Mapping[str, bytes | None],
) -> None:
    """Restore small files only while the lock is held: otherwise they may belong to another save."""
    there = writer.list()
    asides = [step for step in commit.aside if step.name in there]
    if any(step.file in there for step in asides):
        return  # another save's weights have the name
    if any(writer.read(name) not in (content, before[name]) for name, content in commit.final_contents.items()):
        return  # another save's index, or config
    if locked.is_held():
        for name, content in {**small_files, **commit.final_contents}.items():
            old = before[name]
            if old == content or writer.read(name) != content:
                continue
            if old is None:
                writer.remove(name)
                writer.sync_names()
            else:
                writer.replace(name, old)
    is_mixed = any(writer.read(name) != before[name] for name in commit.final_contents)
    for step in asides:
        if not (
            is_mixed and step.file in commit.final_files
        ):  # weights must not be read with another save's config
            writer.rename(step.name, step.file)


# Files of others


def write_again(writer: StorageWriter, file: str, save_id: str) -> None:
    """Replace a file that another library wrote into a local folder by a synced copy. Memory: a block.

    Raises:
        StorageError: it cannot be read or written, or changes during the copy.
    """
    folder, slash, name = file.rpartition("/")
    new = f"{folder}{slash}{commit_plan.pending_name(name, save_id)}"
    copy_in(writer, os.path.join(writer.root, file), new)
    writer.rename(new, file)


def copy_in(writer: StorageWriter, source: str, file: str) -> int:
    """Write a local file into a folder under this name, and sync it. Return its bytes. Memory: a block.

    Raises:
        StorageError: it cannot be read or written, or changes during the copy.
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

    locked: LockedFolder
    folder_state: FolderState
    recorded: Sequence[fingerprints.RecordedSave]


def begin_save(writer: StorageWriter, plan: SavePlan) -> CommitState:
    """Lock the folder, read its state, and remove the remains of saves that were never committed.

    Raises:
        StorageError: another save is writing there, or the folder cannot be written to.
    """
    locked = LockedFolder(writer, plan.save_id)
    try:
        by_name = FolderState(frozenset(writer.list()), weights=frozenset())
        remains = commit_plan.obsolete(plan, by_name)
        remove_pending(writer, remains)
        folder_state = commit_plan.get_folder_state(writer.list(), writer.read(plan.index_file), plan.single_file)
        folder_state = replace(folder_state, named=folder_state.named | _trainings_named(writer, plan))
        recorded = fingerprints.from_bytes(writer.read(fingerprints.fingerprint_file(plan.stem)))
        if folder_state.weights:
            writer.sync_names()  # the committed weights must last before those that were set aside are removed
        kept = (
            folder_state.weights | folder_state.named | {plan.index_file}
        )  # a save that has lost the lock may commit them
        for name in sorted(folder_state.files.intersection(remains) - kept):
            # Older weights that were set aside are the only ones until a save is committed.
            if folder_state.weights or not name.endswith(OLDER):
                writer.remove(name)  # its space may be needed
    except BaseException:
        with contextlib.suppress(StorageError):
            locked.release()
        raise
    return CommitState(locked, folder_state, recorded)


def undo_save(writer: StorageWriter, plan: SavePlan, begun: CommitState) -> None:
    """Remove the files of this save unless it is committed. The older save is unchanged."""
    with contextlib.suppress(StorageError):
        names = {name for name in writer.list() if commit_plan.is_pending(name) and plan.save_id in name}
        if plan.index is None or writer.read(plan.index_file) != plan.index:
            names |= {file.name for file in plan.files} - _trainings_named(writer, plan)
        for name in names:
            writer.remove(name)
    with contextlib.suppress(StorageError):
        begun.locked.release()


def _trainings_named(writer: StorageWriter, plan: SavePlan) -> frozenset[str]:
    """Return the training files of the adapter that is valid or set aside, or all of them if that is unknown."""
    files = writer.list()
    there = frozenset(name for name in files if is_training_file(name))
    if plan.stem != ADAPTER or not there:
        return frozenset()
    aside = [name for name in files if name.startswith(plan.stem) and name.endswith(OLDER)]
    try:
        with open_storage(writer.root).reader as reader:
            adapters = [plan.single_file] if plan.single_file in files else aside
            return there & {get_training_file(read_header(reader, name)) for name in adapters}
    except (FormatError, StorageError):
        return there


def commit_save(
    writer: StorageWriter,
    plan: SavePlan,
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
    fingerprints_file = fingerprints.fingerprint_file(plan.stem)
    bound = _bound(writer, plan, small_files)
    free = {name: content for name, content in small_files.items() if name not in bound}
    commit = commit_plan.plan_commit(plan, begun.folder_state, bound)
    removed = commit_files(writer, begun.locked, commit, {**free, fingerprints_file: both})
    if begun.locked.is_held():
        writer.replace(fingerprints_file, fingerprints.to_bytes([recorded]))
    begun.locked.release()
    return removed


def _bound(writer: StorageWriter, plan: SavePlan, small_files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the small files that would change the meaning of the older weights: a new config of an adapter."""
    content = small_files.get(ADAPTER_CONFIG)
    if plan.stem != ADAPTER or content is None or writer.read(ADAPTER_CONFIG) == content:
        return {}
    return {ADAPTER_CONFIG: content}


def commit_written(
    locked: LockedFolder,
    written: WrittenFiles,
    older: Sequence[str],
    small_files: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Commit the files of a save, rename them, and remove the older ones. Then release the lock.

    ``small_files`` are replaced just before.

    Raises:
        StorageError: as of :func:`commit_files`.
    """
    root = locked.writer.root
    renames = Renames(locked.save_id, tuple(written.named), tuple(older))
    folders = {name.rpartition("/")[0] for name in (*written.named, *written.beside, *older)} - {""}
    with LocalWriter(root, folders=folders) as writer:
        commit_files(writer, locked, renames.commit(written), small_files)
    if locked.is_held():  # else another save has found the list, and finishes it
        finish(root, renames.file, locked)
    remove_empty(root, folders)
    remove_folder(work_folder(root, locked.save_id))
    locked.release()
