"""Conversion rules run on recorded tensors: the rules themselves say which elements go where.

A :class:`Recorded` tensor has no data; its ``expression`` says which stored elements it stands for. Every aten
operation that only moves elements yields another recorded tensor; anything else raises :class:`NotStructural`, and
the caller decides (see :mod:`shardwise.models.conversions.key_conversions`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.conversion import Expression, concat, permute, reshape, slice_dim, stack
from shardwise.models._torch_private import without_data
from shardwise.tensors import numel

aten = torch.ops.aten


class NotStructural(Exception):
    """An operation computes values, or reads them, instead of moving elements."""


class Recorded(torch.Tensor):
    """A tensor without data that stands for an expression over stored tensors."""

    expression: Expression

    @staticmethod
    def __new__(cls, expression: Expression, dtype: torch.dtype) -> Recorded:
        made: Recorded = without_data(cls, expression.shape, dtype)
        made.expression = expression
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Recorded({self.expression})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            raise NotStructural(f"{func}")
        return handler(*args, **(kwargs or {}))


def _same(tensor: Recorded, expression: Expression) -> Recorded:
    return Recorded(expression, tensor.dtype)


def _keep(tensor: Recorded, **_: Any) -> Recorded:
    return _same(tensor, tensor.expression)


def _to_copy(tensor: Recorded, *, dtype: torch.dtype | None = None, **_: Any) -> Recorded:
    if dtype is not None and dtype != tensor.dtype:
        raise NotStructural(f"a cast from {tensor.dtype} to {dtype}")
    return _keep(tensor)


def _view(tensor: Recorded, size: Sequence[int], **_: Any) -> Recorded:
    sizes = list(size)
    if -1 in sizes:
        known = -numel(sizes)
        if known == 0:
            raise NotStructural("a reshape of an empty tensor with an unknown size")
        sizes[sizes.index(-1)] = tensor.numel() // known
    return _same(tensor, reshape(tensor.expression, sizes))


def _unsqueeze(tensor: Recorded, dim: int) -> Recorded:
    shape = list(tensor.shape)
    shape.insert(dim + tensor.ndim + 1 if dim < 0 else dim, 1)
    return _same(tensor, reshape(tensor.expression, shape))


def _squeeze(tensor: Recorded, dims: int | Sequence[int] | None = None) -> Recorded:
    chosen = range(tensor.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {_dim(tensor, dim) for dim in chosen if tensor.shape[dim] == 1}
    return _same(tensor, reshape(tensor.expression, [size for d, size in enumerate(tensor.shape) if d not in gone]))


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
    first, last, _ = slice(start, end).indices(tensor.shape[dim])
    size = max(0, -(-(last - first) // step))
    return _same(tensor, slice_dim(tensor.expression, dim, first if size else 0, size, step))


def _select(tensor: Recorded, dim: int, index: int) -> Recorded:
    dim = _dim(tensor, dim)
    index = index + tensor.shape[dim] if index < 0 else index
    return _squeeze(_same(tensor, slice_dim(tensor.expression, dim, index, 1)), dim)


def _unbind(tensor: Recorded, dim: int = 0) -> list[Recorded]:
    return [_select(tensor, dim, index) for index in range(tensor.shape[dim])]


def _split_with_sizes(tensor: Recorded, sizes: Sequence[int], dim: int = 0) -> list[Recorded]:
    dim = _dim(tensor, dim)
    parts: list[Recorded] = []
    start = 0
    for size in sizes:
        parts.append(_same(tensor, slice_dim(tensor.expression, dim, start, size)))
        start += size
    return parts


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
    aten._reshape_alias.default: lambda tensor, size, stride: _view(tensor, size),
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
