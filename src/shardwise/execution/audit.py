"""Proves after a load that every element was written once, nothing is on meta, and buffers and ties agree."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from shardwise.conversion.expression import Expression
from shardwise.errors import CoverageError, DisagreementError
from shardwise.execution.reading import Placer
from shardwise.execution.world import OddRanks, World, digest_of
from shardwise.layout import TensorKind
from shardwise.models.torch_words import to_torch
from shardwise.models.view import Held, raw_bytes
from shardwise.planning.load_plan import LoadPlan, Tie
from shardwise.report.names import collapse
from shardwise.tensors import Box, DType, numel


def audit(plan: LoadPlan, written: Mapping[str, int], on_meta: Sequence[str]) -> None:
    """Check that every element of this rank's parameters and persistent buffers was written exactly once.

    ``written`` counts elements by FQN; ``on_meta`` are the names of what has no memory. A plan's copies never write
    an element twice (see [Note: Regions] in :mod:`shardwise.conversion.computed`), so that equal counts mean full
    coverage.

    Raises:
        CoverageError: naming the tensors that were not written in full, or that are still on meta.
    """
    wrong: list[str] = []
    for tensor in plan.layout.saved():
        if isinstance(plan.fills[tensor.fqn], Tie):
            continue
        count = written.get(tensor.fqn, 0)
        if count != tensor.local_numel:
            wrong.append(f"{tensor.fqn}: {count} of {tensor.local_numel} elements written")
    wrong += [f"{name}: still on meta" for name in on_meta]
    if wrong:
        shown = "\n  ".join(pattern for pattern, _ in collapse(wrong)[:20])
        raise CoverageError(
            f"the model is not whole after loading:\n  {shown}\n"
            "A tensor kept as a plain attribute can be registered as a buffer, which buffers=... then computes."
        )


def require_equal_buffers(world: World, held: Sequence[Held]) -> None:
    """Raise on every rank when a non-persistent buffer differs between ranks. Collective: yes.

    Raises:
        DisagreementError: naming the buffers.
    """
    digests = {item.fqn: _digest_of(item.local) for item in held if item.kind is TensorKind.BUFFER}
    if world.all_reduce(lambda: digest_of(sorted(digests.items())), OddRanks.among) is None:
        return
    first = world.from_first(lambda: digests)

    def refuse(told: Sequence[Sequence[str]]) -> None:
        if names := sorted({name for found in told for name in found}):
            raise DisagreementError(
                f"non-persistent buffers differ between ranks: {', '.join(names[:20])}; pass buffers=... with a "
                "callable that computes them"
            )

    world.all_reduce(lambda: [name for name in digests if first.get(name) != digests[name]], refuse)


def _digest_of(tensor: torch.Tensor) -> str:
    flat = raw_bytes(tensor.cpu())
    shape = f"{tuple(tensor.shape)} {tensor.dtype}"
    return hashlib.sha256(shape.encode() + flat.numpy().tobytes()).hexdigest()


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
