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
from shardwise.formats.safetensors_header import NewFile
from shardwise.planning.moves.assembly import WantedTensor, plan_assembly, shares_by_rank
from shardwise.planning.moves.parcels import ALIGNMENT_BYTES, Round, ToAll, ToEach
from shardwise.planning.saves.save_plan import choose_owners
from shardwise.tensors import Box, DType, numel

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

    def run(self, rounds, size):
        """Every box as its targets get it, by key and box: packed by the sources, unpacked by the targets."""
        made = [{} for _ in range(size)]
        for items in rounds:
            before = [dict(memory) for memory in made]
            parts = [items.part(rank, size) for rank in range(size)]
            for rank, part in enumerate(parts):
                for parcel in part.keeps:
                    self.put(made[rank], parcel, self.packed(parcel))
                sent = part.load.parts[rank : rank + 1] * size if items.is_gathered else part.load.sent
                boxes = [np.full(nbytes // ITEMSIZE, -9) for nbytes in sent]
                for parcel, ways in part.sends:
                    values = self.packed(parcel)
                    for target, start in ways:
                        boxes[target][start // ITEMSIZE :][: len(values)] = values
                for target in range(size):
                    awaited = parts[target].load
                    if items.is_gathered or target != rank:
                        nbytes = awaited.parts[rank] if items.is_gathered else awaited.received[rank]
                        assert nbytes == sent[target]
                    box = boxes[rank if items.is_gathered else target]
                    for parcel, start in parts[target].receives:
                        if parcel.source == rank:
                            count = parcel.nbytes // ITEMSIZE
                            self.put(made[target], parcel, box[start // ITEMSIZE :][:count])
            for rank in range(size):
                assert not before[rank].keys() & {(p.tensor, p.box) for p in items.parcels}
        return made

    def packed(self, parcel):
        values = [
            view(self.share(parcel.leaves[piece.leaf], parcel.source, piece.share), piece.source).reshape(-1)
            for piece in parcel.pieces
        ]
        return np.concatenate(values)

    def put(self, memory, parcel, packed):
        found = memory.setdefault((parcel.tensor, parcel.box), np.full(parcel.box.numel, -7))
        for piece, sizes in zip(parcel.pieces, parcel.sizes, strict=True):
            count = numel(sizes)
            view(found, piece.target)[...] = packed[:count].reshape(sizes)
            packed = packed[count:]
        assert not len(packed)


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
    by_rank = Simulated(grower.leaves, shares).run(rounds, size)
    for item in wanted:
        for rank, made in enumerate(by_rank):
            parts = [made[at] for items in rounds for at in items.boxes() if at[0] == item.key and at in made]
            flat = np.concatenate(parts) if parts else np.empty(0)
            expected = arrays[item.key].reshape(-1) if rank in item.targets else np.empty(0)
            assert np.array_equal(flat, expected), "boxes come in order, and are runs"
    for items in rounds:
        padding = ALIGNMENT_BYTES * size * len(items.boxes())
        for rank in range(size):
            got = {(p.tensor, p.box) for p in items.parcels if rank in p.targets}
            assert sum(box.numel * ITEMSIZE for _, box in got) <= bucket
            assert sent_bytes(items, rank, size) <= bucket + padding
            assert received_bytes(items, rank, size) <= 1.25 * (bucket + padding)


def sent_bytes(items: Round, rank: int, size: int) -> int:
    load = items.part(rank, size).load
    return load.parts[rank] if isinstance(load, ToAll) else sum(load.sent)


def received_bytes(items: Round, rank: int, size: int) -> int:
    load = items.part(rank, size).load
    if isinstance(load, ToAll):
        return max(load.parts) * size if load.is_padded else sum(load.parts)
    return sum(load.received)


def test_a_tensor_larger_than_a_bucket_comes_in_rows():
    leaf = Stored("w", (10, 8), DType.F32)
    shares = {"w": shares_by_rank([(Box((0, 0), (5, 8)),), (Box((5, 0), (5, 8)),)], 0, 4)}
    rounds = plan_assembly([[WantedTensor("w", leaf, 4, (0,))]], shares, 2, 100)
    assert [box for items in rounds for _, box in items.boxes()] == [
        Box((0, 0), (3, 8)),
        Box((3, 0), (3, 8)),
        Box((6, 0), (3, 8)),
        Box((9, 0), (1, 8)),
    ]
    assert [items.part(0, 2).load for items in rounds] == [ToEach((0, 0), (0, n)) for n in (0, 32, 96, 32)]
    assert [items.moves for items in rounds] == [False, True, True, True]


def test_small_tensors_share_a_round_until_the_bucket_is_full():
    shares = {str(n): shares_by_rank([(Box((0,), (4,)),), (Box((4,), (4,)),)], 0, 4) for n in range(5)}
    wanted = [WantedTensor(str(n), Stored(str(n), (8,), DType.F32), 4, (0, 1)) for n in range(5)]
    rounds = plan_assembly([wanted], shares, 2, 64)
    assert [[key for key, _ in items.boxes()] for items in rounds] == [["0", "1"], ["2", "3"], ["4"]]
    assert all(items.part(0, 2).load.is_padded for items in rounds)
    assert received_bytes(rounds[0], 0, 2) == received_bytes(rounds[0], 1, 2) == 64


def test_what_one_rank_gives_to_all_is_not_padded():
    """Experts that lie on one rank: the others would send as much of nothing."""
    shares = {"w": shares_by_rank([(Box((0, 0), (4, 8)),), ()], 0, 4)}
    (items,) = plan_assembly([[WantedTensor("w", Stored("w", (4, 8), DType.F32), 4, (0, 1))]], shares, 2, 1 << 10)
    assert items.part(1, 2).load == ToAll((128, 0), is_padded=False)
    assert received_bytes(items, 1, 2) == 128


def test_equal_layers_share_what_is_given():
    way = shares_by_rank([(Box((0,), (4,)),), (Box((4,), (4,)),)], 0, 4)
    wanted, shares = [], {}
    for number in range(3):
        shares[f"{number}.q"] = shares[f"{number}.k"] = way
        parts = [Stored(f"{number}.{name}", (8,), DType.F32) for name in "qk"]
        wanted.append(WantedTensor(f"{number}.half", slice_dim(concat(parts, 0), 0, 2, 12), 4, (0,)))
    (items,) = plan_assembly([wanted], shares, 2, 1 << 10)
    given = [parcel for parcel in items.parcels if parcel.source == 0]
    assert len({id(parcel.pieces) for parcel in given}) == 1
    assert [parcel.leaves for parcel in given] == [("0.q", "0.k"), ("1.q", "1.k"), ("2.q", "2.k")]


def test_streams_go_side_by_side():
    """Two owners that get from each other: in every round both do."""
    shares, streams = {}, []
    for rank in range(2):
        shares[str(rank)] = shares_by_rank([(Box((0,), (40,)),), (Box((40,), (40,)),)], 0, 4)
        streams.append([WantedTensor(str(rank), Stored(str(rank), (80,), DType.F32), 4, (rank,))])
    rounds = plan_assembly(streams, shares, 2, 160)
    assert [sorted({parcel.targets for parcel in items.parcels}) for items in rounds] == [[(0,), (1,)]] * 2


def test_a_rank_that_gives_to_several_sends_no_more_than_a_bucket():
    """Two owners get from one rank: each has room for its tensor at once, but that rank sends them one by one."""
    shares = {str(rank): shares_by_rank([(Box((0,), (8,)),), (), ()], 0, 4) for rank in (1, 2)}
    streams = [[WantedTensor(name, Stored(name, (8,), DType.F32), 4, (int(name),))] for name in shares]
    for bucket, keys in ((32, [["1"], ["2"]]), (64, [["1", "2"]])):
        rounds = plan_assembly(streams, shares, 3, bucket)
        assert [[key for key, _ in items.boxes()] for items in rounds] == keys
        assert all(sent_bytes(items, 0, 3) <= bucket for items in rounds)


def test_what_all_get_and_what_one_gets_go_in_rounds_of_their_own():
    """They travel in different ways."""
    shares = {name: shares_by_rank([(Box((0,), (4,)),), (Box((4,), (4,)),)], 0, 4) for name in "ab"}
    streams = [[WantedTensor(n, Stored(n, (8,), DType.F32), 4, on)] for n, on in (("a", (0, 1)), ("b", (1,)))]
    rounds = plan_assembly(streams, shares, 2, 1 << 10)
    assert [([key for key, _ in items.boxes()], items.is_gathered) for items in rounds] == [
        (["a"], True),
        (["b"], False),
    ]


def test_a_bucket_smaller_than_an_element_takes_one_at_a_time():
    shares = {"w": shares_by_rank([(Box((0,), (3,)),), ()], 0, 4)}
    rounds = plan_assembly([[WantedTensor("w", Stored("w", (3,), DType.F32), 4, (1,))]], shares, 2, 1)
    assert [items.boxes() for items in rounds] == [[("w", Box((n,), (1,)))] for n in range(3)]


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
