"""A rank of a Trainer that fails alone, while the others go on into a collective."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from tests.integrations.failing import fail_alone, share_memory_error
from tests.integrations.requirements import require_patched_names
from tests.integrations.runs import Run, train
from tests.support.local_ranks import LocalRanks

require_patched_names()


pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("place", ["batches", "loss", pytest.param("model", marks=pytest.mark.slow)])
def test_an_error_of_one_rank_ends_the_others(two: LocalRanks, folder: Path, tmp_path: Path, place: str) -> None:
    """The one that fails lives on until the other has ended, which no broken connection does; both go on to train.

    Where it fails within the model, the other one is in a gather by then.
    """
    run = Run(str(folder), arguments={"output_dir": str(tmp_path / "run")})
    with LocalRanks(2, is_forked=True) if place == "model" else nullcontext(two) as ranks:
        first, second = ranks.run(fail_alone, run, place)
    assert second.error == "ValueError: row 7 is odd"
    assert re.fullmatch(
        r"RankLostError: in step 2: rank 1 \(host .*, process \d+\) has left the call: ValueError: row 7 is odd",
        first.error,
    )
    assert place == "model" or (first.step, second.step) == (1, 1)
    if place == "batches":
        assert [outcome.last_step for outcome in two.run(train, run)] == [4, 4]


def test_a_callback_out_of_memory_on_one_rank_is_a_training_error_on_all(two: LocalRanks) -> None:
    told = two.run(share_memory_error)
    assert told == [("TrainingError", "rank 1: out of memory (MemoryError). See docs/out_of_memory.md")] * 2


@pytest.mark.parametrize("place", ["metrics", "evaluate"])
def test_an_error_of_one_ranks_metrics_ends_the_others(
    two: LocalRanks, folder: Path, tmp_path: Path, place: str
) -> None:
    arguments = {"output_dir": str(tmp_path), "eval_strategy": "steps", "eval_steps": 1}
    first, second = two.run(fail_alone, Run(str(folder), arguments=arguments), place)
    assert second.error == "ValueError: row 7 is odd"
    assert re.fullmatch(r"RankLostError: rank 1 \(.*\) has left the call: ValueError: row 7 is odd", first.error)
