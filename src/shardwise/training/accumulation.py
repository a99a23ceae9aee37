"""What ranks keep of gradients between the micro-batches of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import nn
from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True, slots=True)
class WholeGradients:
    """Each rank adds up its own gradients, whole, and they are exchanged once for a step.

    Memory: between micro-batches a whole gradient of all that is trained, in the dtype it is computed in, on every
    rank. A step with one micro-batch takes none of it.
    """


@dataclass(frozen=True, slots=True)
class ShardedGradients:
    """Gradients are dealt to their shards after each micro-batch; over replicas they are exchanged once for a step.

    Memory: no more than a step with one micro-batch. Traffic: one reduce-scatter for every micro-batch.
    """


Accumulation: TypeAlias = WholeGradients | ShardedGradients


def exchange_gradients(model: nn.Module, accumulation: Accumulation, *, is_last: bool) -> None:
    """Tell FSDP2 what to do with the gradients of the backward pass that comes next."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            is_dealt = is_last or isinstance(accumulation, ShardedGradients)
            module.set_requires_gradient_sync(is_dealt, recurse=False)
            module.set_requires_all_reduce(is_last, recurse=False)
