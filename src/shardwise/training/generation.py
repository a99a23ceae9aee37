"""A sharded model that answers: without gradients, with all ranks in step, and nothing left gathered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from shardwise.execution.ranks.world import World
from shardwise.models.pretrained import is_pretrained


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards each module is in its own mode again, and sharded.

    FSDP2 keeps the root group gathered after a forward pass, for a backward pass that none of these has.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
            if isinstance(module, FSDPModule):
                module.reshard()


def generate(model: nn.Module, input_ids: torch.Tensor, **keywords: Any) -> torch.Tensor:
    """The model's own ``generate``, under FSDP2 too: ranks may have other prompts, and end at other lengths.

    A rank that is done goes on computing until all are, since its shards are needed. One without prompts, of shape
    (0, tokens), computes on a token of its own making, and returns no rows.

    Collective: yes, over the default process group.

    Args:
        model: one of transformers', or of PEFT's around it.
        input_ids: (rows, tokens), on this rank.
        keywords: as of ``generate`` of transformers; the same on every rank but for ``attention_mask``.

    Returns: (rows, tokens), prompts included.
    """
    rows = input_ids.shape[0]
    if not rows:
        input_ids = torch.zeros((1, 1), dtype=torch.int64, device=input_ids.device)
        keywords["attention_mask"] = torch.ones_like(input_ids)
    if World.current().size > 1:
        keywords["synced_gpus"] = True
    if isinstance(model, FSDPModule) and not is_pretrained(model) and "generate" not in vars(model):
        # A model of PEFT's goes around the forward pass of its root; FSDP2 gathers for this method then.
        register_fsdp_forward_method(model, "generate")
    with evaluating(model):
        generated: torch.Tensor = model.generate(input_ids=input_ids, **keywords)  # type: ignore[operator]
    return generated[:rows]
