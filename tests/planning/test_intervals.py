"""Every rank reads one interval of the checkpoint: each element once, few files, even bytes; all get their own."""

from __future__ import annotations

import itertools
import random
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conversion.random_expressions import Grower

from shardwise.conversion import (
    Stored,
    concat,
    copies,
    leaf_boxes,
    permute,
    reshape,
    slice_dim,
    stack,
    stored_leaves,
)
from shardwise.formats.checkpoint_index import CheckpointIndex, TensorEntry
from shardwise.planning.moves.exchange import WantedBoxes, staging_of
from shardwise.planning.moves.intervals import IntervalPart, handed_over, intervals, stretch
from shardwise.tensors import Box, DType, numel

BF16 = DType.BF16
SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


def index_of(leaves, files, header=100):
    """The tensors one after the other, file by file, each file about as large as the others."""
    leaves = list(leaves)
    entries, sizes = {}, {}
    for number, leaf in enumerate(leaves):
        file = f"model-{number * files // len(leaves):03d}.safetensors"
        start = sizes.get(file, header)
        stop = start + numel(leaf.shape) * leaf.dtype.itemsize
        entries[leaf.key] = TensorEntry(leaf.key, leaf.dtype, leaf.shape, file, start, stop)
        sizes[file] = stop
    return CheckpointIndex("somewhere", sizes, entries, {}, "indexed")


def elements(box):
    return list(itertools.product(*(range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))))


def count(boxes, shape):
    found = np.zeros(shape, dtype=int)
    for box in boxes:
        found[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] += 1
    return found


def layer(number, experts, hidden, width, *, apart=False):
    """The leaves of a layer in file order, and its tensors: experts one by one, a fused matrix, and plain ones.

    ``apart``: the gates of all experts are stored before all ups.
    """
    gates = [Stored(f"{number:02d}.{e}.gate", (width, hidden), BF16) for e in range(experts)]
    ups = [Stored(f"{number:02d}.{e}.up", (width, hidden), BF16) for e in range(experts)]
    downs = [Stored(f"{number:02d}.{e}.down", (hidden, width), BF16) for e in range(experts)]
    fused = Stored(f"{number:02d}.qkv", (3 * hidden, hidden), BF16)
    turned = Stored(f"{number:02d}.out", (hidden, 2 * hidden), BF16)
    norm = Stored(f"{number:02d}.norm", (hidden,), DType.F32)
    made = {
        f"{number:02d}.gate_up": concat([stack(gates, 0), stack(ups, 0)], 1),
        f"{number:02d}.down": stack(downs, 0),
        **{f"{number:02d}.{n}": slice_dim(fused, 0, hidden * i, hidden) for i, n in enumerate("qkv")},
        f"{number:02d}.out": permute(turned, (1, 0)),
        f"{number:02d}.norm": norm,
    }
    by_expert = zip(gates, ups, downs, strict=True)
    stacked = [*gates, *ups, *downs] if apart else list(itertools.chain.from_iterable(by_expert))
    return [norm, fused, turned, *stacked], made


def model(layers=2, experts=4, hidden=8, width=6, *, files=3, apart=False):
    leaves, reads = [Stored("embed", (20, hidden), BF16)], {}
    reads["embed"] = leaves[0]
    for number in range(layers):
        more, made = layer(number, experts, hidden, width, apart=apart)
        leaves += more
        reads |= made
    return reads, index_of(leaves, files)


MODELS = st.builds(
    model,
    st.integers(1, 3),
    st.integers(2, 5),
    st.integers(1, 9),
    st.integers(1, 7),
    files=st.integers(1, 6),
    apart=st.booleans(),
)


def ranges_of(reads, index, interval):
    """(file, start, stop) of all that a rank reads, run by run."""
    for portion in interval:
        for copy in copies(reads[portion.tensor], portion.box):
            entry = index.entries[copy.leaf.key]
            itemsize = entry.dtype.itemsize
            start = entry.start + copy.source.offset * itemsize
            assert copy.source.is_contiguous
            yield entry.file, start, start + copy.numel * itemsize


@given(SHAPES, st.data())
def test_a_stretch_is_these_elements_in_order_in_few_boxes(shape, data):
    start = data.draw(st.integers(0, numel(shape)))
    stop = data.draw(st.integers(start, numel(shape)))
    boxes = list(stretch(shape, start, stop))
    assert list(itertools.chain.from_iterable(map(elements, boxes))) == elements(Box.whole(shape))[start:stop]
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(box.numel for box in boxes)


def test_a_stretch_from_within_a_row_into_the_next_is_two_boxes():
    assert list(stretch((2, 3), 1, 5)) == [Box((0, 1), (1, 2)), Box((1, 0), (1, 2))]


@given(st.integers(0, 2**32))
def test_leaf_boxes_make_up_any_expression(seed):
    node, array = Grower(random.Random(seed)).grow(6)
    if array.size <= 20_000:
        assert (count(leaf_boxes(node), node.shape) == 1).all()


@pytest.mark.parametrize(
    ("expression", "boxes", "leaves"),
    [
        (lambda a, b: concat([stack([a, b], 0), stack([b, a], 0)], 1), 4, 1),
        (lambda a, b: permute(stack([a, b], 0), (2, 1, 0)), 2, 1),
        (lambda a, b: reshape(stack([a, b], 0), (8, 6)), 2, 1),
        (lambda a, b: slice_dim(concat([a, b], 0), 0, 1, 4, 2), 2, 1),
        (lambda a, b: slice_dim(concat([a, b], 0), 0, 4, 3), 1, 1),
        (lambda a, b: reshape(concat([a, b], 1), (6, 8)), 12, 1),  # rows of both leaves in turn
        (lambda a, b: reshape(stack([a, b], 2), (4, 12)), 1, 2),  # elements of both in turn
    ],
)
def test_each_box_is_of_one_leaf_where_it_can_be(expression, boxes, leaves):
    node = expression(Stored("a", (4, 6), BF16), Stored("b", (4, 6), BF16))
    found = list(leaf_boxes(node))
    assert len(found) == boxes
    assert (count(found, node.shape) == 1).all()
    assert {len({copy.leaf.key for copy in copies(node, box)}) for box in found} == {leaves}


@given(MODELS, st.integers(1, 9))
def test_each_element_is_read_by_one_rank(made, ranks):
    reads, index = made
    found = intervals(reads, index, ranks)
    assert len(found) == ranks
    for name, expression in reads.items():
        boxes = [part.box for interval in found for part in interval if part.tensor == name]
        assert (count(boxes, expression.shape) == 1).all()
    assert sum(part.nbytes for interval in found for part in interval) == index.nbytes


@given(MODELS, st.integers(1, 9))
def test_intervals_follow_each_other_in_the_files(made, ranks):
    reads, index = made
    found = intervals(reads, index, ranks)
    ranges = [list(ranges_of(reads, index, interval)) for interval in found]
    line = list(itertools.chain(*ranges))
    assert line == sorted(line)
    for (file, _, stop), (following, start, _) in itertools.pairwise(line):
        assert file != following or start == stop
    assert sum(len({file for file, *_ in held}) for held in ranges) <= len(index.files) + ranks - 1


@given(MODELS, st.integers(1, 9))
def test_intervals_are_even(made, ranks):
    reads, index = made
    mean = index.nbytes / ranks
    widest = max(entry.dtype.itemsize for entry in index.entries.values())
    for interval in intervals(reads, index, ranks):
        assert abs(sum(part.nbytes for part in interval) - mean) <= mean / 64 + widest


def test_small_tensors_and_rows_stay_whole():
    reads = {"norm": Stored("norm", (10,), BF16), "w": Stored("w", (64 * 4, 64), BF16)}
    found = intervals(reads, index_of(reads.values(), 1), 2)
    assert [part.box for part in found[0]] == [Box((0,), (10,)), Box((0, 0), (128, 64))]
    assert [part.box for part in found[1]] == [Box((128, 0), (128, 64))]


def test_what_is_stored_transposed_is_cut_as_it_is_stored():
    reads = {"w": permute(Stored("w", (64, 128), BF16), (1, 0))}
    found = intervals(reads, index_of(stored_leaves(reads["w"]), 1), 4)
    assert [[part.box for part in interval] for interval in found] == [
        [Box((0, 16 * rank), (128, 16))] for rank in range(4)
    ]


def test_more_ranks_than_elements():
    reads = {"w": Stored("w", (3,), BF16)}
    found = intervals(reads, index_of(reads.values(), 1), 8)
    assert (count([part.box for interval in found for part in interval], (3,)) == 1).all()
    assert intervals({}, index_of(reads.values(), 1), 8) == ((),) * 8


# What becomes of what has been read


def wanted_of(reads, ranks, dims):
    """The tensors, each dealt along a dimension or (None) whole on every rank."""
    found = []
    for (name, expression), dim in zip(sorted(reads.items()), itertools.cycle(dims), strict=False):
        shape = expression.shape
        boxes = [()] * ranks
        for rank in range(ranks):
            if dim is None:
                boxes[rank] = (Box.whole(shape),)
                continue
            along = min(dim, len(shape) - 1)
            size = ceil(shape[along] / ranks)
            start, stop = min(rank * size, shape[along]), min((rank + 1) * size, shape[along])
            offsets = tuple(start if d == along else 0 for d in range(len(shape)))
            sizes = tuple(stop - start if d == along else n for d, n in enumerate(shape))
            boxes[rank] = (Box(offsets, sizes),) if stop > start else ()
        found.append(WantedBoxes(name, 2, tuple(boxes)))
    return found


DIMS = st.lists(st.sampled_from([0, 1, 2, None]), min_size=1, max_size=4)


@settings(max_examples=30)  # each is a model of several tensors on several ranks: a fifth of a second
@given(MODELS, st.integers(2, 5), DIMS, st.integers(0, 3000))
def test_everybody_gets_exactly_its_boxes_within_the_budget(made, ranks, dims, extra):
    reads, index = made
    budget = 16 * ranks + extra
    wanted = wanted_of(reads, ranks, dims)
    read = intervals(reads, index, ranks)
    rounds_of = [handed_over(wanted, read, budget, rank) for rank in range(ranks)]
    assert len({tuple(items.moves for items in own) for own in rounds_of}) == 1
    for item in wanted:
        shape = reads[item.tensor].shape
        for rank, own in enumerate(rounds_of):
            got = [p.box for items in own for p in items.parcels if p.tensor == item.tensor and rank in p.targets]
            assert (count(got, shape) == count(item.boxes[rank], shape)).all()
    for number in range(len(rounds_of[0])):
        given = [p for rank, own in enumerate(rounds_of) for p in own[number].parcels if p.source == rank]
        assert given
        assert rounds_of[0][number].moves == any(target != p.source for p in given for target in p.targets)
        used = [0] * ranks
        for parcel in given:
            for rank, nbytes in staging_of(parcel).items():
                used[rank] += nbytes
        assert max(used) <= budget


@given(MODELS, st.integers(2, 5), DIMS)
def test_what_one_rank_sends_the_other_awaits_in_the_same_order(made, ranks, dims):
    reads, index = made
    read = intervals(reads, index, ranks)
    rounds_of = [handed_over(wanted_of(reads, ranks, dims), read, 1000, rank) for rank in range(ranks)]
    for number in range(len(rounds_of[0])):
        for source, target in itertools.permutations(range(ranks), 2):
            sent, awaited = (
                [
                    (p.tensor, p.box, p.block)
                    for p in rounds_of[side][number].parcels
                    if p.source == source and target in p.targets
                ]
                for side in (source, target)
            )
            assert sent == awaited


def test_a_rank_writes_down_its_own_part_only():
    reads, index = model(layers=3, experts=8)
    read = intervals(reads, index, 8)
    for rank in range(8):
        own = handed_over(wanted_of(reads, 8, [0]), read, 1 << 20, rank)
        assert all(rank == p.source or rank in p.targets for items in own for p in items.parcels)


@pytest.mark.parametrize("ranks", [3, 8, 16])
def test_all_read_at_once_and_rounds_are_nearly_full(ranks):
    """Equal layers, as many as ranks: readers that went in step would all hand to one rank."""
    reads, index = model(layers=ranks, experts=ranks, hidden=64, width=32, files=4)
    wanted, budget = wanted_of(reads, ranks, [0]), 1 << 14
    read = intervals(reads, index, ranks)
    rounds_of = [handed_over(wanted, read, budget, rank) for rank in range(ranks)]
    rounds = len(rounds_of[0])
    least = 2 * index.nbytes / (ranks * budget)  # what is given and what is taken
    assert rounds <= 1.5 * least + 16
    busy = [sum(any(p.source == rank for p in items.parcels) for items in rounds_of[rank]) for rank in range(ranks)]
    assert min(busy) > 0.6 * rounds


def test_a_block_of_more_ranks_than_the_budget_has_room_for_is_halved():
    """Eight ranks hold a column of one byte each, and each takes 16 bytes of staging: there is room for two."""
    ranks, budget = 8, 32
    reads = {"w": Stored("w", (4, 8), DType.U8)}
    wanted = [WantedBoxes("w", 1, tuple((Box((0, rank), (4, 1)),) for rank in range(ranks)))]
    read = intervals(reads, index_of(reads.values(), 1), ranks)
    rounds_of = [handed_over(wanted, read, budget, rank) for rank in range(ranks)]
    for rank, own in enumerate(rounds_of):
        parcels = [parcel for items in own for parcel in items.parcels]
        got = [parcel.box for parcel in parcels if rank in parcel.targets]
        assert (count(got, (4, 8)) == count(wanted[0].boxes[rank], (4, 8))).all()
        assert {parcel.block.numel for parcel in parcels} == {2}
    for number in range(len(rounds_of[0])):
        used = [0] * ranks
        for rank, own in enumerate(rounds_of):
            for parcel in own[number].parcels:
                for place, nbytes in staging_of(parcel).items():
                    used[place] += nbytes if parcel.source == rank else 0
        assert max(used) <= budget


def test_blocks_of_a_part_have_their_shares_of_its_bytes():
    part = IntervalPart("w", Box((2, 0), (6, 4)), (1, 0), 48)
    blocks = list(part.blocks(5))
    assert [(block.nbytes, block.tensor, block.order) for block in blocks] == [
        (2 * block.box.numel, "w", (1, 0)) for block in blocks
    ]
    assert (count([block.box for block in blocks], (8, 4)) == count([part.box], (8, 4))).all()


def test_a_budget_below_one_element_is_refused():
    reads = {"w": Stored("w", (6,), BF16)}
    read = intervals(reads, index_of(reads.values(), 1), 3)
    with pytest.raises(ValueError, match="31 bytes are too few to hand an element of w"):
        handed_over(wanted_of(reads, 3, [None]), read, 31, 0)
