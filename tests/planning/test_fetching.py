"""What ranks fetch that share their reads: each element once, in even parts."""

from __future__ import annotations

import itertools
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.layout import LocalBox, MeshShape, Spread
from shardwise.planning.forecasts.forecast import Fetching, FetchingPeers, peers_on
from shardwise.planning.moves.exchange import SMALL_BYTES
from shardwise.tensors import Box, Strided, numel


def dealt(shape, parts, dim):
    size = ceil(shape[dim] / parts)
    boxes = []
    for position in range(parts):
        start, stop = min(position * size, shape[dim]), min((position + 1) * size, shape[dim])
        box = Box(
            tuple(start if d == dim else 0 for d in range(len(shape))),
            tuple(stop - start if d == dim else n for d, n in enumerate(shape)),
        )
        boxes.append((LocalBox(box, Strided.contiguous(box.sizes)),) if box.numel else ())
    return Spread(tuple(boxes), 0)


def whole(shape, positions):
    box = Box.whole(shape)
    return Spread(((LocalBox(box, Strided.contiguous(shape)),),) * positions, box.numel)


FLAT, HYBRID = MeshShape.flat(4), MeshShape(("replicate", "shard"), (3, 4))


@pytest.mark.parametrize(
    ("mesh", "spread", "is_sharded", "peers"),
    [
        (FLAT, dealt((8, 6), 4, 0), True, None),
        (FLAT, dealt((8, 8), 4, 1), True, FetchingPeers(True, 4, 1)),
        (FLAT, whole((8, 6), 4), False, FetchingPeers(True, 4, 4)),
        (HYBRID, dealt((8, 6), 4, 0), True, FetchingPeers(False, 3, 3)),
        (HYBRID, dealt((8, 8), 4, 1), True, FetchingPeers(True, 12, 3)),
        (HYBRID, whole((8, 6), 4), False, FetchingPeers(True, 12, 12)),
        (MeshShape(("replicate", "shard"), (3, 1)), dealt((8, 6), 1, 0), True, FetchingPeers(True, 3, 3)),
        (MeshShape.flat(1), dealt((8, 6), 1, 0), True, None),
    ],
)
def test_with_whom_reads_are_shared(mesh, spread, is_sharded, peers):
    shape = (8, 8) if peers and spread.boxes[0][0].box.sizes == (8, 2) else (8, 6)
    assert peers_on(mesh, spread, shape, is_sharded=is_sharded) == peers


@given(
    rows=st.integers(1, 30),
    columns=st.integers(1, 5),
    replicas=st.integers(1, 4),
    positions=st.integers(1, 5),
    dim=st.integers(0, 1),
    itemsize=st.sampled_from([2, SMALL_BYTES]),
)
def test_each_element_is_fetched_once_by_the_ranks_that_share_it(rows, columns, replicas, positions, dim, itemsize):
    shape, mesh = (rows, columns), MeshShape(("replicate", "shard"), (replicas, positions))
    spread = dealt(shape, positions, dim)
    are_all = spread.boxes[0][0].box.sizes[1:] != shape[1:] or positions == 1
    peers = FetchingPeers(are_all, mesh.ranks if are_all else replicas, replicas)
    fetched = Fetching(mesh).spread(spread, shape, itemsize, peers)
    assert len(fetched.boxes) == mesh.ranks
    count = np.zeros(shape, dtype=int)
    for part in itertools.chain.from_iterable(fetched.boxes):
        count[tuple(slice(o, o + n) for o, n in zip(part.box.offsets, part.box.sizes, strict=True))] += 1
    assert (count == 1).all()


def test_large_ones_are_dealt_evenly_and_small_ones_in_turn():
    mesh = MeshShape(("replicate", "shard"), (4, 2))
    large, small = dealt((1000, 100), 2, 0), dealt((10, 3), 2, 0)
    fetching = Fetching(mesh)
    peers = FetchingPeers(False, 4, 4)
    fetched = fetching.spread(large, (1000, 100), 4, peers)
    assert {sum(numel(part.box.sizes) for part in boxes) for boxes in fetched.boxes} == {12500}
    turns = [fetching.spread(small, (10, 3), 4, peers) for _ in range(5)]
    readers = [[rank for rank, boxes in enumerate(item.boxes) if boxes] for item in turns]
    assert readers == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1]]
    assert turns[4] is turns[0]
