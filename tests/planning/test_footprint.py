"""What ranks read, against the copies themselves, byte by byte."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.conversion import (
    Opaque,
    Stored,
    concat,
    copies,
    permute,
    reshape,
    skeleton,
    slice_dim,
    stack,
    stored_leaves,
)
from shardwise.formats import CheckpointIndex, TensorEntry
from shardwise.layout import LocalBox, Spread
from shardwise.planning.footprint import Footprint, Footprints
from shardwise.storage import ReadPolicy
from shardwise.tensors import Box, ByteRange, DType, Strided, coalesce, numel

F16 = DType.F16


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


def expected(index, wanted, read_policy, position):
    """The same, from the copies, without any of the ways to be quick."""
    touched = {}
    needed = 0
    for expression, how in wanted:
        for part in how.boxes[position]:
            for copy in copies(expression, part.box, part.local):
                entry = index.entries[copy.leaf.key]
                for element in places(copy.source):
                    touched.setdefault(entry.file, set()).add(entry.start + element * copy.leaf.dtype.itemsize)
                needed += copy.numel * copy.leaf.dtype.itemsize
    joined = {
        file: coalesce((ByteRange(p, p + F16.itemsize) for p in found), max_gap_bytes=read_policy.max_gap_bytes)
        for file, found in touched.items()
    }
    ranges = [item for found in joined.values() for item in found]
    return Footprint(
        needed,
        sum(item.nbytes for item in ranges),
        sum(ceil(item.nbytes / read_policy.request_bytes) for item in ranges),
        tuple(sorted(joined)),
    )


def places(view):
    grid = [view.offset]
    for size, stride in zip(view.sizes, view.strides, strict=True):
        grid = [place + step * stride for place in grid for step in range(size)]
    return grid


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


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("gap", "at_once"), [(0, 1 << 20), (8, 10), (4096, 1 << 20)])
def test_footprints_are_those_of_the_copies(ranks, gap, at_once):
    stored, wanted = [], []
    for number in range(3):
        leaves, made = layer(number)
        stored += leaves
        wanted += [(expression, spread(expression.shape, ranks)) for expression in made]
        wanted.append((made[0], spread(made[0].shape, ranks, dim=2)))
    shared = {}  # equal ones are one object
    wanted = [(made, shared.setdefault(how.boxes, how)) for made, how in wanted]
    index = index_of(stored, files=4)
    footprints = Footprints(index, wanted, policy(gap, at_once))
    for position in range(ranks):
        assert footprints.at(position) == expected(index, wanted, policy(gap, at_once), position)


@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    ranks=st.integers(1, 9),
    gap=st.integers(0, 40),
    files=st.integers(1, 3),
)
def test_any_sizes_and_gaps(sizes, ranks, gap, files):
    stored = [Stored(f"t.{number}", (size, 3), F16) for number, size in enumerate(sizes)]
    wanted = [(leaf, spread(leaf.shape, ranks)) for leaf in stored]
    index = index_of(stored, files)
    footprints = Footprints(index, wanted, policy(gap))
    found = [footprints.at(position) for position in range(ranks)]
    assert found == [expected(index, wanted, policy(gap), position) for position in range(ranks)]
    assert sum(item.needed_bytes for item in found) == index.nbytes


def test_equal_layers_are_one_kind():
    stored, wanted = [], []
    spreads = {}
    for number in range(4):
        leaves, made = layer(number)
        stored += leaves
        wanted += [(item, spreads.setdefault(item.shape, spread(item.shape, 2))) for item in made]
    assert len({(skeleton(item)[0], id(how)) for item, how in wanted}) == 6


def test_all_positions_tile_every_stored_tensor():
    """Each stored byte is read by one position, when no gap is read over."""
    leaves, made = layer(0)
    wanted = [(item, spread(item.shape, 3)) for item in (*made[:3], made[3], made[5])]
    index = index_of(leaves, files=2)
    footprints = Footprints(index, wanted, policy())
    found = [footprints.ranges(position) for position in range(3)]
    starts = np.concatenate([item.starts for item in found])
    stops = np.concatenate([item.stops for item in found])
    order = np.argsort(starts)
    assert (stops[order][:-1] <= starts[order][1:]).all()
    assert (stops - starts).sum() == index.nbytes == sum(item.needed_bytes for item in found)


def test_what_computes_reads_its_inputs_whole_and_once():
    inputs = (Stored("a", (4, 2), F16), Stored("b", (4,), F16))
    operation = dict
    made = [Opaque("Op", name, (3, 2), inputs, operation) for name in ("x", "y")]
    one_rank = Spread((spread((3, 2), 1).boxes[0], ()), 6)
    index = index_of(inputs, files=1)
    footprints = Footprints(index, [(item, one_rank) for item in made], policy())
    assert footprints.at(0) == Footprint(24, 24, 1, ("0.safetensors",))
    assert footprints.at(1) == Footprint(0, 0, 0, ())


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
        Opaque("Op", "x", (4, 3), (), dict),
        Opaque("Op", "x", (4, 3), (), list),
    ]
    assert len({skeleton(item)[0] for item in different}) == len(different)
