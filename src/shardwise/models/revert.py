"""Saving a model of transformers: its conversions run backwards on recorded tensors, names, and small files."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.conversion.expression import Expression, Stored
from shardwise.errors import KnownNames
from shardwise.layout import ModelLayout, TensorLayout
from shardwise.models import torch_api
from shardwise.models.pretrained import quantized_parts
from shardwise.models.tracing import ModelFacade, NotStructural, Recorded, computed_whole
from shardwise.tensors import DType

with KnownNames("transformers", "5.17 to 5.23"):
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, revert_weight_conversion
    from transformers.dynamic_module_utils import custom_object_save
    from transformers.modeling_utils import _get_tied_weight_keys

    for _name in ("_keys_to_ignore_on_save", "is_remote_code"):
        getattr(PreTrainedModel, _name)


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor of the checkpoint and its expression, whose leaves are the model's tensors by name."""

    key: str
    dtype: DType
    expression: Expression

    @classmethod
    def of(cls, key: str, tensor: TensorLayout) -> Self:
        """A tensor of the model as it is."""
        return cls(key, tensor.dtype, Stored(tensor.fqn, tensor.shape, tensor.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.expression.shape


def revert(model: nn.Module, layout: ModelLayout, *, internal_names: bool = False) -> dict[str, Output]:
    """Return the outputs of a model's checkpoint by key, as expressions of the model's elements.

    Keys are in the order in which transformers would save them. With ``internal_names`` these are the model's
    tensors under their own names. The layout's boxes play no role.
    """
    names = {name: tensor for tensor in layout.saved() for name in names_in_file(model, tensor)}
    transforms = [] if internal_names else saved_conversions(model)
    facade: Any = ModelFacade(model, layout, transforms)

    def backwards(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(revert_weight_conversion(facade, dict(values)) if transforms else values)

    def recorded(chosen: Iterable[str]) -> dict[str, torch.Tensor]:
        return {name: _recorded(name, names[name]) for name in chosen}

    try:
        made = backwards(recorded(names))
        return _outputs_of(made)
    except NotStructural:
        pass
    outputs: dict[str, Output] = {}
    followed = backwards(
        {
            name: _Followed(tensor.shape, torch_api.to_torch(tensor.dtype), frozenset({name}))
            for name, tensor in names.items()
        }
    )
    for sources, keys in _groups(followed, names):
        try:
            outputs |= _outputs_of(backwards(recorded(sources)))
        except NotStructural:
            made = {key: followed[key] for key in keys}
            outputs |= _computed([names[name] for name in sources], sources, made, backwards)
    return {key: outputs[key] for key in followed}


def _computed(
    tensors: Sequence[TensorLayout],
    names: Sequence[str],
    made: Mapping[str, torch.Tensor],
    backwards: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]],
) -> dict[str, Output]:
    """Outputs that are computed of whole tensors of the model. ``made`` has their shapes and dtypes, by key."""

    def function(values: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return backwards(dict(zip(names, values, strict=True)))

    inputs = tuple(Stored(name, item.shape, item.dtype) for name, item in zip(names, tensors, strict=True))
    nbytes = sum(item.numel * item.dtype.itemsize for item in tensors)
    nbytes += sum(tensor.numel() * tensor.itemsize for tensor in made.values())
    found = computed_whole("a conversion of transformers'", inputs, made, function, nbytes)
    return {key: Output(key, item.dtype, item) for key, item in found.items()}


def names_in_file(model: nn.Module, tensor: TensorLayout) -> tuple[str, ...]:
    """The names under which a tensor is saved: one, as transformers chooses it among those that are tied.

    Where names of a transformers model share a tensor without being declared tied, it could not tie them again:
    each is saved.
    """
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    names = [name for name in tensor.names if name not in ignored]
    if len(names) < 2:
        return tuple(names)
    if not isinstance(model, PreTrainedModel):
        return tuple(names[:1])
    targets = _get_tied_weight_keys(model)
    for name in sorted(names):
        if len(names) > 1 and any(re.search(pattern, name) for pattern in targets):
            names.remove(name)
    return tuple(names)


def _recorded(name: str, tensor: TensorLayout) -> Recorded:
    return Recorded(Stored(name, tensor.shape, tensor.dtype), torch_api.to_torch(tensor.dtype))


def _outputs_of(made: Mapping[str, torch.Tensor]) -> dict[str, Output]:
    """Return the outputs of a recorded conversion.

    Raises:
        NotStructural: something that is not made of them.
    """
    outputs: dict[str, Output] = {}
    for key, value in made.items():
        if not isinstance(value, Recorded):
            raise NotStructural(f"{key} is computed")
        outputs[key] = Output(key, torch_api.from_torch(value.dtype, key), value.expression)
    return outputs


class _Followed(torch.Tensor):
    """A tensor without data that records the tensors of the model that it depends on, through any operation."""

    sources: frozenset[str]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, sources: frozenset[str]) -> Self:
        made: Self = torch_api.without_data(cls, shape, dtype)
        made.sources = sources
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        seen: set[str] = set()

        def bare(value: Any) -> Any:
            if not isinstance(value, cls):
                return value.to("meta") if isinstance(value, torch.Tensor) else value
            seen.update(value.sources)
            return torch.empty(value.shape, dtype=value.dtype, device="meta")

        flat = torch_api.tree_map(bare, (args, kwargs or {}))
        made = func(*flat[0], **{**flat[1], **({"device": "meta"} if "device" in flat[1] else {})})
        return torch_api.tree_map(
            lambda item: cls(item.shape, item.dtype, frozenset(seen)) if isinstance(item, torch.Tensor) else item,
            made,
        )


def _groups(
    made: Mapping[str, torch.Tensor], names: Mapping[str, TensorLayout]
) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The smallest groups of (the model's names, keys) that depend on each other only, in the order of the keys."""
    leader = {name: name for name in names}

    def find(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    sources: dict[str, frozenset[str]] = {}
    for key, value in made.items():
        found = value.sources if isinstance(value, _Followed) else frozenset[str]()
        sources[key] = found
        first, *others = sorted(found) or [""]
        for other in others:
            leader[find(other)] = find(first)
    keys: dict[str, list[str]] = {}
    members: dict[str, list[str]] = {}
    for key, found in sources.items():
        keys.setdefault(find(min(found)) if found else "", []).append(key)
    for name in names:
        members.setdefault(find(name), []).append(name)
    return [(tuple(members.get(group, [])), tuple(found)) for group, found in keys.items()]


def saved_conversions(model: nn.Module) -> list[Any]:
    """The renames and converters to run backwards for saving: those that loading used, else the class's own.

    As in ``revert_weight_conversion``: a model that was not loaded has no legacy names, and no prefix to restore.
    """
    if not isinstance(model, PreTrainedModel):
        return []
    used = getattr(model, "_weight_conversions", None)
    if used is not None:
        return list(used)
    with torch_api.original_classes(model):
        found = get_model_conversion_mapping(model, add_legacy=False)
    return [item for item in found if not isinstance(item, PrefixChange)]


def save_small_files(model: nn.Module, dtype: torch.dtype | None, folder: Path) -> None:
    """Write the files of ``save_pretrained`` other than weights.

    Config, generation config, and the model's own code.

    ``dtype`` is the dtype for the config. A quantized checkpoint's ``quantization_config`` is left out where a
    model has been made of its numbers. The model's own config is not touched. Nothing for other modules.
    """
    if not isinstance(model, PreTrainedModel):
        return
    kind: Any = torch_api.original_class(model)
    config: Any = deepcopy(model.config)
    config.architectures = [kind.__name__]
    if dtype is not None:
        config.dtype = str(dtype).removeprefix("torch.")
    if not getattr(model, "is_quantized", False):
        for part in quantized_parts(config):
            del part.quantization_config
    if kind.is_remote_code():
        custom_object_save(model, str(folder), config=config)
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
