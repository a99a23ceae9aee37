"""Checks of a load: every element is written once, and buffers and tied tensors are equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shardwise.core.errors import KeyMismatchError, RankMismatchError
from shardwise.core.expression import Expression
from shardwise.core.formatting import abbreviate, few_names
from shardwise.core.layout import TensorKind
from shardwise.core.tensors import Box, DType, numel
from shardwise.fsdp.named_tensors import TensorRef, raw_bytes
from shardwise.fsdp.torch_private import to_torch
from shardwise.loading.plan import LoadPlan, Tie
from shardwise.ranks.call_arguments import find_differences
from shardwise.ranks.world import World, repr_digest
from shardwise.transfer.checksums import checksums
from shardwise.transfer.read import ReadExecutor


def audit(plan: LoadPlan, written: Mapping[str, int], on_meta: Sequence[str]) -> None:
    """Check that every element of this rank's parameters and persistent buffers was written exactly once.

    ``written`` counts elements by FQN. ``on_meta`` has the names of tensors without memory. A plan's copies never
    write an element twice (see [Note: Regions] in ``core/regions.py``), so equal counts mean full
    coverage.

    Raises:
        KeyMismatchError: naming the tensors that were not written in full, or that are still on meta.
    """
    wrong: list[str] = []
    for tensor in plan.layout.saved():
        # A tied name shares the storage of the name that is counted.
        if isinstance(plan.fills[tensor.fqn], Tie):
            continue
        count = written.get(tensor.fqn, 0)
        if count != tensor.local_numel:
            wrong.append(f"{tensor.fqn}: {count} of {tensor.local_numel} elements written")
    wrong += [f"{name}: still on meta" for name in on_meta]
    if wrong:
        shown = "\n  ".join(abbreviate(wrong))
        raise KeyMismatchError(
            f"the model is incomplete after loading:\n  {shown}\n"
            "Register a tensor that is a plain attribute as a buffer, and pass buffers=... to compute it"
        )


def require_equal_buffers(world: World, refs: Sequence[TensorRef]) -> None:
    """Raise on every rank when a non-persistent buffer differs between ranks. Collective: yes.

    Raises:
        RankMismatchError: naming the buffers.
    """
    if world.size == 1:
        return
    buffers = {item.fqn: item.local for item in refs if item.kind is TensorKind.NON_PERSISTENT_BUFFER}
    values = checksums(list(buffers.values()))
    sums: dict[str, tuple[tuple[int, ...], torch.dtype, int]] = {}
    for (name, tensor), value in zip(buffers.items(), values, strict=True):
        sums[name] = tuple(tensor.shape), tensor.dtype, value
    # One digest of each rank first. Names and checksums are exchanged only if these differ.
    # Sorted, because modules may register buffers in the order of a set.
    mismatched = world.all_reduce_object(repr_digest(sorted(sums.items())), world.find_mismatched)
    if mismatched is not None:
        names = few_names(find_differences(world, mismatched, sums))
        raise RankMismatchError(
            f"non-persistent buffers differ between ranks: {names}. Pass buffers=... with a callable that computes "
            "them"
        )


_BLOCK_NUMEL = 1 << 20
"""Elements of tied tensors that are compared at once."""


def find_unequal_tied(plan: LoadPlan, executor: ReadExecutor) -> list[str]:
    """Return names of tensors whose other expressions differ from the first in this rank's part of the rows."""
    reads = plan.reads()
    unequal: list[str] = []
    for name, others in plan.duplicates.items():
        dtype = plan.layout.by_name[name].dtype
        first = reads[name].expression
        if not all(are_equal(first, other, dtype, executor) for other in others):
            unequal.append(name)
    return unequal


def are_equal(first: Expression, second: Expression, dtype: DType, executor: ReadExecutor) -> bool:
    """Return whether two expressions have bitwise the same values as ``dtype``, in this rank's part of the rows.

    Blocks of rows are distributed over the executor's ranks, which together read each expression once.
    Memory: two blocks, each of about a million elements, or of one row if it is larger.
    """
    if first.shape != second.shape:
        return False
    rows = first.shape[0] if first.shape else 1
    # An embedding of shape (151936, 4096) has blocks of 256 rows. With 4 ranks, rank 1 compares the rows from 256,
    # 1280, 2304, ... on.
    step = max(1, _BLOCK_NUMEL // max(1, numel(first.shape[1:])))
    world = executor.world
    for start in range(world.rank * step, rows, world.size * step):
        # A tensor without dimensions is one block, which the first rank compares.
        box = Box.whole(first.shape)
        if first.shape:
            box = box.narrow(0, start, min(step, rows - start))
        one, other = executor.read_values([(item, box, to_torch(dtype)) for item in (first, second)])
        if not torch.equal(raw_bytes(one), raw_bytes(other)):
            return False
    return True
