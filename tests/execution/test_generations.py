"""Generations of ranks over one store: each has a part of it for itself, whatever others have left."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore, Store

from shardwise.errors import RankLostError
from shardwise.execution.processes.launched import store_of_generation


def test_a_generation_finds_nothing_of_those_before_it() -> None:
    store = HashStore()
    for number, size in enumerate((3, 3, 2, 4)):  # elastic: generations may have other sizes

        def come(rank: int, number: int = number, size: int = size) -> tuple[bool, list[str]]:
            own: Store = store_of_generation(store, rank, size, patience_s=20.0)
            is_clean = not own.check([f"met/{rank}"])
            own.set(f"met/{rank}", str(number))
            own.wait([f"met/{other}" for other in range(size)])
            return is_clean, [own.get(f"met/{other}").decode() for other in range(size)]

        with ThreadPoolExecutor(size) as pool:
            found = list(pool.map(come, range(size)))
        assert found == [(True, [str(number)] * size)] * size


def test_a_rank_that_has_left_its_word_and_gone_holds_nobody_up() -> None:
    store = HashStore()
    store.set("shardwise generation/asked/1", "of a generation before")
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda rank: store_of_generation(store, rank, 2, patience_s=20.0), (0, 1)))
    found[0].set("key", "value")
    assert found[1].get("key") == b"value"


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_come_are_waited_for_no_longer_than_said(rank: int) -> None:
    with pytest.raises(RankLostError):
        store_of_generation(HashStore(), rank, 2, patience_s=0.2)
