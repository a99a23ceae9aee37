"""Each element that several ranks hold is given by one of them."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.expression import Stored
from shardwise.core.tensors import Box, DType
from shardwise.transfer import move_plan as giving
from shardwise.transfer.move_plan import (
    Move,
    find_shared_boxes,
    first_holder_shares,
    local_share,
    plan_rounds,
    shares_by_rank,
    shares_in_turn,
)

SHAPES = st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple)


def indices(boxes):
    for box in boxes:
        yield from itertools.product(*(range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)))


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(giving, "SMALL_BYTES", 24)


@given(shape=SHAPES, offset=st.integers(0, 3), replicas=st.integers(1, 6), turn=st.integers(0, 9))
@pytest.mark.usefixtures("small")
def test_replicas_give_each_element_of_a_box_once(shape, offset, replicas, turn):
    box = Box((offset,) * len(shape), shape)
    given_by = [local_share(box, replica, replicas, turn, 4) for replica in range(replicas)]
    assert Counter(index for boxes in given_by for index in indices(boxes)) == Counter(indices([box]))


@pytest.mark.parametrize(("nbytes", "givers"), [(1 << 16, 1), ((1 << 16) + 2, 2)])
def test_up_to_64_kib_are_given_by_one(nbytes, givers):
    shares = [local_share(Box((0,), (nbytes // 2,)), replica, 2, 0, 2) for replica in range(2)]
    assert sum(map(bool, shares)) == givers


def test_the_rows_of_a_large_box_are_dealt_evenly():
    box = Box((100, 0), (512, 1024))
    first, second = (local_share(box, replica, 2, turn=7, itemsize=2) for replica in range(2))
    assert first == (Box((100, 0), (256, 1024)),)
    assert second == (Box((356, 0), (256, 1024)),)


def test_small_boxes_go_by_turns():
    box = Box((0,), (1000,))
    givers = [[replica for replica in range(3) if local_share(box, replica, 3, turn, 4)] for turn in range(6)]
    assert givers == [[0], [1], [2], [0], [1], [2]]


@given(data=st.data())
def test_ranks_that_hold_the_same_rows_share_them(data):
    shards, replicas = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    rows = data.draw(st.lists(st.integers(0, 5), min_size=shards, max_size=shards))
    starts = [sum(rows[:shard]) for shard in range(shards)]
    held = [
        (Box((starts[shard], 0), (rows[shard], 3)),) if rows[shard] else ()
        for _ in range(replicas)
        for shard in range(shards)
    ]
    whole = Box((0, 0), (sum(rows), 3))
    of_first = first_holder_shares(held)
    assert Counter(index for boxes in of_first for index in indices(boxes)) == Counter(indices([whole]))
    assert not any(of_first[shards:])
    for rank, mine in enumerate(held):
        with_others = find_shared_boxes({"w": held}, rank).get("w", ())
        assert with_others == tuple((box, tuple(range(rank % shards, len(held), shards))) for box in mine) * (
            replicas > 1
        )
    given_by = shares_by_rank(held, data.draw(st.integers(0, 5)), 1 << 14)
    assert Counter(index for boxes in given_by for index in indices(boxes)) == Counter(indices([whole]))
    for mine, boxes in zip(held, given_by, strict=True):
        assert all(box.intersect(part) == box for box in boxes for part in mine)


def sharded(shards: int, replicas: int, rows: int = 8) -> tuple[tuple[Box, ...], ...]:
    """Boxes by rank, made anew at each call."""
    return tuple((Box((shard * rows, 0), (rows, 1 << 10)),) for _ in range(replicas) for shard in range(shards))


@pytest.mark.parametrize(
    ("shards", "replicas", "rows", "expected"),
    [(8, 1, 8, 1), (4, 2, 8, 2), (4, 2, 64, 1)],
    ids=["sharded", "small and replicated", "replicated"],
)
def test_equal_tensors_have_one_object_for_each_turn(shards, replicas, rows, expected):
    shares = list(shares_in_turn((sharded(shards, replicas, rows), 2) for _ in range(100)))
    assert len({id(item) for item in shares}) == len(set(shares)) == expected
    assert shares == [shares_by_rank(sharded(shards, replicas, rows), turn, 2) for turn in range(100)]


def test_the_boxes_of_all_ranks_are_hashed_once_for_each_turn():
    hashes = []

    class Layout(tuple):
        def __hash__(self):
            hashes.append(self)
            return super().__hash__()

    layout = Layout(sharded(4, 2))
    shares = list(shares_in_turn((layout, 2) for _ in range(100)))
    assert shares == [shares_by_rank(layout, turn, 2) for turn in range(100)]
    assert len(hashes) == 3  # the number of turns, and two turns


def test_the_pieces_of_equal_tensors_are_searched_once(monkeypatch):
    searches = []
    search = giving._Cutter._find_pieces
    monkeypatch.setattr(giving._Cutter, "_find_pieces", lambda *args: searches.append(args[-1]) or search(*args))
    boxes, names = sharded(8, 1), [f"layers.{number}.weight" for number in range(100)]
    shares = dict(zip(names, shares_in_turn((boxes, 2) for _ in names), strict=True))
    whole = Box.whole((64, 1 << 10))
    moves = [Move(name, Stored(name, whole.sizes, DType.BF16), 2, [(whole,), *((),) * 7]) for name in names]
    plan_rounds([moves], shares, 1 << 30)
    assert searches == [whole]
