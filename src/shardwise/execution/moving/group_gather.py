"""All-gathers FSDP2's groups on one machine through shared memory, not through sockets.

A step of FSDP2 gathers every group twice. Through sockets each byte is copied into the kernel and out of it, at a
fraction of the speed of memory, and on a machine whose ranks compute on its processors, that is their time. In a
window a rank puts its part down once, and the others copy it from where it lies ([Note: Windows] in
:mod:`shardwise.execution.memory.host_memory`). The bytes are the same.

What is gathered into is fresh memory each time, which glibc gives back to the system and has anew, page by page,
for the next group; over a step that is twice the model. So one block, as large as an ordinary group, is kept and
used again as soon as nothing of it is held any more. (To have glibc keep all that is freed was tried: its heap is
soon full of holes, and twice as large.)
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.execution.memory.copy_in import memory_of
from shardwise.execution.memory.host_memory import HostMemory, open_windows
from shardwise.execution.ranks.world import World

_KEPT_BYTES = 256 << 20
"""The largest block that is kept. What is larger, of the embeddings mostly, is gathered once or twice a step."""

_HALF_BYTES = 16 << 20
"""What a rank puts down at once; while it is read, the next goes to the other half. More would leave the caches."""


class GatherInWindows:
    """What ``FSDPModule.set_custom_all_gather`` takes. One for all groups of a model, which gather in one order.

    A rank gathers with the same ranks each time: that those have read a window is learned from the next gathering.

    Args:
        windows: by rank of the default process group; each has two halves.
    """

    def __init__(self, windows: Sequence[torch.Tensor]) -> None:
        self._halves = [window.chunk(2) for window in windows]
        self._turn = 0
        self._kept = torch.empty(0, dtype=torch.uint8)
        self._lent: Callable[[], object] = lambda: None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for what is gathered: the kept block, where it is free and large enough or may grow to be."""
        numel = math.prod(int(part) for part in size)
        nbytes = numel * dtype.itemsize
        if not 0 < nbytes <= _KEPT_BYTES or self._lent() is not None:
            return torch.empty(*size, dtype=dtype, device=device)
        if self._kept.numel() < nbytes:
            memory = HostMemory([nbytes])
            self._kept = memory.take((nbytes,), torch.uint8)
            memory.touch_rest()
        lease = memory_of(self._kept)[:nbytes]
        self._lent = weakref.ref(lease)  # alive as long as the tensor's storage, whoever has it
        return torch.frombuffer(lease, dtype=dtype).view(*size)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: ARG002, FBT001, FBT002 - as FSDP2 calls it
    ) -> None:
        """Gather; done when it returns. Collective: yes, over ``group``."""
        if not input_tensor.numel():
            return
        own = input_tensor.view(torch.uint8)
        parts = output_tensor.view(torch.uint8).view(group.size(), -1)
        ranks = dist.get_process_group_ranks(group)
        half_bytes = self._halves[0][0].numel()
        for start in range(0, own.numel(), half_bytes):
            stop = min(start + half_bytes, own.numel())
            self._turn = 1 - self._turn
            self._halves[ranks[group.rank()]][self._turn][: stop - start].copy_(own[start:stop])
            # Who is here has put this half down, and has read the other one, which may now be written again.
            dist.barrier(group)
            for place, rank in enumerate(ranks):
                part = parts[place, start:stop]
                if rank != ranks[group.rank()]:
                    part.copy_(self._halves[rank][self._turn][: stop - start])
                elif part.data_ptr() != own[start:].data_ptr():
                    part.copy_(own[start:stop])


def gather_in_windows(model: nn.Module, world: World) -> bool:
    """Have the groups of a model on the CPU gathered through windows, where all ranks see one memory; whether so.

    A model on several meshes, where a rank gathers now with these and now with those, is left as it is.

    Collective: yes, where there is anything to gather; over the default process group.
    Memory: a window of 32 MiB, and a block of at most 256 MiB, for as long as the model is.
    """
    groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
    meshes = {parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)}
    if not groups or len(meshes) != 1 or world.size == 1:
        return False
    windows = open_windows(world, 2 * _HALF_BYTES)
    if windows is None:
        return False
    gather = GatherInWindows(windows)
    for module in groups:
        module.set_custom_all_gather(cast(Any, gather))  # torch's own class of that kind is private
    return True
