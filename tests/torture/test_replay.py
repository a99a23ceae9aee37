"""Crashes, kills and concurrent saves: a few moments here, all of them in `make torture`."""

import os
import random
from collections.abc import Callable, Collection

import pytest
from tests.torture import scenarios
from tests.torture.verbs import OF_TWO_SIZES, VERBS

CASES = [verb for verb in VERBS if verb not in OF_TWO_SIZES]

# Of all verbs, those that differ most in how they commit; the rest takes longer.
SOME = {"several over one", "accelerate state"}

everywhere = pytest.mark.parametrize("verb", CASES)


def but_slow(quick: Collection[str]) -> pytest.MarkDecorator:
    cases = [pytest.param(case, marks=[] if case in quick else [pytest.mark.slow]) for case in CASES]
    return pytest.mark.parametrize("verb", cases)


mostly_slow = but_slow(SOME)
partly_slow = but_slow(SOME | {"accelerate folder"})
slow_with_many_files = but_slow(SOME - {"accelerate state"})

over_an_older_one = pytest.mark.parametrize("over", [True, False], ids=["over an older one", "the first"])

# A few moments


@partly_slow
@over_an_older_one
def test_a_crash_leaves_one_save_or_the_other(verb: str, over: bool) -> None:
    scenarios.alone(verb, over=over, samples=0)


@mostly_slow
@over_an_older_one
def test_a_save_after_a_kill_is_durable(verb: str, over: bool) -> None:
    scenarios.after_a_kill(verb, over=over, most=3, samples=0)


@mostly_slow
@over_an_older_one
def test_a_save_after_a_crash_may_crash(verb: str, over: bool) -> None:
    scenarios.after_a_crash(verb, over=over, most=3, samples=0)


@slow_with_many_files
def test_two_saves_at_once_leave_one_that_returned(verb: str) -> None:
    moments = scenarios.every(3, scenarios.effects_of(verb))
    scenarios.beside(verb, scenarios.another_saves, moments, samples=0)


@slow_with_many_files
def test_a_mark_that_is_taken_away_too_early_loses_nothing(verb: str) -> None:
    """Before the last step also by one that is killed."""
    moments = scenarios.every(3, scenarios.effects_of(verb))
    scenarios.beside(verb, scenarios.another_takes_over, moments, samples=0)
    for number in moments:
        dies = scenarios.another_takes_over_and_dies(number)
        scenarios.beside(verb, dies, [scenarios.last_step(verb)], samples=0)


# All of them


def _moments(verb: str) -> list[int]:
    """Numbers of the effects before which a save is held: all, or TORTURE_MOMENTS of them at random."""
    effects = scenarios.effects_of(verb)
    most = min(int(os.environ.get("TORTURE_MOMENTS", "0")) or len(effects), len(effects))
    seed = int(os.environ.get("TORTURE_SEED", random.SystemRandom().randrange(10**6)))
    print(f"{verb}: {most} of {len(effects)} moments; TORTURE_SEED={seed}")
    return sorted(random.Random(seed).sample(effects, most))


def _taken_over_and_died(verb: str) -> None:
    """The moments of the one that is held, and three to twelve of the one that dies: about 400 pairs at most."""
    effects = scenarios.effects_of(verb)
    for number in scenarios.every(min(12, max(3, 400 // len(effects))), effects):
        dies = scenarios.another_takes_over_and_dies(number)
        scenarios.beside(verb, dies, _moments(verb), samples=0)


def _on_both(scene: Callable[..., None], **how: int) -> Callable[[str], list[None]]:
    return lambda verb: [scene(verb, over=over, **how) for over in (True, False)]


def _beside(meanwhile: scenarios.Meanwhile) -> Callable[[str], None]:
    return lambda verb: scenarios.beside(verb, meanwhile, _moments(verb), samples=2)


ALL: dict[str, Callable[[str], object]] = {
    "alone": _on_both(scenarios.alone, samples=16),
    "after a kill": _on_both(scenarios.after_a_kill, most=1_000, samples=2),
    "after a crash": _on_both(scenarios.after_a_crash, most=100, samples=1),
    "beside another": _beside(scenarios.another_saves),
    "taken over": _beside(scenarios.another_takes_over),
    "taken over by one that dies": _taken_over_and_died,
}


@pytest.mark.torture
@pytest.mark.timeout(36000)  # a merge is taken over hundreds of times
@everywhere
@pytest.mark.parametrize("scene", ALL)
def test_every_moment(scene: str, verb: str) -> None:
    ALL[scene](verb)
