"""What may happen to saves: crashes, kills, a second process at any moment, and who comes afterwards.

Whatever happens: an acknowledged save is never lost, unless to one that was called later; what is found is wholly
one save or wholly another, by values; there is always one; what nobody needs any more is removed by who comes next.
"""

import atexit
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from tests.torture.actors import Part, actor, files_in, play
from tests.torture.verbs import IN_MEMORY, MARK, NEW, NEXT, OLD, OTHER, SEEDS, VERBS, Found

TOKEN = re.compile(r"[0-9a-f]{8,}")

FIRST, SECOND, THIRD, BY_HAND = 0, 1, 2, 9
"""Writers: the first actor, the second one, the one that follows, and the one that removes a mark."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class Stage:
    """A folder that is saved to, and the log of all that is done to it."""

    verb: str
    folder: Path
    log_path: str

    @property
    def log(self) -> EffectLog:
        return EffectLog(self.log_path)

    def part(self, seed: int, writer: int) -> Part:
        return Part(self.verb, seed, str(self.folder), self.log_path, writer, _inputs(VERBS[self.verb].prepare))

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
def stage(verb: str) -> Iterator[Stage]:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as around:
        yield Stage(verb, Path(around, "runs", "out"), f"{around}/log")


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
def known(verb: str) -> Known:
    before: dict[str, bytes] = {}
    found, kinds = {}, {}
    for seed in SEEDS:
        with stage(verb) as here:
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
    about = known(here.verb)
    assert here.look() == about.found[seed]
    assert kinds_of(here.files()) == about.kinds[seed]


def every(number: int, items: Sequence[Item]) -> list[Item]:
    """At most so many of them, evenly; the first and the last among them."""
    if len(items) <= number:
        return list(items)
    return [items[index * (len(items) - 1) // max(1, number - 1)] for index in range(number)]


@cache
def played(verb: str, *, over: bool) -> tuple[dict[str, bytes], list[Entry]]:
    """What was there before, and what a process did that is gone now; the record is whole."""
    before = dict(known(verb).before) if over else {}
    with stage(verb) as here:
        here.put(before)
        with actor(here.part(NEW, FIRST)) as first:
            error = first.end()
        assert not error, error
        entries = here.log.entries()
        _require_record(here, before, entries)
    return before, entries


def _require_record(here: Stage, before: Mapping[str, bytes], entries: Sequence[Entry]) -> None:
    """Nothing was done to files beside all writers: then the record would not lead to what is there."""
    *_, last = states_after_kill(before, entries)
    files, there = last.state.files, here.files()
    has_ended_early = any(isinstance(entry, Killed | Failed) for entry in entries)
    left = VERBS[here.verb].is_of_others if has_ended_early else lambda _: False
    odd = sorted(
        name
        for name in {*files, *there}
        if files.get(name) != there.get(name) and not (left(name) and (name not in files or name.endswith("/")))
    )
    assert not odd, f"written beside all writers: {', '.join(odd)}"


def _require_whole(
    here: Stage,
    before: Mapping[str, bytes],
    entries: Sequence[Entry],
    values: Mapping[str, Found],
    samples: int,
    since: int = 0,
) -> None:
    """The record is whole, and the machine may die at any moment of it."""
    _require_record(here, before, entries)
    look = VERBS[here.verb].look
    assert_nothing_is_lost(before, entries, look, values, samples=samples, since=since)


# The scenes


def alone(verb: str, *, over: bool, samples: int) -> None:
    """The machine dies at any moment of a save."""
    before, entries = played(verb, over=over)
    values, look = known(verb).values(over=over), VERBS[verb].look
    assert_nothing_is_lost(before, entries, look, values, samples=samples)


def after_a_kill(verb: str, *, over: bool, most: int, samples: int) -> None:
    """A process is killed at any moment of its save; another one saves; the machine dies at any moment of that."""
    before, entries = played(verb, over=over)
    values = known(verb).values(over=over)
    moments = list(states_after_kill(before, entries))
    cut_short = [moment for moment in moments if _is_in_a_rename(moment)]
    for killed in {id(moment): moment for moment in [*every(most, moments), *every(most, cut_short)]}.values():
        with stage(verb) as here, at(f"{killed.state.what}, then another save"):
            for entry in killed.done:
                here.log.note(entry)
            if FolderMade(FIRST, "") in killed.done:
                here.folder.mkdir(parents=True)
            here.put(killed.state.files)
            _require_next(here, before, values, OTHER, SECOND, samples, since=len(killed.done))


def _is_in_a_rename(moment: KilledState) -> bool:
    last = moment.done[-1] if moment.done else None
    return isinstance(last, Partly) and isinstance(last.effect, Renamed)


def after_a_crash(verb: str, *, over: bool, most: int, samples: int) -> None:
    """The machine dies at any moment of a save; another one follows, at any moment of which it dies again."""
    before, entries = played(verb, over=over)
    for state in every(most, list(states_after_crash(before, entries, samples=1))):
        with stage(verb) as here, at(f"a crash {state.what}, then another save"):
            here.put(state.files)
            values = known(verb).values(over=False, first=VERBS[verb].look(state))
            _require_next(here, state.files, values, NEXT, THIRD, samples)


@contextmanager
def at(moment: str) -> Iterator[None]:
    """Whatever fails in the block tells the moment."""
    try:
        yield
    except Exception as error:
        error.add_note(moment)
        raise


def _require_next(
    here: Stage,
    before: Mapping[str, bytes],
    values: Mapping[str, Found],
    seed: int,
    writer: int,
    samples: int,
    since: int = 0,
) -> None:
    """Somebody saves, alone: it succeeds, is found, and leaves nothing of others."""
    with marks_are_filled_soon():
        error = play(here.part(seed, writer))
    assert not error, f"it fails: {error}"
    assert here.look() == values[f"seed {seed}"], "it is not found"
    litter = [kind for kind in kinds_of(here.files()) if kind not in known(here.verb).kinds[seed]]
    assert not litter, f"it leaves {', '.join(litter)}"
    _require_whole(here, before, here.log.entries(), values, samples, since)


@contextmanager
def marks_are_filled_soon() -> Iterator[None]:
    """An empty mark is waited for only briefly: a crash tore it."""
    with mock.patch("shardwise.saving.saving_lock._MAX_UNPARSED_S", 0.05):
        yield


Meanwhile = Callable[[Stage], None]
"""What happens while the first actor is held."""


def beside(verb: str, meanwhile: Meanwhile, holds: Iterable[int], *, samples: int) -> None:
    """Something happens while a save is held before one of its effects; then that goes on, and somebody follows.

    ``holds`` are the numbers of the effects.
    """
    about = known(verb)
    values = about.values(over=True)
    for hold in holds:
        with stage(verb) as here, at(f"held before effect {hold}"):
            here.put(about.before)
            with actor(here.part(NEW, FIRST), hold) as first:
                if not first.is_held():
                    assert hold > 1, first.error
                    break
                since = len(here.log.entries())
                meanwhile(here)
                error = first.finish()
            entries = here.log.entries()
            assert not error or error.startswith("StorageError"), error
            _require_whole(here, about.before, entries, values, samples, since)
            has_died = any(isinstance(entry, Killed) for entry in entries)  # who has, may have been in the way
            assert has_died or any(isinstance(entry, Returned) for entry in entries), f"nobody succeeds: {error}"
            _require_next(here, about.before, values, NEXT, THIRD, samples, since=len(entries))


def another_saves(here: Stage) -> None:
    """Which is refused, or is one of two that overlap; the one that is held has its mark still."""
    with marks_are_filled_soon():
        error = play(here.part(OTHER, SECOND))
    assert not error or error.startswith("StorageError"), error


def another_takes_over(here: Stage) -> None:
    """As somebody does who removes the mark by hand, too early, and saves."""
    _remove_mark(here)
    with marks_are_filled_soon():
        error = play(here.part(OTHER, SECOND))
    assert not error, error


def another_takes_over_and_dies(hold_before: int) -> Meanwhile:
    """The same, but that one is killed before one of its effects."""

    def meanwhile(here: Stage) -> None:
        _remove_mark(here)
        with actor(here.part(OTHER, SECOND), hold_before) as second:
            if second.is_held():
                second.kill()

    return meanwhile


def _remove_mark(here: Stage) -> None:
    for mark in here.folder.rglob(f"{MARK}*"):
        with here.log.next() as note:
            mark.unlink()
            note(Removed(BY_HAND, mark.relative_to(here.folder).as_posix()))


@cache
def look_before_effects(verb: str) -> list[Found]:
    """What is found before each effect of a save over an older one, as an actor counts them."""
    with stage(verb) as here:
        here.put(known(verb).before)
        found: list[Found] = []
        assert not play(here.part(NEW, FIRST), lambda: found.append(here.look()))
    return found


def effects_of(verb: str) -> range:
    """The numbers of the effects of a save."""
    return range(1, len(look_before_effects(verb)) + 1)


def last_step(verb: str) -> int:
    """The number of the effect with which a save begins to count."""
    seen = look_before_effects(verb)
    return max(number for number, found in enumerate(seen, 1) if found != known(verb).found[NEW])
