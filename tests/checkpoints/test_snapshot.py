"""A state whose tensors were collected is recognized until anything in it is replaced."""

import copy

import pytest
import torch
from tests.checkpoints.tiny import Training, differences
from torch import nn

from shardwise import Checkpointer, TrainState
from shardwise.checkpoints import checkpointer as checkpointer_module
from shardwise.checkpoints.snapshot import StateSnapshot
from shardwise.checkpoints.state import collect_state

CHANGES = {
    "parameter": lambda model, _: setattr(model, "scale", nn.Parameter(model.scale.detach())),
    "name": lambda model, _: setattr(model, "factor", model._parameters.pop("scale")),
    "memory": lambda model, _: setattr(model.scale, "data", model.scale.data.clone()),
    "strides": lambda model, _: setattr(model.narrow.weight, "data", model.narrow.weight.data.view(6, 1).t()),
    "dtype": lambda model, _: setattr(model.seen, "data", model.seen.data.view(torch.int32)),
    "frozen": lambda model, _: model.scale.requires_grad_(False),
    "buffer": lambda model, _: setattr(model, "seen", torch.ones(3)),
    "persistent buffer": lambda model, _: model._non_persistent_buffers_set.clear(),
    "new module": lambda model, _: model.narrow.add_module("inner", nn.Linear(2, 2)),
    "group": lambda _, optimizer: optimizer.param_groups[0]["params"].reverse(),
    "state": lambda _, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "entry": lambda model, optimizer: optimizer.state[model.scale].pop("exp_avg"),
    "number": lambda model, optimizer: optimizer.state[model.scale].update(count=10**6),
}


@pytest.mark.parametrize("change", [*CHANGES, None])
def test_a_snapshot_is_current_until_something_is_replaced(change):
    training = Training()
    training.step()
    collected = collect_state(training.state, None)
    snapshot = StateSnapshot.take(training.state, collected)
    training.step()
    assert snapshot.is_current(training.state, collected)
    assert not snapshot.is_current(TrainState(training.model), collected)
    assert not snapshot.is_current(copy.deepcopy(training).state, collected)
    if change:
        CHANGES[change](training.model, training.optimizer)
        assert not snapshot.is_current(training.state, collected)


def test_an_unchanged_state_is_not_collected_again(tmp_path, monkeypatch):
    training, checkpointer = Training(), Checkpointer(tmp_path)
    training.step()
    checkpointer.save(0, training.state)
    monkeypatch.delattr(checkpointer_module, "collect_state")
    training.step()
    checkpointer.save(1, training.state)
    wanted = training.taken()
    training.step()
    monkeypatch.undo()
    checkpointer.restore(training.state)
    assert differences(training.taken(), wanted) == []


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_torchscript_and_state_of_no_parameter(tmp_path):
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state["count"] = 0
    checkpointer = Checkpointer(tmp_path)
    for step in (1, 2):
        checkpointer.save(step, TrainState(model, optimizer))
        model[0].weight.data = torch.full((2, 2), float(step))
    checkpointer.restore(TrainState(model, optimizer))
    assert model[0].weight.eq(1).all()
