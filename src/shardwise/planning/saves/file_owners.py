"""Assigns files to ranks where each file has one writer. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwise.conversion import Expression
from shardwise.formats.safetensors_header import NewFile
from shardwise.planning.moves.assembly import WantedTensor


def choose_owners(files: Sequence[NewFile], size: int) -> tuple[int, ...]:
    """By file, the rank that writes it: the largest first, each to the rank that has the fewest bytes by then.

    Where there are fewer files than ranks, the owners are spread over all of these, and so over machines.
    """
    count = min(len(files), size)
    load = {number * size // count: 0 for number in range(count)}
    owners = [0] * len(files)
    for number in sorted(range(len(files)), key=lambda item: -files[item].nbytes):
        owner = min(load, key=lambda rank: (load[rank], rank))
        owners[number] = owner
        load[owner] += files[number].nbytes
    return tuple(owners)


def wanted_by_owners(
    files: Sequence[NewFile], owners: Sequence[int], expressions: Mapping[str, Expression], size: int
) -> list[list[WantedTensor]]:
    """For every rank, the tensors of its files, in the order in which they lie in these."""
    return [
        [
            WantedTensor(entry.key, expressions[entry.key], entry.dtype.itemsize, (rank,))
            for file, owner in zip(files, owners, strict=True)
            if owner == rank
            for entry in file.entries
        ]
        for rank in range(size)
    ]
