"""What is foreseen where ranks share what they read; and of training."""

from __future__ import annotations

import math

import pytest
from tests.planning.test_forecast import BF16, POLICY, Made

from shardwise.conversion import Computed, Hole, Stored, WholeOperation, concat
from shardwise.errors import ConfigError
from shardwise.layout import MeshShape, TensorKind
from shardwise.planning.forecasts.forecast import (
    FetchingPeers,
    forecast_ranks,
    forecast_training,
    shared_tensors,
    uneven_tensors,
)
from shardwise.planning.forecasts.own_forecast import Homes
from shardwise.planning.moves.sharing_choice import Alone, InIntervals, OncePerGroup, Weighed
from shardwise.report.forecast_parts import GroupForecast
from shardwise.storage.contract import ReadPolicy
from shardwise.tensors import DType

HYBRID = MeshShape(("replicate", "shard"), (2, 2))
CPU, CUDA = Homes("cpu", 1 << 20), Homes("cuda", 1 << 20)
REMOTE = ReadPolicy(0, 1 << 20, 1, is_remote=True, bytes_per_s=2e9)


def model(mesh):
    inputs = (Stored("packed", (8, 8), BF16),)
    operation = WholeOperation("Dequantize", ((8, 8),), {"computed": (4, 4)}, dict, 256)
    return (
        Made(mesh)
        .add("computed", (4, 4), expression=Computed(operation, "computed", (4, 4), BF16, inputs))
        .add("rows", (8, 6))
        .add("columns", (4, 6), dim=1)
        .add("whole", (5,), dim=None)
    )


def shared(made, sharing, *, homes=CPU, policy=REMOTE):
    world = made.world()
    return shared_tensors(made.plan(world.first), world, made.index(), homes, policy, sharing)


def test_which_tensors_are_read_once():
    made = model(HYBRID)
    assert shared(made, OncePerGroup()) == {
        "rows": FetchingPeers(False, 2, 2),
        "columns": FetchingPeers(True, 4, 2),
        "whole": FetchingPeers(True, 4, 4),
    }
    assert shared(made, InIntervals()) == dict.fromkeys(("rows", "columns", "whole"), FetchingPeers(True, 4, 2))
    assert shared(made, Alone()) == shared(made, Weighed(1e15), policy=POLICY) == {}
    assert shared(model(MeshShape.flat(1)), InIntervals()) == shared(model(MeshShape.flat(1)), OncePerGroup()) == {}
    assert shared(model(MeshShape.flat(2)), InIntervals())["rows"] == FetchingPeers(True, 2, 1)


@pytest.mark.parametrize("sharing", [OncePerGroup(), InIntervals(), Weighed(1e15)])
def test_a_tensor_with_new_rows_is_read_by_each_rank(sharing):
    """The rows that are not stored are nobody's to hand over."""
    made = Made(HYBRID).add("rows", (8, 6))
    made.add("grown", (12, 6), expression=concat([Stored("grown", (8, 6), BF16), Hole((4, 6), BF16)], 0))
    assert set(shared(made, sharing)) == {"rows"}


def test_shards_of_accelerators_are_shared_over_their_fabric():
    """Two reads against one and two sendings at the network's speed: more than twice the storage's pays."""
    made = model(HYBRID)
    assert shared(made, Weighed()) == {}
    assert set(shared(made, Weighed(), homes=CUDA)) == {"rows", "columns"}
    assert set(shared(made, Weighed(3e9))) == {"whole"}
    assert set(shared(made, Weighed(5e9))) == {"rows", "columns", "whole"}


@pytest.mark.parametrize("sharing", [OncePerGroup(), InIntervals()])
def test_what_is_shared_is_read_once_in_all(sharing):
    made = model(HYBRID)
    del made.tensors[0]  # what is computed is read whole by every rank
    world, index = made.world(), made.index()
    plan = made.plan(world.first)
    stored = sum(entry.nbytes for entry in index.entries.values()) - 128
    alone = forecast_ranks(plan, world, index, CPU, POLICY)
    assert [rank.read_bytes for rank in alone] == [48 + 24 + 10] * 4
    peers = shared(made, sharing)
    found = forecast_ranks(plan, world, index, CPU, POLICY, peers, sharing)
    assert sum(rank.read_bytes for rank in found) == stored
    assert [rank.needed_bytes for rank in found] == [rank.needed_bytes for rank in alone]
    assert [rank.rank for rank in found] == [0, 1, 2, 3]


def test_an_interval_is_one_read_and_as_long_as_any_other():
    """Of one file without gaps; parts of each tensor would be a read each."""
    made = Made(HYBRID).add("rows", (8, 6)).add("columns", (4, 6), dim=1).add("whole", (4,), dim=None)
    world, index = made.world(), made.index()
    peers = shared(made, InIntervals())
    found = forecast_ranks(made.plan(world.first), world, index, CPU, POLICY, peers, InIntervals())
    assert [(rank.reads, rank.read_bytes) for rank in found] == [(1, index.nbytes // 4)] * 4


def test_training_takes_gradients_moments_and_the_largest_group():
    made = Made(MeshShape.flat(3)).add("a", (4, 6)).add("b", (2,), dim=None, dtype=DType.F32)
    made.add("steps", (3,), dim=None, dtype=DType.I64, kind=TensorKind.PERSISTENT_BUFFER)
    groups = [GroupForecast(("",), "BF16", 1, 24, gathered_bytes=nbytes) for nbytes in (7, 99, 8)]
    ranks = made.forecast()
    found = forecast_training(made.world(), groups, ranks)
    assert [item.rank for item in found] == [0, 1, 2]
    assert [item.weight_bytes for item in found] == [rank.padded_bytes for rank in ranks]
    assert [item.gradient_bytes for item in found] == [2 * 6 * 2 + 2 * 4] * 3
    assert [item.optimizer_bytes for item in found] == [2 * (24 + 8), 2 * (24 + 8), 2 * 8]
    assert [item.gathered_bytes for item in found] == [99] * 3
    assert [item.accumulated_bytes for item in found] == [24 * 2 + 2 * 4] * 3
    in_float32 = forecast_training(made.world(), groups, ranks, DType.F32)
    assert [item.accumulated_bytes for item in in_float32] == [(24 + 2) * 4] * 3
    assert "and 104 B where steps add up whole gradients of several micro-batches" in str(in_float32[0])
    alone = Made(MeshShape.flat(1)).add("a", (4, 6))
    [single] = forecast_training(alone.world(), groups, alone.forecast())
    assert (single.gathered_bytes, single.accumulated_bytes) == (0, 0)
    assert forecast_training(made.world(), [], ranks)[0].gathered_bytes == 0


@pytest.mark.parametrize(("dtype", "itemsize"), [(DType.F16, 2), (DType.F32, 4), (DType.F64, 8)])
def test_gradients_and_moments_are_as_wide_as_the_parameter(dtype, itemsize):
    made = Made(MeshShape.flat(2)).add("a", (4, 3), dtype=dtype)
    (found, _) = forecast_training(made.world(), [], made.forecast())
    assert (found.gradient_bytes, found.optimizer_bytes) == (6 * itemsize, 2 * 6 * itemsize)


def test_every_uneven_tensor_is_named_and_no_other():
    made = Made(MeshShape.flat(4)).add("even", (16, 100)).add("half", (2, 100)).add("third", (3, 900))
    made.add("whole", (500,), dim=None)
    assert [line.split(":")[0] for line in uneven_tensors(made.world(), 1.0)] == ["third", "half"]
    assert [line.split(":")[0] for line in uneven_tensors(made.world(), 1.5)] == ["half"]
    assert uneven_tensors(made.world(), 2.0) == []  # twice the mean is not more than that


def test_the_memory_beside_the_tensors_is_the_larger_of_two():
    made = model(HYBRID)
    plan = made.plan(made.world().first)
    without = Made(HYBRID).add("rows", (8, 6))
    least = Homes.of(plan, POLICY, device="cpu", budget_bytes=1, offloads_shards=False)
    assert least.budget_bytes == 256  # twice the input of what is computed
    most = Homes.of(plan, POLICY, device="cpu", budget_bytes=1 << 20, offloads_shards=True)
    assert 256 < most.budget_bytes <= 1 << 20
    assert most.offloads_shards
    few = Homes.of(without.plan(without.world().first), POLICY, device="cpu", budget_bytes=1, offloads_shards=False)
    assert few.budget_bytes == 64  # the least that a worker stages


def test_a_network_has_a_positive_number_of_bytes_per_second():
    assert Weighed(0.5).network_bytes_per_s == 0.5
    for given in (0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="is not a positive number of bytes per second"):
            Weighed(given)
