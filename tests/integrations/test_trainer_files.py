"""A checkpoint of the Hugging Face Trainer's goes on here, on any number of ranks, and says what does not."""

import shutil
from pathlib import Path

import pytest
from tests.integrations import resuming
from tests.small_checkpoints import small_qwen3
from tests.support.files import change_json
from tests.support.world import require_same_error
from torch import nn

import shardwise
from shardwise.core.errors import FormatError


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
def test_a_run_of_the_trainers_continues(worlds, checkpoints, size):
    folder = str(checkpoints[True])
    for faults, report in worlds(size).run(resuming.resume, folder) if size else [resuming.resume(folder)]:
        assert faults == []
        assert report["step"] == 2
        assert report["epoch"] == pytest.approx(1 / 3)
        assert report["trainer_state"]["max_steps"] == 6
        names = {"training_args.bin", "scheduler.pt", "optimizer", "position in the data", "random numbers"}
        assert report["not_restored"].keys() == names
        assert (
            "with its file optimizer.pt, if it was made of named parameters" in report["not_restored"]["optimizer"]
        )


def test_the_report_names_what_restores_the_optimizer(checkpoints, tmp_path):
    folder = shutil.copytree(checkpoints[True], tmp_path / "checkpoint-2")
    (folder / "optimizer.pt").unlink()
    reasons = []
    for name in ("none", "global_step2", "state"):
        (folder / name).mkdir()
        reasons.append(shardwise.load_trainer_checkpoint(small_qwen3(), folder).not_restored.get("optimizer"))
    assert reasons[0] is None
    assert "only DeepSpeed reads its files" in reasons[1]
    assert "ShardwiseTrainer resumes it" in reasons[2]


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_run_under_fsdp_continues_with_another_number_of_ranks(worlds, tmp_path, form):
    worlds(3).run(resuming.write_fsdp, str(tmp_path), form)
    for faults, report in worlds(2).run(resuming.resume_fsdp, str(tmp_path)):
        assert faults == []
        assert report["step"] == 1
        assert "random numbers" in report["not_restored"]


REFUSED = {
    "unnamed": ("ConfigError", "indices in place of parameter names"),
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
def test_an_epoch_that_is_none(tmp_path, epoch, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "trainer_state.json").write_text(f'{{"global_step": 2, "epoch": {epoch}}}')
    with pytest.raises(FormatError, match="are no place in a training"):
        shardwise.load_trainer_checkpoint(nn.Linear(1, 1), "~")
