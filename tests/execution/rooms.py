"""What the ranks of a test world do in common rooms. Importable, so that spawned processes find it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import torch
from torch import nn

import shardwise
from shardwise import Sharding
from shardwise.options import WholeModel


class Wide(nn.Module):
    """Tensors large enough for rooms of their own, and small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(640, 640) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def common_memory() -> Iterator[str]:
    """Where this process has common memory: files that are open, and what is mapped."""
    for file in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{file}")
        except FileNotFoundError:  # the one by which the folder was listed
            continue
        if target.startswith("/memfd:shardwise"):
            yield target
    with open("/proc/self/maps") as maps:
        yield from (line for line in maps if "/memfd:shardwise" in line)


def left_after(count: int | None) -> tuple[int, int]:
    """How much common memory there is in a loop over the tensors, and after it is left."""
    torch.manual_seed(0)
    model = Wide()
    shardwise.shard(model, Sharding(wrap=WholeModel()))
    during = 0
    kept = []
    tensors = shardwise.iter_hf_tensors(model, names=shardwise.options.InternalNames())
    for number, (_, tensor) in enumerate(tensors):
        kept.append(tensor)
        during = max(during, len(list(common_memory())))
        if number == count:
            break
    tensors.close()  # type: ignore[attr-defined]
    assert all(float(tensor.abs().sum()) > 0 for tensor in kept)  # they are the caller's
    del tensors, tensor, kept
    gc.collect()
    return during, len(list(common_memory()))
