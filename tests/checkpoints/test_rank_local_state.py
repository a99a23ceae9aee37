"""Rank-local optimizer state: restored bit by bit on as many ranks, refused on others."""

from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import rank_local
from tests.support.local_ranks import LocalRanks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("rank_local"))


@pytest.fixture(scope="module")
def saved(two: LocalRanks, folder: str) -> list[dict[str, Any]]:
    return two.run(rank_local.call, "save_each", folder, [(kind, "torchao") for kind in rank_local.KINDS])


def test_torchao_s_state_comes_back_bit_by_bit_on_as_many_ranks(saved: list[dict[str, Any]]) -> None:
    for told in saved:
        for kind, found in told.items():
            assert [what for what, is_so in found.items() if not is_so] == [], kind
            assert found["parts"] >= 3, kind  # of blocks, and as numbers


def test_shards_of_several_sizes_come_back_where_they_were(two: LocalRanks, folder: str) -> None:
    """One rank keeps blocks of its shard, the other numbers."""
    for told in two.run(rank_local.call, "save_each", folder, [("AdamW8bit", "torchao")], 143):
        assert all(told["AdamW8bit"].values())


def test_one_rank_is_refused_the_state_of_two_and_may_begin_anew(
    saved: list[dict[str, Any]], folder: str, tmp_path: Path
) -> None:
    assert saved
    with LocalRanks(1, is_forked=True) as one:
        [told] = one.run(rank_local.call, "refused", folder)
        kinds = [("AdamW8bit", "bitsandbytes"), ("Adafactor", "torch")]
        [whole] = one.run(rank_local.call, "save_each", str(tmp_path), kinds)
    kind, text = told["other ranks"]
    assert kind == "KeyMismatchError"
    assert "state was saved by 2 ranks and cannot be resumed by 1. Resume on 2 ranks, or start the" in text
    assert (told["untouched"], told["anew"]) == (0, (("optimizers",), 0))
    kind, text = told["handed out"]
    assert (kind, "is rank-local (8-bit, 4-bit or factored)" in text) == ("ShardingError", True)
    for name, found in whole.items():  # one process steps whole tensors
        assert [what for what, is_so in found.items() if not is_so and what != "parts"] == [], name


def test_what_steps_whole_tensors_is_refused_for_shards(two: LocalRanks, folder: str) -> None:
    told = two.run(rank_local.call, "whole_only", folder)
    assert told[0] == told[1]
    for name, (kind, text) in told[0].items():
        library = name.partition(",")[0]
        whose = {"bitsandbytes": "bitsandbytes' AdamW8bit", "transformers": "transformers' Adafactor"}
        expected = f"{whose.get(library, 'torch' + chr(39) + 's Adafactor')}: steps whole tensors, not shards."
        assert (kind, f"{expected} Use torchao's AdamW8bit" in text) == ("ShardingError", True), (name, text)


def test_other_blocks_are_refused_by_all_ranks(two: LocalRanks, saved: list[dict[str, Any]], folder: str) -> None:
    assert saved
    for kind, text in two.run(rank_local.call, "other_blocks", folder):
        assert (kind, "state was saved of other shards or blocks." in text) == ("KeyMismatchError", True), text


def test_shards_that_torchao_keeps_in_32_bits_are_reported_and_uneven_ones_refused(two: LocalRanks) -> None:
    told = two.run(rank_local.call, "made_for_shards")
    assert told[0] == told[1]
    assert told[0]["256"] == told[0]["7"] == ("", "")
    kind, text = told[0]["143"]
    assert kind == "ShardingError"
    assert "torchao's AdamW8bit: 0.weight, of shape (143, 64), is cut into shards of several sizes" in text
    first, second = told[0]["lines"]
    assert "keeps 32 bits of 3 of 4 parameters, such as 0.bias" in first
    assert "keeps 32 bits of 4 of 4 parameters, such as 0.weight" in second


@pytest.mark.gpu
def test_paged_state_comes_back_paged(folder: str) -> None:
    with LocalRanks(1) as one:
        assert one.run(rank_local.call, "paged", f"{folder}/paged") == [[True, True, True]]
