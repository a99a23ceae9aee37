"""A snapshot shows a model and its optimizers as long as no object of theirs is another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.models.unchanged import Snapshot


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2)))
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.1}])
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def taken(model: nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
    state = [value for entries in optimizer.state.values() for value in entries.values()]
    return Snapshot(model, [optimizer], [*model.parameters(), *state])


def test_a_step_changes_nothing() -> None:
    model, optimizer = make()
    found = taken(model, optimizer)
    for _ in range(3):
        assert found.shows(model, [optimizer])
        step(model, optimizer)
        optimizer.param_groups[0]["lr"] = 0.5


def put(name: str, value: Callable[[nn.Module], Any]) -> Callable[[nn.Module, Any], None]:
    def change(model: nn.Module, _: Any) -> None:
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, value(model))

    return change


def add_group(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": model[1].parameters()})


def load_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def forget_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model[0].weight].clear()


def other_memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[0].weight.data = model[0].weight.data.clone()


def freeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[0].weight.requires_grad_(False)


@pytest.mark.parametrize(
    "change",
    [
        put("0.weight", lambda model: nn.Parameter(model[0].weight.detach().clone())),
        put("0.more", lambda model: nn.Parameter(torch.ones(2))),
        put("1.running_mean", lambda model: torch.zeros(4)),
        put("1.more", lambda model: nn.Identity()),
        put("2.0", lambda model: nn.Linear(4, 2)),
        add_group,
        load_state,
        forget_state,
        other_memory,
        freeze,
    ],
)
def test_what_is_another_is_seen(change: Callable[[nn.Module, Any], None]) -> None:
    model, optimizer = make()
    found = taken(model, optimizer)
    change(model, optimizer)
    assert not found.shows(model, [optimizer])


def test_another_model_or_another_number_of_optimizers() -> None:
    (model, optimizer), (other, theirs) = make(), make()
    found = taken(model, optimizer)
    assert not found.shows(other, [optimizer])
    assert not found.shows(model, [theirs])
    assert not found.shows(model, [optimizer, theirs])
    assert not found.shows(model, [])
