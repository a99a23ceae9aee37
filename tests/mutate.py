"""``make mutate``: are the tests of a room able to fail? Small faults are put into it, one at a time.

For each room some mutants are drawn (``--seed``), and its own tests are run on each until one fails. What survives
is listed. A room passes with nine of ten killed, those in ``tests/equivalent_mutants.txt`` not counted: faults that
change nothing anybody can see, each with the reason.

A process imports the room and collects its tests once. A first run of every test, each in a process forked from
that one, says which lines it runs and how long it takes. Then a process is forked for each mutant: the functions
that are there get the code with the fault, and the tests that run its lines are run, quickest first. A fault in
what runs while modules are imported has everything imported anew, and all tests run. ::

    make mutate ARGS="--room tensors --mutants 20 --seed 3"
    make mutate ARGS="--room formats --file zip_archive.py --jobs 2"
"""

from __future__ import annotations

import argparse
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

import pytest
from tests.forked import Work, in_processes
from tests.mutants import SOURCES, Mutant, compiled, functions_changed, mutants_in

ROOT = Path(__file__).parent.parent
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")

ROOMS = ("tensors", "conversion", "layout", "formats", "planning")
NEEDED = 0.9

_CALM = 1.0
"""Seconds of the processor that a test has with a mutant in any case; beyond these, twice what it takes without."""

_LONGEST_S = 300.0
"""That any test takes without one."""

Line = tuple[str, int]


def place_of(room: str) -> str:
    """How the paths of a room's files begin: a folder, or one file."""
    file = SOURCES / f"{room}.py"
    return str(file) if file.is_file() else str(SOURCES / room) + os.sep


def files_of(room: str) -> list[Path]:
    """The files of a room."""
    file = SOURCES / f"{room}.py"
    return [file] if file.is_file() else sorted((SOURCES / room).rglob("*.py"))


@dataclass
class Measured:
    """What the tests of a room run, and how long they take; lines by file and number, tests by their id."""

    imported: set[Line] = field(default_factory=set)
    lines: dict[str, set[Line]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def tests_of(self, mutant: Mutant) -> list[str]:
        """That run its lines, quickest first."""
        struck = _lines_of(mutant)
        return sorted((test for test, lines in self.lines.items() if lines & struck), key=self.seconds.__getitem__)

    def limits_s(self, tests: Iterable[str]) -> dict[str, float]:
        return {test: _CALM + 2 * self.seconds[test] for test in tests}


def _lines_of(mutant: Mutant) -> set[Line]:
    return {(str(mutant.file), line) for line in mutant.lines}


class _Traced:
    """Collects the lines of a room that run, on all threads."""

    def __init__(self, room: str) -> None:
        self.place = place_of(room)
        self.lines: set[Line] = set()

    def __enter__(self) -> set[Line]:
        threading.settrace(self._call)
        sys.settrace(self._call)
        return self.lines

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self.place) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line


class _Collected:
    """A plugin that is called in place of pytest's own loop over the tests."""

    def __init__(self, then: Callable[[pytest.Session], bool]) -> None:
        self.then = then
        self.is_good = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.is_good = not session.testsfailed and self.then(session)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            print(report.longreprtext)


def collected(room: str, then: Callable[[pytest.Session], bool]) -> bool:
    """What ``then`` says of the room's tests; False where they cannot be collected."""
    plugin = _Collected(then)
    quiet = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # plugins of libraries that are imported already
    pytest.main(["-q", "-s", "-p", "no:cacheprovider", *quiet, "-m", "not slow", f"tests/{room}"], [plugin])
    return plugin.is_good


def passes(session: pytest.Session, limits_s: Mapping[str, float]) -> bool:
    """Whether all these tests pass; the first that fails is the last. One that takes too long ends the process."""
    items = {item.nodeid: item for item in session.items}
    chosen = [items[test] for test in limits_s]
    for item, following in zip(chosen, [*chosen[1:], None], strict=True):
        signal.setitimer(signal.ITIMER_PROF, limits_s[item.nodeid])
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return False
    return True


def measured(session: pytest.Session, room: str, imported: set[Line], jobs: int, scratch: Path) -> Measured | None:
    """Each test by itself, so that nothing is kept from another; None where one fails."""
    found = Measured(imported)

    def run(test: str, folder: Path) -> bool:
        with _Traced(room) as lines:
            is_good = passes(session, {test: _LONGEST_S})
        (folder / "lines").write_bytes(pickle.dumps((lines, time.process_time())))
        return is_good

    names = [item.nodeid for item in session.items]
    works = (Work(name, lambda folder, name=name: run(name, folder), _LONGEST_S) for name in names)  # type: ignore[misc]
    for name, is_good, folder in in_processes(works, jobs, scratch):
        if not is_good:
            print(f"{room}: {name} fails as it is", (folder / "output").read_text(), sep="\n")
            return None
        found.lines[name], found.seconds[name] = pickle.loads((folder / "lines").read_bytes())
    return found


class Functions:
    """The functions of a room that are in this process, by file, qualified name and first line."""

    def __init__(self, room: str) -> None:
        place = place_of(room)
        self._found: dict[tuple[str, str, int], list[FunctionType]] = {}
        for one in gc.get_objects():
            if type(one) is FunctionType and one.__code__.co_filename.startswith(place):
                code = one.__code__
                key = code.co_filename, code.co_qualname, code.co_firstlineno
                self._found.setdefault(key, []).append(one)
        assert self._found, f"nothing of {room} is imported"

    def given(self, mutant: Mutant) -> list[tuple[FunctionType, Any]]:
        """The functions that the fault changes, with their new code; none where it has to be imported."""
        changed = functions_changed(mutant)
        keys = [(str(mutant.file), *key) for key in changed]
        if not all(key in self._found for key in keys):
            return []
        return [(one, code) for key, code in zip(keys, changed.values(), strict=True) for one in self._found[key]]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from its mutant."""

    def __init__(self, mutant: Mutant) -> None:
        parts = mutant.file.relative_to(SOURCES.parent).with_suffix("").parts
        self.name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.is_package = parts[-1] == "__init__"
        self.file = mutant.file
        self.code = compiled(mutant)

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        places = [str(self.file.parent)] if self.is_package else None
        return importlib.util.spec_from_file_location(
            name, self.file, loader=self, submodule_search_locations=places
        )

    def exec_module(self, module: ModuleType) -> None:
        exec(self.code, module.__dict__)


@dataclass
class Tally:
    """What became of the mutants of a room."""

    room: str
    until: float
    """By the clock: none is begun after it."""
    killed: int = 0
    alive: list[str] = field(default_factory=list)

    def note(self, label: str, *, survives: bool, why: str = "") -> None:
        self.killed += not survives
        if survives:
            self.alive.append(label)
            print(f"  survives{why}  {label}", flush=True)


def with_functions(
    session: pytest.Session, found: Measured, chosen: list[Mutant], tally: Tally, jobs: int, scratch: Path
) -> list[Mutant]:
    """Mutants of functions, in a process in which the room is imported; the rest comes back."""
    functions, to_import = Functions(tally.room), []
    gc.collect()
    gc.freeze()

    def works() -> Iterator[Work]:
        for mutant in chosen:
            if time.monotonic() > tally.until:
                return
            tests, given = found.limits_s(found.tests_of(mutant)), functions.given(mutant)
            if found.imported & _lines_of(mutant) or not given:
                to_import.append(mutant)
            elif not tests:
                tally.note(mutant.label, survives=True, why=" (no test runs it)")
            else:
                yield Work(
                    mutant.label,
                    lambda folder, given=given, tests=tests: faulty(given, tests),  # type: ignore[misc]
                    sum(tests.values()),
                )

    def faulty(given: list[tuple[FunctionType, Any]], tests: Mapping[str, float]) -> bool:
        for one, code in given:
            one.__code__ = code
        return passes(session, tests)

    for label, survives, _ in in_processes(works(), jobs, scratch):
        tally.note(label, survives=survives)
    return to_import


def with_imports(found: Measured, chosen: list[Mutant], tally: Tally, jobs: int, scratch: Path) -> None:
    """Mutants that everything is imported anew for. All tests: first those that run something of the file."""

    def works() -> Iterator[Work]:
        for mutant in chosen:
            if time.monotonic() > tally.until:
                return
            near = {
                test for test, lines in found.lines.items() if any(file == str(mutant.file) for file, _ in lines)
            }
            tests = found.limits_s(sorted(found.seconds, key=lambda test: (test not in near, found.seconds[test])))
            limit = sum(tests.values()) + 60
            yield Work(mutant.label, lambda folder, m=mutant, t=tests: faulty(m, t), limit)  # type: ignore[misc]

    def faulty(mutant: Mutant, tests: Mapping[str, float]) -> bool:
        sys.meta_path.insert(0, _Finder(mutant))
        return collected(tally.room, lambda session: passes(session, tests))

    for label, survives, _ in in_processes(works(), jobs, scratch):
        tally.note(label, survives=survives)


def room_is_good(room: str, given: argparse.Namespace, excuses: set[str], until: float) -> bool:
    """Whether enough of the room's mutants are killed."""
    begin = time.monotonic()
    every = [mutant for file in files_of(room) for mutant in mutants_in(file)]
    keys = {mutant.key for mutant in every}
    for key in sorted(key for key in excuses if key.startswith((f"{room}/", f"{room}.py")) and key not in keys):
        print(f"  no such mutant any more: {key}")
    every = [mutant for mutant in every if given.file in (None, mutant.file.name)]
    drawn = random.Random(f"{room} {given.seed}").sample(every, min(given.mutants, len(every)))
    chosen = [mutant for mutant in drawn if mutant.key not in excuses]
    tally = Tally(room, until)

    def first(folder: Path) -> bool:
        """In a process of its own, so that this one imports nothing of shardwise."""
        trace = _Traced(room)

        def then(session: pytest.Session) -> bool:
            trace.__exit__()
            os.dup2(output, 1)
            found = measured(session, room, set(trace.lines), given.jobs, folder)
            if found is None:
                return False
            seconds, number = sum(found.seconds.values()), len(found.seconds)
            print(
                f"{room}: {len(drawn)} of {len(every)} mutants, seed {given.seed}; {number} tests, {seconds:.0f} s"
            )
            rest = with_functions(session, found, chosen, tally, given.jobs, folder)
            (folder / "done").write_bytes(pickle.dumps((found, tally, rest)))
            return True

        with trace:
            return collected(room, then)

    with tempfile.TemporaryDirectory() as name, os.fdopen(os.dup(1), "w") as kept:
        scratch, output = Path(name), kept.fileno()
        for _, is_good, folder in in_processes([Work(room, first, 24 * 3600)], 1, scratch):
            if not is_good:
                print(f"{room}: its tests fail as it is, or cannot be collected", (folder / "output").read_text())
                return False
            found, tally, rest = pickle.loads((folder / "done").read_bytes())
        with_imports(found, rest, tally, given.jobs, scratch)
    looked_at = tally.killed + len(tally.alive)
    share = tally.killed / looked_at if looked_at else 1.0
    print(
        f"{room}: {tally.killed} of {looked_at} killed, {share:.1%}; {len(drawn) - len(chosen)} equivalent; "
        f"{len(chosen) - looked_at} not looked at; {len(rest)} imported; {time.monotonic() - begin:.0f} s",
        flush=True,
    )
    return share >= NEEDED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", action="append", choices=ROOMS, default=[])
    parser.add_argument("--file", help="only mutants of files of this name")
    parser.add_argument("--mutants", type=int, default=200, help="for each room")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no more after this time")
    given = parser.parse_args()
    until = time.monotonic() + given.seconds
    excuses = {line.split("  #")[0].strip() for line in EQUIVALENT.read_text().splitlines() if "→" in line}
    os.chdir(ROOT)
    os.environ["HYPOTHESIS_PROFILE"] = "mutation"
    # What tests need and takes seconds to import; nothing of shardwise, which mutants replace.
    import torch
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import transformers
    import transformers.conversion_mapping
    import transformers.modeling_utils

    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    assert "shardwise" not in sys.modules
    is_good = [room_is_good(room, given, excuses, until) for room in given.room or ROOMS]
    return 0 if all(is_good) else 1


if __name__ == "__main__":
    sys.exit(main())
