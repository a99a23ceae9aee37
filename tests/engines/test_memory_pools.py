"""Ranks of one machine share its free memory."""

import pytest


@pytest.mark.distributed
def test_ranks_of_one_machine_share_its_memory(worlds, qwen3):
    """Each rank needs about a quarter of a MiB; there is room for one rank, then for two."""
    assert worlds(2).run(load_with_room, str(qwen3)) == [("needs", "loaded")] * 2


def load_with_room(checkpoint: str) -> tuple[str, str]:
    import shardwise
    from shardwise.execution import memory
    from shardwise.planning.load_memory import Available

    options = shardwise.options.LoadOptions(budget_bytes=1 << 16)
    _, report = shardwise.from_pretrained(checkpoint, options=options, output_loading_info=True)
    need = report.estimate.host_bytes
    original = memory.available_memory

    def load(room: int) -> str:
        memory.available_memory = lambda device: Available(host_bytes=room)
        try:
            shardwise.from_pretrained(checkpoint, options=options)
        except shardwise.ShardingError as error:
            return "needs" if "needs" in str(error) else str(error)
        finally:
            memory.available_memory = original
        return "loaded"

    return load(need * 3 // 2), load(need * 3)
