"""A small model that is trained on ranks, and what is known of its state."""

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tests.state.optimizing import differences as differences
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from shardwise import TrainState, get_model_state_dict, get_optimizer_state_dict


class Tiny(nn.Module):
    """Odd sizes, a dimension smaller than the ranks are many, tied weights, a persistent buffer, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(2))
        self.narrow = nn.Linear(6, 1)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("table", torch.arange(6.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.table
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden * self.scale) + self.narrow(hidden)


class Positions:
    """A position in the data."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def built(seed: int = 0, way: str = "flat") -> nn.Module:
    torch.manual_seed(seed)
    model = Tiny()
    if not dist.is_initialized():
        return model
    size = dist.get_world_size()
    if way == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (size,))
    for block in [*model.blocks, model]:
        fully_shard(block, mesh=mesh, shard_placement_fn=by_columns if way == "columns" else None)
    return model


def by_columns(parameter: nn.Parameter) -> Shard | None:
    """For the way "columns", where dimensions can be split evenly."""
    size = dist.get_world_size()
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % size == 0 else None


class Training:
    """A model, an optimizer, a schedule and a position, trained on data that does not depend on the ranks."""

    def __init__(self, seed: int = 0, way: str = "flat", make: Any = torch.optim.AdamW, **settings: Any) -> None:
        self.model = built(seed, way)
        whole = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [{"params": whole}, {"params": others, "lr": 0.02}]
        self.optimizer = make(groups, lr=0.05, **settings)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.data = Positions()
        self.losses: list[float] = []

    @property
    def state(self) -> TrainState:
        user = {"best": 0.25, "tags": ["a"]}
        return TrainState(self.model, self.optimizer, schedulers=self.schedule, data=self.data, user=user)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            tokens = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(self.data.at))
            loss = self.model(tokens).float().logsumexp(-1).mean()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            with torch.no_grad():
                self.model.seen += 1
            self.data.at += 1
            self.losses.append(loss.item())

    def taken(self) -> dict[str, Any]:
        """Everything that matters, whole, as plain tensors and values."""
        moments = get_optimizer_state_dict(self.model, self.optimizer, "full_on_all_ranks")
        return {
            "model": {k: v.clone() for k, v in get_model_state_dict(self.model, "full_on_all_ranks").items()},
            "moments": {name: dict(entries) for name, entries in sorted(moments["state"].items())},
            "groups": moments["param_groups"],
            "schedule": dict(self.schedule.state_dict()),
            "data": self.data.at,
        }


def draws() -> tuple[float, float, float]:
    """The next number of each generator."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))
