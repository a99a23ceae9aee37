"""What ranks do with input that asks for much."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tests import truth
from tests.harness.world import attempt
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardwise
from shardwise.engines.load_plan import SharedReads


class Wide(nn.Module):
    """Matrices with few rows and many columns, and the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(32768, 6)
        self.columns = nn.Linear(6, 4096, bias=False)


def on_meta(dtype: torch.dtype) -> Wide:
    with torch.device("meta"):
        return Wide().to(dtype)


def along(dim: int) -> Callable[[nn.Parameter], Shard]:
    return lambda parameter: Shard(dim if parameter.ndim > dim else 0)


def differing(model: nn.Module, directory: str) -> list[str]:
    """Names of what is not, cast, what the file holds."""
    stored = load_file(Path(directory) / "model.safetensors")
    return [
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(truth.whole(parameter), stored[name].to(parameter.dtype))
    ]


def load_wide(directory: str, dim: int, dtype: torch.dtype, budget_bytes: int) -> list[str]:
    model = on_meta(dtype)
    fully_shard(model, shard_placement_fn=along(dim))
    shardwise.load(model, directory, options=shardwise.options.LoadOptions(budget_bytes=budget_bytes))
    return differing(model, directory)


def load_wide_replicas(directory: str, dim: int, budget_bytes: int, shared_reads: SharedReads) -> list[str]:
    """Two replicas of two shards, every byte read once."""
    model = on_meta(torch.float32)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh, shard_placement_fn=along(dim))
    options = shardwise.options.LoadOptions(budget_bytes=budget_bytes, shared_reads=shared_reads)
    shardwise.load(model, directory, options=options)
    return differing(model, directory)


def load_uneven(directory: str) -> list[str]:
    """Every matrix dealt by columns, without ``fully_shard``."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = on_meta(torch.float32)
    for layer in (model.rows, model.columns):
        sharded = distribute_tensor(layer.weight.detach(), mesh, [Shard(1)], src_data_rank=None)
        layer.weight = nn.Parameter(sharded)
    shardwise.load(model, directory)
    return differing(model, directory)


def partial(directory: str) -> tuple[str, str]:
    """A parameter whose true value is a sum over ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = on_meta(torch.float32)
    pending = DTensor.from_local(model.rows.weight.detach(), mesh, [Replicate(), Partial()], run_check=False)
    model.rows.weight = nn.Parameter(pending)
    return attempt(lambda: shardwise.load(model, directory))
