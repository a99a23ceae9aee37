"""What the plan of an assembly moves makes the tensors, within its buckets."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conversion.random_expressions import Grower, view

from shardwise.conversion import Stored, concat, slice_dim
from shardwise.formats import NewFile
from shardwise.planning.assembly import Round, WantedTensor, plan_assembly
from shardwise.planning.exchange import ALIGNMENT_BYTES
from shardwise.planning.giving import shares_by_rank
from shardwise.planning.owners import choose_owners
from shardwise.tensors import Box, DType

ITEMSIZE = 4


def dealt(rng: random.Random, shape: tuple[int, ...], size: int):
    """What each rank gives of a leaf: rows of some dimension to some, replicas, or all of it on every rank."""
    whole = Box.whole(shape)
    if not shape or rng.random() < 0.3:
        held = [(whole,)] * size
    else:
        dim = rng.randrange(len(shape))
        step = -(-shape[dim] // size)
        held = []
        for rank in range(size):
            start, stop = min(rank * step, shape[dim]), min((rank + 1) * step, shape[dim])
            offsets = tuple(start if d == dim else 0 for d in range(len(shape)))
            sizes = tuple(stop - start if d == dim else n for d, n in enumerate(shape))
            held.append((Box(offsets, sizes),))
    return shares_by_rank(held, rng.randrange(size), ITEMSIZE)


@dataclass
class Simulated:
    """All ranks in one process."""

    leaves: dict[str, np.ndarray]
    shares: dict[str, tuple]

    def share(self, name, rank, number):
        box = self.shares[name][rank][number]
        part = self.leaves[name][tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))]
        return np.ascontiguousarray(part).reshape(-1)

    def run(self, rounds):
        """Every block as its targets get it, by key, box and target: packed by the giver, unpacked by the taker."""
        made = {}
        for items in rounds:
            for block in items.blocks:
                memory = np.full(block.box.numel, -7)
                for gift in block.gifts:
                    values = [
                        view(self.share(block.leaves[piece.leaf], gift.source, piece.share), piece.source).reshape(
                            -1
                        )
                        for piece in gift.pieces
                    ]
                    packed = np.concatenate(values)
                    assert len(packed) == gift.numel
                    for piece in gift.pieces:
                        count = piece.target.numel
                        view(memory, piece.target)[...] = packed[:count].reshape(piece.target.sizes)
                        packed = packed[count:]
                assert (block.key, block.box) not in made
                made[block.key, block.box] = memory
        return made


@given(seed=st.integers(0, 2**32), size=st.integers(1, 4), bucket=st.integers(16, 400), to_all=st.booleans())
def test_blocks_make_the_tensors_within_the_bucket(seed, size, bucket, to_all):
    rng = random.Random(seed)
    grower = Grower(rng)
    wanted, arrays = [], {}
    for number in range(rng.randint(1, 4)):
        expression, array = grower.grow(rng.randint(0, 4))
        targets = tuple(range(size)) if to_all else (rng.randrange(size),)
        wanted.append(WantedTensor(str(number), expression, ITEMSIZE, targets))
        arrays[str(number)] = array
    shares = {name: dealt(rng, leaf.shape, size) for name, leaf in grower.leaves.items()}
    streams = [wanted] if to_all else [[item for item in wanted if item.targets == (r,)] for r in range(size)]
    rounds = plan_assembly(streams, shares, size, bucket)
    made = Simulated(grower.leaves, shares).run(rounds)
    for key, array in arrays.items():
        parts = [(box, memory) for (found, box), memory in made.items() if found == key]
        flat = np.concatenate([memory for _, memory in parts]) if parts else np.empty(0)
        assert np.array_equal(flat, array.reshape(-1)), "blocks come in order, and are runs"
    for items in rounds:
        padding = ALIGNMENT_BYTES * size * len(items.blocks)
        for rank in range(size):
            assert sum(block.nbytes for block in items.blocks if rank in block.targets) <= bucket
            assert sent_bytes(items, rank) <= bucket + padding
            assert received_bytes(items, rank) <= 1.25 * (bucket + padding)


def sent_bytes(items: Round, rank: int) -> int:
    return sum(size for (giver, _), size in items.lanes.items() if giver == rank)


def received_bytes(items: Round, rank: int) -> int:
    if items.is_padded:
        return items.part_bytes * len(items.blocks[0].targets)
    return sum(size for (_, receiver), size in items.lanes.items() if items.is_for_all or receiver == rank)


def test_a_tensor_larger_than_a_bucket_comes_in_rows():
    leaf = Stored("w", (10, 8), DType.F32)
    shares = {"w": shares_by_rank([(Box((0, 0), (5, 8)),), (Box((5, 0), (5, 8)),)], 0, 4)}
    rounds = plan_assembly([[WantedTensor("w", leaf, 4, (0,))]], shares, 2, 100)
    assert [block.box for items in rounds for block in items.blocks] == [
        Box((0, 0), (3, 8)),
        Box((3, 0), (3, 8)),
        Box((6, 0), (3, 8)),
        Box((9, 0), (1, 8)),
    ]
    assert [items.lanes for items in rounds] == [{}, {(1, 0): 32}, {(1, 0): 96}, {(1, 0): 32}]


def test_small_tensors_share_a_round_until_the_bucket_is_full():
    shares = {str(n): shares_by_rank([(Box((0,), (4,)),), (Box((4,), (4,)),)], 0, 4) for n in range(5)}
    wanted = [WantedTensor(str(n), Stored(str(n), (8,), DType.F32), 4, (0, 1)) for n in range(5)]
    rounds = plan_assembly([wanted], shares, 2, 64)
    assert [[block.key for block in items.blocks] for items in rounds] == [["0", "1"], ["2", "3"], ["4"]]
    assert all(items.is_padded for items in rounds)
    assert received_bytes(rounds[0], 0) == received_bytes(rounds[0], 1) == 64


def test_what_one_rank_gives_to_all_is_not_padded():
    """Experts that lie on one rank: the others would send as much of nothing."""
    shares = {"w": shares_by_rank([(Box((0, 0), (4, 8)),), ()], 0, 4)}
    (items,) = plan_assembly([[WantedTensor("w", Stored("w", (4, 8), DType.F32), 4, (0, 1))]], shares, 2, 1 << 10)
    assert not items.is_padded
    assert received_bytes(items, 1) == 128


def test_equal_layers_share_what_is_given():
    way = shares_by_rank([(Box((0,), (4,)),), (Box((4,), (4,)),)], 0, 4)
    wanted, shares = [], {}
    for number in range(3):
        shares[f"{number}.q"] = shares[f"{number}.k"] = way
        parts = [Stored(f"{number}.{name}", (8,), DType.F32) for name in "qk"]
        wanted.append(WantedTensor(f"{number}.half", slice_dim(concat(parts, 0), 0, 2, 12), 4, (0,)))
    (items,) = plan_assembly([wanted], shares, 2, 1 << 10)
    assert len({id(block.gifts) for block in items.blocks}) == 1
    assert [block.leaves for block in items.blocks] == [("0.q", "0.k"), ("1.q", "1.k"), ("2.q", "2.k")]


def test_streams_go_side_by_side():
    """Two owners that get from each other: in every round both do."""
    shares, streams = {}, []
    for rank in range(2):
        shares[str(rank)] = shares_by_rank([(Box((0,), (40,)),), (Box((40,), (40,)),)], 0, 4)
        streams.append([WantedTensor(str(rank), Stored(str(rank), (80,), DType.F32), 4, (rank,))])
    rounds = plan_assembly(streams, shares, 2, 160)
    assert [sorted(block.targets for block in items.blocks) for items in rounds] == [[(0,), (1,)]] * 2


@pytest.mark.parametrize(
    ("sizes", "ranks", "owners"),
    [
        ([5], 4, (0,)),
        ([5, 5], 4, (0, 2)),
        ([9, 5, 5, 1], 2, (0, 1, 1, 0)),
        ([1, 1, 1], 1, (0, 0, 0)),
        ([], 3, ()),
    ],
)
def test_owners_are_spread_and_have_about_the_same_to_write(sizes, ranks, owners):
    assert choose_owners([NewFile(str(n), b"", (), nbytes) for n, nbytes in enumerate(sizes)], ranks) == owners
