"""Sixty-four ranks that really run, on one machine: each with its part of a tiny model."""

import pytest
import torch
from tests import truth
from tests.faults import on_ranks
from tests.faults.doomed import Doomed
from tests.verbs.conftest import small_qwen3

from shardwise.execution import Timeouts

RANKS = 64


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", ["flat", "hsdp"])
def test_sixty_four_ranks_load_what_was_saved(way, tmp_path, qwen3):
    torch.save(truth.snapshot(small_qwen3()), tmp_path / "truth.pt")
    with Doomed(RANKS) as world:
        outcome = world.run(
            on_ranks.load_and_compare, qwen3, way, Timeouts(), str(tmp_path / "truth.pt"), limit_s=350
        )
    assert outcome.errors() == dict.fromkeys(range(RANKS), ("", ""))
    assert [outcome.ends[rank].value["faults"] for rank in range(RANKS)] == [[]] * RANKS
    # Every rank reads its own bytes: all together about one checkpoint, not one each.
    stored = outcome.ends[0].value["checkpoint_bytes"]
    assert sum(end.value["read_bytes"] for end in outcome.ends.values()) < 2 * stored
