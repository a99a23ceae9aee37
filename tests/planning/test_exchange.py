"""Parcels reach every rank's boxes exactly once, and rounds keep the budget."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwise.planning.moves import exchange
from shardwise.planning.moves.exchange import (
    WantedBoxes,
    covers,
    cut,
    dealt,
    even_parts,
    from_holders,
    from_sources,
    hull,
    rounds,
    staging_of,
)
from shardwise.planning.moves.parcels import Parcel
from shardwise.tensors import Box

SHAPES = st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple)
ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16])


@st.composite
def partitions(draw, shape, ranks):
    """Boxes by rank: a dimension is cut anywhere, and the parts are dealt to ranks, to several of them perhaps."""
    if not shape:
        return tuple((Box((), ()),) if draw(st.booleans()) else () for _ in range(ranks))
    dim = draw(st.integers(0, len(shape) - 1))
    edges = sorted({0, shape[dim], *draw(st.lists(st.integers(0, shape[dim]), max_size=4))})
    held = [[] for _ in range(ranks)]
    for start, stop in itertools.pairwise(edges):
        offsets = tuple(start if d == dim else 0 for d in range(len(shape)))
        sizes = tuple(stop - start if d == dim else n for d, n in enumerate(shape))
        for rank in draw(st.sets(st.integers(0, ranks - 1))):
            held[rank].append(Box(offsets, sizes))
    return tuple(map(tuple, held))


@st.composite
def worlds_of_tensors(draw):
    ranks = draw(st.integers(1, 5))
    wanted = tuple(
        WantedBoxes(f"t{number}", draw(ITEMSIZES), draw(partitions(draw(SHAPES), ranks)))
        for number in range(draw(st.integers(1, 3)))
    )
    return ranks, wanted


@pytest.fixture(autouse=True)
def _nothing_is_small(monkeypatch):
    monkeypatch.setattr(exchange, "SMALL_BYTES", 24)


def indices(box):
    return itertools.product(*(range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)))


def elements(boxes):
    return sorted(index for box in boxes for index in indices(box))


def received(parcels, tensor, rank):
    return [parcel.box for parcel in parcels if parcel.tensor == tensor and rank in parcel.targets]


@given(worlds_of_tensors(), st.data())
def test_everybody_gets_exactly_its_boxes_from_sources(world, data):
    ranks, wanted = world
    sources = sorted(data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)))
    source_of = [rank if rank in sources else data.draw(st.sampled_from(sources)) for rank in range(ranks)]
    spread = from_sources(wanted, [source_of] * len(wanted))
    parcels = [*spread.first, *spread.then]
    for item in wanted:
        for rank in range(ranks):
            assert elements(received(parcels, item.tensor, rank)) == elements(item.boxes[rank])
    for parcel in spread.first:
        assert parcel.source in sources
        assert all(source_of[target] == parcel.source for target in parcel.targets)
    for parcel in spread.then:  # what is handed on has been received before
        assert parcel.source not in parcel.targets
        mine = set(elements(received(spread.first, parcel.tensor, parcel.source)))
        assert mine.issuperset(indices(parcel.box))


@given(worlds_of_tensors(), st.data())
def test_everybody_gets_exactly_its_boxes_from_holders(world, data):
    ranks, wanted = world
    held = []
    for item in wanted:
        shape = tuple(
            max((box.offsets[dim] + box.sizes[dim] for boxes in item.boxes for box in boxes), default=0)
            for dim in range(len(next((box.sizes for boxes in item.boxes for box in boxes), ())))
        )
        boxes = [list(part) for part in data.draw(partitions(shape, ranks))]
        for part in cut(Box.whole(shape), 3):  # what nobody holds, the last rank does
            if not any(part.intersect(box) for by_rank in boxes for box in by_rank if box.numel):
                boxes[-1].append(part)
        assume(covers(shape, boxes))
        held.append(boxes)
    spread = from_holders(wanted, held)
    parcels = [*spread.first, *spread.then]
    for item, boxes in zip(wanted, held, strict=True):
        for rank in range(ranks):
            assert elements(received(parcels, item.tensor, rank)) == elements(item.boxes[rank])
        own = [set(elements(box for box in by_rank if box.numel)) for by_rank in boxes]
        for parcel in parcels:
            if parcel.tensor == item.tensor:
                inside = set(indices(parcel.box))
                assert all(target == parcel.source or not inside & own[target] for target in parcel.targets)
                if parcel in spread.first:
                    assert inside <= own[parcel.source]
                else:
                    mine = elements(received(spread.first, parcel.tensor, parcel.source))
                    assert inside <= set(mine)


def test_of_several_holders_each_gives_its_part():
    """Two replicas of two shards, gathered on the first rank: ranks 1 and 3 hold the same, and take turns."""
    rows = [Box((0, 0), (4, 8)), Box((4, 0), (4, 8))]
    held = [[rows[rank % 2]] for rank in range(4)]
    wanted = [WantedBoxes(f"t{number}", 4, ((Box.whole((8, 8)),), (), (), ())) for number in range(4)]
    spread = from_holders(wanted, [held] * 4)
    assert spread.then == ()
    assert [parcel.source for parcel in spread.first] == [0, 1, 0, 3, 0, 1, 0, 3]


def test_holders_of_a_part_each_give_it_straight_to_all_who_want_it():
    """Two of them send at once as it is: what they send is not dealt, to be handed on."""
    rows = [Box((0, 0), (4, 8)), Box((4, 0), (4, 8))]
    wanted = [WantedBoxes("w", 4, ((), (), *(((Box.whole((8, 8)),),) * 2)))]
    spread = from_holders(wanted, [[[rows[0]], [rows[1]], [], []]])
    assert [(p.source, p.targets, p.box) for p in spread.first] == [(0, (2, 3), rows[0]), (1, (2, 3), rows[1])]
    assert spread.then == ()


def test_what_one_rank_has_whole_is_handed_on_by_those_who_want_it():
    wanted = [WantedBoxes("w", 4, ((), *(((Box.whole((6, 8)),),) * 3)))]
    spread = from_holders(wanted, [[[Box.whole((6, 8))], [], [], []]])
    assert [(p.source, p.targets, p.box.sizes) for p in spread.first] == [(0, (r,), (2, 8)) for r in (1, 2, 3)]
    assert sorted((p.source, p.targets) for p in spread.then) == [(1, (2, 3)), (2, (1, 3)), (3, (1, 2))]


@given(worlds_of_tensors(), st.data())
def test_a_group_gets_exactly_its_boxes_from_itself(world, data):
    ranks, wanted = world
    readers = sorted(data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)))
    parcels = dealt(wanted, readers, 1 << 20)
    for item in wanted:
        for rank in range(ranks):
            mine = elements(item.boxes[rank]) if rank in readers else []
            assert elements(received(parcels, item.tensor, rank)) == mine
    assert {parcel.source for parcel in parcels} <= set(readers)


@given(worlds_of_tensors(), st.integers(0, 400))
def test_rounds_keep_the_budget_and_lose_nothing(world, extra):
    ranks, wanted = world
    spread = from_sources(wanted, [[0] * ranks] * len(wanted))
    budget = 16 * ranks + extra
    made = rounds([*spread.first, *spread.then], budget)
    assert made == rounds([*spread.first, *spread.then], budget)
    assert all(items.parcels for items in made)
    for items in made:
        used = [0] * ranks
        for parcel in items.parcels:
            for rank, nbytes in staging_of(parcel).items():
                used[rank] += nbytes
        assert max(used) <= budget
    for item in wanted:
        for rank in range(ranks):
            boxes = received(itertools.chain(*(items.parcels for items in made)), item.tensor, rank)
            assert elements(boxes) == elements(item.boxes[rank])


@given(SHAPES, st.integers(1, 40))
def test_cuts_are_in_memory_order_and_no_larger_than_asked(shape, most):
    parts = list(cut(Box.whole(shape), most))
    assert [index for part in parts for index in indices(part)] == list(indices(Box.whole(shape)))
    assert all(part.numel <= most for part in parts)
    rows = math.prod(shape[1:])
    if rows and most >= rows:
        assert len(parts) == -(-shape[0] // (most // rows)) if shape else 1


def replicas(shape, ranks):
    return tuple((Box.whole(shape),) for _ in range(ranks))


def test_replicas_fetch_even_parts_of_the_rows():
    parcels = dealt([WantedBoxes("w", 4, replicas((10, 8), 3))], (0, 1, 2), 1 << 20)
    assert [(p.source, p.box.offsets[0], p.box.sizes[0], p.targets) for p in parcels] == [
        (0, 0, 3, (0, 1, 2)),
        (1, 3, 3, (0, 1, 2)),
        (2, 6, 4, (0, 1, 2)),
    ]


def test_few_and_long_rows_are_dealt_in_parts():
    parcels = dealt([WantedBoxes("experts", 4, replicas((2, 6, 5), 4))], (0, 1, 2, 3), 1 << 20)
    assert [(p.source, p.box) for p in parcels] == [
        (0, Box((0, 0, 0), (1, 3, 5))),
        (1, Box((0, 3, 0), (1, 3, 5))),
        (2, Box((1, 0, 0), (1, 3, 5))),
        (3, Box((1, 3, 0), (1, 3, 5))),
    ]


def test_small_tensors_are_fetched_whole_by_who_has_the_least():
    wanted = [WantedBoxes(f"norm{size}", 4, replicas((size,), 2)) for size in (6, 2, 3, 4)]
    parcels = dealt(wanted, (0, 1), 1 << 20)
    assert [(p.tensor, p.source, p.box.numel) for p in parcels] == [
        ("norm6", 0, 6),
        ("norm2", 1, 2),
        ("norm3", 1, 3),
        ("norm4", 1, 4),
    ]


def test_what_a_rank_gets_alone_counts_when_small_boxes_are_given_out():
    large, small = Box((0,), (20,)), Box((0,), (4,))
    wanted = [WantedBoxes("large", 4, ((), (large,), ())), WantedBoxes("small", 4, ((), (small,), (small,)))]
    spread = from_sources(wanted, [[0, 0, 0]] * 2)
    assert [(p.tensor, p.targets) for p in spread.first] == [("large", (1,)), ("small", (2,))]
    assert [(p.tensor, p.source, p.targets) for p in spread.then] == [("small", 2, (1,))]


@given(st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple), st.integers(1, 12))
def test_even_parts_are_of_about_one_size_and_in_memory_order(shape, count):
    parts = list(even_parts(Box.whole(shape), count))
    assert [index for part in parts for index in indices(part)] == list(indices(Box.whole(shape)))
    assert min(count, math.prod(shape)) <= len(parts) < 2 * count
    assert max(part.numel for part in parts) <= 2 * min(part.numel for part in parts)


def test_fewer_rows_than_parts_are_cut_into_runs():
    """Two rows of six for four: half a row each, not single elements."""
    parts = list(even_parts(Box.whole((2, 6)), 4))
    assert parts == [Box((row, column), (1, 3)) for row in (0, 1) for column in (0, 3)]


def test_columns_are_fetched_in_rows():
    columns = tuple((Box((0, 4 * rank), (6, 4)),) for rank in range(2))
    parcels = dealt([WantedBoxes("w", 4, columns)], (0, 1), 1 << 20)
    assert [(p.source, p.targets, p.box) for p in parcels] == [
        (0, (0,), Box((0, 0), (3, 4))),
        (0, (1,), Box((0, 4), (3, 4))),
        (1, (0,), Box((3, 0), (3, 4))),
        (1, (1,), Box((3, 4), (3, 4))),
    ]


def test_rows_that_nobody_wants_are_not_fetched():
    wanted = [WantedBoxes("w", 4, ((Box((0, 0), (2, 8)),), (Box((6, 0), (2, 8)),)))]
    parcels = dealt(wanted, (0, 1), 1 << 20)
    assert elements(p.box for p in parcels) == elements([Box((0, 0), (2, 8)), Box((6, 0), (2, 8))])


@given(st.lists(st.tuples(*[st.tuples(st.integers(0, 9), st.integers(1, 5))] * 2), min_size=1, max_size=4))
def test_a_hull_touches_all_sides_of_its_boxes(ranges):
    boxes = [Box(tuple(o for o, _ in pairs), tuple(n for _, n in pairs)) for pairs in ranges]
    around = hull(boxes)
    assert all(around.intersect(box) == box for box in boxes)
    for dim, (offset, size) in enumerate(zip(around.offsets, around.sizes, strict=True)):
        assert offset in [box.offsets[dim] for box in boxes]
        assert offset + size in [box.offsets[dim] + box.sizes[dim] for box in boxes]


def test_a_source_sends_what_several_ranks_want_once():
    spread = from_sources([WantedBoxes("w", 4, replicas((12, 8), 4))], [[0, 0, 0, 0]])
    sent = sum(p.nbytes for p in spread.first if p.targets != (0,))
    assert sent == 12 * 8 * 4
    assert {p.source for p in spread.then} == {1, 2, 3}
    assert all(0 not in p.targets for p in spread.then)


def test_a_budget_below_one_element_is_refused():
    with pytest.raises(ValueError, match="too few to hand an element of w to 3 ranks"):
        rounds([Parcel("w", 0, (1, 2, 3), Box((0,), (5,)), 8)], 32)


def test_a_parcel_of_nothing_is_in_no_round():
    assert rounds([Parcel("w", 0, (1,), Box((0,), (0,)), 4)], 64) == []


def test_columns_of_the_same_rows_follow_each_other_in_blocks():
    columns = tuple((Box((0, 10 * rank), (64, 10)),) for rank in range(4))
    parcels = dealt([WantedBoxes("w", 1000, columns)], (0, 1, 2, 3), block_bytes=4 * 40 * 1000)
    rows = [(parcel.source, parcel.box.offsets[0]) for parcel in parcels]
    assert rows == sorted(rows)
    assert all(parcel.box.sizes == (4, 10) for parcel in parcels)
    assert len(parcels) == 64
