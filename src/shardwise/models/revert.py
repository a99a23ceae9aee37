"""From a model's tensors to its checkpoint's: transformers' conversions run backwards, on recorded tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from shardwise.conversion.computed import Computed, WholeOperation
from shardwise.conversion.expression import Expression, Stored
from shardwise.layout import ModelLayout, TensorLayout
from shardwise.models import pretrained
from shardwise.models.key_conversions import ModelFacade, NotStructural, Recorded
from shardwise.models.pretrained import is_pretrained
from shardwise.models.torch_words import from_torch, to_torch, tree_map, without_data
from shardwise.tensors import DType, numel


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor of the checkpoint, and what it is made of: leaves are the model's tensors, by name."""

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
    """What the checkpoint of a model holds, by key, and which of the model's elements it is made of.

    Keys are in the order in which transformers would save them. With ``internal_names`` these are the model's
    tensors under their own names. The layout's boxes play no role.
    """
    names = {name: tensor for tensor in layout.saved() for name in names_in_file(model, tensor)}
    transforms = [] if internal_names else pretrained.saved_conversions(model)
    facade = ModelFacade(model, layout)

    def backwards(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return pretrained.revert(facade, transforms, values)

    def recorded(chosen: Iterable[str]) -> dict[str, torch.Tensor]:
        return {name: _recorded(name, names[name]) for name in chosen}

    try:
        made = backwards(recorded(names))
        return _outputs_of(made)
    except NotStructural:
        pass
    outputs: dict[str, Output] = {}
    followed = backwards({name: _followed(name, names[name]) for name in names})
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
    shapes = {key: tuple(tensor.shape) for key, tensor in made.items()}
    dtypes = {key: from_torch(tensor.dtype, key) for key, tensor in made.items()}
    nbytes = sum(item.numel * item.dtype.itemsize for item in tensors)
    nbytes += sum(numel(shape) * dtypes[key].itemsize for key, shape in shapes.items())
    label = "a conversion of transformers'"
    operation = WholeOperation(label, tuple(item.shape for item in inputs), shapes, function, nbytes)
    return {
        key: Output(key, dtypes[key], Computed(operation, key, shape, dtypes[key], inputs))
        for key, shape in shapes.items()
    }


def names_in_file(model: nn.Module, tensor: TensorLayout) -> tuple[str, ...]:
    """The names under which a tensor is saved: one, as transformers chooses it among those that are tied.

    Where names of a transformers model share a tensor without being declared tied, it could not tie them again:
    each is saved.
    """
    ignored = pretrained.names_never_saved(model)
    names = [name for name in tensor.names if name not in ignored]
    if len(names) < 2:
        return tuple(names)
    targets = pretrained.tie_targets(model)
    for name in sorted(names):
        if len(names) > 1 and any(re.search(pattern, name) for pattern in targets):
            names.remove(name)
    return tuple(names) if is_pretrained(model) else tuple(names[:1])


def _recorded(name: str, tensor: TensorLayout) -> Recorded:
    return Recorded(Stored(name, tensor.shape, tensor.dtype), to_torch(tensor.dtype))


def _outputs_of(made: Mapping[str, torch.Tensor]) -> dict[str, Output]:
    """What came out of recorded tensors.

    Raises:
        NotStructural: something that is not made of them.
    """
    outputs: dict[str, Output] = {}
    for key, value in made.items():
        if not isinstance(value, Recorded):
            raise NotStructural(f"{key} is computed")
        outputs[key] = Output(key, from_torch(value.dtype, key), value.expression)
    return outputs


class _Followed(torch.Tensor):
    """A tensor without data that knows which of the model's tensors it depends on, whatever was done to them."""

    sources: frozenset[str]

    @staticmethod
    def __new__(cls, meta: torch.Tensor, sources: frozenset[str]) -> _Followed:
        made: _Followed = without_data(cls, tuple(meta.shape), meta.dtype)
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

        flat = tree_map(bare, (args, kwargs or {}))
        made = func(*flat[0], **{**flat[1], **({"device": "meta"} if "device" in flat[1] else {})})
        return tree_map(lambda item: cls(item, frozenset(seen)) if isinstance(item, torch.Tensor) else item, made)


def _followed(name: str, tensor: TensorLayout) -> _Followed:
    return _Followed(torch.empty(tensor.shape, dtype=to_torch(tensor.dtype), device="meta"), frozenset({name}))


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
