"""Checkpoints by ShardwiseTrainer: they go on from any number of ranks, and none that counts is lost."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.integrations import eight_bits
from tests.integrations.requirements import require_patched_names
from tests.integrations.runs import Outcome, Run, caught, require_same, train, train_by_metric, warned
from tests.support.files import change_json
from tests.support.local_ranks import LocalRanks, RankError
from tests.truth import require_equal

from shardwise.options import Ignore

require_patched_names()


pytestmark = pytest.mark.distributed

HEADER = "shardwise.trainer.json"
SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "logging_steps": 1}


def saving(folder: Path, output: Path, **changes: Any) -> Run:
    model = changes.pop("model", "whole")
    given = SAVED | {"output_dir": str(output)} | changes
    return Run(str(folder), model=model, arguments=given)


@pytest.fixture(scope="module")
def whole(two: LocalRanks, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """That was never interrupted."""
    return two.run(train, saving(folder, tmp_path_factory.mktemp("whole")))


def kinds(output: Path) -> list[str]:
    return sorted(place.name for place in output.glob("checkpoint-*"))


@pytest.mark.parametrize(
    "model", ["whole", "dropping lora", pytest.param("replicated lora", marks=pytest.mark.slow)]
)
def test_continues_from_a_checkpoint_on_other_ranks(
    two: LocalRanks, one: LocalRanks, folder: Path, tmp_path: Path, model: str
) -> None:
    """From step 4 of a training whose tracker broke in step 5: on one rank, and on as many as before."""
    output = tmp_path / "run"
    whole = two.run(train, saving(folder, tmp_path / "whole", model=model))
    broken = saving(folder, output, model=model).but(dies_at=5, on_rank=1)
    errors = two.run(caught, broken)
    assert all("the tracker is gone" in error for error in errors), errors
    assert errors[1].startswith("OSError"), "where it was raised it is what it was"
    assert kinds(output) == ["checkpoint-2", "checkpoint-4"]
    # A copy made of links, with the state of a later step in it, as folders of the hub's cache may be.
    shutil.copytree(output, tmp_path / "again", copy_function=os.symlink)
    states = tmp_path / "again" / "checkpoint-4" / "state"
    shutil.copytree(states / "step-4", states / "step-9")
    (found,) = one.run(train, saving(folder, output, model=model).but(resume=True))
    same = two.run(train, saving(folder, tmp_path / "again", model=model).but(resume=True))
    assert found.last_step == 6
    if not model.startswith("dropping"):  # what is drawn depends on the ranks
        require_same(found, whole[0])  # what was logged before comes with the trainer's state
    for outcome in same:
        assert outcome.steps == whole[0].steps, "on as many ranks bit by bit"
        require_equal(outcome.weights, whole[0].weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "further"),
    [
        ("trainer", {"train_sampling_strategy": "group_by_length"}),
        ("trainer", {"train_sampling_strategy": "batch_rebalance"}),
        ("grpo", {"gradient_accumulation_steps": 4}),
    ],
)
def test_the_order_of_an_epoch_is_the_same_after_a_resume(
    two: LocalRanks, folder: Path, tmp_path: Path, trainer: str, further: dict[str, Any]
) -> None:
    """An epoch has three steps. Checkpoints are in the first epoch and in the second."""
    given = {"per_device_train_batch_size": 4, "max_steps": 5, **further}
    run = saving(folder, tmp_path / "run", **given).but(trainer=trainer)
    whole = two.run(train, run)
    for step in (2, 4):
        resumed = saving(folder, tmp_path / f"from-{step}", **given)
        source = str(tmp_path / "run" / f"checkpoint-{step}")
        for outcome in two.run(train, resumed.but(trainer=trainer, resume=source)):
            assert outcome.steps == whole[0].steps
            require_equal(outcome.weights, whole[0].weights)


@pytest.mark.slow
def test_another_base_is_refused_unless_it_is_allowed(one: LocalRanks, folder: Path, tmp_path: Path) -> None:
    """The files of the base are replaced between two trainings; a model stored whole resumes."""
    models = shutil.copytree(folder, tmp_path / "models")
    runs = {
        model: saving(models, tmp_path / model, model=model, max_steps=2).but(resume=True)
        for model in ("lora", "frozen")
    }
    for run in runs.values():
        one.run(train, run.but(resume=None))
    file = models / "causal" / "model.safetensors"
    save_file({name: values * 1.5 for name, values in load_file(file).items()}, file, metadata={"format": "pt"})
    more = {model: run.but(arguments=run.arguments | {"max_steps": 3}) for model, run in runs.items()}
    (error,) = one.run(caught, more["lora"])
    assert error.startswith("KeyMismatchError")
    assert "belongs to another base model:\n  values: of " in error
    (found,) = one.run(train, more["lora"].but(keywords={"on_other_base": Ignore()}))
    assert found.last_step == 3
    (found,) = one.run(train, more["frozen"])
    assert found.last_step == 3


def test_what_a_checkpoint_is(two: LocalRanks, folder: Path, tmp_path: Path) -> None:
    """Its model is one of transformers', its adapter one of PEFT's; limits and the best one keep their meaning."""
    from transformers import AutoModelForCausalLM

    given = {
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "learning_rate": 0.2,
        "max_steps": 8,
    }
    run = saving(folder, tmp_path / "run", **given).but(asks_for="save")
    found = two.run(train, run)
    best = min(range(4), key=lambda number: found[0].evaluated[number])
    assert found[0].best == str(tmp_path / "run" / f"checkpoint-{2 * (best + 1)}")
    steps = {int(name.partition("-")[2]) for name in kinds(tmp_path / "run")}
    assert len(steps) == 2
    assert {2 * (best + 1), 8} <= steps
    kept = AutoModelForCausalLM.from_pretrained(found[0].best)
    last = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "last")
    for name, value in dict(kept.named_parameters()).items():
        assert torch.equal(value, found[0].weights[name]), "the best one was loaded at the end"
        assert torch.equal(value, dict(last.named_parameters())[name])
    assert (tmp_path / "run" / "last" / "training_args.bin").is_file()
    assert (tmp_path / "run" / "config.json").is_file(), "beside the checkpoints"

    # Moved, it is gone on from by another run, which has nothing better: what is here is not its to remove.
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    state = moved / "checkpoint-8" / "trainer_state.json"
    change_json(state, best_metric=-1e9)
    beside, more = kinds(moved), {**given, "save_total_limit": 1, "max_steps": 10}
    after = two.run(train, saving(folder, tmp_path / "other", **more).but(resume=str(state.parent)))
    assert kinds(moved) == beside
    assert kinds(tmp_path / "other") == ["checkpoint-10"]
    assert after[0].best == str(moved / Path(found[0].best).name), "by its name, beside the one gone on from"
    require_equal(after[0].weights, found[0].weights)  # the best one was loaded at the end

    lora = saving(folder, tmp_path / "lora", model="lora", **given | {"save_total_limit": 1})
    adapted = two.run(train, lora)
    assert kinds(tmp_path / "lora") == [Path(adapted[0].best).name], "the best alone is left at the end"
    kept = load_file(tmp_path / "lora" / kinds(tmp_path / "lora")[0] / "adapter_model.safetensors")
    for name, value in adapted[0].weights.items():
        assert torch.equal(kept[name.replace(".default", "")], value), "the best one was loaded at the end"

    alone = two.run(train, saving(folder, tmp_path / "alone", model="lora", save_only_model=True, max_steps=2))
    place = tmp_path / "alone" / "checkpoint-2"
    assert not (place / "state").exists()
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(folder / "causal")
    adapted = PeftModel.from_pretrained(base, place, is_trainable=True)
    for name, value in adapted.named_parameters():
        if value.requires_grad:
            assert torch.equal(value, alone[0].weights[name]), name
    again = saving(folder, tmp_path / "alone", model="lora", max_steps=3).but(resume=str(place))
    [(more, warnings), _] = two.run(warned, again)
    assert more.last_step == 3, "the model goes on, with an optimizer of its own"
    assert "optimizer and the learning-rate schedule start from the beginning" in warnings[0]
    faster = saving(folder, tmp_path / "alone", model="lora", max_steps=4, learning_rate=0.5).but(resume=True)
    [(_, warnings), _] = two.run(warned, faster)
    assert "learning_rate and weight_decay stay those of the checkpoint" in warnings[0]


def test_refused_checkpoints(two: LocalRanks, folder: Path, tmp_path: Path) -> None:
    """Each is one error on all ranks, and what is there stays."""
    output = tmp_path / "run"
    run = saving(folder, output, max_steps=2)
    two.run(train, run)

    def refused(run: Run) -> str:
        errors = two.run(caught, run)
        assert errors[0] == errors[1] != "", errors
        assert (output / "checkpoint-2" / "shardwise.trainer.json").is_file()
        return str(errors[0])

    assert "checkpoint-2 of another run" in refused(run)
    assert "resume_from_checkpoint=True to resume" in refused(run)
    other = saving(folder, output, model="lora").but(resume=True)
    assert "holds the state of everything, and this training has adapter default" in refused(other)
    rows = saving(folder, output, per_device_train_batch_size=3).but(resume=True)
    assert "was saved with 8 rows in a step, and this training has 12" in refused(rows)
    shorter = saving(folder, output, dataloader_drop_last=True).but(resume=True)
    assert "in the order of any ranks, and this training has that of dataloader_drop_last" in refused(shorter)
    reseeded = saving(folder, output, seed=9).but(resume=True)
    assert "rows with seed 9, so that its position in the data cannot be restored" in refused(reseeded)
    unordered = saving(folder, output, dataloader_in_order=False, dataloader_num_workers=2).but(resume=True)
    assert "with dataloader_in_order=False rows come in any order" in refused(unordered)
    empty = saving(folder, tmp_path / "empty").but(resume=True)
    assert "has no complete checkpoint of ShardwiseTrainer" in refused(empty)
    for run in (saving(folder, tmp_path / "b"), saving(folder, output)):
        assert "no such folder" in refused(run.but(resume=str(tmp_path / "none")))
    stock = tmp_path / "stock" / "checkpoint-9"
    stock.mkdir(parents=True)
    (stock / "trainer_state.json").write_text("{}")
    assert "load_trainer_checkpoint(model" in refused(saving(folder, tmp_path / "c").but(resume=str(stock)))
    assert "checkpoint-9 of another run" in refused(saving(folder, stock.parent))
    later = tmp_path / "later"
    shutil.copytree(output, later)
    shutil.copytree(later / "checkpoint-2", later / "checkpoint-6")
    facts = later / "checkpoint-6" / "shardwise.trainer.json"
    change_json(facts, step=6)
    from_older = refused(saving(folder, later).but(resume=str(later / "checkpoint-2")))
    assert "has checkpoint-6, which this training would overwrite" in from_older
    assert "Remove them to resume from checkpoint-2" in from_older
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "checkpoint-3").touch()
    assert "checkpoint-3 of another run" in refused(saving(folder, tmp_path / "file"))
    (later / "checkpoint-6" / "state" / "step-2" / ".metadata").unlink()
    assert "files are missing or truncated" in refused(saving(folder, later).but(resume=True))
    facts.write_text("{")
    assert "is not valid JSON" in refused(saving(folder, later).but(resume=True))


MOMENTS = ["begin", "complete", "complete before", "remove", "remove before", "state before", "state"]


@pytest.mark.parametrize(
    "moment", [pytest.param(item, marks=pytest.mark.slow) for item in MOMENTS[1:]] + MOMENTS[:1]
)
def test_killed_while_it_saves(
    two: LocalRanks, whole: list[Outcome], folder: Path, tmp_path: Path, moment: str
) -> None:
    """After a kill, training resumes from the newest complete checkpoint, and remains are removed."""
    run = saving(folder, tmp_path / "run", save_total_limit=2)
    with pytest.raises(RankError), LocalRanks(2, is_forked=True) as doomed:
        doomed.run(train, run.but(dies_at=6 if moment.startswith("remove") else 4, event=f"in {moment}"))
    counted = [name for name in kinds(tmp_path / "run") if (tmp_path / "run" / name / HEADER).is_file()]
    newest = {"complete": "checkpoint-4", "remove": "checkpoint-6", "remove before": "checkpoint-6"}
    assert counted[-1] == newest.get(moment, "checkpoint-2")
    again = two.run(train, run.but(resume=True))
    assert again[0].steps == whole[0].steps
    # Nothing was saved after "remove before", so nothing was removed.
    left = ["checkpoint-2"] if moment == "remove before" else []
    assert kinds(tmp_path / "run") == [*left, "checkpoint-4", "checkpoint-6"]


def test_a_rank_that_is_lost_is_named(folder: Path, tmp_path: Path) -> None:
    """The other one ends, with an error that names it; the checkpoint before stays."""
    doomed = saving(folder, tmp_path / "run").but(dies_at=3, on_rank=1, end="kill", tells=str(tmp_path / "told"))
    with pytest.raises(RankError), LocalRanks(2, is_forked=True) as found:
        found.run(caught, doomed)
    told = (tmp_path / "told").read_text()
    assert told.startswith("RankLostError: in step ")
    assert "rank 1" in told
    assert (tmp_path / "run" / "checkpoint-2" / HEADER).is_file()


def test_a_request_of_one_rank_applies_to_all(two: LocalRanks, folder: Path, tmp_path: Path) -> None:
    stopped = two.run(train, saving(folder, tmp_path / "run").but(dies_at=3, on_rank=0, end="stop"))
    assert [outcome.last_step for outcome in stopped] == [3, 3]
    # The loss falls, so that the first evaluation is the best.
    best = {"save_strategy": "best", "metric_for_best_model": "loss", "greater_is_better": True}
    run = saving(folder, tmp_path / "best", **best, eval_strategy="steps", eval_steps=1, max_steps=3)
    two.run(train, run.but(dies_at=3, on_rank=0, end="save"))
    assert kinds(tmp_path / "best") == ["checkpoint-1", "checkpoint-3"]


def test_schedules_and_early_stopping_go_by_the_metrics_of_the_first_rank(
    two: LocalRanks, folder: Path, tmp_path: Path
) -> None:
    """They rise on the first rank alone. A callback that runs the model in an evaluation leaves it sharded."""
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "mode": "max"}}
    best = {"metric_for_best_model": "score", "greater_is_better": True, "eval_strategy": "steps", "eval_steps": 1}
    run = saving(folder, tmp_path, **plateau, **best, save_strategy="no", max_steps=4)
    for steps, best_metric, rates, are_sharded in two.run(train_by_metric, run):
        assert (steps, best_metric, set(rates)) == (4, 4.0, {1e-2})
        assert are_sharded == [True] * 8, "before each micro-batch"


@pytest.mark.slow
def test_continues_with_8_bits_on_as_many_ranks(folder: Path, tmp_path: Path) -> None:
    arguments = SAVED | {"output_dir": str(tmp_path)}
    with LocalRanks(2) as two:
        told = two.run(eight_bits.trained_twice, str(folder), arguments, str(tmp_path / "checkpoint-4"))
    for whole, again in told:
        assert len(whole) == 6
        assert again == whole
