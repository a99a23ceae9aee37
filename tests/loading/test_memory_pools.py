"""Ranks of one machine share its free memory."""

from unittest import mock

from tests.support.world import said

import shardwise
from shardwise.core.reports import Available
from shardwise.transfer import memory


def test_ranks_of_one_machine_share_its_memory(worlds, qwen3):
    """Each rank needs about a quarter of a MiB; there is room for one rank, then for two."""
    for scarce, enough in worlds(2).run(load_with_room, str(qwen3)):
        assert scarce.startswith("ShardingError")
        assert "needs" in scarce
        assert enough == ""


def load_with_room(checkpoint: str) -> list[str]:
    options = shardwise.options.LoadOptions(budget_bytes=1 << 16)
    _, report = shardwise.from_pretrained(checkpoint, options=options, output_loading_info=True)
    found = []
    for room in (report.estimate.host_bytes * 3 // 2, report.estimate.host_bytes * 3):
        with mock.patch.object(memory, "available_memory", return_value=Available(host_bytes=room)):
            found.append(said(lambda: shardwise.from_pretrained(checkpoint, options=options)))
    return found
