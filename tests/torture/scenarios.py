"""What may happen to saves: crashes, kills, a second process at any moment, and who comes afterwards.

A scene returns what is wrong, in words; an empty list is a scene that went well. Whatever happens: an acknowledged
save is never lost, unless to one that was called later; what is found is wholly one save or wholly another, by
values; there is always one; what nobody needs any more is removed by who comes next.
"""

import atexit
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar
from unittest import mock

from tests.support.crashes import (
    BEFORE,
    CrashState,
    EffectLog,
    Entry,
    Failed,
    FolderMade,
    Killed,
    KilledState,
    Partly,
    Removed,
    Renamed,
    Returned,
    assert_nothing_is_lost,
    states_after_crash,
    states_after_kill,
)
from tests.torture import objects
from tests.torture.actors import Part, actor, files_in, play
from tests.torture.verbs import IN_MEMORY, MARK, NEW, NEXT, OLD, OTHER, SEEDS, VERBS, Found

from shardwise.errors import StorageError
from shardwise.storage.contract import LOCAL_WRITES, OBJECT_STORE_WRITES, WritePolicy

POLICIES = {"disk": LOCAL_WRITES, "s3": OBJECT_STORE_WRITES, "az": OBJECT_STORE_WRITES}
TOKEN = re.compile(r"[0-9a-f]{8,}")

FIRST, SECOND, THIRD, BY_HAND = 0, 1, 2, 9
"""Writers: the first actor, the second one, the one that follows, and the one that removes a mark."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class Stage:
    """A folder that is saved to, on one of the storages, and the log of all that is done to it."""

    verb: str
    store: str
    target: str
    folder: Path
    log_path: str

    @property
    def log(self) -> EffectLog:
        return EffectLog(self.log_path)

    @property
    def policy(self) -> WritePolicy:
        return POLICIES[self.store]

    def part(self, seed: int, writer: int) -> Part:
        return Part(self.verb, seed, self.target, self.log_path, writer, _inputs(VERBS[self.verb].prepare))

    def put(self, files: Mapping[str, bytes]) -> None:
        if files:
            CrashState(files, 0, "").put_into(self.folder)

    def files(self) -> dict[str, bytes]:
        return files_in(self.folder)

    def look(self) -> Found:
        return VERBS[self.verb].look(CrashState(self.files(), 0, "what is there"))


@cache
def _inputs(prepare: Callable[[Path], None]) -> Path:
    """What verbs take, made once, and removed when the tests end."""
    kept = tempfile.TemporaryDirectory(dir=IN_MEMORY)
    atexit.register(kept.cleanup)
    prepare(Path(kept.name))
    return Path(kept.name)


@contextmanager
def stage(verb: str, store: str) -> Iterator[Stage]:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as around:
        if store == "disk":
            folder = Path(around, "runs", "out")
            yield Stage(verb, store, str(folder), folder, f"{around}/log")
        else:
            with objects.bucket(store) as url:
                target = f"{url}/runs/out"
                yield Stage(verb, store, target, objects.behind(target), f"{around}/log")


@dataclass(frozen=True)
class Known:
    """What a verb does where nothing happens."""

    before: Mapping[str, bytes]
    found: Mapping[int, Found]
    kinds: Mapping[int, list[str]]

    def values(self, *, over: bool, first: Found = None) -> dict[str, Found]:
        """What is found of each save; ``first`` of what is there before, where that is neither."""
        return {
            BEFORE: self.found[OLD] if over else first,
            **{f"seed {seed}": self.found[seed] for seed in (NEW, OTHER, NEXT)},
        }


@cache
def known(verb: str, store: str) -> Known:
    before: dict[str, bytes] = {}
    found, kinds = {}, {}
    for seed in SEEDS:
        with stage(verb, store) as here:
            here.put(before)
            error = play(here.part(seed, FIRST))
            assert not error, error
            if seed == OLD:
                before = here.files()
            found[seed], kinds[seed] = here.look(), kinds_of(here.files())
    assert len(set(found.values())) == len(SEEDS)
    assert None not in found.values()
    return Known(before, found, kinds)


def kinds_of(files: Mapping[str, bytes]) -> list[str]:
    """Names, without what tells one save from another."""
    return sorted(TOKEN.sub("*", name) for name in files)


def require_found(here: Stage, seed: int) -> None:
    """The save of the seed is found, and nothing of another."""
    about = known(here.verb, here.store)
    assert here.look() == about.found[seed]
    assert kinds_of(here.files()) == about.kinds[seed]


def every(number: int, items: Sequence[Item]) -> list[Item]:
    """At most so many of them, evenly; the first and the last among them."""
    if len(items) <= number:
        return list(items)
    return [items[index * (len(items) - 1) // max(1, number - 1)] for index in range(number)]


@cache
def played(verb: str, store: str, *, over: bool) -> tuple[dict[str, bytes], list[Entry]]:
    """What was there before, and what a process did that is gone now; the record is whole."""
    before = dict(known(verb, store).before) if over else {}
    with stage(verb, store) as here:
        here.put(before)
        with actor(here.part(NEW, FIRST)) as first:
            error = first.end()
        assert not error, error
        entries = here.log.entries()
        faults = _not_recorded(here, before, entries)
        assert not faults, faults
    return before, entries


def _not_recorded(here: Stage, before: Mapping[str, bytes], entries: Sequence[Entry]) -> list[str]:
    """What was done to files beside all writers: then the record does not lead to what is there."""
    try:
        *_, last = states_after_kill(before, entries, policy=here.policy)
    except StorageError as error:
        return [str(error)]
    files, there = last.state.files, here.files()
    has_ended_early = any(isinstance(entry, Killed | Failed) for entry in entries)
    left = VERBS[here.verb].is_of_others if has_ended_early else lambda _: False
    odd = sorted(
        name
        for name in {*files, *there}
        if files.get(name) != there.get(name) and not (left(name) and (name not in files or name.endswith("/")))
    )
    return [f"written beside all writers: {', '.join(odd)}"] if odd else []


def _checked(
    here: Stage,
    before: Mapping[str, bytes],
    entries: Sequence[Entry],
    values: Mapping[str, Found],
    samples: int,
    since: int = 0,
) -> list[str]:
    try:
        assert_nothing_is_lost(
            before, entries, VERBS[here.verb].look, values, policy=here.policy, samples=samples, since=since
        )
    except AssertionError as error:
        return [str(error)]
    return []


# The scenes


def alone(verb: str, store: str, *, over: bool, samples: int) -> list[str]:
    """The machine dies at any moment of a save."""
    try:
        before, entries = played(verb, store, over=over)
    except AssertionError as error:
        return [f"alone: {error}"]
    with stage(verb, store) as here:
        faults = _checked(here, before, entries, known(verb, store).values(over=over), samples)
    return [f"alone: {fault}" for fault in faults]


def after_a_kill(verb: str, store: str, *, over: bool, most: int, samples: int) -> list[str]:
    """A process is killed at any moment of its save; another one saves; the machine dies at any moment of that."""
    faults: list[str] = []
    try:
        before, entries = played(verb, store, over=over)
    except AssertionError as error:
        return [f"after a kill: {error}"]
    values = known(verb, store).values(over=over)
    moments = list(states_after_kill(before, entries, policy=POLICIES[store]))
    cut_short = [moment for moment in moments if _is_in_a_rename(moment)]
    for killed in {id(moment): moment for moment in [*every(most, moments), *every(most, cut_short)]}.values():
        with stage(verb, store) as here:
            for entry in killed.done:
                here.log.note(entry)
            if FolderMade(FIRST, "") in killed.done:
                here.folder.mkdir(parents=True)
            here.put(killed.state.files)
            faults += [
                f"{killed.state.what}, then another save: {fault}"
                for fault in _next(here, before, values, OTHER, SECOND, samples, since=len(killed.done))
            ]
    return faults


def _is_in_a_rename(moment: KilledState) -> bool:
    last = moment.done[-1] if moment.done else None
    return isinstance(last, Partly) and isinstance(last.effect, Renamed)


def after_a_crash(verb: str, store: str, *, over: bool, most: int, samples: int) -> list[str]:
    """The machine dies at any moment of a save; another one follows, at any moment of which it dies again."""
    faults: list[str] = []
    try:
        before, entries = played(verb, store, over=over)
    except AssertionError as error:
        return [f"after a crash: {error}"]
    for state in every(most, list(states_after_crash(before, entries, policy=POLICIES[store], samples=1))):
        with stage(verb, store) as here:
            here.put(state.files)
            try:
                values = known(verb, store).values(over=False, first=VERBS[verb].look(state))
            except Exception as error:
                faults.append(f"a crash {state.what} leaves what cannot be read: {error}")
                continue
            faults += [
                f"a crash {state.what}, then another save: {fault}"
                for fault in _next(here, state.files, values, NEXT, THIRD, samples)
            ]
    return faults


def _next(
    here: Stage,
    before: Mapping[str, bytes],
    values: Mapping[str, Found],
    seed: int,
    writer: int,
    samples: int,
    since: int = 0,
) -> list[str]:
    """Somebody saves, alone: it succeeds, is found, and leaves nothing of others."""
    with marks_are_filled_soon():
        error = play(here.part(seed, writer))
    if error:
        return [f"it fails: {error}"]
    faults = []
    if here.look() != values[f"seed {seed}"]:
        faults.append("it is not found")
    clean = known(here.verb, here.store).kinds[seed]
    litter = [kind for kind in kinds_of(here.files()) if kind not in clean]
    if litter:
        faults.append(f"it leaves {', '.join(litter)}")
    entries = here.log.entries()
    return [
        *faults,
        *_not_recorded(here, before, entries),
        *_checked(here, before, entries, values, samples, since),
    ]


@contextmanager
def marks_are_filled_soon() -> Iterator[None]:
    """An empty mark is waited for only briefly: a crash tore it."""
    with mock.patch("shardwise.execution.saving_lock._WRITTEN_S", 0.05):
        yield


Meanwhile = Callable[[Stage], list[str]]
"""What happens while the first actor is held."""


def beside(verb: str, store: str, meanwhile: Meanwhile, holds: Sequence[int] | None, *, samples: int) -> list[str]:
    """Something happens while a save is held before one of its effects; then that goes on, and somebody follows.

    ``holds`` are the numbers of the effects; None for all.
    """
    about = known(verb, store)
    values = about.values(over=True)
    faults: list[str] = []
    hold = 0
    for hold in holds or range(1, 10_000):
        with stage(verb, store) as here:
            here.put(about.before)
            with actor(here.part(NEW, FIRST), hold) as first:
                if not first.is_held():
                    assert hold > 1, first.error
                    break
                since = len(here.log.entries())
                found = meanwhile(here)
                error = first.finish()
            entries = here.log.entries()
            found += _not_recorded(here, about.before, entries)
            found += _checked(here, about.before, entries, values, samples, since)
            if error and not error.startswith("StorageError"):
                found.append(f"the one that was held fails: {error}")
            has_died = any(isinstance(entry, Killed) for entry in entries)  # who has, may have been in the way
            if not has_died and not any(isinstance(entry, Returned) for entry in entries):
                found.append(f"nobody succeeds: {error}")
            if not found:
                found += _next(here, about.before, values, NEXT, THIRD, samples, since=len(entries))
        done = next((entry for entry in entries[since:] if getattr(entry, "writer", None) == FIRST), "its end")
        faults += [f"held before effect {hold} ({done}): {fault}" for fault in found]
    return faults


def another_saves(here: Stage) -> list[str]:
    """Which is refused, or is one of two that overlap; the one that is held has its mark still."""
    with marks_are_filled_soon():
        error = play(here.part(OTHER, SECOND))
    if error and not error.startswith("StorageError"):
        return [f"the other one fails: {error}"]
    return []


def another_takes_over(here: Stage) -> list[str]:
    """As somebody does who removes the mark by hand, too early, and saves."""
    _remove_mark(here)
    with marks_are_filled_soon():
        error = play(here.part(OTHER, SECOND))
    return [f"the other one fails: {error}"] if error else []


def another_takes_over_and_dies(hold_before: int) -> Meanwhile:
    """The same, but that one is killed before one of its effects."""

    def meanwhile(here: Stage) -> list[str]:
        _remove_mark(here)
        with actor(here.part(OTHER, SECOND), hold_before) as second:
            if second.is_held():
                second.kill()
        return []

    return meanwhile


def _remove_mark(here: Stage) -> None:
    """By whatever name; on object stores every save has one of its own."""
    for mark in here.folder.rglob(f"{MARK}*"):
        with here.log.next() as note:
            mark.unlink()
            note(Removed(BY_HAND, mark.relative_to(here.folder).as_posix()))


@cache
def look_before_effects(verb: str, store: str) -> list[Found]:
    """What is found before each effect of a save over an older one, as an actor counts them."""
    with stage(verb, store) as here:
        here.put(known(verb, store).before)
        found: list[Found] = []
        assert not play(here.part(NEW, FIRST), lambda: found.append(here.look()))
    return found


def effects_of(verb: str, store: str) -> range:
    """The numbers of the effects of a save."""
    return range(1, len(look_before_effects(verb, store)) + 1)


def last_step(verb: str, store: str) -> int:
    """The number of the effect with which a save begins to count."""
    seen = look_before_effects(verb, store)
    return max(number for number, found in enumerate(seen, 1) if found != known(verb, store).found[NEW])
