"""Checkpoint tensors of a transformers model, by its conversions in reverse, and the small files of a save."""

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.core.computed import ComputedBlock, FullOperation
from shardwise.core.errors import private
from shardwise.core.expression import Expression, Stored
from shardwise.core.layout import ModelLayout, TensorLayout
from shardwise.core.tensors import DType
from shardwise.fsdp import torch_private
from shardwise.models.pretrained import quantized_configs
from shardwise.models.tracing import (
    ModelFacade,
    NotStructural,
    Recorded,
    computed_outputs,
    recorded_expressions,
    shapes_by_name,
)


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
    """
    names = {name: tensor for tensor in layout.saved() for name in names_in_file(model, tensor)}
    transforms = [] if internal_names else saved_conversions(model)
    return _Reversal(ModelFacade(model, layout, transforms), names).outputs()


@dataclass(frozen=True)
class _Reversal:
    """The conversions of a model in reverse. ``tensors`` are its saved tensors by name."""

    facade: Any
    tensors: Mapping[str, TensorLayout]

    def outputs(self) -> dict[str, Output]:
        if not self.facade._weight_conversions:
            return {name: Output.unchanged(name, tensor) for name, tensor in self.tensors.items()}
        try:
            return self._recorded(list(self.tensors))
        except NotStructural:
            pass
        followed = self.run(
            {
                name: _Followed(tensor.shape, torch_private.to_torch(tensor.dtype), frozenset({name}))
                for name, tensor in self.tensors.items()
            }
        )
        outputs: dict[str, Output] = {}
        for sources, keys in _groups(followed, self.tensors):
            try:
                outputs |= self._recorded(sources)
            except NotStructural:
                outputs |= self._computed(sources, {key: followed[key] for key in keys})
        return {key: outputs[key] for key in followed}

    def run(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        run = private("transformers.core_model_loading:revert_weight_conversion")
        return dict(run(self.facade, dict(values)))

    def _recorded(self, names: Sequence[str]) -> dict[str, Output]:
        recorded: dict[str, torch.Tensor] = {}
        for name in names:
            tensor = self.tensors[name]
            recorded[name] = Recorded(
                Stored(name, tensor.shape, tensor.dtype), torch_private.to_torch(tensor.dtype)
            )
        made = self.run(recorded)
        return {
            key: Output(key, torch_private.from_torch(made[key].dtype, key), expression)
            for key, expression in recorded_expressions(made).items()
        }

    def _computed(self, names: Sequence[str], made: Mapping[str, torch.Tensor]) -> dict[str, Output]:
        """Return outputs that are computed from full tensors. ``made`` has their shapes and dtypes by key."""
        tensors = [self.tensors[name] for name in names]
        inputs = tuple(Stored(name, item.shape, item.dtype) for name, item in zip(names, tensors, strict=True))
        nbytes = sum(item.numel * item.dtype.itemsize for item in tensors)
        nbytes += sum(tensor.numel() * tensor.itemsize for tensor in made.values())
        shapes = tuple(item.shape for item in inputs)
        operation = _RevertedConversion(
            "a conversion of transformers'", shapes, shapes_by_name(made), nbytes, self, tuple(names)
        )
        found = computed_outputs(operation, inputs, made)
        return {key: Output(key, item.dtype, item) for key, item in found.items()}


@dataclass(frozen=True, slots=True, eq=False)
class _RevertedConversion(FullOperation):
    """A conversion in reverse that computes, of the model's tensors with these names."""

    reversal: _Reversal
    names: tuple[str, ...]

    def evaluate(self, _block: ComputedBlock, values: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return self.reversal.run(dict(zip(self.names, values, strict=True)))


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
    targets = private("transformers.modeling_utils:_get_tied_weight_keys")(model)
    for name in sorted(names):
        if len(names) > 1 and any(re.search(pattern, name) for pattern in targets):
            names.remove(name)
    return tuple(names)


class _Followed(torch.Tensor):
    """A tensor without data that records the tensors of the model that it depends on."""

    sources: frozenset[str]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, sources: frozenset[str]) -> Self:
        made: Self = torch_private.without_data(cls, shape, dtype)
        made.sources = sources
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = torch_private.tree_leaves((args, kwargs or {}))
        sources = frozenset[str]().union(*(leaf.sources for leaf in leaves if isinstance(leaf, cls)))
        args, keywords = torch_private.tree_map_only(torch.Tensor, _on_meta, (args, kwargs or {}))
        if "device" in keywords:
            keywords["device"] = "meta"
        made = func(*args, **keywords)
        return torch_private.tree_map_only(torch.Tensor, lambda item: cls(item.shape, item.dtype, sources), made)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _groups(
    made: Mapping[str, torch.Tensor], names: Mapping[str, TensorLayout]
) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the smallest groups of (names, keys) without dependencies between groups, in the order of the keys."""
    parent = {name: name for name in names}

    def find(name: str) -> str:
        while parent[name] != name:
            name = parent[name]
        return name

    sources: dict[str, frozenset[str]] = {}
    for key, value in made.items():
        found = value.sources if isinstance(value, _Followed) else frozenset[str]()
        sources[key] = found
        first, *others = sorted(found) or [""]
        for other in others:
            parent[find(other)] = find(first)
    keys: dict[str, list[str]] = {}
    members: dict[str, list[str]] = {}
    for key, found in sources.items():
        keys.setdefault(find(min(found)) if found else "", []).append(key)
    for name in names:
        members.setdefault(find(name), []).append(name)
    return [(tuple(members.get(group, [])), tuple(found)) for group, found in keys.items()]


def saved_conversions(model: nn.Module) -> list[Any]:
    """Return the renames and converters that the load used, otherwise those of the model's class.

    As in ``revert_weight_conversion``, a model that was not loaded has no legacy names, and no prefix to restore.
    """
    if not isinstance(model, PreTrainedModel):
        return []
    used = getattr(model, "_weight_conversions", None)
    if used is not None:
        return list(used)
    with torch_private.original_classes(model):
        found = private("transformers.conversion_mapping:get_model_conversion_mapping")(model, add_legacy=False)
    prefix_change = private("transformers.core_model_loading:PrefixChange")
    return [item for item in found if not isinstance(item, prefix_change)]


def save_configs(model: nn.Module, dtype: torch.dtype | None, folder: Path) -> None:
    """Write the config, generation config and own code of a model, as ``save_pretrained`` does.

    ``dtype`` is the dtype for the config. The ``quantization_config`` of a checkpoint that was dequantized is left
    out. The model's own config is not changed. Modules that are not of transformers have no such files.
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
    if private("transformers:PreTrainedModel.is_remote_code", kind)():
        private("transformers.dynamic_module_utils:custom_object_save")(model, str(folder), config=config)
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
