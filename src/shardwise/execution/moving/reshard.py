"""Reshards tensors between ranks: gathers, scatters, or goes from one mesh to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwise.errors import DisagreementError, PlacementError
from shardwise.execution.moving.distribute import LocalTensor
from shardwise.execution.moving.exchange import Traffic, exchange
from shardwise.execution.ranks.world import World
from shardwise.models.view import local_boxes, local_tensor
from shardwise.planning.moves.exchange import WantedBoxes, covers, from_holders, rounds
from shardwise.planning.moves.parcels import Parcel
from shardwise.planning.states.forms import FullState
from shardwise.report.names import collapse
from shardwise.tensors import Box

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Handover:
    """A tensor under way. All but ``mine`` and ``into`` is the same on every rank.

    Attributes:
        name: that of no other.
        dtype: in which it travels and arrives.
        held: the boxes that each rank has, by rank.
        wanted: those that each rank is to have.
        mine: what this rank has; None for nothing.
        into: where it is to lie on this rank; None where nothing is.
    """

    name: str
    dtype: torch.dtype
    held: tuple[tuple[Box, ...], ...]
    wanted: tuple[tuple[Box, ...], ...]
    mine: LocalTensor | None
    into: LocalTensor | None


def landing(tensor: torch.Tensor, name: str) -> LocalTensor:
    """Where a tensor lies on this rank."""
    return LocalTensor(local_tensor(tensor), local_boxes(tensor, name))


def hand_over(world: World, items: Sequence[Handover], *, budget_bytes: int, device: torch.device) -> Traffic:
    """Bring all tensors from where they are to where they are to be. ``device`` is where staging lies.

    Collective: yes.
    Memory: ``budget_bytes``.

    Raises:
        CheckpointError: (or a subclass) the same on every rank, when anything raised on any.
    """
    by_name = {item.name: item for item in items}
    spread = from_holders(
        [WantedBoxes(item.name, item.dtype.itemsize, item.wanted) for item in items], [item.held for item in items]
    )

    def give(parcel: Parcel) -> torch.Tensor:
        item = by_name[parcel.tensor]
        is_held = any(box.intersect(parcel.box) == parcel.box for box in item.held[world.rank])
        return _there(item.mine if is_held else item.into).view(parcel.box)  # what is not has come here before

    def take(parcel: Parcel, values: torch.Tensor) -> None:
        _there(by_name[parcel.tensor].into).view(parcel.box).copy_(values)

    plan = [*rounds(spread.first, budget_bytes), *rounds(spread.then, budget_bytes)]
    dtypes = {item.name: item.dtype for item in items}
    return exchange(world, plan, give, take, dtypes, device, budget_bytes=budget_bytes)


def _there(place: LocalTensor | None) -> LocalTensor:
    assert place is not None, "the plan has this rank give or take what it has no part in"
    return place


def gather(
    world: World,
    tensors: Mapping[str, torch.Tensor],
    form: FullState,
    *,
    budget_bytes: int,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Whole tensors on the CPU, on the ranks that are to have them; on the others none.

    ``tensors`` are of the same names on every rank, shards or whole, and not on meta. What several ranks hold has
    the same values on them.

    Collective: yes.
    Memory: ``budget_bytes``; and the whole tensors, on the ranks that get them.

    Raises:
        DisagreementError: ranks have different tensors.
        PlacementError: ranks do not have, together, all of a tensor.
    """
    told = world.each(lambda: {name: facts_of(tensor, name) for name, tensor in tensors.items()})
    held = world.together(lambda: held_by_rank(tensors, told))
    receivers = form.receivers(world.size)

    def begin() -> tuple[list[Handover], dict[str, torch.Tensor]]:
        made: dict[str, torch.Tensor] = {}
        items: list[Handover] = []
        for name, tensor in tensors.items():
            whole = (Box.whole(tuple(tensor.shape)),)
            into = None
            if world.rank in receivers:
                made[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                into = landing(made[name], name)
            wanted = tuple(whole if rank in receivers else () for rank in range(world.size))
            items.append(Handover(name, tensor.dtype, held[name], wanted, landing(tensor, name), into))
        return items, made

    items, made = world.together(begin)
    hand_over(world, items, budget_bytes=budget_bytes, device=device)
    return made


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What one rank tells of a tensor: all but the boxes is the same on every rank."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...]


def facts_of(tensor: torch.Tensor, name: str) -> TensorFacts:
    """What this rank tells of a tensor."""
    return TensorFacts(tuple(tensor.shape), str(tensor.dtype), boxes_of(tensor, name))


def boxes_of(tensor: torch.Tensor, name: str) -> tuple[Box, ...]:
    """The boxes of a tensor that this rank has."""
    return tuple(item.box for item in local_boxes(tensor, name))


def require_same_tensors(told: Sequence[Mapping[str, TensorFacts]]) -> None:
    """Raise when what ranks tell is not of the same tensors.

    Raises:
        DisagreementError: naming tensors.
    """
    first = {name: (item.shape, item.dtype) for name, item in told[0].items()}
    for rank, found in enumerate(told):
        mine = {name: (item.shape, item.dtype) for name, item in found.items()}
        if list(mine.items()) == list(first.items()):
            continue
        names = [name for name in dict.fromkeys([*first, *mine]) if mine.get(name) != first.get(name)]
        raise DisagreementError(
            f"rank {rank} has other tensors than rank 0 (absent, or of another shape, dtype or order): "
            f"{_few(names or list(mine))}; build the model and its optimizers alike on every rank"
        )


def held_by_rank(
    tensors: Mapping[str, torch.Tensor], told: Sequence[Mapping[str, TensorFacts]]
) -> dict[str, tuple[tuple[Box, ...], ...]]:
    """The boxes of every tensor by rank, when all ranks have the same tensors and all elements of each.

    Raises:
        DisagreementError: ranks have different tensors.
        PlacementError: ranks do not have, together, all of a tensor.
    """
    require_same_tensors(told)
    held = {name: tuple(found[name].boxes for found in told) for name in tensors}
    lacking = [name for name, tensor in tensors.items() if not covers(tuple(tensor.shape), held[name])]
    if lacking:
        raise PlacementError(
            f"the ranks do not hold, together, each element of {_few(lacking)}; pass a process_group that has "
            "all ranks of the tensors' meshes"
        )
    return held


def _few(names: Sequence[str]) -> str:
    groups = collapse(names)
    more = f" and {len(groups) - _SHOWN} more" if len(groups) > _SHOWN else ""
    return ", ".join(pattern for pattern, _ in groups[:_SHOWN]) + more
