"""Ranks that a launcher starts again over one store find nothing of those before them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore, Store

from shardwise.errors import RankLostError
from shardwise.execution.launched import store_of_generation


def test_a_generation_finds_nothing_of_those_before_it() -> None:
    store = HashStore()
    store.set("shardwise/asks/1", "of a rank that has gone")
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


@pytest.mark.parametrize(("rank", "other"), [(0, 1), (1, 0)])
def test_ranks_that_do_not_come_are_named_and_waited_for_no_longer_than_said(rank: int, other: int) -> None:
    with pytest.raises(RankLostError, match=f"waiting for rank {other} of 2"):
        store_of_generation(HashStore(), rank, 2, patience_s=0.2)
