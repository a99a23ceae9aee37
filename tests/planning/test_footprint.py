"""What ranks read, against the copies themselves, byte by byte."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.conversion import (
    Computed,
    Stored,
    WholeOperation,
    concat,
    copies,
    permute,
    reshape,
    skeleton,
    slice_dim,
    stack,
    stored_leaves,
)
from shardwise.execution.memory.copy_in import landings
from shardwise.formats.checkpoint_index import CheckpointIndex, TensorEntry
from shardwise.layout import LocalBox, MeshShape, Spread
from shardwise.planning.forecasts.footprint import Footprint, Footprints, Reading
from shardwise.planning.loads.schedule import schedule, segments_of, staging_within
from shardwise.storage.contract import ReadPolicy
from shardwise.tensors import Box, DType, Strided, numel

F16 = DType.F16
BUDGET = 4096


def policy(gap=0, request=1 << 20):
    return ReadPolicy(gap, request, concurrency=1, is_remote=False, bytes_per_s=1e9)


def index_of(stored, files):
    """The tensors one after the other, dealt over files."""
    entries, sizes = {}, {}
    for number, leaf in enumerate(stored):
        file = f"{number % files}.safetensors"
        start = sizes.get(file, 100)
        stop = start + numel(leaf.shape) * leaf.dtype.itemsize
        entries[leaf.key] = TensorEntry(leaf.key, leaf.dtype, leaf.shape, file, start, stop)
        sizes[file] = stop
    return CheckpointIndex("somewhere", dict(sorted(sizes.items())), entries, {}, "indexed")


def spread(shape, ranks, dim=0):
    """Torch's own way of dealing a dimension: parts of one size, the last ones smaller or empty."""
    size = ceil(shape[dim] / ranks)
    boxes = []
    for rank in range(ranks):
        start, stop = min(rank * size, shape[dim]), min((rank + 1) * size, shape[dim])
        sizes = (*shape[:dim], stop - start, *shape[dim + 1 :])
        offsets = tuple(start if d == dim else 0 for d in range(len(shape)))
        box = Box(offsets, sizes)
        boxes.append((LocalBox(box, Strided.contiguous(sizes)),) if box.numel else ())
    return Spread(tuple(boxes), numel(shape))


def expected(index, wanted, read_policy, position, budget=BUDGET):
    """The same, by the schedule itself, device by device."""
    needed, requests = 0, []
    for on_device in (False, True):
        staging = staging_within(budget, read_policy.concurrency, on_device=on_device).nbytes
        segments = []
        for item in wanted:
            if item.on_device is not on_device:
                continue
            for part in item.spread.boxes[position]:
                for copy in copies(item.expression, part.box, part.local):
                    entry = index.entries[copy.leaf.key]
                    needs_staging = on_device or item.dtype != entry.dtype
                    needed += copy.numel * entry.dtype.itemsize
                    segments += [
                        (entry.file, segment)
                        for segment in segments_of(
                            copy, 0, entry, needs_staging=needs_staging, policy=read_policy, block_bytes=staging
                        )
                    ]
        requests += schedule(segments, read_policy, staging_bytes=staging)
    return Footprint(
        needed,
        sum(request.bytes.nbytes for request in requests),
        len(requests),
        tuple(sorted({request.file for request in requests})),
    )


def layer(number, experts=5):
    """One layer's expressions: a stack, parts of a fused matrix, an interleave, a transpose, a plain one."""
    gates = [Stored(f"{number}.{e}.gate", (6, 4), F16) for e in range(experts)]
    ups = [Stored(f"{number}.{e}.up", (6, 4), F16) for e in range(experts)]
    fused = Stored(f"{number}.qkv", (12, 4), F16)
    inter = Stored(f"{number}.inter", (8, 6), F16)
    plain = Stored(f"{number}.norm", (7,), F16)
    made = [
        concat([stack(gates, 0), stack(ups, 0)], 1),
        slice_dim(fused, 0, 0, 4),
        slice_dim(fused, 0, 4, 8),
        reshape(permute(reshape(inter, (4, 2, 6)), (1, 0, 2)), (8, 6)),
        permute(inter, (1, 0)),
        plain,
    ]
    return [*gates, *ups, fused, inter, plain], made


def wanted_of(expressions, ranks, *, dtype=F16, on_device=False, dim=0):
    """The expressions as tensors, dealt to ranks; equal spreads are one object."""
    made = {}
    return [
        Reading(item, made.setdefault(item.shape, spread(item.shape, ranks, dim)), dtype, on_device)
        for item in expressions
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("gap", "at_once"), [(0, 1 << 20), (8, 10), (8, 200), (4096, 1 << 20), (4096, 300)])
def test_footprints_are_those_of_the_schedule(ranks, gap, at_once):
    """Tensors on the host as they are stored, cast, and on a device; dealt by rows and by columns."""
    stored, wanted = [], []
    for number in range(3):
        leaves, made = layer(number)
        stored += leaves
        wanted += wanted_of(made, ranks)
        wanted += wanted_of(made[:2], ranks, dtype=DType.F32)
        wanted += wanted_of(made[1:], ranks, on_device=True)
        wanted += wanted_of(made[:1], ranks, dim=2)
        both = stack([stack(leaves[:5], 0), stack(leaves[5:10], 0)], 1)
        wanted += wanted_of([permute(made[0], (0, 2, 1)), both], ranks, dim=2)
    index = index_of(stored, files=4)
    footprints = Footprints(MeshShape.flat(ranks), index, wanted, policy(gap, at_once), BUDGET)
    for position in range(ranks):
        assert footprints.at(position) == expected(index, wanted, policy(gap, at_once), position)


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    ranks=st.integers(1, 9),
    gap=st.integers(0, 60),
    at_once=st.integers(2, 400),
    budget=st.integers(1, 2000),
    files=st.integers(1, 3),
    on_device=st.booleans(),
)
def test_any_sizes_gaps_and_budgets(sizes, ranks, gap, at_once, budget, files, on_device):
    stored = [Stored(f"t.{number}", (size, 3), F16) for number, size in enumerate(sizes)]
    wanted = wanted_of(stored, ranks, on_device=on_device)
    rules = policy(gap, at_once)
    index = index_of(stored, files)
    footprints = Footprints(MeshShape.flat(ranks), index, wanted, rules, budget)
    found = [footprints.at(position) for position in range(ranks)]
    assert found == [expected(index, wanted, rules, position, budget) for position in range(ranks)]
    assert sum(item.needed_bytes for item in found) == index.nbytes


def test_what_every_rank_holds_whole_every_rank_reads():
    leaves = [Stored(f"{number}.norm", (7,), F16) for number in range(3)]
    whole = Spread(spread((7,), 1).boxes * 3, 7)
    index = index_of(leaves, files=2)
    wanted = [Reading(leaf, whole, F16, on_device=False) for leaf in leaves]
    footprints = Footprints(MeshShape.flat(3), index, wanted, policy(), BUDGET)
    for position in range(3):
        assert footprints.at(position) == expected(index, wanted, policy(), position)
        assert footprints.at(position).needed_bytes == index.nbytes


def test_only_what_is_cast_takes_staging():
    """A hundred tensors that are read into place, and two that are cast, of which the staging has room for one."""
    leaves = [Stored(f"t.{number}", (3,), F16) for number in range(100)]
    cast = [Stored(f"cast.{number}", (32,), F16) for number in range(2)]
    index = index_of([*leaves, *cast], files=1)
    wanted = [*wanted_of(leaves, 1), *wanted_of(cast, 1, dtype=DType.F32)]
    footprint = Footprints(MeshShape.flat(1), index, wanted, policy(), 64).at(0)
    assert footprint == Footprint(728, 728, 2, ("0.safetensors",)) == expected(index, wanted, policy(), 0, 64)


def test_all_positions_tile_every_stored_tensor():
    """Each stored byte is read by one position, when no gap is read over."""
    leaves, made = layer(0)
    wanted = wanted_of((*made[:4], made[5]), 3)
    index = index_of(leaves, files=2)
    footprints = Footprints(MeshShape.flat(3), index, wanted, policy(), BUDGET)
    found = [footprints.segments(position, on_device=False) for position in range(3)]
    starts = np.concatenate([item.starts for item in found])
    stops = np.concatenate([item.stops for item in found])
    order = np.argsort(starts)
    assert (stops[order][:-1] <= starts[order][1:]).all()
    assert (stops - starts).sum() == index.nbytes == sum(item.needed_bytes for item in found)


def test_what_computes_reads_its_inputs_whole_and_once():
    inputs = (Stored("a", (4, 2), F16), Stored("b", (4,), F16))
    operation = WholeOperation("Op", ((4, 2), (4,)), {"x": (3, 2), "y": (3, 2)}, dict, 48)
    made = [Computed(operation, name, (3, 2), F16, inputs) for name in ("x", "y")]
    one_rank = Spread((spread((3, 2), 1).boxes[0], ()), 6)
    index = index_of(inputs, files=1)
    wanted = [Reading(item, one_rank, F16, on_device=True) for item in made]
    footprints = Footprints(MeshShape.flat(2), index, wanted, policy(), BUDGET)
    assert footprints.at(0) == Footprint(24, 24, 1, ("0.safetensors",))
    assert footprints.at(1) == Footprint(0, 0, 0, ())


@pytest.mark.parametrize("budget", [4096, 1 << 18, 3 << 19, 5_000_000, 256 << 20])
@pytest.mark.parametrize("concurrency", [1, 4, 8, 32])
def test_staging_is_what_the_workers_of_a_load_have(budget, concurrency):
    tools = landings(budget, concurrency, torch.device("cpu"))
    found = staging_within(budget, concurrency, on_device=False)
    assert [len(tool.begin()) for tool in tools] == [found.nbytes] * found.workers
    assert found.total_bytes <= budget
    on_device = staging_within(budget, concurrency, on_device=True)
    assert 2 * on_device.workers * on_device.nbytes <= budget


def test_skeletons_tell_expressions_apart_by_all_but_keys():
    one, other = (concat([Stored(f"{n}.a", (2, 3), F16), Stored(f"{n}.b", (2, 3), F16)], 0) for n in (1, 2))
    assert skeleton(one)[0] == skeleton(other)[0]
    assert skeleton(other)[1] == ("2.a", "2.b") == tuple(leaf.key for leaf in stored_leaves(other))
    same_key = concat([Stored("1.a", (2, 3), F16), Stored("1.a", (2, 3), F16)], 0)
    different = [
        one,
        same_key,
        concat([Stored("1.a", (2, 3), DType.F32), Stored("1.b", (2, 3), F16)], 0),
        concat([Stored("1.a", (2, 3), F16), Stored("1.b", (2, 3), F16)], 1),
        stack([Stored("1.a", (2, 3), F16), Stored("1.b", (2, 3), F16)], 0),
        reshape(one, (3, 4)),
        reshape(one, (12,)),
        permute(one, (1, 0)),
        slice_dim(one, 0, 0, 2),
        slice_dim(one, 0, 1, 2),
        slice_dim(one, 0, 0, 2, step=2),
        Computed(WholeOperation("Op", (), {"x": (4, 3)}, dict, 0), "x", (4, 3), F16, ()),
        Computed(WholeOperation("Op", (), {"x": (4, 3)}, dict, 0), "x", (4, 3), F16, ()),
    ]
    assert len({skeleton(item)[0] for item in different}) == len(different)
