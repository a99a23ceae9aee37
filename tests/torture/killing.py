"""Two processes that save into one folder for ever, each what can be told from all else, until they are killed."""

import contextlib
import os
import pickle
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tests.checkpoints.tiny import Training, differences
from tests.faults.saving import Blocks
from tests.support.crashes import BEFORE, Called, EffectLog, Entry, Failed, Killed, Returned, may_be_found
from tests.support.fork_server import start_server
from tests.support.local_ranks import LIMIT_S
from tests.torture.objects import behind
from tests.torture.verbs import MARK, ONE_FILE, SEVERAL_FILES, saving

import shardwise
from shardwise import Checkpointer, StorageError

_STATES = "TZX"


@dataclass(frozen=True)
class Kind:
    """A way to save what a seed makes, and to tell the seed of what is there; both raise what is wrong."""

    save: Callable[[str, int], None]
    found: Callable[[str], int]


def _model_in(folder: str) -> int:
    """Whole, by values, and by the fingerprints that were recorded of it."""
    model = Blocks(0)
    shardwise.load(model, folder, options=shardwise.options.LoadOptions(progress=False))
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seed = int(found["steps"])
    wanted = Blocks(seed).state_dict()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted), f"a mixture, of {seed} and another"
    assert shardwise.verify(folder).is_sound
    return seed


def _made(seed: int) -> Training:
    training = Training(seed)
    training.data.at = seed
    return training


def _checkpointing(mode: Any) -> Callable[[str, int], None]:
    def save(folder: str, seed: int) -> None:
        with Checkpointer(folder, keep=2, mode=mode) as checkpointer:
            checkpointer.save((checkpointer.latest() or 0) + 1, _made(seed).state)

    return save


def _checkpoint_in(folder: str) -> int:
    training = Training(0)
    Checkpointer(folder).restore(training.state)
    seed = training.data.at
    wanted = _made(seed)
    odd = differences(training.taken(), wanted.taken())
    assert not odd, f"a mixture, of {seed} and another: {odd}"
    return seed


KINDS: dict[str, Kind] = {
    "one file": Kind(saving(ONE_FILE), _model_in),
    "several files": Kind(saving(SEVERAL_FILES), _model_in),
    "one and several": Kind(saving(ONE_FILE, SEVERAL_FILES), _model_in),
    "checkpoint": Kind(_checkpointing("sync"), _checkpoint_in),
    "checkpoint beside": Kind(_checkpointing("async"), _checkpoint_in),
}


def _for_ever(kind: str, folder: str, log_path: str, first_seed: int) -> None:
    from tests.quiet import quieten
    from tests.torture.objects import register

    quieten()
    register()
    log = EffectLog(log_path)
    seed = first_seed
    while True:
        log.note(Called(str(seed)))
        try:
            KINDS[kind].save(folder, seed)
        except StorageError:  # the other one was faster
            log.note(Failed(str(seed)))
            time.sleep(0.002)
        except BaseException as error:
            log.note(Failed(f"{seed}"))
            Path(f"{log_path}.error").write_text(f"{type(error).__name__}: {error}")
            os._exit(1)
        else:
            log.note(Returned(str(seed)))
        seed += 1


class Turns:
    """What became of the saves so far; what was read once is not read again."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._position = 0
        self._entries: list[Entry] = []

    def so_far(self) -> list[Entry]:
        with open(self._path, "rb") as log:
            log.seek(self._position)
            with contextlib.suppress(EOFError, pickle.UnpicklingError):  # the last one may be on its way
                while True:
                    self._entries.append(pickle.load(log))
                    self._position = log.tell()
        return self._entries

    def add(self, entry: Entry) -> None:
        """What only we know. Not in the log: whoever is stopped may hold its lock."""
        self._entries.append(entry)


@dataclass
class Tally:
    """What was seen in so many kills."""

    kills: int = 0
    returned: int = 0
    refused: int = 0
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.kills} kills, {self.returned} saves returned, {self.refused} raised, {len(self.faults)} faults"
        )


def kill_again_and_again(kind: str, folder: str, log_path: str, *, kills: int, seed: int) -> Tally:
    """Two processes save; one or both are killed at random moments, again and again, and looked at what is there.

    The one that is left is stopped while we look, wherever it is: what is there is whole at every moment. On a busy
    machine saves take longer, so they are given longer: kills that come before anything has returned show nothing.
    """
    draw = random.Random(seed)
    tally = Tally()
    log = EffectLog(log_path)
    seeds = iter(range(1_000, 10**9, 1_000))
    log.note(Called("1"))
    KINDS[kind].save(folder, 1)
    log.note(Returned("1"))
    turns = Turns(log_path)
    longest_s = 0.08
    with contextlib.ExitStack() as stack:
        both = [_started(kind, folder, log_path, next(seeds), stack) for _ in range(2)]
        while (tally.kills < kills or tally.returned <= kills) and len(tally.faults) < 20:
            _wait_for_calls(turns, [first for first, _ in both])
            time.sleep(draw.uniform(0.0, longest_s))
            doomed = draw.choice([(0,), (1,), (0, 1)])
            for which in range(2):
                _stop(both[which][1].pid)
            for which in doomed:
                both[which][1].kill()
                both[which][1].join()
                tally.kills += 1
            for which in doomed:
                if (open_call := _open_call(turns.so_far(), both[which][0])) is not None:
                    turns.add(Killed(open_call))
            tally.faults += [f"kill {tally.kills}: {fault}" for fault in _faults(kind, folder, turns.so_far())]
            error = Path(f"{log_path}.error")
            if error.exists():
                tally.faults.append(f"kill {tally.kills}: a save raised {error.read_text()}")
                error.unlink()
            for which in range(2):
                if which in doomed:
                    both[which] = _started(kind, folder, log_path, next(seeds), stack)
                else:
                    os.kill(both[which][1].pid, signal.SIGCONT)
            tally.returned = sum(isinstance(entry, Returned) for entry in turns.so_far())
            longest_s = min(2.0, longest_s * 1.1) if tally.returned <= tally.kills else longest_s
    entries = turns.so_far()
    tally.refused = sum(isinstance(entry, Failed) for entry in entries)
    return tally


def _faults(kind: str, folder: str, entries: list[Entry]) -> list[str]:
    allowed = may_be_found(entries) - {BEFORE}
    try:
        found = KINDS[kind].found(folder)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    return [] if str(found) in allowed else [f"save {found} is found, and not {' or '.join(sorted(allowed)[-4:])}"]


def _started(kind: str, folder: str, log_path: str, first_seed: int, stack: Any) -> tuple[int, Any]:
    process = start_server().Process(target=_for_ever, args=(kind, folder, log_path, first_seed), daemon=True)
    process.start()
    stack.callback(process.join)
    stack.callback(process.kill)
    return first_seed, process


def _wait_for_calls(turns: Turns, first_seeds: list[int]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        called = {entry.save for entry in turns.so_far() if isinstance(entry, Called)}
        if {str(first) for first in first_seeds} <= called:
            return
        time.sleep(0.005)
    raise AssertionError("a process did not begin")


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in _STATES:
        time.sleep(0.0005)


def _open_call(entries: list[Entry], first_seed: int) -> str | None:
    """The save that a process was at, of those that began with this seed."""
    own = [
        entry for entry in entries if hasattr(entry, "save") and first_seed <= int(entry.save) < first_seed + 1_000
    ]
    return own[-1].save if own and isinstance(own[-1], Called) else None


def litter(folder: str) -> Iterator[str]:
    """What looks as if nobody needed it."""
    place = behind(folder) if "://" in folder else Path(folder)
    for path in sorted(place.rglob("*")):
        if "://" in folder and "#" in path.name:
            continue  # an upload that a kill has cut short; obstore's local store never lists it
        if path.name.endswith((".incomplete", ".older")) or path.name.startswith(MARK):
            yield path.name
