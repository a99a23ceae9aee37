"""States of a storage after a save was killed or the machine crashed, made by replaying a part of its effects."""

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.support.crashes.disk import Disk, DiskFile, Naming, Write, folders_around, grow, put, steps_of
from tests.support.crashes.effects import Called, Effect, Entry, Failed, Killed, Partly, Returned
from tests.support.memory_storage import MemoryReader

_BLOCK_BYTES: Final = 4096
"""What a disk writes whole or not at all."""

_MOST_ONE_BY_ONE: Final = 24
"""Up to so many effects that may be lost, each is lost alone, and kept alone."""


@dataclass(frozen=True, slots=True)
class CrashState:
    """What may be found after a crash.

    Attributes:
        files: every file, and its bytes; a name that ends with "/" is an empty folder.
        completed: how many effects had been completed when the machine died.
        what: the moment, and what was lost.
    """

    files: Mapping[str, bytes] = field(repr=False)
    completed: int
    what: str

    def reader(self) -> MemoryReader:
        """A reader of the files."""
        return MemoryReader(
            {name: content for name, content in self.files.items() if not name.endswith("/")}, root=f"<{self.what}>"
        )

    def put_into(self, folder: str | os.PathLike[str]) -> None:
        """Write the files into a folder, which is empty or not there."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            place = Path(folder, name)
            if name.endswith("/"):
                place.mkdir(parents=True, exist_ok=True)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content)


@dataclass(frozen=True, slots=True)
class KilledState:
    """What is found, by who comes next, after a process was killed while the machine stays up.

    Attributes:
        done: what the process had done; what was not synced may still be lost.
        state: what is seen.
    """

    done: Sequence[Entry] = field(repr=False)
    state: CrashState


def states_after_crash(
    before: Mapping[str, bytes],
    effects: Sequence[Entry],
    *,
    samples: int = 8,
    seed: int = 0,
    since: int = 0,
) -> Iterator[CrashState]:
    """What may be found after a crash at any moment of a save; see [Note: What a crash leaves].

    For every moment: everything kept that may be, nothing kept, only names, only bytes; each single effect lost,
    and each kept alone, where they are not too many; and ``samples`` drawn at random, the same for the same
    ``seed``. States of one moment differ; the last ones, after all effects, have ``completed == len(effects)``.

    The effects may be those of several writers, and of one after another that was killed. The first ``since`` of
    them are completed in every state.

    Memory: one copy of all files at a time, beside the effects.
    """
    disk = Disk(before)
    draw = random.Random(seed)
    if not since:
        yield from _states_now(disk, 0, "before everything", samples, draw)
    for number, effect in enumerate(effects):
        match effect:
            case Called() | Killed():
                continue  # nothing new may be found
            case Returned() | Failed():
                if number >= since:
                    yield from _states_now(disk, number + 1, f"after {effect}", samples, draw)
                continue
        steps = steps_of(effect)
        for index, step in enumerate(steps):
            step(disk)
            is_last = index == len(steps) - 1
            if number + is_last < since:
                continue
            moment = f"after {effect}" if is_last else f"within {effect}, after step {index + 1} of {len(steps)}"
            yield from _states_now(disk, number + is_last, moment, samples, draw)


def states_after_kill(before: Mapping[str, bytes], effects: Sequence[Entry]) -> Iterator[KilledState]:
    """What is found after a kill of the process at any moment of a save, before each step of each effect."""
    disk = Disk(before)
    yield KilledState((), _seen(disk, 0, "before everything"))
    for number, effect in enumerate(effects):
        if isinstance(effect, (Called, Returned, Failed, Killed)):
            continue
        steps = steps_of(effect)
        for index, step in enumerate(steps):
            step(disk)
            is_last = index == len(steps) - 1
            last: Effect = effect if is_last else Partly(effect, index + 1)
            yield KilledState((*effects[:number], last), _seen(disk, number + is_last, f"a kill after {last}"))


def _seen(disk: Disk, completed: int, what: str) -> CrashState:
    """What there is for all who look on while the machine is up."""
    nothing_lost = _Fate("nothing lost", lambda _: True, lambda _: True, lambda file: file.nbytes)
    return CrashState(_files(disk, disk.names, nothing_lost), completed, what)


@dataclass(frozen=True, slots=True)
class _Fate:
    """Which of the effects that may be lost are kept."""

    what: str
    keeps_name: Callable[[Naming], bool]
    keeps_block: Callable[[Write], bool]
    size: Callable[[DiskFile], int]
    keeps_old_name: Callable[[], bool] = lambda: False


def _fates(disk: Disk, samples: int, draw: random.Random) -> Iterator[_Fate]:
    namings, writes = list(disk.namings), disk.writes()

    def whole(file: DiskFile) -> int:
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


def _random_fate(number: int, writes: Sequence[Write], draw: random.Random) -> _Fate:
    chance = draw.choice((0.1, 0.5, 0.9))
    # Some writes stay or go as a whole, others are torn.
    wholes = {id(write): draw.random() < chance for write in writes if draw.random() < 0.5}

    def size(file: DiskFile) -> int:
        blocks = draw.randint(0, file.nbytes // _BLOCK_BYTES)
        return draw.choice((0, file.nbytes, blocks * _BLOCK_BYTES))

    return _Fate(
        f"a part lost (sample {number})",
        lambda _: draw.random() < chance,
        lambda write: wholes[id(write)] if id(write) in wholes else draw.random() < chance,
        size,
        lambda: draw.random() < 0.5,
    )


def _states_now(disk: Disk, completed: int, moment: str, samples: int, draw: random.Random) -> Iterator[CrashState]:
    found: set[tuple[tuple[str, bytes], ...]] = set()
    for fate in _fates(disk, samples, draw):
        names = dict(disk.durable_names)
        for naming in disk.namings:
            if fate.keeps_name(naming):
                naming.apply(names, keeps_old=fate.keeps_old_name())
        state = tuple(_files(disk, names, fate).items())
        if state not in found:
            found.add(state)
            yield CrashState(dict(state), completed, f"{moment}: {fate.what}")


def _files(disk: Disk, names: Mapping[str, DiskFile], fate: _Fate) -> dict[str, bytes]:
    """All files and their bytes, by name; folders that are empty end with "/"."""
    there = disk.reachable(names)
    contents = {id(file): _content(file, fate) for file in there.values()}  # a file of two names is one file
    full = {folder for name in there for folder in folders_around(name)}
    return {
        name: contents[id(file)]
        for name, file in sorted(there.items())
        if not (name.endswith("/") and (name == "/" or name.removesuffix("/") in full))
    }


def _content(file: DiskFile, fate: _Fate) -> bytes:
    content = bytearray(file.durable)
    if not file.is_size_durable:
        grow(content, fate.size(file))
    for write in file.writes:
        if write.is_durable:
            put(content, write.start, write.content)
            continue
        for start, block in _blocks(write):
            if fate.keeps_block(write):
                put(content, start, block)
    return bytes(content)


def _blocks(write: Write) -> Iterator[tuple[int, bytes]]:
    """The write, cut where blocks of the file begin."""
    stop = write.start + len(write.content)
    start = write.start
    while start < stop:
        end = min(stop, (start // _BLOCK_BYTES + 1) * _BLOCK_BYTES)
        yield start, write.content[start - write.start : end - write.start]
        start = end
