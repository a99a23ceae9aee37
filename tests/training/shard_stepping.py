"""Steps of sharded parameters, in the tests of optimizers that are taught them."""

from __future__ import annotations

from typing import Any

import torch
from tests.quiet import quieten
from tests.training import stepping
from tests.verbs.on_ranks import attempt
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardwise
from shardwise.training.optimizing.shard_steps import step_shards

CASES = {
    "rows": ((8, 6), [Shard(0)]),
    "uneven rows": ((7, 6), [Shard(0)]),
    "one row": ((1, 12), [Shard(0)]),
    "columns": ((6, 9), [Shard(1)]),
    "experts": ((3, 4, 6), [Shard(0)]),
    "vector": ((7,), [Shard(0)]),
    "whole": ((4, 4), [Replicate()]),
}
SETTINGS = {"weight_decay": 0.1, "d": 1.5, "maximize": True}


def values(name: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(3)
    shape = CASES[name][0]
    return torch.randn(shape, generator=draw), [torch.randn(shape, generator=draw) for _ in range(3)]


def alone(name: str, **settings: Any) -> list[torch.Tensor]:
    """In one process, by torch's own code: the parameter and what is kept of it."""
    start, gradients = values(name)
    parameter = nn.Parameter(start.clone())
    optimizer = torch.optim.Adafactor([parameter], lr=0.05, **settings)
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
    return [parameter.detach(), *(value for key, value in optimizer.state[parameter].items())]


def on_rank() -> dict[str, Any]:
    quieten()
    mesh = init_device_mesh("cpu", (2,))
    told: dict[str, Any] = {"hooks": 0}
    for name, (_, placements) in CASES.items():
        for settings in ({}, SETTINGS):
            start, gradients = values(name)
            parameter = nn.Parameter(distribute_tensor(start, mesh, placements))
            plain = nn.Parameter(start.clone())
            optimizer = step_shards(torch.optim.Adafactor([parameter, plain], lr=0.05, **settings))
            optimizer.register_step_post_hook(lambda *_: told.update(hooks=told["hooks"] + 1))
            for gradient in gradients:
                parameter.grad = distribute_tensor(gradient, mesh, placements)
                plain.grad = gradient.clone()
                optimizer.step()
            found = [stepping.whole(value) for value in (parameter, *optimizer.state[parameter].values())]
            told[f"{name}, {len(settings)}"] = found
            told[f"{name}, {len(settings)}, plain"] = [plain.detach(), *optimizer.state[plain].values()]
    model = nn.Linear(6, 8)
    shardwise.shard(model, shardwise.Sharding(wrap=shardwise.options.WholeModel()))
    fresh = torch.optim.Adafactor(model.parameters())
    state = {
        "state": {"weight": {"step": torch.tensor(1.0), "row_var": torch.ones(8, 6), "col_var": torch.ones(1, 6)}},
        "param_groups": [{**fresh.param_groups[0], "params": ["weight", "bias"]}],
    }
    told["other shape"] = attempt(shardwise.set_optimizer_state, model, fresh, state)
    state["state"]["weight"]["row_var"] = torch.arange(8.0)[:, None]
    shardwise.set_optimizer_state(model, fresh, state)
    kept = fresh.state[model.weight]
    told["placed"] = [str(kept[name].placements) for name in ("row_var", "col_var")]
    told["row_var"] = stepping.whole(kept["row_var"])
    return told
