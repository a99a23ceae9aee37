"""A disk in a model: what surely stays after a crash, and what may be lost."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from tests.support.crashes.effects import (
    Created,
    Effect,
    FolderMade,
    FolderRemoved,
    NamesSynced,
    Partly,
    Removed,
    Renamed,
    ReplacedFile,
    Synced,
    Wrote,
)

from shardwise.core.errors import StorageError
from shardwise.files.storage import INCOMPLETE

_AROUND = ".."
"""The folder in which the root lies."""

# [Note: What a crash leaves]
#
# The machine dies at some moment, and what it had in memory is gone. What is on its disk then is modeled after
# what POSIX promises, which is less than any one file system does:
#
# - What a writer wrote stays if that writer has synced the file since; so does the size, for the writer that
#   created it. A sync of one writer does nothing for another: they may be on different machines.
# - Of other writes any part may be there, cut at blocks of 4096 bytes, in any order; elsewhere the file has what it
#   had before, zeros if it is new. A size that is not synced may be anything up to the real one.
# - A name that was created, renamed or removed stays so after `sync_names` (which `rename` and `replace` end with).
#   Others may be lost one by one, in any order: a later one may be there and an earlier one not. That a file is
#   synced says nothing about its name.
# - A rename is one step for who looks on. After a crash the new name leads to the whole file or to what it led to
#   before; the old name may have stayed beside it.
# - A folder's name is one in the folder around it, with which it lasts or is lost, with all that is in it.
#
# All effects of one save are put into one order, that in which they happened, so a crash comes between any two of
# them, or within `rename` and `replace`, which are several. A process that is killed leaves all that it did, and of
# the effect that it was at some of the steps (`Partly`); what it did not sync may still be lost, when the machine
# dies later. So what one process left and another one did after it are effects of one disk, in one order.


@dataclass(slots=True, eq=False)
class Write:
    """Bytes put into a file, which stay only once they are durable."""

    writer: int
    start: int
    content: bytes
    is_durable: bool = False


@dataclass(slots=True, eq=False)
class DiskFile:
    """A file without its name: what is surely on the disk, and what came later, in order."""

    durable: bytearray
    creator: int = -1
    nbytes: int = 0
    is_size_durable: bool = True
    writes: list[Write] = field(default_factory=list)

    def sync(self, writer: int) -> None:
        if writer == self.creator and not self.is_size_durable:
            self.is_size_durable = True
            grow(self.durable, self.nbytes)
        for write in self.writes:
            write.is_durable |= write.writer == writer
        # What comes after one that may be lost has to wait for it: they may overlap.
        while self.writes and self.writes[0].is_durable:
            write = self.writes.pop(0)
            put(self.durable, write.start, write.content)


@dataclass(frozen=True, slots=True, eq=False)
class Naming:
    """A file was given a name, lost one, or both."""

    file: DiskFile
    given: str | None
    taken: str | None

    @property
    def name(self) -> str:
        """One of the two; they are in one folder."""
        return self.given or self.taken or ""

    def apply(self, names: dict[str, DiskFile], *, keeps_old: bool = False) -> None:
        if self.given is not None:
            names[self.given] = self.file
        if self.taken is not None and names.get(self.taken) is self.file and not (keeps_old and self.given):
            del names[self.taken]


def folder_of(name: str) -> str:
    """The folder that a noted name is in; "" for none. The names of folders end with "/"."""
    return _AROUND if name == "/" else name.removesuffix("/").rpartition("/")[0]


def folders_around(name: str) -> list[str]:
    """All folders that a noted name is in, from its own up to the root, which is ""."""
    folder = folder_of(name)
    found: list[str] = []
    while folder != _AROUND:
        found.append(folder)
        folder = folder_of(f"{folder}/")
    return found


class Disk:
    """Files, the names that are sure, and those that came later, in order. Folders are files that hold nothing."""

    def __init__(self, before: Mapping[str, bytes]) -> None:
        self.folders = {around for name in before for around in folders_around(name)}
        self.names = {name: DiskFile(bytearray(content)) for name, content in before.items()}
        self.names |= {f"{folder}/": DiskFile(bytearray()) for folder in self.folders}
        self.durable_names = dict(self.names)
        self.namings: list[Naming] = []
        self.opened: dict[tuple[int, str], DiskFile] = {}
        self.interims = 0

    def name(self, file: DiskFile, given: str | None, taken: str | None) -> None:
        naming = Naming(file, given, taken)
        naming.apply(self.names)
        self.namings.append(naming)

    def create(self, writer: int, file: str, nbytes: int) -> None:
        self.opened[writer, file] = DiskFile(bytearray(), writer, nbytes, is_size_durable=False)
        self.name(self.opened[writer, file], file, None)

    def write(self, file: str, write: Write) -> None:
        """Who has a file open goes on writing to it after it has lost its name, and somebody else's has it."""
        found = self.opened.get((write.writer, file)) or self.names.get(file)
        if found is not None:
            self.opened[write.writer, file] = found
            found.writes.append(write)

    def sync(self, writer: int, file: str) -> None:
        found = self.opened.pop((writer, file), None) or self.names.get(file)
        if found is not None:
            found.sync(writer)

    def rename(self, file: str, name: str) -> None:
        if file not in self.names:
            raise StorageError(
                f"{file}: was renamed to {name}, and nobody was seen to create it; write it with a StorageWriter"
            )
        self.name(self.names[file], name, file if file != name else None)

    def remove(self, name: str, writer: int = -1) -> None:
        self.opened.pop((writer, name), None)
        if name in self.names:
            self.name(self.names[name], None, name)

    def sync_names(self, folder: str = "") -> None:
        """Of what lies directly in a folder."""
        others = {name: file for name, file in self.durable_names.items() if folder_of(name) != folder}
        self.durable_names = others | {name: file for name, file in self.names.items() if folder_of(name) == folder}
        self.namings = [naming for naming in self.namings if folder_of(naming.name) != folder]

    def writes(self) -> list[Write]:
        """All that may be lost, of all files that have a name or may have one."""
        files = {id(file): file for file in (*self.names.values(), *self.durable_names.values())}
        files |= {id(naming.file): naming.file for naming in self.namings}
        return [write for file in files.values() for write in file.writes if not write.is_durable]

    def make_folder(self, folder: str) -> None:
        self.folders.add(folder)
        self.name(DiskFile(bytearray()), f"{folder}/", None)

    def reachable(self, names: Mapping[str, DiskFile]) -> dict[str, DiskFile]:
        """Those of the names whose folders are there. One that nobody is known to have made was there before."""
        lost = {folder for folder in self.folders if f"{folder}/" not in names}
        return {name: file for name, file in names.items() if lost.isdisjoint(folders_around(name))}


DiskStep: TypeAlias = Callable[[Disk], None]


def steps_of(effect: Effect) -> list[DiskStep]:
    """What an effect does to the disk, in steps between which a process or the machine may die."""
    if isinstance(effect, Partly):
        return steps_of(effect.effect)[: effect.steps]
    return list(_steps(effect))


def _steps(effect: Effect) -> Iterator[DiskStep]:
    match effect:
        case Created(writer, file, nbytes):
            yield lambda disk: disk.create(writer, file, nbytes)
        case Wrote(writer, file, start, content):
            yield lambda disk: disk.write(file, Write(writer, start, content))
        case Synced(writer, file):
            yield lambda disk: disk.sync(writer, file)
        case Renamed(_, file, name):
            yield lambda disk: disk.rename(file, name)
            yield lambda disk: disk.sync_names(folder_of(name))
        case ReplacedFile(writer, file, content):
            yield from _replacing(writer, file, content)
        case Removed(writer, file):
            yield lambda disk: disk.remove(file, writer)
        case NamesSynced(_, folder):
            yield lambda disk: disk.sync_names(folder)
        case FolderMade(_, folder):
            yield lambda disk: disk.make_folder(folder)
        case FolderRemoved(_, folder):
            yield lambda disk: disk.remove(f"{folder}/")


def _replacing(writer: int, file: str, content: bytes) -> Iterator[DiskStep]:
    """Under another name first, as writers do it."""
    folder, _, name = file.rpartition("/")
    fresh = DiskFile(bytearray(), writer, len(content), is_size_durable=False)
    interim = ""

    def create(disk: Disk) -> None:
        nonlocal interim
        interim = f"{folder}/" if folder else ""
        interim += f".{name}.{disk.interims:08x}{INCOMPLETE}"
        disk.interims += 1
        disk.name(fresh, interim, None)

    yield create
    yield lambda _: fresh.writes.append(Write(writer, 0, content))
    yield lambda _: fresh.sync(writer)
    yield lambda disk: disk.name(fresh, file, interim)
    yield lambda disk: disk.sync_names(folder)


def put(content: bytearray, start: int, part: bytes) -> None:
    """Bytes into a file, which grows where they end behind its own."""
    grow(content, start + len(part))
    content[start : start + len(part)] = part


def grow(content: bytearray, nbytes: int) -> None:
    """Zeros at the end, up to so many bytes."""
    content.extend(bytes(max(0, nbytes - len(content))))
