"""A checkpoint of the Hugging Face Trainer's goes on here, on any number of ranks, and says what does not."""

import re
import shutil
from pathlib import Path

import pytest
from tests.integrations import resuming
from tests.support.files import change_json
from tests.support.world import require_same_error

from shardwise.core.errors import FormatError
from shardwise.integrations.trainer_restoring import TrainerFolder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """By whether the optimizer had the names of parameters."""
    found = {}
    for is_named in (True, False):
        folder = tmp_path_factory.mktemp("trainer")
        resuming.train(folder, is_named)
        found[is_named] = folder / "checkpoint-2"
    return found


@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize("is_named", [True, False], ids=["named", "numbered"])
def test_a_run_of_the_trainers_continues(worlds, checkpoints, size, is_named):
    arguments = str(checkpoints[is_named]), not is_named
    results = worlds(size).run(resuming.resume, *arguments) if size else [resuming.resume(*arguments)]
    for faults, report in results:
        assert faults == []
        assert report["step"] == 2
        assert report["epoch"] == pytest.approx(1 / 3)
        assert report["trainer_state"]["max_steps"] == 6
        assert report["restored"] == ("model", "optimizer", "scheduler")
        assert report["not_restored"].keys() == {"training_args.bin", "position in the data", "random numbers"}


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_run_under_fsdp_continues_with_another_number_of_ranks(worlds, tmp_path, form):
    worlds(3).run(resuming.write_fsdp, str(tmp_path), form)
    for faults, report in worlds(2).run(resuming.resume_fsdp, str(tmp_path)):
        assert faults == []
        assert (report["step"], report["restored"]) == (1, ("model", "optimizer"))
        assert "random numbers" in report["not_restored"]


REFUSED = {
    "unnamed": ("ConfigError", "indices in place of parameter names"),
    "groups": ("KeyMismatchError", "the state has groups of"),
    "shapes": ("KeyMismatchError", "has shape"),
    "scheduler": ("KeyMismatchError", "is of another kind of scheduler than StepLR"),
    "state": ("FormatError", "are no place in a training"),
    "parent": ("FormatError", "Pass one of checkpoint-2 in it"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_mismatches_are_refused_on_all_ranks(worlds, checkpoints, tmp_path, how):
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(checkpoints[False], folder)
    if how == "state":
        change_json(folder / "trainer_state.json", global_step=-1)
    path = Path(folder.parent if how == "parent" else folder)
    require_same_error(worlds(2).run(resuming.refused, str(path), how), *REFUSED[how])


@pytest.mark.parametrize("epoch", ["9" * 400, "NaN", '"2"'])
def test_an_epoch_that_is_none(tmp_path, epoch):
    (tmp_path / "trainer_state.json").write_text(f'{{"global_step": 2, "epoch": {epoch}}}')
    with pytest.raises(FormatError, match="are no place in a training"):
        TrainerFolder.open(tmp_path)


@pytest.mark.parametrize("kind", resuming.MADE)
def test_schedules_of_torch_continue(tmp_path, kind):
    wanted, found = resuming.schedule_goes_on(tmp_path, resuming.MADE[kind])
    assert found == wanted
    assert len(set(map(tuple, wanted))) > 1, "a schedule that changes nothing shows nothing"


OTHER_SCHEDULES = {
    "fewer: functions": r"than LambdaLR \(its base_lrs does not fit the one here",
    "fewer: milestones": r"than MultiStepLR \(its base_lrs does not fit the one here",
    "fewer: chained": r"than ChainedScheduler \(its _last_lr does not fit the one here",
    "fewer: cyclic": r"than CyclicLR \(its max_lrs does not fit the one here",
    "lambda": r"than LambdaLR \(its lr_lambdas does not fit",
    "attributes": r"than LambdaLR \(its lr_lambdas does not fit",
    "function": r"than CyclicLR \(its _scale_fn_custom does not fit",
    "inner": r"than SequentialLR \(its _schedulers does not fit",
    "more": r"than SequentialLR \(its _schedulers does not fit the one here",
    "damaged": r"than MultiStepLR \(its last_epoch does not fit",
    "rates": r"than MultiStepLR \(its base_lrs does not fit",
    "mode": r"ReduceLROnPlateau refuses it \(ValueError: mode mean is unknown!\)",
    "no state": r"than LambdaLR \(it lacks \['_last_lr', ",
}


def test_other_schedules_are_refused_by_all(worlds, tmp_path):
    first, second = worlds(2).run(resuming.schedules_refused, str(tmp_path))
    assert first == second
    assert first.keys() == OTHER_SCHEDULES.keys()
    for name, (kind, text) in first.items():
        assert kind == "KeyMismatchError", (name, kind, text)
        assert re.search(OTHER_SCHEDULES[name], text), (name, text)
        assert "Make the scheduler as it was made when it was saved" in text
