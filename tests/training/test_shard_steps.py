"""Adafactor steps shards as it steps the whole, and its factors are kept and set as they are sharded."""

from __future__ import annotations

import pytest
import torch
from tests.conftest import Worlds
from tests.training import shard_stepping


@pytest.mark.distributed
def test_adafactor_steps_shards_as_it_steps_the_whole(worlds: Worlds) -> None:
    told = worlds(2).run(shard_stepping.on_rank)
    for name in shard_stepping.CASES:
        for settings in ({}, shard_stepping.SETTINGS):
            expected = shard_stepping.alone(name, **settings)
            for found in told:
                key = f"{name}, {len(settings)}"
                torch.testing.assert_close(found[key], expected, rtol=1e-5, atol=1e-6, msg=key)
                torch.testing.assert_close(found[f"{key}, plain"], expected, rtol=0, atol=0)
    assert told[0]["hooks"] == 2 * 3 * len(shard_stepping.CASES)
    for found in told:
        kind, text = found["other shape"]
        assert (kind, "weight: row_var: brought (8, 6) F32 by rank 0, wanted (8, 1) F32" in text) == (
            "CoverageError",
            True,
        ), text
        assert found["placed"] == ["(Shard(dim=0),)", "(Replicate(),)"]
        assert found["row_var"].flatten().tolist() == list(range(8))
