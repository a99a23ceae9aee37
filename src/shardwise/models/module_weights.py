"""How the modules of a model keep their weights, as far as an adapter has to know."""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwise.models._torch_private import parameters_of, walk
from shardwise.models.view import canonical


def parameters_by_module(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """The parameters that sit in each module itself, in its order, by the module's name."""
    return {
        canonical(prefix): tuple(name for name, parameter in parameters_of(module).items() if parameter is not None)
        for prefix, module in walk(model, every_name=True)
    }


def modules_of_columns(model: nn.Module) -> frozenset[str]:
    """Modules whose weights are (in, out), or (experts, in, out), and not the other way round, as PEFT says."""
    return frozenset(
        canonical(prefix)
        for prefix, module in walk(model, every_name=True)
        if isinstance(module, Conv1D) or getattr(module, "is_transposed", False) is True
    )
