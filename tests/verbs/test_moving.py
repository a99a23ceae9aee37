"""Whatever moves tensors between ranks is one exchange, and whatever writes them out one sink."""

from __future__ import annotations

import pytest
from tests.verbs import moving

EXCHANGING = {
    "load, read once",
    "gather",
    "set",
    "iterate",
    "save, as streams",
    "save one file",
}
WRITING = {"save, as streams", "save a folder", "merge"}


@pytest.mark.distributed
def test_one_exchange_moves_tensors_and_one_sink_writes_them(worlds, qwen3, tmp_path):
    first, second = worlds(2).run(moving.moves, str(qwen3), str(tmp_path))
    assert {name for name, (rounds, _) in first.items() if rounds} == EXCHANGING
    assert {name for name, (rounds, _) in second.items() if rounds} == EXCHANGING
    assert {name for name, (_, runs) in first.items() if runs} == WRITING
    assert {name for name, (_, runs) in second.items() if runs} <= WRITING


@pytest.mark.distributed
def test_who_hands_on_gives_what_has_come_to_it_and_not_its_own(worlds):
    """The first rank's values go to the second, which gives them to the third."""
    assert worlds(3).run(moving.mean_of_all) == [[1.0] * 4] * 3
