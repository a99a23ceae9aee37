"""Input that asks for too much: tiny budgets against wide rows, meshes and placements that cannot be."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tests import truth
from tests.fsdp.on_fake_ranks import fake_rank
from tests.support.world import attempt, require_same_error
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardwise
from shardwise.core.errors import ShardingError
from shardwise.fsdp.wrap import Sharding, wrap
from shardwise.loading.prepare import SharedReads


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


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Rows of 64 KiB in bfloat16, and of 128 KiB in float32."""
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(3)
    save_file(Wide().to(torch.bfloat16).state_dict(), folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_budget_smaller_than_a_row_is_enough(worlds, wide, dim, dtype):
    assert worlds(2).run(load_wide, wide, dim, dtype, 4096) == [[], []]


@pytest.mark.parametrize("dim", [0, 1])
def test_a_budget_smaller_than_a_row_suffices_for_shared_reads(worlds, wide, dim):
    assert worlds(4).run(load_wide_replicas, wide, dim, 1 << 16, "always") == [[]] * 4


def test_a_mesh_of_three_axes_is_refused_by_name():
    with fake_rank(0, 8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        with pytest.raises(ShardingError, match=r"on the mesh pp=2, dp=2, tp=2: fully_shard takes one axis"):
            wrap(nn.Sequential(nn.Linear(4, 6)).to("meta"), Sharding(mesh=mesh, wrap="whole_model"))


def test_a_model_that_cannot_be_sharded_is_the_same_error_on_every_rank(worlds, wide):
    errors = worlds(4).run(partial, wide)
    told = "an axis of 2 ranks (mesh (2, 2))"
    require_same_error(errors, "ShardingError", "rows.weight is placed as P", "(sum)", told)


def test_an_uneven_split_of_columns_is_read_where_it_exists(worlds, wide):
    """FSDP2 makes none, but a DTensor of one's own may have it: 6 and 32768 columns on 4 and 3 ranks."""
    for size in (3, 4):
        assert worlds(size).run(load_uneven, wide) == [[]] * size
