"""Two processes save into one folder with accelerate or the Trainer: one is complete, the other raises."""

from collections.abc import Iterator

import pytest
from tests.torture.actors import actor, play
from tests.torture.libraries import has_trainer
from tests.torture.scenarios import FIRST, SECOND, Stage, effects_of, kinds_of, known, stage
from tests.torture.verbs import MARK, NEW, OTHER

KINDS = ["accelerate state", *(["trainer"] if has_trainer() else [])]


@pytest.fixture(params=KINDS)
def here(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """A folder with an older save."""
    with stage(request.param, "disk") as found:
        found.put(known(request.param, "disk").before)
        yield found


def is_found(here: Stage, seed: int) -> None:
    about = known(here.verb, "disk")
    assert here.look() == about.found[seed]
    assert kinds_of(here.files()) == about.kinds[seed], "and nothing of another save"


def unmark(here: Stage) -> None:
    """By hand, and too early."""
    for mark in here.folder.rglob(MARK):
        mark.unlink()


def test_the_second_is_refused_while_the_first_continues_and_saves_when_that_was_killed(here: Stage) -> None:
    half = effects_of(here.verb, "disk") // 2
    with actor(here.part(NEW, FIRST), half) as first:
        assert first.is_held(), first.error
        refused = play(here.part(OTHER, SECOND))
        assert refused.startswith("StorageError")
        assert "another save is writing here" in refused
        assert first.finish() == ""
    is_found(here, NEW)
    with actor(here.part(OTHER, FIRST), half) as doomed:
        assert doomed.is_held(), doomed.error
        doomed.kill()
    assert here.look() == known(here.verb, "disk").found[NEW]
    assert play(here.part(OTHER, SECOND)) == ""
    is_found(here, OTHER)


def test_one_that_is_taken_over_in_the_middle_is_reported_and_harms_nothing(here: Stage) -> None:
    half = effects_of(here.verb, "disk") // 2
    with actor(here.part(NEW, FIRST), half) as first:
        assert first.is_held(), first.error
        unmark(here)
        assert play(here.part(OTHER, SECOND)) == ""
        assert first.finish().startswith("StorageError")
    is_found(here, OTHER)
