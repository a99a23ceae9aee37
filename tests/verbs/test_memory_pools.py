"""Host memory is counted by what it is taken from."""

from __future__ import annotations

import pytest


@pytest.mark.distributed
@pytest.mark.parametrize(("pools", "fits"), [("of each rank", True), ("of all", False)])
def test_ranks_share_what_their_control_groups_share(worlds, qwen3, pools, fits):
    """Each rank needs about a quarter of a MiB; a group has room for one rank."""
    found = worlds(2).run(load_in_a_group, str(qwen3), pools == "of all")
    assert found == ["loaded" if fits else "needs"] * 2


def load_in_a_group(checkpoint: str, is_shared: bool) -> str:
    import torch.distributed as dist

    import shardwise
    from shardwise.engines import load_plan
    from shardwise.planning.forecasts.own_forecast import Available

    options = shardwise.options.LoadOptions(budget_bytes=1 << 16)
    _, report = shardwise.from_pretrained(checkpoint, options=options, output_loading_info=True)
    room = report.forecast.host_bytes * 3 // 2
    group = "/group" if is_shared else f"/group{dist.get_rank()}"
    original = load_plan.available_memory
    load_plan.available_memory = lambda home: Available(host_bytes=room, pools={"": 1 << 40, group: room})
    try:
        shardwise.from_pretrained(checkpoint, options=options)
    except shardwise.PlacementError as error:
        return "needs" if "needs" in str(error) else str(error)
    finally:
        load_plan.available_memory = original
    return "loaded"
