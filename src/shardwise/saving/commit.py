"""Begin, commit and undo of a save, in one process for all ranks.

What the steps of a commit are: [Note: One commit] in ``saving/commit_plan.py``.

[Note: Checked twice] Saves of all formats are committed in the same way:

1. The folder is locked. Files with temporary names are removed before the folder's state is read.
2. Files are written and synced, also those that the last step will rename.
3. Check again that this save holds the lock, and that all files have the sizes that were written.
4. The steps that commit. One of them renames a file that belongs to this save only. A save that has taken the
   folder over has removed that file in its step 1. The rename fails then, and the files of the other save stay. A
   save that takes the folder over after the rename finds this save committed.
5. Check again that this save is committed, and no other in its place.
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
from shardwise.saving.rename_journal import finish_renames, remove_empty, remove_pending, work_folder
from shardwise.transfer import fingerprints

TEMPLATES_FOLDER = "additional_chat_templates"
"""Of a tokenizer's templates other than the default one, as transformers names it."""

_BLOCK_BYTES = 8 << 20

# Any save


def commit_files(
    writer: StorageWriter, locked: LockedFolder, commit: commit_plan.Commit, small_files: Mapping[str, bytes]
) -> list[str]:
    """Commit a written and synced save and remove the older one. Return the removed names.

    Args:
        writer: the writer of the folder that contains the files.
        locked: this folder, or its parent, locked by this save.
        commit: the checks and changes to carry out.
        small_files: small files that are replaced just before the commit, and restored if it fails.

    Raises:
        StorageError: before the commit, the lock was lost or the files had changed, or another save was committed
            instead. See [Note: Checked twice].
    """
    for name, content in commit.ready.items():
        make_file(writer, name, content)
    # After the last file of this save is durable: a file that a faster save has removed is noticed here, and so is
    # a lock that was taken over while this save wrote.
    locked.require()
    _require_files(writer, {**commit.files, **{name: len(content) for name, content in commit.ready.items()}})
    with _restore_on_error(writer, locked, commit, small_files):
        # Before the steps: the weights must never be committed without their config and their fingerprints.
        for name, content in small_files.items():
            if writer.read(name) != content:  # an equal file is left alone, so a crash here changes nothing
                writer.replace(name, content)
        if small_files:
            writer.sync_names()
            locked.require()
        # Each rename is durable before the next begins. The last one commits.
        for step in commit.steps:
            if step in commit.aside:
                # Most steps rename a file of this save, which a save that takes over removes, so they fail then.
                # This one renames the older weights, which may be those of the save that has taken over.
                locked.require()
            _execute(writer, step)
        if not is_committed(writer, commit):
            raise StorageError(
                f"{writer.root}: another save replaced this one during its commit, and no older file was removed. "
                "Save to a directory that no other process writes to"
            )
    # Only now, and only with the lock: before the commit the older files are the valid ones, and without the lock
    # they may belong to the save that holds it, which removes what is older than itself.
    if not locked.is_held():
        return []
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
    # Complete means: each file has its final name and size, no name is left that would be read instead, and the
    # small files have this save's content.
    if any(sizes.get(name) != nbytes for name, nbytes in commit.final_files.items()):
        return False
    if commit.absent_files & sizes.keys():
        return False
    for name, content in commit.final_contents.items():
        is_finished = name in commit.journals and name not in sizes  # another save has carried its renames out
        if not is_finished and writer.read(name) != content:
            return False
    return True


def make_file(writer: StorageWriter, name: str, content: bytes) -> None:
    """Write and sync a small file of this save only."""
    writer.create(name, len(content))
    writer.write(name, 0, [memoryview(content)])
    writer.sync(name)


def _require_files(writer: StorageWriter, files: Mapping[str, int]) -> None:
    sizes = writer.sizes()
    # The sizes only: reading the bytes back is the caller's choice (verify=True).
    for name, nbytes in files.items():
        if sizes.get(name) != nbytes:
            change = "is gone" if name not in sizes else f"has {sizes[name]} bytes"
            raise StorageError(
                f"{shown(name)} in {writer.root}: was written with {nbytes} bytes, and now it {change}: another "
                "save modified it, or the ranks see different directories. Save to a shared directory that no "
                "other process writes to"
            )


def _execute(writer: StorageWriter, step: Rename) -> None:
    try:
        writer.rename(step.file, step.name)
    except StorageError as error:
        # The file is there, so the rename itself has failed. Otherwise its absence is the cause.
        if step.file in writer.list():
            raise
        raise StorageError(
            f"{shown(step.file)} in {writer.root}: was removed by another save that took over the directory, "
            f"before it became {shown(step.name)}. Save to a directory that no other process writes to"
        ) from error


@contextmanager
def _restore_on_error(
    writer: StorageWriter, locked: LockedFolder, commit: commit_plan.Commit, small_files: Mapping[str, bytes]
) -> Iterator[None]:
    """If the block fails and this save is not committed, restore the files that it set aside or replaced."""
    # Read before the first change. None means that there was no such file.
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
    files = writer.list()
    asides = [step for step in commit.aside if step.name in files]
    if any(step.file in files for step in asides):
        return  # another save's weights have the name
    if any(writer.read(name) not in (content, before[name]) for name, content in commit.final_contents.items()):
        return  # another save's index, or config
    # Small files come back before the older weights do: weights must not be read with another save's config.
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
    # Without the lock, the index or config may still be that of this save. Older weights then must not come back
    # under a name that this save has, because they would be read with it.
    is_mixed = any(writer.read(name) != before[name] for name in commit.final_contents)
    for step in asides:
        if is_mixed and step.file in commit.final_files:
            continue
        writer.rename(step.name, step.file)


def replace_templates(root: str | os.PathLike[str], templates: Mapping[str, bytes] | None) -> None:
    """Replace the additional chat templates, after the commit: a tokenizer opens without them.

    None leaves those of the folder, for a save without a tokenizer.
    """
    folder = os.path.join(root, TEMPLATES_FOLDER)
    if templates or (templates is not None and os.path.isdir(folder)):
        with LocalWriter(folder) as writer:
            for name in writer.list():
                if name.endswith(".jinja") and name not in templates:
                    writer.remove(name)
            for name, content in templates.items():
                writer.replace(name, content)


# Files of others


def write_again(writer: StorageWriter, file: str, save_id: str) -> None:
    """Replace a file that another library wrote into a local folder by a synced copy. Memory: a block.

    Raises:
        StorageError: it cannot be read or written, or changes during the copy.
    """
    # The copy is synced under a temporary name, so that the name always has a complete file.
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
            # The size is fixed here, because space is allocated for it. A file that grows or shrinks is an
            # error.
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
    """A save that holds the lock of its folder.

    Attributes:
        plan: the plan of the save.
        small_files: small files that are saved with the weights, by name.
        templates: see :func:`replace_templates`.
        locked: the folder.
        folder_state: its content before the save.
        recorded: its records of earlier saves.
    """

    plan: SavePlan
    small_files: Mapping[str, bytes]
    templates: Mapping[str, bytes] | None
    locked: LockedFolder
    folder_state: FolderState
    recorded: Sequence[fingerprints.RecordedSave]


def begin_save(
    writer: StorageWriter,
    plan: SavePlan,
    small_files: Mapping[str, bytes],
    templates: Mapping[str, bytes] | None = None,
) -> CommitState:
    """Lock the folder, read its state, and remove the remains of saves that were never committed.

    Raises:
        StorageError: another save is writing there, or the folder cannot be written to.
    """
    locked = LockedFolder(writer, plan.save_id)
    try:
        by_name = FolderState(frozenset(writer.list()), weights=frozenset())
        remains = commit_plan.find_obsolete(plan, by_name)
        # Before the folder's state is read: a save that lost its lock and is about to commit renames one of these,
        # and its rename fails from here on.
        remove_pending(writer, remains)
        folder_state = commit_plan.get_folder_state(writer.list(), writer.read(plan.index_file), plan.single_file)
        folder_state = replace(folder_state, listed=folder_state.listed | _find_valid_trainings(writer, plan))
        recorded = fingerprints.parse(writer.read(fingerprints.fingerprint_file(plan.stem)) or b"") or []
        if folder_state.weights:
            writer.sync_names()  # committed weights must be durable before those that were set aside are removed
        # Also the files that the index names while a single file is valid: a save that lost its lock may be about
        # to set that file aside.
        valid = folder_state.weights | folder_state.listed | {plan.index_file}
        for name in sorted(folder_state.files.intersection(remains) - valid):
            # Without valid weights, those that were set aside are the only ones until this save is committed.
            if folder_state.weights or not name.endswith(OLDER):
                writer.remove(name)  # its space may be needed
    except BaseException:
        locked.release()
        raise
    return CommitState(plan, small_files, templates, locked, folder_state, recorded)


def undo_save(state: CommitState) -> None:
    """Remove the files of this save unless it is committed. The older save is unchanged."""
    writer, plan = state.locked.writer, state.plan
    try:
        # Temporary names of this save are never valid. Its other files are, if the index on disk is its own.
        names = {name for name in writer.list() if commit_plan.is_pending(name) and plan.save_id in name}
        if plan.index is None or writer.read(plan.index_file) != plan.index:
            names |= {file.name for file in plan.files} - _find_valid_trainings(writer, plan)
        for name in names:
            writer.remove(name)
    except StorageError:
        pass  # the error that ended the save counts
    finally:
        # Last, so that no other save begins while files of this one are removed.
        state.locked.release()


def _find_valid_trainings(writer: StorageWriter, plan: SavePlan) -> frozenset[str]:
    """Return the training files of the adapter that is valid or set aside, or all of them if that is unknown."""
    files = writer.list()
    trainings = frozenset(name for name in files if is_training_file(name))
    if plan.stem != ADAPTER or not trainings:
        return frozenset()
    aside = [name for name in files if name.startswith(plan.stem) and name.endswith(OLDER)]
    try:
        with open_storage(writer.root).reader as reader:
            # With an adapter under its final name, the ones that were set aside do not count.
            adapters = [plan.single_file] if plan.single_file in files else aside
            return trainings & {get_training_file(read_header(reader, name)) for name in adapters}
    except (FormatError, StorageError):
        return trainings


def commit_save(state: CommitState, sums: Mapping[str, int]) -> list[str]:
    """Commit a written and synced save in one step, and remove the older one. Return the removed names.

    ``sums`` has the fingerprint of every tensor, by key.

    Raises:
        StorageError: as of :func:`commit_files`.
    """
    writer, plan, small_files = state.locked.writer, state.plan, state.small_files
    sizes = {name: file.nbytes for name, file in zip(plan.names, plan.files, strict=True)}
    digests = {name: fingerprints.digest(content) for name, content in small_files.items()}
    headers = {name: fingerprints.digest(file.header) for name, file in zip(plan.names, plan.files, strict=True)}
    recorded = fingerprints.RecordedSave(sizes, sums, digests, headers)
    # The file of fingerprints is replaced before the commit, and either save may be valid after a crash. So it has
    # the records of both until the commit.
    both = fingerprints.to_bytes([*state.recorded, recorded])
    fingerprints_file = fingerprints.fingerprint_file(plan.stem)
    # A new config of an adapter would change the meaning of the older weights, and so is bound to the new ones: the
    # commit renames it itself, next to the weights. It replaces the free files just before.
    bound: dict[str, bytes] = {}
    config = small_files.get(ADAPTER_CONFIG)
    if plan.stem == ADAPTER and config is not None and writer.read(ADAPTER_CONFIG) != config:
        bound[ADAPTER_CONFIG] = config
    free = {name: content for name, content in small_files.items() if name not in bound}
    commit = commit_plan.plan_commit(plan, state.folder_state, bound)
    removed = commit_files(writer, state.locked, commit, {**free, fingerprints_file: both})
    if state.locked.is_held():
        writer.replace(fingerprints_file, fingerprints.to_bytes([recorded]))
        replace_templates(writer.root, state.templates)
    state.locked.release()
    return removed


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
    # One name is renamed by the commit itself. Several are listed in a journal, and renamed after it.
    renames = Renames(locked.save_id, tuple(written.named), tuple(older))
    folders = {name.rpartition("/")[0] for name in (*written.named, *written.beside, *older)} - {""}
    with LocalWriter(root, folders=folders) as writer:
        commit_files(writer, locked, renames.commit(written), small_files)
    # The journal is committed, so the save counts. Whoever holds the lock now carries the renames out.
    if locked.is_held():
        finish_renames(root, renames.file, locked)
    remove_empty(root, folders)
    remove_folder(work_folder(root, locked.save_id))
    locked.release()  # last: the next save may only begin when nothing of this one is left
