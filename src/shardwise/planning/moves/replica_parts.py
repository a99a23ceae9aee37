"""Divides a tensor that several ranks hold among them, each element to exactly one. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from shardwise.planning.moves.exchange import SMALL_BYTES, even_parts
from shardwise.tensors import Box

Boxes: TypeAlias = tuple[Box, ...]
"""Of one tensor, without overlap."""


def own_share(box: Box, replica: int, replicas: int, turn: int, itemsize: int) -> Boxes:
    """The part of a box that one of its holders gives: an even part of the rows, or all or nothing of a small box.

    Args:
        box: what all of them hold.
        replica: which of the holders this is: 0 and up, below ``replicas``.
        replicas: how many hold the box.
        turn: decides who gives a box of at most 64 KiB. Successive numbers for the tensors of a model, so that the
            holders take turns.
        itemsize: bytes of an element.
    """
    if not box.numel:
        return ()
    if replicas == 1:
        return (box,)
    if box.numel * itemsize <= SMALL_BYTES:
        return (box,) if turn % replicas == replica else ()
    parts = list(even_parts(box, replicas))
    return tuple(part for index, part in enumerate(parts) if index * replicas // len(parts) == replica)


def shares_by_rank(held: Sequence[Boxes], turn: int, itemsize: int) -> tuple[Boxes, ...]:
    """What each rank gives of a tensor, from what each holds of it.

    Ranks hold the same box or boxes that do not overlap, as the ranks of a mesh do.
    """
    holders: dict[Box, list[int]] = {}
    for rank, boxes in enumerate(held):
        for box in boxes:
            holders.setdefault(box, []).append(rank)
    given: list[list[Box]] = [[] for _ in held]
    for box, ranks in holders.items():
        for replica, rank in enumerate(ranks):
            given[rank] += own_share(box, replica, len(ranks), turn, itemsize)
    return tuple(map(tuple, given))


def shares_of_first(held: Sequence[Boxes]) -> tuple[Boxes, ...]:
    """What each rank gives where all of a box is to come from the first rank that holds it."""
    seen: set[Box] = set()
    given: list[Boxes] = []
    for boxes in held:
        given.append(tuple(box for box in boxes if box not in seen))
        seen.update(boxes)
    return tuple(given)


Common: TypeAlias = tuple[tuple[Box, tuple[int, ...]], ...]
"""Boxes that a rank holds together with others, each with all ranks that hold it, in order."""


def in_common(held: Mapping[str, Sequence[Boxes]], rank: int) -> dict[str, Common]:
    """What a rank holds together with others, of tensors by name. ``held`` is what each rank holds of them."""
    known: dict[int, Common] = {}
    found: dict[str, Common] = {}
    for name, boxes_by_rank in held.items():
        if id(boxes_by_rank) not in known:  # one value for all that lie alike
            known[id(boxes_by_rank)] = _in_common(boxes_by_rank, rank)
        if known[id(boxes_by_rank)]:
            found[name] = known[id(boxes_by_rank)]
    return found


def _in_common(held: Sequence[Boxes], rank: int) -> Common:
    found: list[tuple[Box, tuple[int, ...]]] = []
    for box in held[rank]:
        holders = tuple(other for other, boxes in enumerate(held) if box in boxes)
        if len(holders) > 1:
            found.append((box, holders))
    return tuple(found)
