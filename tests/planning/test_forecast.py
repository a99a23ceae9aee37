"""Forecasts of all ranks and of one, from layouts and plans made by hand."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest

from shardwise.conversion import (
    Bindings,
    Computed,
    Stored,
    WholeOperation,
    concat,
    permute,
    slice_dim,
    stack,
    stored_leaves,
)
from shardwise.errors import ConfigError, PlacementError
from shardwise.formats.checkpoint_index import CheckpointIndex, TensorEntry
from shardwise.layout import (
    GroupLayout,
    LocalBox,
    MeshShape,
    ModelLayout,
    Origin,
    Spread,
    TensorKind,
    TensorLayout,
    WorldLayout,
)
from shardwise.planning.forecasts.forecast import forecast_computed, forecast_groups, forecast_ranks, uneven_tensors
from shardwise.planning.forecasts.own_forecast import (
    Available,
    Homes,
    RequireMemory,
    TryAnyway,
    forecast_rank,
    require_fits,
)
from shardwise.planning.loads.load_plan import Consent, ModelRules, plan_load
from shardwise.report.forecast_parts import ComputedForecast, Experts, GroupForecast, RankForecast
from shardwise.storage.contract import ReadPolicy
from shardwise.tensors import Box, DType, Strided, numel

BF16, F32 = DType.BF16, DType.F32
POLICY = ReadPolicy(0, 1 << 20, concurrency=1, is_remote=False, bytes_per_s=1e9)
HOMES = Homes("cuda", 1000)


class Made:
    """A world layout, with the checkpoint that fits it, tensor by tensor."""

    def __init__(self, mesh):
        self.mesh = mesh
        self.tensors, self.spreads, self.offers, self.stored = [], {}, {}, []

    def add(self, name, shape, *, dim=0, dtype=BF16, kind=TensorKind.PARAMETER, expression=None):
        """``dim`` None: whole. Without an expression, the tensor is stored under its own name."""
        boxes, padded = [], numel(shape)
        for position in range(self.mesh.shard_size):
            if dim is None:
                boxes.append((LocalBox(Box.whole(shape), Strided.contiguous(shape)),))
                continue
            size = ceil(shape[dim] / self.mesh.shard_size)
            start = min(position * size, shape[dim])
            sizes = (*shape[:dim], min(start + size, shape[dim]) - start, *shape[dim + 1 :])
            box = Box(tuple(start if d == dim else 0 for d in range(len(shape))), sizes)
            boxes.append((LocalBox(box, Strided.contiguous(sizes)),) if box.numel else ())
            padded = numel((*shape[:dim], size, *shape[dim + 1 :]))
        alike = (item for item in self.spreads.values() if item.boxes == tuple(boxes))
        self.spreads[name] = next(alike, Spread(tuple(boxes), padded))
        placement = "whole" if dim is None else f"Shard({dim})"
        self.tensors.append(
            TensorLayout(
                (name,), kind, shape, dtype, boxes[0], placement, requires_grad=True, origin=Origin.AS_IT_IS
            )
        )
        if kind.is_saved:
            expression = expression or Stored(name, shape, dtype)
            self.offers[name] = (expression,)
            self.stored += leaves_of(expression)
        return self

    def world(self, *groups, whole=None):
        return WorldLayout(self.mesh, ModelLayout(tuple(self.tensors)), self.spreads, groups, whole or {})

    def index(self):
        entries, place = {}, 100
        for leaf in self.stored:
            stop = place + numel(leaf.shape) * leaf.dtype.itemsize
            entries[leaf.key] = TensorEntry(leaf.key, leaf.dtype, leaf.shape, "model.safetensors", place, stop)
            place = stop
        return CheckpointIndex("somewhere", {"model.safetensors": place}, entries, {}, "single file")

    def plan(self, layout):
        return plan_load(self.index(), layout, Bindings(self.offers), ModelRules(), Consent())

    def forecast(self, homes=HOMES):
        world = self.world()
        return forecast_ranks(self.plan(world.first), world, self.index(), homes, POLICY)


def leaves_of(expression):
    return list(dict.fromkeys(stored_leaves(expression)))


def experts(name, count, shape):
    return stack([Stored(f"{name}.{number}", shape, BF16) for number in range(count)], 0)


def moe(ranks):
    made = Made(MeshShape.flat(ranks))
    for layer in range(2):
        gate, up = (experts(f"{layer}.experts.{half}", 6, (4, 10)) for half in ("gate", "up"))
        made.add(f"layers.{layer}.experts.gate_up", (6, 8, 10), expression=concat([gate, up], 1))
        made.add(f"layers.{layer}.norm", (10,), dtype=F32)
    made.add("scale", (), dim=None, dtype=F32)
    made.add("steps", (3,), dim=None, dtype=DType.I64, kind=TensorKind.PERSISTENT_BUFFER)
    made.add("inv_freq", (5,), dim=None, dtype=F32, kind=TensorKind.BUFFER)
    return made


def test_what_ranks_hold_read_and_need():
    """Two layers of 6 experts x 80 x 2 bytes and 10 x 4, on 4 ranks; 4 + 24 bytes whole; a buffer of 20 bytes."""
    ranks = moe(4).forecast()
    whole = 4 + 24
    assert [rank.shard_bytes - whole for rank in ranks] == [2 * (320 + 12), 2 * (320 + 12), 2 * (320 + 12), 2 * 4]
    assert {rank.padded_bytes for rank in ranks} == {2 * (320 + 12) + whole}
    assert {(rank.device_bytes, rank.host_bytes) for rank in ranks} == {(2 * (320 + 12) + whole + 20, 1000)}
    assert [rank.needed_bytes for rank in ranks] == [rank.shard_bytes for rank in ranks]
    assert [rank.read_bytes for rank in ranks] == [rank.shard_bytes for rank in ranks]
    assert [rank.rank for rank in ranks] == [0, 1, 2, 3]
    assert ranks[1].experts == {"layers.{0..1}.experts.gate_up": Experts(2, 4, 6, is_cut=False)}
    assert ranks[3].experts == {"layers.{0..1}.experts.gate_up": Experts(0, 0, 6, is_cut=False)}


@pytest.mark.parametrize(
    ("homes", "expected"),
    [
        (Homes("cuda", 1000), (664 + 48, 1000)),
        (Homes("cuda", 1000, offloads_shards=True), (48, 664 + 1000)),
        (Homes("cpu", 1000), (0, 664 + 48 + 1000)),
        (Homes("cpu", 1000, offloads_shards=True), (0, 664 + 48 + 1000)),
    ],
)
def test_memory_goes_where_tensors_live(homes, expected):
    rank = moe(4).forecast(homes)[2]
    assert (rank.device_bytes, rank.host_bytes) == expected


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_one_rank_is_forecast_as_among_all(ranks):
    made = moe(ranks)
    world, index = made.world(), made.index()
    padded = {name: spread.padded_numel for name, spread in made.spreads.items()}
    for expected in made.forecast():
        plan = made.plan(world.at(expected.rank))
        assert forecast_rank(plan, index, expected.rank, HOMES, POLICY, padded) == expected


def test_replicas_hold_and_read_the_same():
    made = Made(MeshShape(("replicate", "shard"), (2, 3))).add("weight", (7, 4))
    found = made.forecast()
    assert [rank.shard_bytes for rank in found] == [24, 24, 8, 24, 24, 8]
    assert [rank.rank for rank in found] == list(range(6))


@pytest.mark.parametrize(
    ("homes", "reads"),
    [(Homes("cpu", 1000), 2), (Homes("cuda", 1000), 16), (Homes("cuda", 1000, offloads_shards=True), 1 + 8)],
)
def test_what_goes_to_an_accelerator_is_read_by_what_its_staging_takes(homes, reads):
    """Two tensors of 2048 bytes, one of them whole: into place at once, or 256 at a time, a power of two."""
    made = Made(MeshShape.flat(1)).add("weight", (32, 32)).add("whole", (32, 32), dim=None)
    index = made.index()
    entries = {**index.entries, "whole": replace(index.entries["whole"], file="b")}
    apart = CheckpointIndex("somewhere", {**index.files, "b": index.nbytes + 100}, entries, {}, "indexed")
    world = made.world()
    (rank,) = forecast_ranks(made.plan(world.first), world, apart, homes, POLICY)
    assert rank.reads == reads


def test_experts_that_are_cut():
    made = Made(MeshShape.flat(4)).add("mlp.experts.down_proj", (2, 8, 5), dim=1)
    (held,) = made.forecast()[3].experts.values()
    assert held == Experts(0, 2, 2, is_cut=True)


@pytest.mark.parametrize(
    ("name", "shape", "expression", "counted"),
    [
        ("experts.weight", (4, 3, 2), None, True),
        ("conv.weight", (4, 3, 2), None, False),
        ("experts.bias", (4, 3), None, False),
        ("moe.weight", (4, 3, 2), experts("e", 4, (3, 2)), True),
        ("moe.weight", (4, 2, 3), permute(experts("e", 4, (3, 2)), (0, 2, 1)), True),
        ("moe.weight", (4, 2, 2), slice_dim(experts("e", 4, (3, 2)), 1, 0, 2), True),
        ("moe.weight", (2, 3, 2), slice_dim(experts("e", 4, (3, 2)), 0, 0, 2), True),
        ("moe.weight", (3, 4, 2), permute(experts("e", 4, (3, 2)), (1, 0, 2)), False),
    ],
)
def test_what_is_a_stack_of_experts(name, shape, expression, counted):
    made = Made(MeshShape.flat(1)).add(name, shape, expression=expression)
    assert bool(made.forecast()[0].experts) is counted


def test_groups_gather_padded_parameters_in_the_dtype_of_mixed_precision():
    made = Made(MeshShape.flat(4)).add("norm", (10,), dtype=F32).add("weight", (6, 2), dtype=F32)
    world = made.world(GroupLayout(("layer",), ("weight", "norm")), GroupLayout(("",), ()))
    assert forecast_groups(world, None) == (GroupForecast(("layer",), "F32", 2, 22, 4 * (2 * 2 + 3) * 4),)
    (group,) = forecast_groups(world, BF16)
    assert group.gathered_bytes == 4 * (2 * 2 + 3) * 2


def test_conversions_that_compute_are_told_with_what_they_need():
    inputs = (Stored("a", (4, 4), BF16), Stored("b", (4,), F32))
    operation = WholeOperation("Dequantize", ((4, 4), (4,)), {"x": (4, 4), "y": (4, 4)}, dict, 96)
    made = Made(MeshShape.flat(2))
    for name in ("x", "y"):
        made.add(name, (4, 4), expression=Computed(operation, name, (4, 4), BF16, inputs))
    assert forecast_computed(made.plan(made.world().first)) == (
        ComputedForecast(("x", "y"), "Dequantize", input_bytes=48, budget_bytes=96),
    )
    assert [rank.needed_bytes for rank in made.forecast()] == [48, 48]


def test_tensors_that_make_ranks_unequal_are_named():
    made = Made(MeshShape.flat(8))
    for layer in range(3):
        made.add(f"layers.{layer}.experts", (2, 5, 7))
    made.add("even", (16, 100)).add("small", (2,))
    (sentence,) = uneven_tensors(made.world(), 1.1)
    assert sentence.startswith(
        "layers.{0..2}.experts: (2, 5, 7) is dealt unevenly to 8 ranks, of which 6 hold nothing"
    )


@pytest.mark.parametrize(("even", "names"), [(194, ["odd"]), (196, ["odd"]), (198, [])])
def test_unequal_tensors_matter_from_a_hundredth_of_what_a_rank_holds(even, names):
    """An excess of 2 bytes on the first of two ranks, which holds 4 + 194, 196 or 198."""
    made = Made(MeshShape.flat(2)).add("odd", (1, 2)).add("even", (even,))
    assert [line.split(":")[0] for line in uneven_tensors(made.world(), 1.1)] == names


RANK = RankForecast(
    3, 0, 0, device_bytes=80 << 30, host_bytes=2 << 30, needed_bytes=0, read_bytes=0, reads=0, files=0
)


@pytest.mark.parametrize(
    ("available", "check"),
    [
        (Available(80 << 30, 2 << 30), RequireMemory()),
        (Available(), RequireMemory()),
        (Available(device_bytes=81 << 30), RequireMemory(reserve_bytes=1 << 30)),
        (Available(1, 1), TryAnyway()),
    ],
)
def test_what_fits_is_let_through(available, check):
    require_fits(RANK, available, check)


@pytest.mark.parametrize(
    ("available", "check", "message"),
    [
        (
            Available(79 << 30),
            RequireMemory(),
            r"rank 3 needs 80\.00 GiB of device memory, of which 79\.00 GiB is free",
        ),
        (
            Available(80 << 30, 1 << 30),
            RequireMemory(),
            r"rank 3 needs 2\.00 GiB of host memory, of which 1\.00 GiB",
        ),
        (Available(1 << 30, 1 << 30), RequireMemory(), r"of device memory, .* and 2\.00 GiB of host memory"),
        (Available(80 << 30), RequireMemory(1), r"80\.00 GiB is free and 1 B is to stay so"),
        (Available(79 << 30), RequireMemory(), r"LoadOptions\(memory_check=TryAnyway\(\)\)"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_way_out(available, check, message):
    with pytest.raises(PlacementError, match=message):
        require_fits(RANK, available, check)


def test_host_memory_is_that_of_the_machine_where_no_pools_are_known():
    assert Available(host_bytes=5).by_pool() == {"": 5}
    assert Available().by_pool() == {"": None}
    assert Available(host_bytes=5, pools={"": 4, "/job": 3}).by_pool() == {"": 4, "/job": 3}


def test_a_negative_reserve_is_refused():
    with pytest.raises(ConfigError, match="reserve_bytes=-1"):
        RequireMemory(-1)
