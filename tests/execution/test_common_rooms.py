"""Where whole tensors lie in memory that all ranks see, and which of it is used again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.execution import rooms

from shardwise.execution.memory.host_memory import CommonMemory, enter
from shardwise.execution.states.assemble import _RoomAllocator, lay_out
from shardwise.planning.moves.parcels import Parcel, Round
from shardwise.tensors import Box

LARGE = (1 << 18) + 1
"""Elements of 4 bytes: more than a tensor has that shares its memory with others."""


def parcel(key: str) -> Parcel:
    return Parcel(key, 0, (0, 1), Box((0,), (1,)), 4)


def rounds(*keys: str) -> list[Round]:
    return [Round(tuple(map(parcel, name.split())), moves=True, is_gathered=True) for name in keys]


def test_large_tensors_have_memory_of_their_own_and_small_ones_of_a_round_share_it():
    shapes = {"a": (3,), "b": (LARGE,), "c": (5,), "d": (7,), "e": (LARGE,)}
    plan = rounds("a b c", "b d e", "e")
    pieces, places = lay_out(plan, shapes, dict.fromkeys(shapes, torch.float32))
    assert places["a"].piece == places["c"].piece
    assert len({places[key].piece for key in "abde"}) == 4
    assert places["c"].start == 64
    assert pieces[places["c"].piece].nbytes == 64 + 20
    assert [(pieces[places[key].piece].first, pieces[places[key].piece].last) for key in "abcde"] == [
        (0, 0),
        (0, 1),
        (0, 0),
        (1, 1),
        (1, 2),
    ]


def test_what_is_written_to_a_loan_is_seen_by_nobody_else():
    memory = CommonMemory(8192)
    one, other = enter(memory.address), enter(memory.address)
    loan, is_there = one.lend()
    other.shared.fill_(7)
    assert loan.unique().tolist() == [7]
    loan.fill_(9)
    assert one.shared.unique().tolist() == [7]
    part = loan[:10]
    del loan
    assert is_there()
    del part
    assert not is_there()
    memory.close()


def test_memory_is_used_again_once_all_ranks_have_let_go_of_it():
    with _RoomAllocator(ranks=2, spare_bytes=100) as keeper:
        first = keeper.open({0: 60, 1: 60})
        keeper.take_back([0])
        assert keeper.open({2: 60})[2] not in first.values()
        keeper.take_back([0])
        assert keeper.open({3: 60})[3] == first[0]
        assert keeper.open({4: 50})[4] not in first.values()


def test_no_more_memory_is_kept_than_may_be_spare():
    with _RoomAllocator(ranks=1, spare_bytes=100) as keeper:
        first = keeper.open({0: 60, 1: 60})
        keeper.take_back([0, 1])
        again = keeper.open({2: 60, 3: 60})
        assert again[2] == first[1]
        assert again[3] not in first.values()


@pytest.mark.distributed
@pytest.mark.parametrize("count", [0, 3, None], ids=["at the first", "in the middle", "at the end"])
def test_no_memory_is_left_of_a_loop_that_was_left(worlds, count):
    for during, after in worlds(2).run(rooms.left_after, count):
        assert during > 0
        assert after == 0


def test_what_is_not_common_memory_is_not_opened(tmp_path):
    memory = CommonMemory(100)
    other = tmp_path / "other"
    other.write_bytes(memory.address.word + bytes(4096 - 32 + 100))
    with open(other, "rb") as file:
        address = replace(memory.address, path=f"/proc/self/fd/{file.fileno()}")
        with pytest.raises(FileNotFoundError, match="is no common memory"):
            enter(address)
    memory.close()
    with pytest.raises(FileNotFoundError):
        enter(memory.address)
