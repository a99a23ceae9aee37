"""Effects of writers on a storage, as data, and a log in which several writers record them in one order."""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeAlias


@dataclass(frozen=True, slots=True)
class _OnFile:
    writer: int
    file: str


@dataclass(frozen=True, slots=True)
class Created(_OnFile):
    """A file was created with its size."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Wrote(_OnFile):
    """Bytes were put into a file."""

    start: int
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Synced(_OnFile):
    """What the writer had written to the file was made durable."""


@dataclass(frozen=True, slots=True)
class Renamed(_OnFile):
    """A file was given another name, for good."""

    name: str


@dataclass(frozen=True, slots=True)
class ReplacedFile(_OnFile):
    """A small file was put in place of another, for good."""

    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Removed(_OnFile):
    """A file was removed."""


@dataclass(frozen=True, slots=True)
class NamesSynced:
    """What had been created and removed in a folder was made durable. ``".."`` is what the root lies in."""

    writer: int
    folder: str = ""


@dataclass(frozen=True, slots=True)
class _OnFolder:
    writer: int
    folder: str


@dataclass(frozen=True, slots=True)
class FolderMade(_OnFolder):
    """A folder was made; its name is not durable before those of the folder around it. "" is the root."""


@dataclass(frozen=True, slots=True)
class FolderRemoved(_OnFolder):
    """An empty folder was removed."""


@dataclass(frozen=True, slots=True)
class Partly:
    """An effect of several steps, after the first of which the process was killed."""

    effect: Effect
    steps: int


Effect: TypeAlias = (
    Created | Wrote | Synced | Renamed | ReplacedFile | Removed | NamesSynced | FolderMade | FolderRemoved | Partly
)


@dataclass(frozen=True, slots=True)
class _OfSave:
    """``save`` names it among all."""

    save: str


@dataclass(frozen=True, slots=True)
class Called(_OfSave):
    """A save began."""


@dataclass(frozen=True, slots=True)
class Returned(_OfSave):
    """The call of a save returned: who called it counts on it from now on."""


@dataclass(frozen=True, slots=True)
class Failed(_OfSave):
    """The call of a save raised: who called it was told that it does not count."""


@dataclass(frozen=True, slots=True)
class Killed(_OfSave):
    """The process of a save was killed: it does nothing more, and nobody was told anything."""


Turn: TypeAlias = Called | Returned | Failed | Killed
"""What becomes of a save, among the effects of all."""

Entry: TypeAlias = Effect | Turn


class EffectLog:
    """A file to which threads and processes add what they did, in the order in which they did it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    @contextmanager
    def next(self) -> Iterator[Callable[[Entry], None]]:
        """Keeps all others waiting while one effect happens; the value notes it."""
        with self._path.open("ab") as log:
            fcntl.flock(log, fcntl.LOCK_EX)  # until the file is closed

            def note(entry: Entry) -> None:
                pickle.dump(entry, log)
                log.flush()  # who is killed in the middle has done what it did

            yield note

    def note(self, entry: Entry) -> None:
        """Add what happened by itself."""
        with self.next() as note:
            note(entry)

    def entries(self) -> list[Entry]:
        """All that was noted so far."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as log:
            return list(_unpickled(log))

    def effects(self) -> list[Effect]:
        """All that was noted so far of what was done to the storage."""
        return [entry for entry in self.entries() if not isinstance(entry, (Called, Returned, Failed, Killed))]


def _unpickled(log: BinaryIO) -> Iterator[Entry]:
    while True:
        try:
            yield pickle.load(log)
        except EOFError:
            return
