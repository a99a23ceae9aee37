"""Chooses the ranks whose values become the model's, and who sends them to whom.

A rank has a tensor *live*, with values, or on meta, without. Every tensor is decided for itself, so that a model
that is live everywhere, on one rank, on one rank of each machine, in part or nowhere is the same case.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from shardwise.errors import DisagreementError
from shardwise.report.names import collapse, few_names, shown_ranks

_SHOWN = 8


ValuesFrom: TypeAlias = Literal["any", "all_ranks", "first_rank", "first_rank_per_node"]
"""Ranks whose values count.

``"any"``: ranks that have values keep their own, and the others get those of the nearest rank that has them. Values
that differ between ranks are those of the lowest rank that has the most of the model; the report names them.
``"all_ranks"``: each rank's own; an error if one has none, or values that differ. ``"first_rank"``: rank 0's; an
error if it has none where another has some. ``"first_rank_per_node"``: those of each machine's lowest rank that
has them; an error if a machine has none, or values that differ.
"""

NOBODY: tuple[int, ...] = ()
"""In place of the sources of a tensor that is on meta everywhere."""


@dataclass(frozen=True, slots=True)
class Item:
    """What all ranks must have alike about a tensor. ``names`` has several where modules share it."""

    names: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]
    requires_grad: bool
    grad_dtype: str = ""
    """What gradients may be, where that has been set."""

    def __str__(self) -> str:
        tied = f", tied to {', '.join(self.names[1:])}" if len(self.names) > 1 else ""
        trained = ", trained" if self.requires_grad else ""
        gradients = f", with gradients of {self.grad_dtype}" if self.grad_dtype else ""
        return f"a {self.kind} of shape {self.shape}{trained}{gradients}{tied}"


def digest(items: Sequence[object]) -> bytes:
    """The same on two ranks when their items are, as they are printed."""
    return hashlib.sha256(repr(items).encode()).digest()


def require_alike(items_by_rank: Sequence[Sequence[Item]]) -> None:
    """Raise when a rank's items are not those of rank 0.

    Raises:
        DisagreementError: naming tensors, and what they are on either rank.
    """
    first = {item.names[0]: item for item in items_by_rank[0]}
    for rank, items in enumerate(items_by_rank):
        mine = {item.names[0]: item for item in items}
        lines = [
            f"{name} is {mine.get(name, 'absent')} on rank {rank}, {first.get(name, 'absent')} on rank 0"
            for name in dict.fromkeys([*first, *mine])
            if first.get(name) != mine.get(name)
        ]
        if not lines and list(first) != list(mine):
            lines = [f"the order of the tensors on rank {rank} is not that on rank 0"]
        if lines:
            shown = "\n  ".join(pattern for pattern, _ in collapse(lines)[:_SHOWN])
            raise DisagreementError(
                f"the ranks hold different models:\n  {shown}\nBuild the model from one configuration on every "
                "rank, with the same weights tied and frozen."
            )


def choose_sources(
    names: Sequence[str], live_by_rank: Sequence[Sequence[bool]], values_from: ValuesFrom, nodes: Sequence[str]
) -> list[tuple[int, ...]]:
    """For every tensor, the source of each rank, or ``NOBODY``. ``nodes`` are the machines by rank.

    Raises:
        DisagreementError: when ranks that ``values_from`` relies on have no values.
    """
    most = [sum(live) for live in live_by_rank]
    made: dict[tuple[bool, ...], tuple[int, ...]] = {}
    lacking: dict[str, list[str]] = {}
    chosen: list[tuple[int, ...]] = []
    for name, live in zip(names, zip(*live_by_rank, strict=True), strict=True):
        if not any(live):
            chosen.append(NOBODY)
            continue
        if live not in made:
            made[live] = _sources(live, most, values_from, nodes)
        if not made[live]:
            lacking.setdefault(_who([rank for rank, has in enumerate(live) if not has]), []).append(name)
        chosen.append(made[live])
    if lacking:
        lines = [f"{who}: {pattern}" for who, found in lacking.items() for pattern, _ in collapse(found)[:_SHOWN]]
        raise DisagreementError(
            f"{values_from} relies on values that ranks do not have:\n  " + "\n  ".join(lines) + "\nAnyone() takes "
            "them from the ranks that have them."
        )
    return chosen


def _sources(
    live: Sequence[bool], most: Sequence[int], values_from: ValuesFrom, nodes: Sequence[str]
) -> tuple[int, ...]:
    having = [rank for rank, has in enumerate(live) if has]
    match values_from:
        case "first_rank":
            having = having[:1] if live[0] else []
        case "all_ranks":
            having = having if all(live) else []
        case "first_rank_per_node":
            firsts = {nodes[rank]: rank for rank in reversed(having)}
            having = sorted(firsts.values()) if set(firsts) == set(nodes) else []
        case "any":
            pass
    if not having:
        return NOBODY
    leader = leading(having, most)
    near = {nodes[rank]: rank for rank in reversed(having)}
    return tuple(rank if rank in having else near.get(nodes[rank], leader) for rank in range(len(live)))


def leading(ranks: Sequence[int], most: Sequence[int]) -> int:
    """The rank whose values count where ranks differ: that with the most of the model, the lowest of these."""
    return min(ranks, key=lambda rank: (-most[rank], rank))


def settle_differences(
    names: Sequence[str],
    chosen: Sequence[tuple[int, ...]],
    sums_by_rank: Sequence[Mapping[str, int]],
    most: Sequence[int],
    values_from: ValuesFrom,
) -> tuple[list[tuple[int, ...]], dict[str, int]]:
    """The sources again, those of tensors whose values differ being one rank; and which rank that is, by name.

    ``sums_by_rank`` has a checksum of every tensor that has several sources, on each of them.

    Raises:
        DisagreementError: when values differ that ``values_from`` takes to be equal.
    """
    settled: list[tuple[int, ...]] = []
    taken: dict[str, int] = {}
    for name, source_of in zip(names, chosen, strict=True):
        sources = sorted(set(source_of))
        if len(sources) > 1 and len({sums_by_rank[rank][name] for rank in sources}) > 1:
            taken[name] = leading(sources, most)
            source_of = (taken[name],) * len(source_of)
        settled.append(source_of)
    if taken and values_from != "any":
        raise DisagreementError(
            f"{len(taken)} tensors have other values on some ranks than on others: {few_names(taken)}; seed the "
            "ranks alike, or pass values_from='first_rank' for those of rank 0"
        )
    return settled, taken


def settle_dtypes(
    names: Sequence[str], chosen: Sequence[tuple[int, ...]], dtypes_by_rank: Sequence[Sequence[str]]
) -> list[str]:
    """The dtype of every tensor on all ranks.

    It is that of the ranks that receive the tensor, to which its source casts; but 8-bit floats, integers and
    booleans mean what their bits say, and are never cast. dtypes are named as torch names them.

    Raises:
        DisagreementError: when ranks have a tensor in dtypes of which none can be everybody's.
    """
    settled: list[str] = []
    faults: list[str] = []
    for index, (name, source_of) in enumerate(zip(names, chosen, strict=True)):
        found = [dtypes[index] for dtypes in dtypes_by_rank]
        sources = set(source_of) or set(range(len(found)))
        stored = {found[rank] for rank in sources}
        wanted = {found[rank] for rank in range(len(found)) if rank not in sources} or stored
        if len(stored) == 1 and (is_exact(*stored) or stored == wanted):
            settled.append(*stored)
        elif len(stored) == 1 and len(wanted) == 1 and not is_exact(*wanted):
            settled.append(*wanted)
        else:
            faults.append(
                f"{name} is "
                + ", ".join(f"{dtype} on {_who(_ranks(found, dtype))}" for dtype in sorted(set(found)))
            )
    if faults:
        shown = "\n  ".join(pattern for pattern, _ in collapse(faults)[:_SHOWN])
        raise DisagreementError(f"the ranks hold tensors in different dtypes:\n  {shown}\nBuild them in one dtype.")
    return settled


def is_exact(dtype: str) -> bool:
    """Whether a dtype's values are never cast: all but floating and complex numbers of 16 bits and more."""
    return dtype.startswith(("float8", "float4")) or not dtype.startswith(("float", "bfloat", "complex"))


def _ranks(found: Sequence[str], dtype: str) -> list[int]:
    return [rank for rank, other in enumerate(found) if other == dtype]


def _who(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {shown_ranks(ranks)}"
