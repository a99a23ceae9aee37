"""Compares tensors that are stored under several names."""

from __future__ import annotations

import torch

from shardwise.conversion import Expression
from shardwise.execution.reading.place import Placer
from shardwise.models.dtypes import to_torch
from shardwise.models.view import raw_bytes
from shardwise.planning.loads.load_plan import LoadPlan
from shardwise.tensors import Box, DType, numel

_BLOCK_NUMEL = 1 << 20


def unequal_twins(plan: LoadPlan, placer: Placer, rank: int, size: int) -> list[str]:
    """Names of tensors whose further expressions differ from the first in this rank's part of the rows."""
    reads = plan.reads()
    unequal: list[str] = []
    for name, others in plan.twins.items():
        dtype = plan.layout.by_name[name].dtype
        first = reads[name].expression
        if not all(are_equal(first, other, dtype, placer, rank, size) for other in others):
            unequal.append(name)
    return unequal


def are_equal(first: Expression, second: Expression, dtype: DType, placer: Placer, rank: int, size: int) -> bool:
    """Whether two expressions have bitwise the same values as ``dtype``, in this rank's part of the rows.

    Rows are dealt to the ``size`` ranks in blocks, so that all ranks together read each expression once.
    Memory: two blocks of about a million elements.
    """
    if first.shape != second.shape:
        return False
    rows = first.shape[0] if first.shape else 1
    step = max(1, _BLOCK_NUMEL // max(1, numel(first.shape[1:])))
    for start in range(rank * step, rows, size * step):
        box = (
            Box((start, *[0] * (len(first.shape) - 1)), (min(step, rows - start), *first.shape[1:]))
            if first.shape
            else Box((), ())
        )
        one, other = (placer.values(item, box, to_torch(dtype)) for item in (first, second))
        if not torch.equal(raw_bytes(one), raw_bytes(other)):
            return False
    return True
