"""Says a strided view of a tensor in nodes that move elements."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.conversion.expression import Expression, concat, permute, reshape, slice_dim
from shardwise.tensors import Strided


def view(source: Expression, strided: Strided) -> Expression:
    """``torch.as_strided`` of a flat source, where no element is seen twice.

    The steps of the widest stride become rows of a reshape, the next their columns, and so on inwards. Where the
    last row would end beyond the source, it is taken by itself.

    Raises:
        ValueError: for a view that reaches beyond the source, or sees elements twice.
    """
    if len(source.shape) != 1 or strided.stop > source.shape[0]:
        raise ValueError(f"{strided} is no view of {source.shape} elements")
    if strided.numel == 0:
        return reshape(slice_dim(source, 0, 0, 0), strided.sizes)
    steps = [
        (stride, size, dim)
        for dim, (size, stride) in enumerate(zip(strided.sizes, strided.strides, strict=True))
        if size > 1
    ]
    steps.sort(key=lambda step: step[0], reverse=True)
    made = _rows(source, strided.offset, [(stride, size) for stride, size, _ in steps])
    order = [dim for _, _, dim in steps]
    ordered = permute(made, [order.index(dim) for dim in sorted(order)])
    return reshape(ordered, strided.sizes)


def _rows(source: Expression, offset: int, steps: Sequence[tuple[int, int]]) -> Expression:
    """The last dimension of the source replaced by one for each (stride, size), widest stride first."""
    *outer, length = source.shape
    dim = len(outer)
    if not steps:
        return reshape(slice_dim(source, dim, offset, 1), outer)
    (stride, size), *inner = steps
    if not inner:
        return slice_dim(source, dim, offset, size, stride)
    reach = sum(step * (count - 1) for step, count in inner)
    if stride <= reach:
        raise ValueError(f"steps of {stride} see elements twice")
    # Rows of one stride each, from so far before the first element that the last row ends within the source. (One
    # row can always be had so, which ends this.)
    start = min(offset, length - size * stride)
    if start >= 0 and offset - start + reach < stride:
        rows = reshape(slice_dim(source, dim, start, size * stride), (*outer, size, stride))
        return _rows(rows, offset - start, inner)
    return concat(
        [
            _rows(source, offset, [(stride, size - 1), *inner]),
            _rows(source, offset + stride * (size - 1), [(stride, 1), *inner]),
        ],
        dim,
    )
