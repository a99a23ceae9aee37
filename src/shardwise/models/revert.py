"""Checkpoint tensors of a transformers model, by its conversions in reverse, and the small files of a save."""

import re
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.core.errors import KeyMismatchError, private
from shardwise.core.expression import Expression, Stored
from shardwise.core.layout import ModelLayout, TensorLayout
from shardwise.core.tensors import DType
from shardwise.fsdp import torch_private
from shardwise.models.pretrained import quantized_configs
from shardwise.models.tracing import ModelFacade, NotStructural, Recorded, get_expressions


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor of the checkpoint, as an expression of the model's tensors by name."""

    key: str
    dtype: DType
    expression: Expression

    @classmethod
    def unchanged(cls, key: str, tensor: TensorLayout) -> Self:
        """Return an unchanged tensor of the model."""
        return cls(key, tensor.dtype, Stored(tensor.fqn, tensor.shape, tensor.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.expression.shape


def revert(model: nn.Module, layout: ModelLayout, *, internal_names: bool = False) -> dict[str, Output]:
    """Return the tensors of a model's checkpoint by key.

    Keys are in the order in which transformers would save them. With ``internal_names`` the result is the model's
    own tensors under their own names. The layout's boxes are not used.

    Raises:
        KeyMismatchError: transformers computes some of the tensors, and does not only move their elements.
    """
    tensors = {name: tensor for tensor in layout.saved() for name in names_in_file(model, tensor)}
    conversions = [] if internal_names else get_saved_conversions(model)
    if not conversions:
        return {name: Output.unchanged(name, tensor) for name, tensor in tensors.items()}
    # transformers' own function runs on tensors without data. What it does to them is the expression of each key.
    recorded: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stored = Stored(name, tensor.shape, tensor.dtype)
        recorded[name] = Recorded(stored, torch_private.to_torch(tensor.dtype))
    run = private("transformers.core_model_loading:revert_weight_conversion")
    try:
        state_dict = dict(run(ModelFacade(model, layout, conversions), recorded))
        expressions = get_expressions(state_dict)
    except NotStructural as error:
        raise KeyMismatchError(
            f"{torch_private.original_class(model).__name__}: transformers computes a tensor of its checkpoint in "
            f"a save ({error}), which is not supported. Pass names='internal' to save the model's own tensors"
        ) from error
    return {
        key: Output(key, torch_private.from_torch(state_dict[key].dtype, key), expression)
        for key, expression in expressions.items()
    }


def names_in_file(model: nn.Module, tensor: TensorLayout) -> tuple[str, ...]:
    """Return the names under which a tensor is saved: the one that transformers chooses among tied names.

    Names of a transformers model that share a tensor without being declared tied are all saved, because a load
    would not tie them again.
    """
    ignored = getattr(model, "_keys_to_ignore_on_save", None)
    if isinstance(model, PreTrainedModel):
        ignored = private("transformers:PreTrainedModel._keys_to_ignore_on_save", model)
    names = [name for name in tensor.names if name not in (ignored or ())]
    if len(names) < 2:
        return tuple(names)
    if not isinstance(model, PreTrainedModel):
        return tuple(names[:1])
    # As in save_pretrained: declared targets of ties are left out, as long as one name stays.
    targets = private("transformers.modeling_utils:_get_tied_weight_keys")(model)
    for name in sorted(names):
        if len(names) > 1 and any(re.search(pattern, name) for pattern in targets):
            names.remove(name)
    return tuple(names)


def get_saved_conversions(model: nn.Module) -> list[Any]:
    """Return the renames and converters that the load used, otherwise those of the model's class.

    As in ``revert_weight_conversion``, a model that was not loaded has no legacy names, and no prefix to restore.
    """
    if not isinstance(model, PreTrainedModel):
        return []
    recorded = getattr(model, "_weight_conversions", None)
    if recorded is not None:
        return list(recorded)
    # transformers finds the conversions by the name of the model's class, which fully_shard has changed.
    with torch_private.original_classes(model):
        conversions = private("transformers.conversion_mapping:get_model_conversion_mapping")(
            model, add_legacy=False
        )
    prefix_change = private("transformers.core_model_loading:PrefixChange")
    return [item for item in conversions if not isinstance(item, prefix_change)]


def save_configs(model: nn.Module, dtype: torch.dtype | None, folder: Path) -> None:
    """Write the config, generation config and own code of a model, as ``save_pretrained`` does.

    ``dtype`` is the dtype for the config. The ``quantization_config`` of a checkpoint that was dequantized is left
    out. The model's own config is not changed. Modules that are not models of transformers have no such files.
    """
    if not isinstance(model, PreTrainedModel):
        return
    kind: Any = torch_private.original_class(model)
    config: Any = deepcopy(model.config)
    config.architectures = [kind.__name__]
    if dtype is not None:
        config.dtype = str(dtype).removeprefix("torch.")
    if not getattr(model, "is_quantized", False):
        for section in quantized_configs(config):
            del section.quantization_config
    # Before the config is written: this adds auto_map to it, by which a reader finds the code.
    if private("transformers:PreTrainedModel.is_remote_code", kind)():
        copy_code = private("transformers.dynamic_module_utils:custom_object_save")
        with torch_private.original_classes(model):  # it copies the file of the model's class
            copy_code(model, str(folder), config=config)
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
