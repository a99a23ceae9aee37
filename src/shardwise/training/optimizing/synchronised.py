"""Parameters that would become another on every rank, refused before the first step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardwise.errors import ConfigError
from shardwise.execution.ranks.world import World
from shardwise.models.replicated import is_averaged
from shardwise.models.view import canonical
from shardwise.report.names import collapse

_SHOWN = 8


def require_synchronised(model: nn.Module, world: World) -> None:
    """Refuse trained parameters whose gradients the ranks would keep to themselves.

    Right are those that ``fully_shard`` (or another user of DTensors) has spread over all ranks, whole ones that
    :func:`~shardwise.models.replicated.average_replicated_gradients` looks after, and those in torch's
    DistributedDataParallel.

    Collective: no; the same on every rank where models are.

    Raises:
        ConfigError: naming them.
    """
    if world.size == 1:
        return
    cared_for = {
        parameter
        for module in model.modules()
        if isinstance(module, DistributedDataParallel)
        for parameter in module.parameters()
    }
    alone: list[str] = []
    elsewhere: list[str] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or not parameter.numel() or parameter in cared_for:
            continue
        if isinstance(parameter, DTensor):
            if parameter.device_mesh.size() < world.size:
                elsewhere.append(canonical(name))
        elif not is_averaged(parameter):
            alone.append(canonical(name))
    if alone:
        raise ConfigError(
            f"{_in_words(alone)} trained, but neither sharded nor averaged over the {world.size} ranks, so that "
            "each rank would train its own; have them there before the model is sharded (from_pretrained, shard), "
            "call shardwise.models.replicated.average_replicated_gradients(model, mesh) after adding them, or "
            "freeze them"
        )
    if elsewhere:
        raise ConfigError(
            f"{_in_words(elsewhere)} trained, but on a mesh that has not all of the {world.size} ranks, so that "
            "the others would train their own; shard the model on a mesh of all ranks, with an axis for replicas"
        )


def _in_words(names: list[str]) -> str:
    return f"{few(names)} {'is' if len(names) == 1 else 'are'}"


def few(names: Sequence[str]) -> str:
    """Names of parameters, what is alike in one; the first of them."""
    patterns = [pattern for pattern, _ in collapse(names)]
    more = f" and {len(patterns) - _SHOWN} more" if len(patterns) > _SHOWN else ""
    return ", ".join(patterns[:_SHOWN]) + more
