"""Groups of FSDP2 gathered through windows: the same bytes as by collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shardwise.execution.moving import group_gather
from shardwise.execution.ranks.world import World


def trained(replicas: int, half_bytes: int) -> list[torch.Tensor]:
    """Losses and weights of some steps, of a model whose rows do not divide evenly."""
    group_gather._HALF_BYTES = half_bytes or 1 << 20
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 33), nn.GELU(), nn.Linear(33, 5, dtype=torch.bfloat16), nn.Linear(5, 3))
    size = dist.get_world_size()
    mesh: Any = init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("copy", "shard"))
    mesh = mesh if replicas > 1 else mesh["shard"]
    for module in (model[0], model[2], model[3], model):
        if module is not model:
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    fully_shard(model, mesh=mesh)
    if half_bytes:
        assert group_gather.gather_in_windows(model, World.current())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told: list[torch.Tensor] = []
    for step in range(3):
        rows = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.detach())
    return told + [parameter.full_tensor().detach() for parameter in model.parameters()]


@pytest.mark.distributed
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("half_bytes", [64, 1 << 20])
def test_windows_bring_the_same_bytes(worlds, replicas: int, half_bytes: int) -> None:
    size = 4 if replicas > 1 else 3
    through_windows, by_collectives = (worlds(size).run(trained, replicas, each) for each in (half_bytes, 0))
    for ours, theirs in zip(through_windows, by_collectives, strict=True):
        assert all(one.equal(other) for one, other in zip(ours, theirs, strict=True))


def test_alone_there_is_nothing_to_gather() -> None:
    assert not group_gather.gather_in_windows(nn.Linear(2, 2), World.current())


def on_two_meshes() -> bool:
    size = dist.get_world_size()
    one, other = (init_device_mesh("cpu", (size,), mesh_dim_names=(name,)) for name in ("one", "other"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module, mesh in zip(model, (one, other), strict=True):
        fully_shard(module, mesh=mesh)
    return group_gather.gather_in_windows(model, World.current())


@pytest.mark.distributed
def test_a_model_on_several_meshes_is_left_as_it_is(worlds) -> None:
    assert worlds(3).run(on_two_meshes) == [False] * 3


def test_the_block_is_used_again_when_nothing_of_it_is_held(monkeypatch) -> None:
    monkeypatch.setattr(group_gather, "_KEPT_BYTES", 4096)
    gather = group_gather.GatherInWindows([])
    how: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    first = gather.allocate((1000,), **how)
    part, address = first[3:7], first.data_ptr()
    del first
    assert gather.allocate((1000,), **how).data_ptr() != address  # a part of it is still held
    del part
    assert gather.allocate((10,), **how).data_ptr() == address
    assert gather.allocate((0,), **how).numel() == 0
    assert gather.allocate((2000,), **how).data_ptr() != address  # too large to be kept
