"""Reads folders whose last save counts by a list of renames that is still to be carried out.

See [Note: A list of renames] in ``planning/saves/commit.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from shardwise.errors import FormatError, StorageError
from shardwise.formats.accelerate_names import is_distributed_folder
from shardwise.planning.saves.commit import Renames, fresh, lists_among, token_of_fresh
from shardwise.storage.names import shown
from shardwise.storage.reading.local import LocalReader

_MAX_LIST_BYTES = 1 << 24


def read_list(folder: Path, file: str) -> Renames | None:
    """A list of renames; None where it is not there any more.

    Raises:
        FormatError: it makes no sense, or names what is not in the folder itself.
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
    renames = Renames.from_bytes(file, content)
    if renames is None:
        raise FormatError(f"{file} in {folder}: is no list of renames of an interrupted save; remove it")
    linked = [way for way in _folders_of(folder, renames) if (folder / way).is_symlink()]
    if linked:
        raise FormatError(
            f"{file} in {folder}: lists files in {shown(linked[0])}, which is a link; remove the list"
        )
    return renames


def _folders_of(folder: Path, renames: Renames) -> list[str]:
    """Folders that listed names lead into, as far as they are there, each before what lies in it."""
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


def lists_in(folder: Path) -> list[Renames]:
    """The lists of renames that an interrupted save has left in a folder.

    Raises:
        FormatError, StorageError: as of :func:`read_list`.
    """
    try:
        names = os.listdir(folder) if folder.is_dir() else []
    except OSError as error:
        raise StorageError(f"{folder}: listing it failed, {error.strerror}; check its permissions") from error
    return [found for file in lists_among(names) if (found := read_list(folder, file)) is not None]


@contextmanager
def as_renamed(folder: Path) -> Iterator[Path]:
    """A folder as it is once the renames that are listed in it have been carried out. Nothing in it is changed.

    It is the folder itself where nothing is listed, else a temporary one of links, for the time of the block. Links
    lead nowhere once somebody carries the list out: see :func:`leads_nowhere`.

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
                        f"{pending[0].file} in {folder}: lists {shown(gone[0])}, which is gone; "
                        "the save is damaged: take another, or remove the list to have the one before"
                    )
                break
            place = folder  # carried out meanwhile
        yield place


def leads_nowhere(place: Path) -> bool:
    """Whether a folder of links has some to files that are gone by now."""
    return any(path.is_symlink() and not path.exists() for path in place.rglob("*"))


def _link(folder: Path, pending: Sequence[Renames], place: Path) -> list[str]:
    """Make links to what is in a folder, by the names that files are to have; the listed names that are gone."""
    inner = {way for renames in pending for way in _folders_of(folder, renames)}
    links: dict[str, str] = {}
    for way in ("", *sorted(inner)):
        (place / way).mkdir(exist_ok=True)
        names = [(PurePosixPath(way) / name).as_posix() for name in os.listdir(folder / way)]
        links |= {name: name for name in names if name not in inner and token_of_fresh(name) is None}
    for renames in pending:
        links |= {name: new for name in renames.names if (folder / (new := fresh(name, renames.token))).is_file()}
        for name in {renames.file, *renames.older} - {*renames.names}:
            links.pop(name, None)
    for name, lies_at in links.items():
        (place / name).symlink_to(folder / lies_at)
    return [name for renames in pending for name in renames.names if name not in links]
