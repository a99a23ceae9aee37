"""What ranks ask for that do not ask for the same, or for what there is not. Importable by spawned processes."""

from typing import Any

import torch
import torch.distributed as dist
from tests.harness.world import attempt
from torch import nn

import shardwise


def _ask(directory: str, common: dict[str, Any], own: dict[str, Any], where: int) -> tuple[str, str]:
    keywords = {**common, **(own if dist.get_rank() == where else {})}
    return attempt(lambda: shardwise.from_pretrained(directory, **keywords))


def one_rank_asks_otherwise(directory: str, asked: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[Any]:
    """The outcome of each pair of keywords: those of all ranks, and what the second rank has beside."""
    return [_ask(directory, common, own, 1) for common, own in asked]


def one_rank_shards_with_nonsense(directory: str) -> tuple[str, str]:
    policy: Any = ("Block",) if dist.get_rank() == 1 else "whole_model"
    return attempt(lambda: shardwise.shard(nn.Linear(4, 4), shardwise.Sharding(wrap=policy)))


def one_rank_loads_otherwise(directory: str) -> list[tuple[str, str]]:
    """``load`` with a budget, and with another kind of checkpoint, on one rank alone."""
    rank = dist.get_rank()

    def load(checkpoint: Any, options: Any) -> None:
        with torch.device("meta"):
            model = nn.Linear(4, 4)
        shardwise.load(model, checkpoint, options=options)

    budget = shardwise.options.LoadOptions(budget_bytes=1 << (20 + rank))
    plain: Any = shardwise.options.LoadOptions() if rank else {"budget_bytes": 5000}
    return [
        attempt(load, directory, budget),
        attempt(load, directory if rank else "https://host/name", shardwise.options.LoadOptions()),
        attempt(load, directory, plain),
    ]
