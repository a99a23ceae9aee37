"""What a save leaves behind when the machine dies in the middle: its effects recorded, and replayed in part."""

from __future__ import annotations

import fcntl
import os
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self, TypeAlias, TypeVar

from shardwise.errors import StorageError
from shardwise.storage.memory import MemoryReader
from shardwise.storage.writer import LOCAL_WRITES, StorageWriter, WritePolicy

Seen = TypeVar("Seen")

_BLOCK_BYTES: Final = 4096
"""What a disk writes whole or not at all."""

_MOST_ONE_BY_ONE: Final = 24
"""Up to so many effects that may be lost, each is lost alone, and kept alone."""


# [Note: What a crash leaves]
#
# The machine dies at some moment, and what it had in memory is gone. What is on its disk then is modelled after
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
#
# A store that takes files as streams shows a file whole when it is synced, replaced or removed, and never loses it.
#
# All effects of one save are put into one order, that in which they happened, so a crash comes between any two of
# them, or within `rename` and `replace`, which are several.


@dataclass(frozen=True, slots=True)
class Created:
    """A file was created with its size."""

    writer: int
    file: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Wrote:
    """Bytes were put into a file."""

    writer: int
    file: str
    start: int
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Synced:
    """What the writer had written to the file was made durable."""

    writer: int
    file: str


@dataclass(frozen=True, slots=True)
class Renamed:
    """A file was given another name, for good."""

    writer: int
    file: str
    name: str


@dataclass(frozen=True, slots=True)
class Replaced:
    """A small file was put in place of another, for good."""

    writer: int
    file: str
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Removed:
    """A file was removed."""

    writer: int
    file: str


@dataclass(frozen=True, slots=True)
class NamesSynced:
    """What had been created and removed in a folder was made durable."""

    writer: int
    folder: str = ""


Effect: TypeAlias = Created | Wrote | Synced | Renamed | Replaced | Removed | NamesSynced


class EffectLog:
    """A file to which threads and processes add what they did, in the order in which they did it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    @contextmanager
    def next(self) -> Iterator[Callable[[Effect], None]]:
        """Keeps all others waiting while one effect happens; the value notes it."""
        with self._path.open("ab") as log:
            fcntl.flock(log, fcntl.LOCK_EX)  # until the file is closed
            yield lambda effect: pickle.dump(effect, log)

    def effects(self) -> list[Effect]:
        """All that was noted so far."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as log:
            return list(_unpickled(log))


def _unpickled(log: BinaryIO) -> Iterator[Effect]:
    while True:
        try:
            yield pickle.load(log)
        except EOFError:
            return


class RecordingWriter:
    """Notes in ``log`` what happens through it to another writer, ``inner``; closing it closes that one.

    Writers of several threads or processes share a log file: what they do is done one after the other. ``writer``
    tells them apart (the rank). Calls that fail are not noted. Writers to several folders share one, too: the names
    of files are noted with the ``folder`` in front.
    """

    def __init__(self, inner: StorageWriter, log: EffectLog, *, writer: int = 0, folder: str = "") -> None:
        self._inner = inner
        self._log = log
        self._writer = writer
        self._folder = folder

    @property
    def root(self) -> str:
        return self._inner.root

    @property
    def policy(self) -> WritePolicy:
        return self._inner.policy

    def list(self) -> list[str]:
        return self._inner.list()

    def sizes(self) -> dict[str, int]:
        return self._inner.sizes()

    def read(self, file: str) -> bytes | None:
        return self._inner.read(file)

    def create(self, file: str, nbytes: int) -> None:
        with self._log.next() as note:
            self._inner.create(file, nbytes)
            note(Created(self._writer, self._noted(file), nbytes))

    def write(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        with self._log.next() as note:
            self._inner.write(file, start, buffers)
            content = b"".join(buffer.tobytes() for buffer in buffers)
            note(Wrote(self._writer, self._noted(file), start, content))

    def sync(self, file: str) -> None:
        with self._log.next() as note:
            self._inner.sync(file)
            note(Synced(self._writer, self._noted(file)))

    def rename(self, file: str, name: str) -> None:
        with self._log.next() as note:
            self._inner.rename(file, name)
            note(Renamed(self._writer, self._noted(file), self._noted(name)))

    def publish(self, file: str, name: str) -> None:
        with self._log.next() as note:
            content = self._inner.read(file)
            self._inner.publish(file, name)
            if self.policy.can_rename:
                note(Renamed(self._writer, self._noted(file), self._noted(name)))
            else:  # a copy, and then a removal
                note(Replaced(self._writer, self._noted(name), content or b""))
                note(Removed(self._writer, self._noted(file)))

    def replace(self, file: str, content: bytes) -> None:
        with self._log.next() as note:
            self._inner.replace(file, content)
            note(Replaced(self._writer, self._noted(file), bytes(content)))

    def remove(self, file: str) -> None:
        with self._log.next() as note:
            self._inner.remove(file)
            note(Removed(self._writer, self._noted(file)))

    def sync_names(self) -> None:
        with self._log.next() as note:
            self._inner.sync_names()
            note(NamesSynced(self._writer, self._folder))

    def close(self) -> None:
        self._inner.close()

    def _noted(self, file: str) -> str:
        return f"{self._folder}/{file}" if self._folder else file

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class CrashState:
    """What may be found after a crash.

    Attributes:
        files: every file, and its bytes.
        completed: how many effects had been completed when the machine died.
        what: the moment, and what was lost.
    """

    files: Mapping[str, bytes] = field(repr=False)
    completed: int
    what: str

    def reader(self) -> MemoryReader:
        """A reader of the files."""
        return MemoryReader(self.files, root=f"<{self.what}>")

    def put_into(self, folder: str | os.PathLike[str]) -> None:
        """Write the files into a folder, which is empty or not there."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for file, content in self.files.items():
            Path(folder, file).parent.mkdir(exist_ok=True)
            Path(folder, file).write_bytes(content)


def states_after_crash(
    before: Mapping[str, bytes],
    effects: Sequence[Effect],
    *,
    policy: WritePolicy = LOCAL_WRITES,
    samples: int = 8,
    seed: int = 0,
) -> Iterator[CrashState]:
    """What may be found after a crash at any moment of a save; see [Note: What a crash leaves].

    For every moment: everything kept that may be, nothing kept, only names, only bytes; each single effect lost,
    and each kept alone, where they are not too many; and ``samples`` drawn at random, the same for the same
    ``seed``. States of one moment differ; the last ones, after all effects, have ``completed == len(effects)``.

    Memory: one copy of all files at a time, beside the effects.
    """
    disk = _Disk(before)
    draw = random.Random(seed)
    yield from _states_now(disk, 0, "before everything", samples, draw)
    for number, effect in enumerate(effects):
        steps = list(_steps(effect, policy))
        for index, step in enumerate(steps):
            step(disk)
            is_last = index == len(steps) - 1
            moment = f"after {effect}" if is_last else f"within {effect}, after step {index + 1} of {len(steps)}"
            yield from _states_now(disk, number + is_last, moment, samples, draw)


def assert_old_or_new(
    before: Mapping[str, bytes],
    effects: Sequence[Effect],
    look: Callable[[MemoryReader], Seen],
    *,
    old: Seen,
    new: Seen,
    policy: WritePolicy = LOCAL_WRITES,
    samples: int = 8,
    seed: int = 0,
) -> int:
    """After a crash at any moment, ``look`` sees either what was saved before or what was to be saved.

    After the last effect it sees what was to be saved. ``look`` must read all that counts.

    Returns:
        How many states were looked at.

    Raises:
        AssertionError: for the first state in which something else is seen, or ``look`` fails; it says which.
    """
    count = 0
    for state in states_after_crash(before, effects, policy=policy, samples=samples, seed=seed):
        count += 1
        allowed = [new] if state.completed == len(effects) else [old, new]
        try:
            with state.reader() as reader:
                seen = look(reader)
        except Exception as error:
            raise AssertionError(f"a crash {state.what} leaves what cannot be read: {error}") from error
        if seen not in allowed:
            kind = "what was there before" if seen == old else "neither the older nor the newer save"
            raise AssertionError(f"a crash {state.what} leaves {kind}")
    return count


# ── the disk ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, eq=False)
class _Write:
    """Bytes put into a file, which stay only once they are durable."""

    writer: int
    start: int
    content: bytes
    is_durable: bool = False


@dataclass(slots=True, eq=False)
class _File:
    """A file without its name: what is surely on the disk, and what came later, in order."""

    durable: bytearray
    creator: int = -1
    nbytes: int = 0
    is_size_durable: bool = True
    writes: list[_Write] = field(default_factory=list)

    def sync(self, writer: int) -> None:
        if writer == self.creator and not self.is_size_durable:
            self.is_size_durable = True
            _grow(self.durable, self.nbytes)
        for write in self.writes:
            write.is_durable |= write.writer == writer
        # What comes after one that may be lost has to wait for it: they may overlap.
        while self.writes and self.writes[0].is_durable:
            write = self.writes.pop(0)
            _put(self.durable, write.start, write.content)


@dataclass(frozen=True, slots=True, eq=False)
class _Naming:
    """A file was given a name, lost one, or both."""

    file: _File
    given: str | None
    taken: str | None

    @property
    def name(self) -> str:
        """One of the two; they are in one folder."""
        return self.given or self.taken or ""

    def apply(self, names: dict[str, _File], *, keeps_old: bool = False) -> None:
        if self.given is not None:
            names[self.given] = self.file
        if self.taken is not None and names.get(self.taken) is self.file and not (keeps_old and self.given):
            del names[self.taken]


def folder_of(name: str) -> str:
    """The folder that a noted name is in; "" for none."""
    return name.rpartition("/")[0]


class _Disk:
    """Files, the names that are sure, and those that came later, in order."""

    def __init__(self, before: Mapping[str, bytes]) -> None:
        self.names = {name: _File(bytearray(content)) for name, content in before.items()}
        self.durable_names = dict(self.names)
        self.namings: list[_Naming] = []
        self.streams: dict[str, _File] = {}

    def name(self, file: _File, given: str | None, taken: str | None) -> None:
        naming = _Naming(file, given, taken)
        naming.apply(self.names)
        self.namings.append(naming)

    def sync_names(self, folder: str = "") -> None:
        """Of the files that lie directly in a folder."""
        others = {name: file for name, file in self.durable_names.items() if folder_of(name) != folder}
        self.durable_names = others | {name: file for name, file in self.names.items() if folder_of(name) == folder}
        self.namings = [naming for naming in self.namings if folder_of(naming.name) != folder]

    def writes(self) -> list[_Write]:
        """All that may be lost, of all files that have a name or may have one."""
        files = {id(file): file for file in (*self.names.values(), *self.durable_names.values())}
        files |= {id(naming.file): naming.file for naming in self.namings}
        return [write for file in files.values() for write in file.writes if not write.is_durable]


_Step: TypeAlias = Callable[[_Disk], None]


def _steps(effect: Effect, policy: WritePolicy) -> Iterator[_Step]:
    """What an effect does to the disk, in steps between which the machine may die."""
    if not policy.has_random_writes:
        yield lambda disk: _stream(disk, effect)
        return
    match effect:
        case Created(writer, file, nbytes):
            yield lambda disk: disk.name(_File(bytearray(), writer, nbytes, is_size_durable=False), file, None)
        case Wrote(writer, file, start, content):
            # One who has the file open goes on writing to it after it has lost its name.
            yield (
                lambda disk: (
                    disk.names[file].writes.append(_Write(writer, start, content)) if file in disk.names else None
                )
            )
        case Synced(writer, file):
            yield lambda disk: disk.names[file].sync(writer) if file in disk.names else None
        case Renamed(_, file, name):
            taken = file if file != name else None
            yield lambda disk: disk.name(disk.names[file], name, taken)
            yield lambda disk: disk.sync_names(folder_of(name))
        case Replaced(writer, file, content):
            folder, _, name = file.rpartition("/")
            interim = f"{folder}/.{name}.incomplete" if folder else f".{name}.incomplete"
            fresh = _File(bytearray(), writer, len(content), is_size_durable=False)
            yield lambda disk: disk.name(fresh, interim, None)
            yield lambda disk: fresh.writes.append(_Write(writer, 0, content))
            yield lambda disk: fresh.sync(writer)
            yield lambda disk: disk.name(fresh, file, interim)
            yield lambda disk: disk.sync_names(folder_of(file))
        case Removed(_, file):
            yield lambda disk: disk.name(disk.names[file], None, file) if file in disk.names else None
        case NamesSynced(_, folder):
            yield lambda disk: disk.sync_names(folder)


def _stream(disk: _Disk, effect: Effect) -> None:
    """An effect on a store that takes files as streams, and shows and keeps them whole."""
    match effect:
        case Created(_, file, nbytes):
            disk.streams[file] = _File(bytearray(nbytes))
        case Wrote(_, file, start, content):
            _put(disk.streams[file].durable, start, content)
        case Synced(_, file) if file in disk.streams:
            disk.names[file] = disk.streams.pop(file)
        case Replaced(_, file, content):
            disk.names[file] = _File(bytearray(content))
        case Removed(_, file):
            disk.streams.pop(file, None)
            disk.names.pop(file, None)
        case Renamed(_, file):
            raise StorageError(f"{file}: renamed in a store that cannot rename; pass the policy of its writer")
        case _:
            pass
    disk.sync_names()


# ── what becomes of what may be lost ──────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Fate:
    """Which of the effects that may be lost are kept."""

    what: str
    keeps_name: Callable[[_Naming], bool]
    keeps_block: Callable[[_Write], bool]
    size: Callable[[_File], int]
    keeps_old_name: Callable[[], bool] = lambda: False


def _fates(disk: _Disk, samples: int, draw: random.Random) -> Iterator[_Fate]:
    namings, writes = list(disk.namings), disk.writes()

    def whole(file: _File) -> int:
        return file.nbytes

    yield _Fate("nothing lost", lambda _: True, lambda _: True, whole)
    if not namings and not writes and all(file.is_size_durable for file in disk.names.values()):
        return
    yield _Fate("all lost that was not synced", lambda _: False, lambda _: False, lambda _: 0)
    yield _Fate("names kept, bytes and sizes lost", lambda _: True, lambda _: False, lambda _: 0)
    yield _Fate("names and sizes kept, bytes lost", lambda _: True, lambda _: False, whole)
    yield _Fate("bytes kept, names lost", lambda _: False, lambda _: True, whole)
    if len(namings) + len(writes) <= _MOST_ONE_BY_ONE:
        for one in namings:
            told = f"of {one.name}"
            yield _Fate(f"the name {told} lost", _all_but(one), lambda _: True, whole)
            yield _Fate(f"no name kept but that {told}", _only(one), lambda _: True, whole)
        for two in writes:
            told = f"{len(two.content)} bytes at {two.start} of writer {two.writer}"
            yield _Fate(f"{told} lost", lambda _: True, _all_but(two), whole)
            yield _Fate(f"no bytes kept but {told}", lambda _: True, _only(two), whole)
    for number in range(samples):
        yield _random_fate(number, writes, draw)


def _only(one: object) -> Callable[[object], bool]:
    return lambda other: other is one


def _all_but(one: object) -> Callable[[object], bool]:
    return lambda other: other is not one


def _random_fate(number: int, writes: Sequence[_Write], draw: random.Random) -> _Fate:
    chance = draw.choice((0.1, 0.5, 0.9))
    # Some writes stay or go as a whole, others are torn.
    wholes = {id(write): draw.random() < chance for write in writes if draw.random() < 0.5}

    def size(file: _File) -> int:
        blocks = draw.randint(0, file.nbytes // _BLOCK_BYTES)
        return draw.choice((0, file.nbytes, blocks * _BLOCK_BYTES))

    return _Fate(
        f"a part lost (sample {number})",
        lambda _: draw.random() < chance,
        lambda write: wholes[id(write)] if id(write) in wholes else draw.random() < chance,
        size,
        lambda: draw.random() < 0.5,
    )


def _states_now(
    disk: _Disk, completed: int, moment: str, samples: int, draw: random.Random
) -> Iterator[CrashState]:
    found: set[tuple[tuple[str, bytes], ...]] = set()
    for fate in _fates(disk, samples, draw):
        names = dict(disk.durable_names)
        for naming in disk.namings:
            if fate.keeps_name(naming):
                naming.apply(names, keeps_old=fate.keeps_old_name())
        # A file of two names is one file.
        contents = {id(file): _content(file, fate) for file in names.values()}
        files = {name: contents[id(file)] for name, file in sorted(names.items())}
        state = tuple(files.items())
        if state not in found:
            found.add(state)
            yield CrashState(files, completed, f"{moment}: {fate.what}")


def _content(file: _File, fate: _Fate) -> bytes:
    content = bytearray(file.durable)
    if not file.is_size_durable:
        _grow(content, fate.size(file))
    for write in file.writes:
        if write.is_durable:
            _put(content, write.start, write.content)
            continue
        for start, block in _blocks(write):
            if fate.keeps_block(write):
                _put(content, start, block)
    return bytes(content)


def _blocks(write: _Write) -> Iterator[tuple[int, bytes]]:
    """The write, cut where blocks of the file begin."""
    stop = write.start + len(write.content)
    start = write.start
    while start < stop:
        end = min(stop, (start // _BLOCK_BYTES + 1) * _BLOCK_BYTES)
        yield start, write.content[start - write.start : end - write.start]
        start = end


def _put(content: bytearray, start: int, part: bytes) -> None:
    _grow(content, start + len(part))
    content[start : start + len(part)] = part


def _grow(content: bytearray, nbytes: int) -> None:
    content.extend(bytes(max(0, nbytes - len(content))))
