"""The loss of a batch, in the precision that a training computes in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from shardwise.models.placement import computing_device, root_of
from shardwise.training.data.batches import Batch
from shardwise.training.options import Precision
from shardwise.training.passes.losses import Loss, WholeLogits


@dataclass(frozen=True, slots=True)
class Forward:
    """A model, and how its loss is taken.

    Attributes:
        model: sharded or not.
        loss: see :func:`~shardwise.training.passes.losses.prepare_loss`.
        dtype: what is computed in.
    """

    model: nn.Module
    loss: Loss = field(default_factory=WholeLogits)
    dtype: Precision = "float32"

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return computing_device(next(self.model.parameters()))

    def summed(self, batch: Batch) -> torch.Tensor:
        """The loss of a batch, summed. Collective: as the model is."""
        device = self.device
        with computing_in(self.model, device, self.dtype):
            return self.loss.summed(self.model, batch.to(device))


def computing_in(model: nn.Module, device: torch.device, dtype: Precision) -> AbstractContextManager[object]:
    """Mixed precision for a model that is not sharded; a sharded one has it in its FSDP2 policy."""
    if dtype == "float32" or root_of(model) is not None:
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, dtype))
