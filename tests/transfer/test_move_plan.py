"""Plans of moves: blocks make the tensors, each element once, within their buckets."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.random_expressions import Grower, view

from shardwise.core.expression import Stored
from shardwise.core.tensors import Box, DType
from shardwise.files.safetensors_files import NewFile
from shardwise.saving.plan import assign_owners
from shardwise.transfer.move_plan import ALIGNMENT_BYTES, Move, full_on_ranks, plan_rounds, shares_by_rank

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
        """Every box as its targets get it, by key and box; each element is written once."""
        made = [{} for _ in range(size)]
        for blocks in rounds:
            for block in blocks:
                memory = np.full(block.box.numel, -7)
                written = np.zeros(block.box.numel, int)
                for rank, parts in block.pieces_by_rank:
                    for piece in parts:
                        values = view(self.share(block.leaves[piece.leaf], rank, piece.share), piece.source)
                        view(memory, piece.target)[...] = values
                        view(written, piece.target)[...] += 1
                assert (written == 1).all()
                for target in block.targets:
                    assert (block.key, block.box) not in made[target]
                    made[target][block.key, block.box] = memory
        return made


def staged(blocks, rank):
    return sum(block.count_staged_bytes()[rank] for block in blocks)


@given(seed=st.integers(0, 2**32), size=st.integers(1, 4), bucket=st.integers(16, 400), to_all=st.booleans())
def test_blocks_make_the_tensors_within_the_bucket(seed, size, bucket, to_all):
    rng = random.Random(seed)
    grower = Grower(rng)
    moves, arrays, targets = [], {}, {}
    for number in range(rng.randint(1, 4)):
        expression, array = grower.grow(rng.randint(0, 4))
        on = tuple(range(size)) if to_all else (rng.randrange(size),)
        moves.append(Move(str(number), expression, ITEMSIZE, full_on_ranks(on, expression.shape, size)))
        arrays[str(number)], targets[str(number)] = array, on
    shares = {name: dealt(rng, leaf.shape, size) for name, leaf in grower.leaves.items()}
    streams = [moves] if to_all else [[item for item in moves if targets[item.key] == (r,)] for r in range(size)]
    rounds = plan_rounds(streams, shares, bucket)
    by_rank = Simulated(grower.leaves, shares).run(rounds, size)
    for item in moves:
        for rank, made in enumerate(by_rank):
            at = [(block.key, block.box) for blocks in rounds for block in blocks if block.key == item.key]
            parts = [made[place] for place in at if place in made]
            flat = np.concatenate(parts) if parts else np.empty(0)
            expected = arrays[item.key].reshape(-1) if rank in targets[item.key] else np.empty(0)
            assert np.array_equal(flat, expected), "boxes come in order, and are runs"
    for blocks in rounds:
        padding = ALIGNMENT_BYTES * size * size
        if len(blocks) > 1:
            assert max(staged(blocks, rank) for rank in range(size)) <= bucket
        assert max(staged(blocks, rank) for rank in range(size)) <= bucket + padding


def test_tensors_that_stay_on_a_rank_are_within_the_bucket():
    shares = {name: ((Box((0,), (80,)),),) for name in "abc"}
    rounds = plan_rounds([[move(name, (0,), (80,), size=1) for name in "abc"]], shares, 160)
    assert [sum(block.count_local_bytes()[0] for block in blocks) for blocks in rounds] == [160] * 6


def halves(*names):
    return {name: shares_by_rank([(Box((0,), (4,)),), (Box((4,), (4,)),)], 0, 4) for name in names}


def move(name, targets, shape=(8,), size=2):
    return Move(name, Stored(name, shape, DType.F32), 4, full_on_ranks(targets, shape, size))


def test_a_tensor_larger_than_a_bucket_comes_in_rows():
    shares = {"w": shares_by_rank([(Box((0, 0), (5, 8)),), (Box((5, 0), (5, 8)),)], 0, 4)}
    rounds = plan_rounds([[move("w", (0,), (10, 8))]], shares, 200)
    boxes = [Box((0, 0), (3, 8)), Box((3, 0), (3, 8)), Box((6, 0), (3, 8)), Box((9, 0), (1, 8))]
    assert [block.box for blocks in rounds for block in blocks] == boxes
    assert [staged(blocks, 0) for blocks in rounds] == [160]


def test_small_tensors_share_a_round_until_the_bucket_is_full():
    rounds = plan_rounds([[move(name, (0, 1)) for name in "abcde"]], halves(*"abcde"), 64)
    assert [[block.key for block in blocks] for blocks in rounds] == [["a", "b"], ["c", "d"], ["e"]]
    assert staged(rounds[0], 0) == staged(rounds[0], 1) == 64


def test_rounds_for_all_ranks_do_not_depend_on_their_number():
    """Each source stages its rows once, and not for each rank."""
    counts = []
    for size in (2, 8, 64):
        boxes = [(Box((rank * 64 // size, 0), (64 // size, 16)),) for rank in range(size)]
        shares = {name: shares_by_rank(boxes, 0, 4) for name in "ab"}
        rounds = plan_rounds([[move(name, range(size), (64, 16), size) for name in "ab"]], shares, 1 << 10)
        assert all(block.is_broadcast for blocks in rounds for block in blocks)
        assert max(staged(blocks, rank) for blocks in rounds for rank in range(size)) <= 1 << 10
        counts.append(len(rounds))
    assert counts == [8, 8, 8]


def test_what_is_for_all_ranks_has_rounds_of_its_own():
    streams = [[move("a", (0, 1)), move("b", (1,)), move("c", (0, 1))]]
    rounds = plan_rounds(streams, halves(*"abc"), 1 << 10)
    assert [[block.key for block in blocks] for blocks in rounds] == [["a"], ["b"], ["c"]]


def test_streams_go_side_by_side():
    """Two owners that get from each other: in every round both do."""
    shares = {name: shares_by_rank([(Box((0,), (40,)),), (Box((40,), (40,)),)], 0, 4) for name in "01"}
    rounds = plan_rounds([[move(name, (int(name),), (80,))] for name in "01"], shares, 160)
    assert all(sorted({block.targets for block in blocks}) == [(0,), (1,)] for blocks in rounds)


def test_a_box_that_several_ranks_want_is_sent_to_each_and_shards_to_one():
    shares = {"w": shares_by_rank([(Box((0,), (8,)),), (), ()], 0, 4)}
    wanted = ((), (Box((0,), (4,)),), (Box((0,), (4,)), Box((4,), (4,))))
    (blocks,) = plan_rounds([[Move("w", Stored("w", (8,), DType.F32), 4, wanted)]], shares, 1 << 10)
    assert [(block.box, block.targets) for block in blocks] == [(Box((0,), (4,)), (1, 2)), (Box((4,), (4,)), (2,))]
    assert [staged(blocks, rank) for rank in range(3)] == [48, 16, 32]


def test_a_bucket_smaller_than_an_element_takes_one_at_a_time():
    shares = {"w": shares_by_rank([(Box((0,), (3,)),), ()], 0, 4)}
    rounds = plan_rounds([[move("w", (1,), (3,))]], shares, 1)
    assert [[block.box for block in blocks] for blocks in rounds] == [[Box((n,), (1,))] for n in range(3)]


@pytest.mark.parametrize(
    ("sizes", "ranks", "owners"),
    [([5], 4, (0,)), ([5, 5], 4, (0, 2)), ([9, 5, 5, 1], 2, (0, 1, 1, 0)), ([1, 1, 1], 1, (0, 0, 0)), ([], 3, ())],
)
def test_owners_are_spread_and_have_about_the_same_to_write(sizes, ranks, owners):
    assert assign_owners([NewFile(str(n), b"", (), nbytes) for n, nbytes in enumerate(sizes)], ranks) == owners
