"""Compares the values of replicas before anything is taken out of a model.

[Note: Patchworks] Of what several ranks hold each gives a part (:mod:`shardwise.planning.moves.assembly`).
Where their values differ, what is put together is on no rank. Parameters, and what optimizers hold of them, are
equal where gradients are averaged; if they are not, something is wrong, and the ranks say so. Buffers may differ
for good reasons, as the running statistics of BatchNorm do: those of the first rank that holds them count, all of
them, so that they belong together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, TypeVar

import numpy as np
import torch

from shardwise.errors import ConfigError, DisagreementError
from shardwise.execution.moving.reshard import Handover, facts_of, hand_over, landing
from shardwise.execution.ranks.messages import digest_of
from shardwise.execution.ranks.world import World
from shardwise.execution.states.checksum import checksums
from shardwise.layout import place_of
from shardwise.models.view import local_boxes, local_tensor, strided_view
from shardwise.planning.loads.load_plan import OnDiffering, Refuse, TakeFirst
from shardwise.planning.moves.assembly import Common, in_common, shares_of_first
from shardwise.report.names import collapse

T = TypeVar("T")

_SHOWN = 6

_SMALL_BYTES = 4096
"""Tensors up to this size are looked at side by side: one of a few bytes takes as long as one of thousands."""


@dataclass(frozen=True, slots=True)
class _Circle:
    """Ranks that hold the same of several tensors, which are buffers or are not."""

    holders: tuple[int, ...]
    has_buffers: bool

    @property
    def name(self) -> CircleName:
        """What its ranks call it: short, however many they are."""
        return CircleName(len(self.holders), self.has_buffers, digest_of(self.holders))


@dataclass(frozen=True, slots=True)
class CircleName:
    """How many ranks hold the same, whether that is buffers, and which ranks, in a few bytes."""

    size: int
    has_buffers: bool
    holders: bytes


@dataclass(frozen=True)
class Replicas:
    """What this rank holds together with others, by name: the elements, on their device."""

    circles: Mapping[_Circle, Mapping[str, Sequence[torch.Tensor]]]

    @classmethod
    def among(
        cls, tensors: Mapping[str, torch.Tensor], common: Mapping[str, Common], buffers: Collection[str]
    ) -> Replicas:
        """Those among these tensors, in one order on all ranks. ``common`` is what this rank has with others."""
        found: dict[_Circle, dict[str, list[torch.Tensor]]] = {}
        for name, boxes in common.items():
            local, places = local_tensor(tensors[name]), local_boxes(tensors[name], name)
            for box, holders in boxes:
                circle = _Circle(holders, name in buffers)
                part = strided_view(local, place_of(box, places))
                found.setdefault(circle, {}).setdefault(name, []).append(part)
        return cls(found)

    @cached_property
    def _batches(self) -> dict[_Circle, tuple[list[torch.Tensor], list[list[torch.Tensor]]]]:
        """Of each circle, large tensors, and small ones that can be put side by side."""
        found: dict[_Circle, tuple[list[torch.Tensor], list[list[torch.Tensor]]]] = {}
        for circle, of in self.circles.items():
            parts = [part for parts in of.values() for part in parts]
            small: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
            for part in parts:
                if part.nbytes <= _SMALL_BYTES and part.is_contiguous():
                    small.setdefault((part.dtype, part.device), []).append(part.view(-1))
            large = [part for part in parts if part.nbytes > _SMALL_BYTES or not part.is_contiguous()]
            found[circle] = large, list(small.values())
        return found

    def digests(self) -> dict[CircleName, list[int]]:
        """A few numbers for each circle, equal on its ranks where the values are."""
        return {
            circle.name: checksums([*large, *map(torch.cat, small)])
            for circle, (large, small) in self._batches.items()
        }

    def details(self, circles: Collection[CircleName]) -> dict[CircleName, dict[str, list[int]]]:
        """Numbers for each tensor, of these circles."""
        return {
            circle.name: {name: checksums(parts) for name, parts in of.items()}
            for circle, of in self.circles.items()
            if circle.name in circles
        }


DigestWords: TypeAlias = tuple[str, dict[CircleName, list[int]]]
"""What a rank is asked for, and its digests."""

OddCircles: TypeAlias = frozenset[CircleName]
"""The ranks that hold the same, and have different values."""


def settle_replicas(world: World, replicas: Replicas, on_differing_buffers: OnDiffering) -> tuple[str, ...]:
    """Compare what several ranks hold; the names of the buffers that differ, of which the first rank's count.

    Collective: yes. Two meetings at most; the second only where something differs.
    Memory: that of :func:`~shardwise.execution.states.checksum.checksums`.

    Raises:
        ConfigError: ``on_differing_buffers`` is no such mode.
        DisagreementError: naming parameters, or state of optimizers, that differ; buffers that may not.
    """
    odd = world.all_reduce(lambda: tell(replicas, on_differing_buffers), odd_circles)
    return settle_odd(world, replicas, odd, on_differing_buffers)


def odd_circles(asked: Sequence[DigestWords]) -> OddCircles:
    """The circles whose values differ, where all ranks have had this to :func:`tell`.

    Raises:
        DisagreementError: ``on_differing_buffers`` is not the same on all ranks.
    """
    if len({mode for mode, _ in asked}) > 1:
        raise DisagreementError("on_differing_buffers is not the same on all ranks; pass one value on every rank")
    return frozenset(
        circle
        for circle, found in _by_circle([digests for _, digests in asked]).items()
        if len(found) != circle.size or any(digests != found[min(found)] for digests in found.values())
    )


def _by_circle(told: Sequence[Mapping[CircleName, T]]) -> dict[CircleName, dict[int, T]]:
    """What each rank of a circle has told of it, by rank."""
    circles: dict[CircleName, dict[int, T]] = {}
    for rank, found in enumerate(told):
        for circle, value in found.items():
            circles.setdefault(circle, {})[rank] = value
    return circles


def settle_odd(
    world: World, replicas: Replicas, odd: OddCircles, on_differing_buffers: OnDiffering
) -> tuple[str, ...]:
    """The same as :func:`settle_replicas`, where the ranks know the circles whose values differ.

    Collective: yes, where there are such.
    """
    if not odd:
        return ()
    return world.all_reduce(lambda: replicas.details(odd), lambda told: _settled(told, on_differing_buffers))


def _settled(
    details: Sequence[Mapping[CircleName, Mapping[str, list[int]]]], on_differing_buffers: OnDiffering
) -> tuple[str, ...]:
    faults: dict[str, set[int]] = {}
    buffers: dict[str, set[int]] = {}
    for circle, found in sorted(_by_circle(details).items(), key=lambda item: sorted(item[1])):
        first, *others = sorted(found)
        for name in dict.fromkeys(name for numbers in found.values() for name in numbers):
            if differing := {rank for rank in others if found[rank].get(name) != found[first].get(name)}:
                (buffers if circle.has_buffers else faults).setdefault(name, set()).update(differing)
    if faults:
        raise DisagreementError(
            f"{_told(faults)}, and all that is taken out of the model would be a patchwork of them. Parameters "
            "stay equal where every rank begins with the same values and gradients are averaged. An adapter or a "
            "module that was added after sharding is not averaged: add it before (tuning=..., or before "
            "fully_shard), or give all ranks one rank's values (torch.distributed.broadcast) and average its "
            "gradients. Replicas that have drifted apart go on from the last checkpoint"
        )
    if buffers and isinstance(on_differing_buffers, Refuse):
        raise DisagreementError(
            f"{_told(buffers)}. These are buffers, such as running statistics: average them over the ranks, "
            "or pass on_differing_buffers=TakeFirst() for those of the first rank"
        )
    return tuple(buffers)


def require_mode(on_differing_buffers: object) -> None:
    """Raises ConfigError for what is no such mode."""
    if not isinstance(on_differing_buffers, (TakeFirst, Refuse)):
        raise ConfigError(f"on_differing_buffers={on_differing_buffers!r}: pass TakeFirst() or Refuse()")


def tell(replicas: Replicas, on_differing_buffers: OnDiffering) -> DigestWords:
    """What this rank tells of its replicas.

    Raises:
        ConfigError: ``on_differing_buffers`` is no such mode.
    """
    require_mode(on_differing_buffers)
    return repr(on_differing_buffers), replicas.digests()


def _told(differing: Mapping[str, set[int]]) -> str:
    groups = collapse(differing)
    more = f" and {len(groups) - _SHOWN} more" if len(groups) > _SHOWN else ""
    names = ", ".join(pattern for pattern, _ in groups[:_SHOWN]) + more
    ranks = sorted(set().union(*differing.values()))
    who = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    count = f"{len(differing)} tensors have" if len(differing) > 1 else "one tensor has"
    return f"{count} other values on rank {who} than on the first rank that holds the same: {names}"


def equal_on_all(
    world: World,
    tensors: Mapping[str, torch.Tensor],
    buffers: Collection[str],
    on_differing_buffers: OnDiffering,
    *,
    budget_bytes: int,
    device: torch.device,
) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """The tensors, those buffers that differ as copies of the first rank's; and their names.

    Collective: yes.
    Memory: the copies, and ``budget_bytes`` for staging, on ``device``.

    Raises:
        DisagreementError: as of :func:`settle_replicas`; ranks have different tensors.
    """
    told = world.each(lambda: {name: facts_of(tensor, name).boxes for name, tensor in tensors.items()})
    held = {name: tuple(found.get(name, ()) for found in told) for name in tensors}
    replicas = world.together(lambda: Replicas.among(tensors, in_common(held, world.rank), buffers))
    differing = settle_replicas(world, replicas, on_differing_buffers)
    copies = {name: torch.empty_like(tensors[name]) for name in differing}

    def begin() -> list[Handover]:
        return [
            Handover(
                name,
                tensors[name].dtype,
                shares_of_first(held[name]),
                held[name],
                landing(tensors[name], name),
                landing(copy, name),
            )
            for name, copy in copies.items()
        ]

    if differing:
        hand_over(world, world.together(begin), budget_bytes=budget_bytes, device=device)
    return {**tensors, **copies}, differing


def as_bytes(value: object) -> torch.Tensor:
    """A number, or text, as a tensor that is compared like any other."""
    return torch.from_numpy(np.frombuffer(repr(value).encode(), dtype=np.uint8).copy())
