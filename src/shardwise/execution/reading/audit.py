"""Proves after a load that every element was written once, nothing is on meta, and buffers agree."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from shardwise.errors import CoverageError, DisagreementError
from shardwise.execution.ranks.messages import OddRanks, digest_of
from shardwise.execution.ranks.world import World
from shardwise.layout import TensorKind
from shardwise.models.view import Held, raw_bytes
from shardwise.planning.loads.load_plan import LoadPlan, Tie
from shardwise.report.names import collapse


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
    digests = {item.fqn: _digest(item.local) for item in held if item.kind is TensorKind.BUFFER}
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


def _digest(tensor: torch.Tensor) -> str:
    flat = raw_bytes(tensor.cpu())
    shape = f"{tuple(tensor.shape)} {tensor.dtype}"
    return hashlib.sha256(shape.encode() + flat.numpy().tobytes()).hexdigest()
