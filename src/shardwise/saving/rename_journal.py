"""Rename journals, by which several files are committed at once, and removal of remains of killed saves.

Readers see a folder as its journal states and change nothing. The next save in the folder carries the journal out
([Note: Rename journals] in ``saving/commit_plan.py``).
"""

import contextlib
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from shardwise.core.errors import FormatError, StorageError
from shardwise.files.accelerate_saves import is_distributed_folder
from shardwise.files.distributed import read_metadata
from shardwise.files.folders import remove_folder
from shardwise.files.join_entries import METADATA
from shardwise.files.local_reader import LocalReader
from shardwise.files.local_writer import LocalWriter, is_through_link, open_writer
from shardwise.files.storage import StorageWriter
from shardwise.files.urls import shown
from shardwise.ranks.world import World
from shardwise.saving import commit_plan
from shardwise.saving.commit_plan import Renames
from shardwise.saving.locked_folder import LockedFolder, Saving, lock_on_first_rank


def remove_pending(writer: StorageWriter, files: Collection[str]) -> None:
    """Remove the files that have temporary names, so that no other save can commit by renaming one."""
    names = [file for file in files if commit_plan.is_pending(file)]
    for name in names:
        writer.remove(name)
    if names:
        writer.sync_names()


_WORK = (".shardwise.", ".work")
"""Prefix and suffix of a folder that other libraries write to for a save. Between them is its id."""


def work_folder(folder: str | os.PathLike[str], save_id: str) -> Path:
    """Return the folder that other libraries write to before their files are saved."""
    return Path(folder, save_id.join(_WORK))


def clean_up(saving: Saving) -> None:
    """On the first rank, finish pending renames, and remove the remains of saves of accelerate's files.

    Raises:
        FormatError: a rename journal is invalid.
        StorageError: a file cannot be renamed or removed.
    """
    root = saving.locked.writer.root
    folders = distributed_folders(root)
    with LocalWriter(root, folders=folders) as writer:
        writer.sync_names()  # renames of a killed save must be durable before the replaced files are removed
        # Before the journals are read: a save that lost its lock commits by renaming its pending journal. That
        # fails from here on.
        remove_pending(writer, writer.list())
        for file in commit_plan.find_journals(writer.list()):
            finish_renames(root, file, saving.locked)
        # After the journals, whose files have temporary names until they are renamed.
        _remove_uncommitted(writer, folders)
    for entry in _entries(root):
        if entry.name.startswith(_WORK[0]) and entry.name.endswith(_WORK[1]):
            remove_folder(entry.path)


def remove_unless_committed(locked: LockedFolder, also: Collection[str] = ()) -> None:
    """Remove the files of this save unless it is committed. ``also`` are further folders that it wrote into."""
    # Once its journal exists, a save is committed: its files are kept, and renamed by the next save.
    root = locked.writer.root
    folders = distributed_folders(root)
    also = [folder for folder in also if not is_through_link(root, folder)]
    with LocalWriter(root, folders={*folders, *also}) as writer:
        names = writer.list()
        journal = Renames(locked.save_id, ()).file
        # The pending journal first: nothing can commit this save any more when its files are removed.
        writer.remove(commit_plan.pending_name(journal, locked.save_id))
        if journal not in names:
            _remove_uncommitted(writer, folders, locked.save_id)
    remove_empty(root, {*folders, *also})
    remove_folder(work_folder(root, locked.save_id))


@contextmanager
def lock_and_clean_up(world: World, folder: str | os.PathLike[str], also: Collection[str] = ()) -> Iterator[Saving]:
    """Lock a folder for a save on the first rank, and clean it up. If the block fails, undo the save.

    Collective: yes, at the beginning.

    Raises:
        FormatError, StorageError: as of :func:`~shardwise.saving.locked_folder.lock_on_first_rank` and
            :func:`clean_up`.
    """
    with lock_on_first_rank(world, folder) as saving:
        try:
            # The lock is held: only one save at a time finishes the renames of earlier ones.
            with world.broadcast("complete earlier renames"):
                if world.rank == 0:
                    clean_up(saving)
            yield saving
        except BaseException:
            with contextlib.suppress(StorageError):
                if saving.is_locked_here:
                    remove_unless_committed(saving.locked, also)
            raise


def _entries(root: str) -> list[os.DirEntry[str]]:
    with os.scandir(root) as entries:
        return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]


def distributed_folders(root: str) -> list[str]:
    """Return the folders of models and optimizers in a folder. Links are not followed."""
    return sorted(entry.name for entry in _entries(root) if is_distributed_folder(entry.name))


def remove_temporary(writer: StorageWriter, files: Collection[str], save_id: str | None = None) -> None:
    """Remove those of these files that saves (by default all) have written and not renamed."""
    for name in files:
        if (owner := commit_plan.parse_temporary_name(name)) is not None and save_id in (None, owner):
            writer.remove(name)


def _remove_uncommitted(writer: LocalWriter, folders: Collection[str], save_id: str | None = None) -> None:
    """Remove the files that saves (by default all) have written and not committed, also in these folders."""
    remove_temporary(writer, writer.list(), save_id)
    for folder in folders:
        for name in find_uncommitted(Path(writer.root, folder), save_id):
            writer.remove(f"{folder}/{name}")


def remove_empty(root: str, folders: Collection[str]) -> None:
    for folder in sorted(folders, reverse=True):
        with contextlib.suppress(OSError):
            os.rmdir(os.path.join(root, folder))


def finish_renames(root: str, file: str, locked: LockedFolder) -> None:
    """Rename the listed files and remove older ones, while holding the lock.

    A save that has taken the folder over does the same at the same time, and may be done first. Then new files do
    not exist under their temporary names any more. Before a name is removed that another save may have written, the
    lock is checked.
    """
    renames = read_journal(Path(root), file)
    if renames is None:
        return  # another save has finished it
    with LocalWriter(root, folders=()) as writer:
        for name in (*renames.names, *renames.older):
            writer.add_parent(name)
        # In any order: each rename is durable alone, and one that is done already is skipped.
        present = set(writer.list())
        for name in renames.names:
            if (new := commit_plan.temporary_name(name, renames.save_id)) in present:
                try:
                    writer.rename(new, name)
                except StorageError:
                    if new in writer.list():
                        raise
            elif name not in present and file in writer.list():
                raise FormatError(
                    f"{file} in {root}: lists {shown(name)}, which is gone. Remove the journal and save again"
                )
        # All new files have their names now, so the older ones are removed. The journal goes last: until then,
        # the next save that finds it does the rest.
        if file not in writer.list():
            return  # the files may belong to a newer save by now
        for name in renames.older:
            if name in present and name not in renames.names:
                if not locked.is_held():
                    return  # the journal stays until all older files are gone; the next save finishes it
                writer.remove(name)
        writer.sync_names()  # the removals must be durable before that of the journal
        writer.remove(file)
        writer.sync_names()


_MAX_JOURNAL_BYTES = 1 << 24


def read_journal(folder: Path, file: str) -> Renames | None:
    """Return a rename journal, or None if it does not exist any more.

    Raises:
        FormatError: it is invalid, or has names outside of the folder.
        StorageError: it cannot be read.
    """
    with LocalReader(folder) as reader:
        try:
            nbytes = reader.size(file)
            # One that is too long is parsed as empty, which is invalid.
            content = reader.read(file, 0, nbytes) if nbytes <= _MAX_JOURNAL_BYTES else b""
        except StorageError:
            if not os.path.lexists(folder / file):
                return None  # finished by another save
            raise
    renames = Renames.from_bytes(file, content)
    if renames is None:
        raise FormatError(f"{file} in {folder}: is not a rename journal of an interrupted save. Remove it")
    if linked := [inner for inner in _existing_folders(folder, renames) if (folder / inner).is_symlink()]:
        raise FormatError(
            f"{file} in {folder}: lists files in {shown(linked[0])}, which is a link. Remove the journal"
        )
    return renames


def _existing_folders(folder: Path, renames: Renames) -> list[str]:
    """Return the existing folders that contain listed names, parents first."""
    parents = {str(parent) for name in (*renames.names, *renames.older) for parent in PurePosixPath(name).parents}
    return sorted(inner for inner in parents - {"."} if (folder / inner).is_dir())


def journal_folder(path: Path) -> Path:
    """Return the folder whose journals concern a path: itself, or the parent of a file or of one model's folder."""
    return path.parent if not path.is_dir() or is_distributed_folder(path.name) else path


def read_journals(folder: Path) -> list[Renames]:
    """Return the rename journals that interrupted saves have left in a folder.

    Raises:
        FormatError, StorageError: as of :func:`read_journal`.
    """
    try:
        names = os.listdir(folder) if folder.is_dir() else []
    except OSError as error:
        raise StorageError(f"{folder}: listing it failed, {error.strerror}. Check its permissions") from error
    journals = [read_journal(folder, file) for file in commit_plan.find_journals(names)]
    return [renames for renames in journals if renames is not None]


@contextmanager
def link_as_renamed(folder: Path) -> Iterator[Path]:
    """Yield a folder as it is after the renames that are listed in it. Nothing in it is changed.

    It is the folder itself if it has no journal, otherwise a temporary folder of links. Links are broken once a
    save finishes the journal: see :func:`has_broken_link`.

    Collective: no.

    Raises:
        FormatError: a journal is invalid, or a file that it names is gone.
        StorageError: the folder cannot be read.
    """
    with ExitStack() as stack:
        # A new view whenever a save has changed the folder meanwhile, until one is complete.
        view = folder
        while pending := read_journals(folder):
            view = Path(stack.enter_context(TemporaryDirectory(prefix="shardwise-renamed-")))
            try:
                gone = _link(folder.absolute(), pending, view)
            except OSError as error:
                raise StorageError(f"{folder}: reading it failed, {error.strerror or error}") from error
            # A save may have carried the journal out while the links were made. They are right only if it is still
            # there.
            if read_journals(folder) == pending:
                if gone:
                    raise FormatError(
                        f"{pending[0].file} in {folder}: lists {shown(gone[0])}, which is gone. "
                        "The save is damaged. Use another one, or remove the journal to restore the one before"
                    )
                break
            view = folder  # a save has finished it
        yield view


def has_broken_link(view: Path) -> bool:
    """Return True if a folder of links has a broken one."""
    return any(path.is_symlink() and not path.exists() for path in view.rglob("*"))


def _link(folder: Path, pending: Sequence[Renames], view: Path) -> list[str]:
    """Link the files of a folder under their final names. Return the listed names that are missing."""
    # Links by final name: files under their names, without temporary ones, then those of the journals in their
    # place.
    inner_folders = {inner for renames in pending for inner in _existing_folders(folder, renames)}
    links: dict[str, str] = {}
    for inner in ("", *sorted(inner_folders)):
        (view / inner).mkdir(exist_ok=True)
        names = {(PurePosixPath(inner) / name).as_posix() for name in os.listdir(folder / inner)} - inner_folders
        links |= {name: name for name in names if commit_plan.parse_temporary_name(name) is None}
    for renames in pending:
        fresh = {name: commit_plan.temporary_name(name, renames.save_id) for name in renames.names}
        links |= {name: new for name, new in fresh.items() if (folder / new).is_file()}
        for name in {renames.file, *renames.older} - {*renames.names}:
            links.pop(name, None)
    for name, source in links.items():
        (view / name).symlink_to(folder / source)
    return [name for renames in pending for name in renames.names if name not in links]


_DATA_FILE = re.compile(r"__[0-9]+_([0-9]+)\.distcp")


_FIRST_NUMBER = 1 << 32
"""Added to the id of a save in file names, because the numbers of torch's own files count from 0."""


def number_of(save_id: str) -> int:
    return _FIRST_NUMBER + int(save_id, 16)


def find_older(folder: Path, files: Collection[str]) -> list[str]:
    """Return data files of older checkpoints in a folder, other than these files."""
    with open_writer(folder) as writer:
        return [name for name in writer.list() if _DATA_FILE.fullmatch(name) and name not in files]


def find_uncommitted(folder: Path, save_id: str | None = None) -> list[str]:
    """Return the data files of shardwise's saves (by default all) that ``.metadata`` does not list."""
    with open_writer(folder) as writer:
        names = writer.list()
    # The second number of a name tells the save. torch's own files have small ones, and are left alone.
    numbers = _save_numbers(names)
    files = [name for name, number in numbers.items() if number >= _FIRST_NUMBER]
    if save_id is not None:
        files = [name for name in files if numbers[name] == number_of(save_id)]
    if not files or METADATA not in names:
        return files
    try:
        with LocalReader(folder) as reader:
            metadata = read_metadata(reader)
    except (FormatError, StorageError):
        return []  # it is unknown which files belong together
    # Files that .metadata lists are committed, and so are all files of the same save.
    places = [place for tensor in metadata.tensors.values() for _, place in tensor.chunks]
    listed = {place.file for place in [*places, *metadata.objects.values()]}
    # The file of a rank that holds nothing is not listed, but belongs to the others of its save.
    committed = set(_save_numbers(listed).values())
    return [name for name in files if numbers[name] not in committed]


def _save_numbers(names: Collection[str]) -> dict[str, int]:
    """Return the second number in the name of each data file."""
    matches = {name: _DATA_FILE.fullmatch(name) for name in names}
    return {name: int(match[1]) for name, match in matches.items() if match is not None}
