"""Two processes save into one folder: one save counts, whole, and the other one raises."""

from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
from tests.support.meanwhile import unmark
from tests.torture.actors import Actor, actor, play
from tests.torture.libraries import has_trainer
from tests.torture.scenarios import FIRST, SECOND, THIRD, Stage, effects_of, known, last_step, require_found, stage
from tests.torture.verbs import NEW, NEXT, OTHER

MODELS = [
    "several over one", "one over several", "several, then one, over one", "one, then several, over several"
]  # fmt: skip
OTHERS = ["accelerate file", "accelerate folder", "accelerate files", "accelerate state"]
OTHERS += ["trainer"] if has_trainer() else []


@pytest.fixture
def here(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """A folder with an older save."""
    with stage(request.param) as found:
        found.put(known(request.param).before)
        yield found


saving_all = pytest.mark.parametrize("here", MODELS + OTHERS, indirect=True)
at_moments = pytest.mark.parametrize("at_last_step", [False, True], ids=["in the middle", "at the last step"])


def held(here: Stage, seed: int, *, at_last_step: bool = False) -> AbstractContextManager[Actor]:
    """A save that is held in the middle, or before the effect with which it begins to count."""
    half = len(effects_of(here.verb)) // 2
    return actor(here.part(seed, FIRST), last_step(here.verb) if at_last_step else half)


@saving_all
def test_the_second_is_refused_while_the_first_continues_and_saves_when_that_was_killed(here: Stage) -> None:
    with held(here, NEW) as first:
        assert first.is_held(), first.error
        refused = play(here.part(OTHER, SECOND))
        assert refused.startswith("StorageError")
        assert "another save is writing here" in refused
        assert first.finish() == ""
    require_found(here, NEW)
    with held(here, OTHER) as doomed:
        assert doomed.is_held(), doomed.error
        doomed.kill()
    assert here.look() == known(here.verb).found[NEW]
    assert play(here.part(OTHER, SECOND)) == ""
    require_found(here, OTHER)


@at_moments
@saving_all
def test_one_that_is_taken_over_is_reported_and_harms_nothing(here: Stage, at_last_step: bool) -> None:
    with held(here, NEW, at_last_step=at_last_step) as first:
        assert first.is_held(), first.error
        unmark(here.folder)
        assert play(here.part(OTHER, SECOND)) == ""
        assert first.finish().startswith("StorageError")
    require_found(here, OTHER)
    assert play(here.part(NEXT, THIRD)) == ""
    require_found(here, NEXT)
