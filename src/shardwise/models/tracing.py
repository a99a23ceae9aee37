"""Tracing of transformers' conversions on tensors without data.

[Note: Memo] A model repeats a few kinds of layers many times. A converter is traced once for each name with masked
numbers and each combination of source shapes. Equal layers get the same expressions over their own keys. If these
do not have the shapes of the model's tensors, the layer is traced separately.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import nn

from shardwise.core.computed import Computed, ComputedBlock, FullOperation, computes
from shardwise.core.errors import ConfigError
from shardwise.core.expression import (
    Expression,
    Stored,
    concat,
    iter_stored_leaves,
    permute,
    reshape,
    slice_dim,
    stack,
    substitute,
)
from shardwise.core.formatting import few_names
from shardwise.core.layout import ModelLayout
from shardwise.core.tensors import numel
from shardwise.files.urls import shown
from shardwise.fsdp.torch_private import from_torch, make_without_memory, to_torch, tree_leaves

GetDtype: TypeAlias = Callable[[str], torch.dtype]
"""Returns the dtype that a tensor gets, by its name."""

_COMPUTING_FACTOR = 2
"""Memory of a conversion that computes, relative to its inputs: inputs and results."""

_NUMBER = re.compile(r"(\d+)")

_MAX_DIGITS = 9
"""Of the number of an element of a list."""

_SHOWN = 6
"""Absent numbers in a message."""


@dataclass
class Conversion:
    """A converter, the name of its first result, and its keys by source pattern."""

    target: str
    converter: Any
    sources: dict[str, list[str]] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        return [key for keys in self.sources.values() for key in keys]

    @property
    def label(self) -> str:
        """The names of the operations."""
        return " → ".join(type(operation).__name__ for operation in self.converter.operations)

    @property
    def targets(self) -> list[str]:
        """The names of the results, derived from the first."""
        first, *_ = patterns = self.converter.target_patterns
        return [self.target.replace(first, pattern) for pattern in patterns]


def trace_conversions(
    model: nn.Module,
    layout: ModelLayout,
    stored: Mapping[str, Stored],
    get_dtype: GetDtype,
    conversions: Iterable[Conversion],
) -> Iterator[tuple[Conversion, dict[str, Expression], str]]:
    """Yield each conversion with its results by name, or with a sentence on why it has none."""
    tracer = _Tracer(model, layout, stored, get_dtype)
    for conversion in conversions:
        if why := _find_index_gap(conversion):
            yield conversion, {}, why
            continue
        try:
            expressions = tracer.trace(conversion)
        except ConfigError:  # a private name that this torch lacks
            raise
        except Exception as error:  # converters raise anything, which is reported with all other faults
            keys = conversion.keys
            several = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            yield conversion, {}, f"{conversion.target} from {keys[0]}{several} by {conversion.label}: {error}"
        else:
            yield conversion, expressions, ""


def _find_index_gap(conversion: Conversion) -> str | None:
    """Return a sentence if the keys of a list (experts, for example) are not numbered 0, 1, 2, ... without gaps."""
    for keys in conversion.sources.values():
        if len(keys) < 2:
            continue
        # experts.0.up, experts.1.up and experts.3.up are the columns (experts. three times), (0, 1, 3), (.up three
        # times). They are a list if only one column varies, and it has numbers.
        columns = list(zip(*(_NUMBER.split(key) for key in keys), strict=False))
        varying = [column for column in columns if len(set(column)) > 1]
        if len(varying) != 1 or not all(token.isdecimal() for token in varying[0]):
            continue
        longest = max(varying[0], key=len)
        if len(longest) > _MAX_DIGITS:
            key = shown(keys[varying[0].index(longest)])
            return f"{conversion.target}: its source {key} has a number of more than {_MAX_DIGITS} digits"
        numbers = sorted(int(token) for token in varying[0])
        if numbers != list(range(len(numbers))):
            # Only the first few: keys are untrusted, and the largest number may be far above the others.
            present = frozenset(numbers)
            absent = [*islice((number for number in range(numbers[-1]) if number not in present), _SHOWN + 1)]
            text = f"{absent[:_SHOWN]}{' and more' * (len(absent) > _SHOWN)}"
            return f"{conversion.target}: its sources, such as {keys[0]}, are numbered with gaps: {text} absent"
    return None


class _Tracer:
    """Runs converters on recorded tensors, once for equal layers (see [Note: Memo])."""

    def __init__(
        self, model: nn.Module, layout: ModelLayout, stored: Mapping[str, Stored], get_dtype: GetDtype
    ) -> None:
        self.facade = ModelFacade(model, layout)
        self.layout = layout
        self.get_dtype = get_dtype
        self.stored = stored
        self.memo: dict[object, tuple[dict[str, Expression], Conversion]] = {}

    def trace(self, conversion: Conversion) -> dict[str, Expression]:
        shapes: list[Hashable] = []
        for pattern, keys in conversion.sources.items():
            tensors = [self.stored[key] for key in keys]
            shapes.append((pattern, tuple((tensor.shape, tensor.dtype) for tensor in tensors)))
        # Equal for equal layers: layers.0.experts.up and layers.7.experts.up are both layers.#.experts.up.
        kind = (id(conversion.converter), _NUMBER.sub("#", conversion.target), tuple(shapes))
        if kind in self.memo:
            # Layers with equal sources may still have different tensors (an odd last layer, say), so shapes are
            # compared with the model's.
            expressions = self.reuse(*self.memo[kind], conversion)
            if expressions is not None and all(self.fits(name, item) for name, item in expressions.items()):
                return expressions
        expressions = self.record(conversion)
        # A node that computes runs the converter with the names of this layer, so it is of no use to others.
        if not any(map(computes, expressions.values())):
            self.memo[kind] = (expressions, conversion)
        return expressions

    def fits(self, name: str, expression: Expression) -> bool:
        tensor = self.layout.by_name.get(name)
        return tensor is not None and tensor.shape == expression.shape

    def reuse(
        self, expressions: dict[str, Expression], first: Conversion, conversion: Conversion
    ) -> dict[str, Expression] | None:
        """Return the results of an equal layer for the keys of this one, or None if names collide."""
        # For example the target of the first is layers.0.experts.up, and this one's is layers.7.experts.up: its
        # result layers.0.experts.down has layers.0.experts in common with the target, and is layers.7.experts.down.
        leaves = {old: self.stored[new] for old, new in zip(first.keys, conversion.keys, strict=True)}
        words_of_target = conversion.target.split(".")
        renamed: dict[str, Expression] = {}
        for name, expression in expressions.items():
            words, origin = name.split("."), first.target.split(".")
            common = next((i for i, (a, b) in enumerate(zip(words, origin, strict=False)) if a != b), len(words))
            renamed[".".join(words_of_target[:common] + words[common:])] = substitute(expression, leaves)
        return renamed if len(renamed) == len(expressions) else None

    def record(self, conversion: Conversion) -> dict[str, Expression]:
        dtype = self.get_dtype(conversion.target)
        recorded = [Recorded(self.stored[key], dtype) for key in conversion.keys]
        # First as movements of elements, of which any slice can be read. A converter that computes becomes one
        # node, which needs all of its sources whole.
        try:
            return get_expressions(self.run(conversion, recorded))
        except NotStructural:
            return self.trace_computed(conversion, dtype)

    def run(self, conversion: Conversion, tensors: Iterable[torch.Tensor]) -> dict[str, Any]:
        """Run the converter on tensors in the order of its keys."""
        following = iter(tensors)
        sources = {pattern: list(islice(following, len(keys))) for pattern, keys in conversion.sources.items()}
        return convert(conversion.converter, conversion.target, sources, self.facade)

    def trace_computed(self, conversion: Conversion, dtype: torch.dtype) -> dict[str, Expression]:
        """Return the converter as one node that computes. A run on meta tensors gives the shapes."""
        inputs = tuple(self.stored[key] for key in conversion.keys)
        meta = self.run(conversion, [torch.empty(item.shape, dtype=dtype, device="meta") for item in inputs])
        nbytes = _COMPUTING_FACTOR * sum(numel(item.shape) * item.dtype.itemsize for item in inputs)
        shapes = tuple(item.shape for item in inputs)
        outputs = {name: tuple(tensor.shape) for name, tensor in meta.items()}
        operation = _ConverterRun(conversion.label, shapes, outputs, nbytes, self, conversion, dtype)
        return {
            name: Computed(operation, name, shape, from_torch(meta[name].dtype, name), inputs)
            for name, shape in outputs.items()
        }


@dataclass(frozen=True, slots=True, eq=False)
class _ConverterRun(FullOperation):
    """A converter that computes. Its stored tensors are cast to ``dtype`` first."""

    tracer: _Tracer
    conversion: Conversion
    dtype: torch.dtype

    def evaluate(self, _block: ComputedBlock, values: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return self.tracer.run(self.conversion, [value.to(self.dtype) for value in values])


class ModelFacade:
    """The model as converters see it: with unsharded meta tensors under canonical names."""

    def __init__(self, model: nn.Module, layout: ModelLayout, conversions: Sequence[Any] = ()) -> None:
        self._model = model
        self._layout = layout
        self._weight_conversions = list(conversions)

    def get_parameter(self, name: str) -> torch.Tensor:
        tensor = self._layout.by_name.get(name)
        if tensor is None:
            raise AttributeError(f"the model has no parameter {name}")
        return torch.empty(tensor.shape, dtype=to_torch(tensor.dtype), device="meta")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


aten = torch.ops.aten


class NotStructural(Exception):
    """An operation computes or reads values instead of moving elements."""


class Recorded(torch.Tensor):
    """A tensor without data that records the expression it is made by."""

    expression: Expression

    @staticmethod
    def __new__(cls, expression: Expression, dtype: torch.dtype) -> Recorded:
        tensor: Recorded = make_without_memory(cls, expression.shape, dtype)
        tensor.expression = expression
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Recorded({self.expression})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
            names = sorted({leaf.key for tensor in tensors for leaf in iter_stored_leaves(tensor.expression)})
            raise NotStructural(f"{func} of {few_names(names)}")
        return handler(*args, **(kwargs or {}))


def get_expressions(results: Mapping[str, Any]) -> dict[str, Expression]:
    """Return the recorded expressions of results, by name.

    Raises:
        NotStructural: one is computed.
    """
    if computed := [name for name, item in results.items() if not isinstance(item, Recorded)]:
        raise NotStructural(f"{computed[0]} is computed")
    return {name: item.expression for name, item in results.items()}


def _same(tensor: Recorded, expression: Expression) -> Recorded:
    return Recorded(expression, tensor.dtype)


def _keep(tensor: Recorded, **_: Any) -> Recorded:
    return _same(tensor, tensor.expression)


def _to_copy(tensor: Recorded, *, dtype: torch.dtype | None = None, **_: Any) -> Recorded:
    if dtype is not None and dtype != tensor.dtype:
        raise NotStructural(f"a cast from {tensor.dtype} to {dtype}")
    return _keep(tensor)


# _reshape_alias also passes strides, which follow from the size.
def _view(tensor: Recorded, size: Sequence[int], *_strides: Any, **_: Any) -> Recorded:
    sizes = list(size)
    if -1 in sizes:
        known = -numel(sizes)  # (4, -1, 2): 8 elements, times -1
        if known == 0:
            raise NotStructural("a reshape of an empty tensor with an unknown size")
        sizes[sizes.index(-1)] = tensor.numel() // known
    return _same(tensor, reshape(tensor.expression, sizes))


def _unsqueeze(tensor: Recorded, dim: int) -> Recorded:
    shape = list(tensor.shape)
    shape.insert(dim + tensor.ndim + 1 if dim < 0 else dim, 1)
    return _same(tensor, reshape(tensor.expression, shape))


def _squeeze(tensor: Recorded, dims: int | Sequence[int] | None = None) -> Recorded:
    if dims is None:
        dims = range(tensor.ndim)
    elif isinstance(dims, int):
        dims = [dims]
    removed = {_dim(tensor, dim) for dim in dims if tensor.shape[dim] == 1}
    shape = [size for dim, size in enumerate(tensor.shape) if dim not in removed]
    return _same(tensor, reshape(tensor.expression, shape))


def _permute(tensor: Recorded, dims: Sequence[int]) -> Recorded:
    return _same(tensor, permute(tensor.expression, [_dim(tensor, dim) for dim in dims]))


def _transpose(tensor: Recorded, dim0: int, dim1: int) -> Recorded:
    dims = list(range(tensor.ndim))
    first, second = _dim(tensor, dim0), _dim(tensor, dim1)
    dims[first], dims[second] = second, first
    return _permute(tensor, dims)


def _t(tensor: Recorded) -> Recorded:
    return _keep(tensor) if tensor.ndim < 2 else _transpose(tensor, 0, 1)


def _slice(
    tensor: Recorded, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Recorded:
    dim = _dim(tensor, dim)
    # For example indices 1, 4, 7 of a dimension of 9: start 1, end 9, step 3, and ceil(8 / 3) = 3 of them.
    first, last, _ = slice(start, end).indices(tensor.shape[dim])
    size = max(0, -(-(last - first) // step))  # rounded up
    return _same(tensor, slice_dim(tensor.expression, dim, first if size else 0, size, step))


def _select(tensor: Recorded, dim: int, index: int) -> Recorded:
    dim = _dim(tensor, dim)
    index = index + tensor.shape[dim] if index < 0 else index
    return _squeeze(_same(tensor, slice_dim(tensor.expression, dim, index, 1)), dim)


def _unbind(tensor: Recorded, dim: int = 0) -> list[Recorded]:
    return [_select(tensor, dim, index) for index in range(tensor.shape[dim])]


def _split_with_sizes(tensor: Recorded, sizes: Sequence[int], dim: int = 0) -> list[Recorded]:
    dim = _dim(tensor, dim)
    pieces: list[Recorded] = []
    start = 0
    for size in sizes:
        pieces.append(_same(tensor, slice_dim(tensor.expression, dim, start, size)))
        start += size
    return pieces


def _split(tensor: Recorded, size: int, dim: int = 0) -> list[Recorded]:
    total = tensor.shape[dim]
    sizes = [min(size, total - start) for start in range(0, total, size)] or [0]
    return _split_with_sizes(tensor, sizes, dim)


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Recorded:
    recorded = _all_recorded(tensors)
    return _same(recorded[0], concat([item.expression for item in recorded], _dim(recorded[0], dim)))


def _stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> Recorded:
    recorded = _all_recorded(tensors)
    dim = dim + recorded[0].ndim + 1 if dim < 0 else dim
    return _same(recorded[0], stack([item.expression for item in recorded], dim))


def _all_recorded(tensors: Sequence[torch.Tensor]) -> list[Recorded]:
    recorded = [item for item in tensors if isinstance(item, Recorded)]
    if len(recorded) != len(tensors):
        raise NotStructural("stored elements joined with computed ones")
    if len({item.dtype for item in recorded}) > 1:
        raise NotStructural("tensors of different dtypes joined")
    return recorded


def _dim(tensor: torch.Tensor, dim: int) -> int:
    return dim + tensor.ndim if dim < 0 else dim


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.alias.default: _keep,
    aten.clone.default: _keep,
    aten.detach.default: _keep,
    aten.contiguous.default: _keep,
    aten.lift_fresh.default: _keep,
    aten._to_copy.default: _to_copy,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten._reshape_alias.default: _view,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.unbind.int: _unbind,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
}


def convert(converter: Any, target: str, sources: Mapping[str, list[torch.Tensor]], model: Any) -> dict[str, Any]:
    """Run a converter on full tensors, by source pattern. Return the results by full name."""
    fresh = deepcopy(converter)  # it collects the tensors, and is used for every layer
    for pattern, tensors in sources.items():
        for tensor in tensors:
            fresh.add_tensor(target, pattern, pattern, tensor)
    results = fresh.convert(target, model=model, config=getattr(model, "config", None))
    return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}
