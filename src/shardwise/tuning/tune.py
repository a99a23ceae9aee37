"""Carrying out a tuning on a model on meta, whatever it is; and the dtypes of what is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.conversion import Bindings
from shardwise.errors import ConfigError
from shardwise.models.torch_words import parameters_of, take_after, walk
from shardwise.models.trained_dtype import TrainedDtype
from shardwise.models.view import look_inside
from shardwise.tuning.lora import Adapter
from shardwise.tuning.modes import Tuning
from shardwise.tuning.ready_model import Tuned


def tune(
    base: PreTrainedModel,
    bindings: Bindings,
    tuning: Tuning,
    trained: TrainedDtype,
    *,
    adapters: Mapping[str, Adapter],
    casts_to: torch.dtype | None = None,
) -> Tuned:
    """Make a model on meta ready to be trained as ``tuning`` says; it is tied already, and not yet sharded.

    Args:
        base: the model; it is changed.
        bindings: what the checkpoint offers for it.
        tuning: what is trained.
        trained: in which dtype that is kept.
        adapters: by name, those that the tuning starts from.
        casts_to: the dtype in which everything computes; None for each parameter's own.

    Raises:
        ConfigError: something named matches nothing, or cannot be honoured.
        CoverageError: an existing adapter does not fit the model.
    """
    made = tuning.prepare(base, bindings, adapters)
    _recast(made.model, trained, casts_to)
    if not made.stays_whole:
        return made
    parameters = {
        name: item.tensor
        for item in look_inside(made.model)
        if isinstance(item.tensor, nn.Parameter)
        for name in item.names
    }
    return replace(made, whole={parameters[name]: reason for name, reason in made.stays_whole.items()})


def _recast(model: nn.Module, trained: TrainedDtype, casts_to: torch.dtype | None) -> None:
    """Give what is trained the dtype it is to be kept in, still on meta.

    Raises:
        ConfigError: a module would compute with parameters of two dtypes.
    """
    for item in look_inside(model):
        tensor = item.tensor
        if not isinstance(tensor, nn.Parameter):
            continue
        dtype = trained.dtype_of(tensor.dtype, tensor.requires_grad)
        if dtype != tensor.dtype:
            other = nn.Parameter(torch.empty_like(tensor, dtype=dtype), requires_grad=tensor.requires_grad)
            take_after(other, tensor)
            item.install(other)
    if casts_to is None:
        _require_one_dtype(model)


def _require_one_dtype(model: nn.Module) -> None:
    for name, module in walk(model):
        own = {local: parameter for local, parameter in parameters_of(module).items() if parameter is not None}
        kinds = {(parameter.dtype, parameter.requires_grad) for parameter in own.values()}
        if len({dtype for dtype, _ in kinds}) > 1 and len({is_trained for _, is_trained in kinds}) > 1:
            words = ", ".join(f"{local} {parameter.dtype}" for local, parameter in own.items())
            raise ConfigError(
                f"{name} would compute with parameters of two dtypes ({words}), of which only some are trained; "
                "pass Sharding(mp_policy=MixedPrecisionPolicy(param_dtype=...)), or trained=AsItIs()"
            )
