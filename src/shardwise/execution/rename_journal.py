"""Rename journals, by which several files are committed at once, and removal of remains of killed saves.

Readers see a folder as its journal states and change nothing. The next save in the folder carries the journal out
([Note: A list of renames] in ``planning/commit_plan.py``).
"""

import contextlib
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from shardwise.errors import FormatError, StorageError
from shardwise.execution.locked_folder import LockedFolder
from shardwise.execution.saving_lock import HeldLock, LockHolder
from shardwise.formats.accelerate_saves import is_distributed_folder
from shardwise.formats.distributed import read_metadata
from shardwise.formats.joining import METADATA
from shardwise.planning import commit_plan
from shardwise.storage.contract import StorageWriter
from shardwise.storage.folders import FoldersWriter, is_through_link, remove_folder
from shardwise.storage.names import shown
from shardwise.storage.reading import LocalReader
from shardwise.storage.writing import open_writer


def remove_unnamed(writer: StorageWriter, files: Collection[str]) -> None:
    """Remove those of these files that were on their way to another name: by them nothing can begin to count."""
    names = [file for file in files if commit_plan.is_on_its_way(file)]
    for name in names:
        writer.remove(name)
    if names:
        writer.sync_names()


_WORK = (".shardwise.", ".work")
"""The beginning and the end of the name of a folder in which others write for a save, with its id between."""


def work_folder(folder: str | os.PathLike[str], save_id: str) -> Path:
    """Return the folder that other libraries write to before their files are saved."""
    return Path(folder, save_id.join(_WORK))


def tidy(marked: LockedFolder) -> None:
    """Finish pending renames, and remove the remains of saves of accelerate's files.

    Raises:
        FormatError: a list of renames makes no sense.
        StorageError: a file cannot be renamed or removed.
    """
    root = marked.writer.root
    folders = distributed_folders(root)
    with FoldersWriter(root, folders) as writer:
        writer.sync_names()  # a rename that a kill has cut short must last before what it replaced is removed
        remove_unnamed(writer, writer.list())  # by what was about to be named nothing can begin to count
        for file in commit_plan.lists_among(writer.list()):
            finish(root, file, marked.held)
        remove_fresh(writer, writer.list())
        for folder in folders:
            for name in left_in(Path(root, folder)):
                writer.remove(f"{folder}/{name}")
    for entry in _entries(root):
        if entry.name.startswith(_WORK[0]) and entry.name.endswith(_WORK[1]):
            remove_folder(entry.path)


def undo(marked: LockedFolder, also: Collection[str] = ()) -> None:
    """Remove the files of this save unless it is committed. ``also`` are further folders that it wrote into."""
    root = marked.writer.root
    folders = distributed_folders(root)
    also = [folder for folder in also if not is_through_link(root, folder)]
    with FoldersWriter(root, {*folders, *also}) as writer:
        names = writer.list()
        listed = commit_plan.Renames(marked.save_id, ()).file
        writer.remove(commit_plan.on_its_way(listed, marked.save_id))
        if listed not in names:
            remove_fresh(writer, [name for name in names if commit_plan.save_id_of_fresh(name) == marked.save_id])
            for folder in folders:
                for name in left_in(Path(root, folder), of=marked.save_id):
                    writer.remove(f"{folder}/{name}")
    remove_empty(root, {*folders, *also})
    remove_folder(work_folder(root, marked.save_id))


def _entries(root: str) -> list[os.DirEntry[str]]:
    with os.scandir(root) as entries:
        return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]


def distributed_folders(root: str) -> list[str]:
    """The folders of models and optimizers that are there. Links are not followed."""
    return sorted(entry.name for entry in _entries(root) if is_distributed_folder(entry.name))


def remove_fresh(writer: FoldersWriter, names: Collection[str]) -> None:
    """Remove those of these files that saves have written and not named."""
    for name in names:
        if commit_plan.save_id_of_fresh(name) is not None:
            writer.remove(name)


def remove_empty(root: str, folders: Collection[str]) -> None:
    for folder in sorted(folders, reverse=True):
        with contextlib.suppress(OSError):
            os.rmdir(os.path.join(root, folder))


def finish(root: str, file: str, held: HeldLock) -> None:
    """Rename the listed files and remove older ones, while holding the lock.

    Whoever has taken the folder over does the same meanwhile, and may be done first. Then new files do not exist
    under their temporary names any more. Before a name is removed that another save may have written, the lock is
    checked.
    """
    renames = read_list(Path(root), file)
    if renames is None:
        return  # somebody else has finished it
    with FoldersWriter(root) as writer:
        for name in (*renames.names, *renames.older):
            writer.add_folder_of(name)
        there = set(writer.list())
        for name in renames.names:
            if (new := commit_plan.fresh(name, renames.save_id)) in there:
                try:
                    writer.rename(new, name)
                except StorageError:
                    if new in writer.list():
                        raise
            elif name not in there and file in writer.list():
                raise FormatError(
                    f"{file} in {root}: lists {shown(name)}, which is gone. Remove that list, and save again"
                )
        if file not in writer.list():
            return  # what is there by now may be of a newer save
        for name in renames.older:
            if name in there and name not in renames.names:
                if held.whose() is not LockHolder.OURS:
                    return  # the list stays until all that is older is gone; whoever has the folder goes on by it
                writer.remove(name)
        writer.sync_names()
        writer.remove(file)
        writer.sync_names()


_MAX_LIST_BYTES = 1 << 24


def read_list(folder: Path, file: str) -> commit_plan.Renames | None:
    """Return a rename journal, or None if it does not exist any more.

    Raises:
        FormatError: it is invalid, or has names outside of the folder.
        StorageError: it cannot be read.
    """
    with LocalReader(folder) as reader:
        try:
            nbytes = reader.size(file)
            content = reader.read(file, 0, nbytes) if nbytes <= _MAX_LIST_BYTES else b""
        except StorageError:
            if not os.path.lexists(folder / file):
                return None  # carried out meanwhile
            raise
    renames = commit_plan.Renames.from_bytes(file, content)
    if renames is None:
        raise FormatError(f"{file} in {folder}: is not a list of renames of an interrupted save. Remove it")
    linked = [way for way in _folders_of(folder, renames) if (folder / way).is_symlink()]
    if linked:
        raise FormatError(
            f"{file} in {folder}: lists files in {shown(linked[0])}, which is a link. Remove the list"
        )
    return renames


def _folders_of(folder: Path, renames: commit_plan.Renames) -> list[str]:
    """Return the existing folders that listed names are in, parents first."""
    found: set[str] = set()
    for around in {name.rpartition("/")[0] for name in (*renames.names, *renames.older)} - {""}:
        for way in accumulate(around.split("/"), "{}/{}".format):
            if way not in found and not (folder / way).is_dir():
                break
            found.add(way)
    return sorted(found)


def home_of(path: Path) -> Path:
    """The folder whose lists concern a path: itself, or that around a file, or around the folder of one model."""
    return path.parent if not path.is_dir() or is_distributed_folder(path.name) else path


def lists_in(folder: Path) -> list[commit_plan.Renames]:
    """The lists of renames that an interrupted save has left in a folder.

    Raises:
        FormatError, StorageError: as of :func:`read_list`.
    """
    try:
        names = os.listdir(folder) if folder.is_dir() else []
    except OSError as error:
        raise StorageError(f"{folder}: listing it failed, {error.strerror}. Check its permissions") from error
    return [found for file in commit_plan.lists_among(names) if (found := read_list(folder, file)) is not None]


@contextmanager
def as_renamed(folder: Path) -> Iterator[Path]:
    """A folder as it is once the renames that are listed in it have been carried out. Nothing in it is changed.

    Yield the folder itself if it has no journal, otherwise a temporary folder of links. Links lead nowhere once
    somebody carries the list out: see :func:`leads_nowhere`.

    Collective: no.

    Raises:
        FormatError: a list makes no sense, or a file that it names is gone.
        StorageError: the folder cannot be read.
    """
    with ExitStack() as stack:
        place = folder
        while pending := lists_in(folder):
            place = Path(stack.enter_context(TemporaryDirectory(prefix="shardwise-renamed-")))
            try:
                gone = _link(folder.absolute(), pending, place)
            except OSError as error:
                raise StorageError(f"{folder}: reading it failed, {error.strerror or error}") from error
            if lists_in(folder) == pending:
                if gone:
                    raise FormatError(
                        f"{pending[0].file} in {folder}: lists {shown(gone[0])}, which is gone. "
                        "The save is damaged. Use another one, or remove the list to restore the one before"
                    )
                break
            place = folder  # carried out meanwhile
        yield place


def leads_nowhere(place: Path) -> bool:
    """Return whether a folder of links has some to files that are gone by now."""
    return any(path.is_symlink() and not path.exists() for path in place.rglob("*"))


def _link(folder: Path, pending: Sequence[commit_plan.Renames], place: Path) -> list[str]:
    """Link the files of a folder under their final names. Return the listed names that are missing."""
    inner = {way for renames in pending for way in _folders_of(folder, renames)}
    links: dict[str, str] = {}
    for way in ("", *sorted(inner)):
        (place / way).mkdir(exist_ok=True)
        names = [(PurePosixPath(way) / name).as_posix() for name in os.listdir(folder / way)]
        links |= {name: name for name in names if name not in inner and commit_plan.save_id_of_fresh(name) is None}
    for renames in pending:
        links |= {
            name: new
            for name in renames.names
            if (folder / (new := commit_plan.fresh(name, renames.save_id))).is_file()
        }
        for name in {renames.file, *renames.older} - {*renames.names}:
            links.pop(name, None)
    for name, lies_at in links.items():
        (place / name).symlink_to(folder / lies_at)
    return [name for renames in pending for name in renames.names if name not in links]


_DATA_FILE = re.compile(r"__[0-9]+_([0-9]+)\.distcp")


_FIRST_NUMBER = 1 << 32
"""Names of files have the number of their save, from here on: those that torch writes count from 0."""


def number_of(save_id: str) -> int:
    return _FIRST_NUMBER + int(save_id, 16)


def older_in(folder: Path, files: Collection[str]) -> list[str]:
    """Return data files of older checkpoints in a folder, other than these files."""
    with open_writer(folder) as writer:
        return [name for name in writer.list() if _DATA_FILE.fullmatch(name) and name not in files]


def left_in(folder: Path, of: str = "") -> list[str]:
    """Return data files of our saves that ``.metadata`` does not list, of the save with this id, or of any."""
    with open_writer(folder) as writer:
        names = writer.list()
    ours = [name for name in names if (found := _DATA_FILE.fullmatch(name)) and int(found[1]) >= _FIRST_NUMBER]
    if of:
        ours = [name for name in ours if (found := _DATA_FILE.fullmatch(name)) and int(found[1]) == number_of(of)]
    if not ours or METADATA not in names:
        return ours
    try:
        with LocalReader(folder) as reader:
            metadata = read_metadata(reader)
    except (FormatError, StorageError):
        return []  # nobody knows what belongs together
    places = [place for tensor in metadata.tensors.values() for _, place in tensor.chunks]
    named = {place.file for place in [*places, *metadata.objects.values()]}
    # A rank that holds nothing has a file that is not told of; it goes with the others of its save.
    counting = {found[1] for name in named if (found := _DATA_FILE.fullmatch(name))}
    return [name for name in ours if (found := _DATA_FILE.fullmatch(name)) and found[1] not in counting]
