"""States of accelerate's are of one optimizer for each model: more are refused before anything is written."""

import pytest
import torch
from tests.faults.saving import sharded
from tests.torture.libraries import accelerated, save_by_accelerate

import shardwise
from shardwise import ConfigError


def test_a_second_optimizer_is_refused_by_name(tmp_path):
    save_by_accelerate(str(tmp_path / "one"), 1, tmp_path)
    with accelerated(2, "SHARDED_STATE_DICT") as (accelerator, _):
        [model] = accelerator._models
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        for call, folder in ((accelerator.save_state, "two"), (accelerator.load_state, "one")):
            with pytest.raises(ConfigError, match=f"{call.__name__}: the accelerator has 2 optimizers and 1 model"):
                call(str(tmp_path / folder))
        assert int(model.steps) == 2
    assert not (tmp_path / "two").exists()


def test_a_model_without_an_optimizer_may_be_prepared_first(tmp_path):
    with accelerated(2, "SHARDED_STATE_DICT") as (accelerator, _):
        [student] = accelerator._models
        accelerator._models.clear()
        accelerator._optimizers.clear()
        teacher = accelerator.prepare(sharded(3))
        accelerator.prepare(student, torch.optim.SGD(student.parameters(), lr=0.5))
        assert accelerator._models == [student, teacher]
        accelerator.save_state(str(tmp_path / "state"))
        accelerator._optimizers[0].param_groups[0]["lr"] = 0.1
        accelerator.load_state(str(tmp_path / "state"))
        assert accelerator._optimizers[0].param_groups[0]["lr"] == 0.5


def test_one_process_without_fsdp_does_not_load_a_state_of_fsdp(tmp_path, monkeypatch):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    save_by_accelerate(str(tmp_path / "one"), 1, tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    try:
        with (
            shardwise.integrations.accelerate(),
            pytest.raises(ConfigError, match="was saved under FSDP, and this accelerator runs one process"),
        ):
            Accelerator(cpu=True).load_state("~/one")
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
