"""Input that asks for too much: tiny budgets against wide rows, meshes and placements that cannot be."""

import pytest
import torch
from safetensors.torch import save_file
from tests.faults import bad_input
from tests.harness.world import require_same_error
from tests.models.on_fake_ranks import fake_rank
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise.errors import ShardingError
from shardwise.models.wrap import Sharding, wrap


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Rows of 64 KiB in bfloat16, and of 128 KiB in float32."""
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(3)
    save_file(bad_input.Wide().to(torch.bfloat16).state_dict(), folder / "model.safetensors")
    return str(folder)


@pytest.mark.distributed
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_budget_smaller_than_a_row_is_enough(worlds, wide, dim, dtype):
    assert worlds(2).run(bad_input.load_wide, wide, dim, dtype, 4096) == [[], []]


@pytest.mark.distributed
@pytest.mark.parametrize("dim", [0, 1])
def test_a_budget_smaller_than_a_row_is_enough_for_what_is_read_once_for_all(worlds, wide, dim):
    assert worlds(4).run(bad_input.load_wide_replicas, wide, dim, 1 << 16, "always") == [[]] * 4


def on_meta():
    with torch.device("meta"):
        model = nn.Module()
        model.layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(4, 6)])
    return model


def test_a_mesh_of_three_axes_is_refused_by_name():
    with fake_rank(0, 8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        with pytest.raises(ShardingError, match=r"on the mesh pp=2, dp=2, tp=2: fully_shard takes one axis"):
            wrap(on_meta(), Sharding(mesh=mesh, wrap="module_list"))


@pytest.mark.distributed
def test_a_model_that_cannot_be_sharded_is_the_same_error_on_every_rank(worlds, wide):
    errors = worlds(4).run(bad_input.partial, wide)
    told = "an axis of 2 ranks (the mesh has (2, 2))"
    require_same_error(errors, "ShardingError", "rows.weight is placed as P", "(sum)", told)


@pytest.mark.distributed
def test_an_uneven_split_of_columns_is_read_where_it_exists(worlds, wide):
    """FSDP2 makes none, but a DTensor of one's own may have it: 6 and 32768 columns on 4 and 3 ranks."""
    for size in (3, 4):
        assert worlds(size).run(bad_input.load_uneven, wide) == [[]] * size
