"""What a mixture of experts adds to its loss so that its router spreads the tokens.

[Note: Router losses] transformers computes one for each forward pass where ``config.output_router_logits`` is on,
and adds it, times a coefficient, to the loss that it takes itself. Losses here are taken from logits, so it is
added here, to the same effect: that of a forward pass counts by its share of the step's supervised tokens, as its
cross entropy does. For one process and one forward pass that is transformers' loss. An evaluation does not count
it: its perplexity is of the cross entropy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.errors import ConfigError
from shardwise.execution.ranks.world import World
from shardwise.models.placement import computing_device
from shardwise.training.data.batches import IGNORED, Batch
from shardwise.training.generation import evaluating

_NAMES = ("router_aux_loss_coef", "aux_loss_coef")
_TRIED_TOKENS = 8
_TOLERANCE = 1e-4
"""Of two sums of a few terms in float32, in nats."""


def with_router_loss(loss: torch.Tensor, model: nn.Module, output: Any, batch: Batch) -> torch.Tensor:
    """A summed cross entropy, and the router's loss of the same forward pass for each of its supervised tokens."""
    auxiliary = getattr(output, "aux_loss", None)
    # A batch without rows keeps a rank in step: there is no mean over its tokens.
    if not isinstance(auxiliary, torch.Tensor) or not model.training or not batch.tokens:
        return loss
    learned = (batch.labels[:, 1:] != IGNORED).sum()
    return loss + _coefficient(model) * learned * auxiliary.to(loss.device)


def require_router_loss(
    world: World, model: nn.Module, computing: Callable[[], AbstractContextManager[object]]
) -> None:
    """Refuse a model whose router's loss, which its config asks for, is not the one that would be counted.

    Its own loss of a few tokens is compared. Collective: yes; one forward pass, where the config asks.

    Raises:
        ConfigError: naming the two losses.
    """
    if not _asks(model):
        return
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    device = computing_device(next(model.parameters()))
    words = min(_TRIED_TOKENS, embeddings.weight.shape[0])
    tokens = (torch.arange(_TRIED_TOKENS, device=device) % words).unsqueeze(0)
    with evaluating(model), computing():
        output = model(input_ids=tokens, labels=tokens, use_cache=False)
        counted = F.cross_entropy(output.logits[0, :-1].float(), tokens[0, 1:])
        auxiliary = getattr(output, "aux_loss", None)
        if isinstance(auxiliary, torch.Tensor):
            counted = counted + _coefficient(model) * auxiliary.to(counted.device)
    own, ours = float(output.loss), float(counted)

    def compare() -> None:
        if not abs(own - ours) <= _TOLERANCE * max(abs(own), 1.0):
            raise ConfigError(
                f"config.output_router_logits is on, but {type(model).__name__} adds something to its loss that is "
                f"not counted here (its own is {own:.6g}, cross entropy and the router's loss are {ours:.6g}); set "
                "output_router_logits to false in config.json, and train without it"
            )

    world.together(compare)


def _asks(model: nn.Module) -> bool:
    return any(getattr(config, "output_router_logits", False) for config in _configs(model))


def _coefficient(model: nn.Module) -> float:
    """As the model has it, inside of PEFT's where it is one, or its config."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    for holder in (base, *_configs(model)):
        for name in _NAMES:
            found = getattr(holder, name, None)
            if found is not None:
                return float(found)
    return 0.0


def _configs(model: nn.Module) -> list[Any]:
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    config = getattr(base, "config", None)
    return [config, getattr(config, "text_config", None)] if config is not None else []
