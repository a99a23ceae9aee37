"""A sharded model trains in the Trainer, and in TRL's, as one that is whole in one process does without us."""

from pathlib import Path

import pytest
from tests.integrations.requirements import require_patched_names
from tests.integrations.runs import Run, compared
from tests.support.local_ranks import LocalRanks

require_patched_names()


pytestmark = pytest.mark.distributed


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
SMOOTHED = EVALUATED | {"label_smoothing_factor": 0.1}


def test_whole_in_the_trainer(two: LocalRanks, one: LocalRanks, folder: Path, tmp_path: Path) -> None:
    run = Run(str(folder), arguments=EVALUATED, asks_for="generation", evaluates_first=True)
    found = compared(two, one, run, tmp_path)
    assert len(found.steps) == 4
    assert len(found.evaluated) == 2
    assert len(found.generated) == 8
    assert found.steps[0][1] > 0.5, "gradients are clipped"


def test_lora_in_the_trainer(two: LocalRanks, one: LocalRanks, folder: Path, tmp_path: Path) -> None:
    run = Run(str(folder), model="lora", arguments=SMOOTHED, asks_for="generation")
    compared(two, one, run, tmp_path)


@pytest.mark.parametrize("model", ["frozen", pytest.param("replicated lora", marks=pytest.mark.slow), "vision"])
def test_others_in_the_trainer(two: LocalRanks, one: LocalRanks, folder: Path, tmp_path: Path, model: str) -> None:
    given = SMOOTHED | {"gradient_checkpointing": True} if model == "frozen" else EVALUATED
    compared(two, one, Run(str(folder), model=model, arguments=given), tmp_path)


def test_the_trainer_itself_takes_the_model(two: LocalRanks, one: LocalRanks, folder: Path, tmp_path: Path) -> None:
    """Without ShardwiseTrainer."""
    compared(two, one, Run(str(folder)), tmp_path, by="patches")


@pytest.mark.slow
def test_one_that_classifies(two: LocalRanks, folder: Path, tmp_path: Path) -> None:
    """The Trainer multiplies the loss of such models by the number of ranks, with DDP as with us."""
    compared(two, two, Run(str(folder), model="classes", arguments=EVALUATED), tmp_path)


@pytest.mark.slow
def test_on_replicas(one: LocalRanks, folder: Path, tmp_path: Path) -> None:
    """Two of two shards each; gradients of micro-batches are put off between replicas only."""
    with LocalRanks(4, is_forked=True) as four:
        compared(four, one, Run(str(folder), model="replicas", arguments=EVALUATED), tmp_path)
