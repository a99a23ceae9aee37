"""Processes that save, one beside another: each can be held before any of its effects, go on, or be killed."""

import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.crashes import Called, EffectLog, Failed, Killed, Returned, recorded
from tests.support.fork_server import start_server
from tests.support.local_ranks import LIMIT_S

TO_THE_END = 0
"""Where to hold who is not to be held."""


@dataclass(frozen=True, slots=True)
class Part:
    """Who saves what: the verb's name, the seed, the folder, the log of all, the number of this writer, and the
    folder with what the verb takes.
    """

    verb: str
    seed: int
    folder: str
    log: str
    writer: int
    inputs: Path

    @property
    def save(self) -> str:
        """The name of the save in the log."""
        return f"seed {self.seed}"


def play(part: Part, before: Any = lambda: None) -> str:
    """Save, and note all of it; what was raised, or ""."""
    from tests.torture.verbs import VERBS

    log = EffectLog(part.log)
    log.note(Called(part.save))
    try:
        with recorded(log, part.folder, writer=part.writer, before=before):
            VERBS[part.verb].act(part.folder, part.seed, part.inputs)
    except Exception as error:
        log.note(Failed(part.save))
        return f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    log.note(Returned(part.save))
    return ""


@dataclass
class Actor:
    """A process that plays its part, up to one of its effects first."""

    part: Part
    hold_before: int = TO_THE_END
    error: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._pipe, theirs = start_server().Pipe()
        self._process = start_server().Process(
            target=_live, args=(self.part, self.hold_before, theirs), daemon=True
        )
        self._process.start()
        theirs.close()

    def is_held(self) -> bool:
        """Wait until it is held, or has ended."""
        if self.error is not None:
            return False
        if not self._pipe.poll(LIMIT_S):
            raise AssertionError(f"{self.part}: neither came to effect {self.hold_before} nor to its end")
        kind, value = self._pipe.recv()
        if kind == "end":
            self.error = value
            self._process.join()
        return kind == "held"

    def finish(self) -> str:
        """Let it go on to its end; what was raised, or ""."""
        if self.error is None:
            self._pipe.send("go on")
            while self.is_held():
                self._pipe.send("go on")
        assert self.error is not None
        return self.error

    def end(self) -> str:
        """Of one that is not held: wait for its end; what was raised, or ""."""
        assert not self.is_held()
        assert self.error is not None
        return self.error

    def kill(self) -> None:
        """SIGKILL, just where it is."""
        if self.error is None:
            assert self._process.pid is not None
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.join()
            EffectLog(self.part.log).note(Killed(self.part.save))
            self.error = "killed"

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


@contextmanager
def actor(part: Part, hold_before: int = TO_THE_END) -> Iterator[Actor]:
    found = Actor(part, hold_before)
    try:
        yield found
    finally:
        found.close()


def _live(part: Part, hold_before: int, pipe: Connection) -> None:
    from tests.quiet import quieten

    quieten()
    count = 0

    def before() -> None:
        nonlocal count
        count += 1
        if count == hold_before:
            pipe.send(("held", count))
            pipe.recv()

    pipe.send(("end", play(part, before)))
    os._exit(0)


def files_in(folder: str | os.PathLike[str]) -> dict[str, bytes]:
    """Every file below a folder, and every empty folder, as a state has them."""
    found: dict[str, bytes] = {}
    for path in sorted(Path(folder).rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file():
            found[name] = path.read_bytes()
        elif not any(path.iterdir()):
            found[f"{name}/"] = b""
    return found
