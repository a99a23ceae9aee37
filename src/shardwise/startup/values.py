"""What ranks hold in the end, as fingerprints that tell models apart. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

from shardwise.tensors.boxes import Box
from shardwise.tensors.fingerprint import MODULUS


@dataclass(frozen=True)
class BroughtUp:
    """What a rank holds in the end, and the budget that a load of ours has had.

    ``shards`` are the fingerprints of its parts of tensors that are sharded, to be added over the ranks; ``wholes``
    those of tensors that every rank has.
    """

    host_bytes: int
    device_bytes: int
    budget_bytes: int
    shards: dict[str, int] = field(default_factory=dict)
    wholes: dict[str, int] = field(default_factory=dict)


def run_starts(box: Box, shape: Sequence[int]) -> list[int]:
    """Where the runs of a box begin in the whole tensor, counted in elements; a run is as long as can be."""
    cut = [dim for dim, size in enumerate(box.sizes) if size != shape[dim]]
    outer = cut[-1] if cut else 0
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    places = product(*(range(size) for size in box.sizes[:outer]))
    return [first + sum(n * stride for n, stride in zip(place, strides, strict=False)) for place in places]


def values_of(ranks: Sequence[BroughtUp]) -> dict[str, str]:
    """By name: what the whole tensor is; one that every rank has is not the same on all, or is."""
    found: dict[str, str] = {}
    for name in {name: None for rank in ranks for name in (*rank.shards, *rank.wholes)}:
        wholes = {rank.wholes[name] for rank in ranks if name in rank.wholes}
        total = sum(rank.shards.get(name, 0) for rank in ranks) % MODULUS
        found[name] = f"{next(iter(wholes), total):016x}" if len(wholes) < 2 else "ranks differ"
    return found


def compared(values: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """``same``, or how many tensors are not those of another run, and one of them."""
    names = [*{**ours, **values}]
    differing = [name for name in names if values.get(name) != ours.get(name) or values[name] == "ranks differ"]
    return "same" if not differing else f"{len(differing)} of {len(names)} differ, as {differing[0]}"
