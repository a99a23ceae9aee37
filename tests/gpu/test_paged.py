"""bitsandbytes' paged optimizers: their state comes back bit by bit, in memory that is paged as theirs is."""

from __future__ import annotations

import pytest
from tests.training import on_peers

from shardwise.execution.processes.local_ranks import LocalRanks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["PagedAdamW8bit", "PagedLion8bit", "PagedAdamW32bit", "AdamW8bit"])
def test_paged_state_comes_back_bit_by_bit(tmp_path, name):
    with LocalRanks(1, timeout_s=300) as ranks:
        [told] = ranks.run(on_peers.call, "saved_and_restored_on_a_gpu", str(tmp_path), name)
    assert told["bits"] >= 4
    assert told["restored"]
    assert told["goes on"]
    assert told["paged"] == [name.startswith("Paged")] * 2
