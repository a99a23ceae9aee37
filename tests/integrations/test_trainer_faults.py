"""A rank of a Trainer that fails alone, while the others go on into a collective."""

import re
from pathlib import Path

import pytest
from tests.harness.local_ranks import LocalRanks
from tests.integrations.doors import require_doors
from tests.integrations.failing import fail_alone
from tests.integrations.runs import Run, train

require_doors()

PRELOADED = ("transformers", "datasets", "accelerate", "peft", "shardwise.integrations.trainer")

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]


@pytest.mark.parametrize("place", ["batches", "loss"])
def test_what_one_rank_raises_alone_ends_the_others(
    two: LocalRanks, folder: Path, tmp_path: Path, place: str
) -> None:
    """Both processes live on, so that no broken connection could end the wait; and both go on to train."""
    run = Run(str(folder), arguments={"output_dir": str(tmp_path / "run")})
    first, second = two.run(fail_alone, run, place)
    assert second.error == "ValueError: row 7 is odd"
    assert re.fullmatch(
        r"RankLostError: in step 2: rank 1 \(host .*, process \d+\) has left the call: ValueError: row 7 is odd",
        first.error,
    )
    assert (first.step, second.step) == (1, 1)
    assert abs(first.at - second.at) < 10
    if place == "batches":
        assert [outcome.last_step for outcome in two.run(train, run)] == [4, 4]


@pytest.mark.slow
def test_a_rank_that_fails_within_the_model_ends_the_others(folder: Path, tmp_path: Path) -> None:
    """It lives on; the other one is in a gather by then."""
    run = Run(str(folder), arguments={"output_dir": str(tmp_path / "run")})
    with LocalRanks(2, timeout_s=90, preloaded=PRELOADED) as found:
        first, second = found.run(fail_alone, run, "model")
    assert second.error == "ValueError: row 7 is odd"
    assert re.fullmatch(
        r"RankLostError: in step 2: rank 1 \(host .*, process \d+\) has left the call: ValueError: row 7 is odd",
        first.error,
    )
    assert abs(first.at - second.at) < 15
