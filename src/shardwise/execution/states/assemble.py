"""Assembles tensors of a checkpoint out of what all ranks hold, by one exchange."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

import torch

from shardwise.execution.moving.exchange import Exchange, TakePieces
from shardwise.execution.ranks.world import World
from shardwise.execution.states.given_parts import Giver
from shardwise.models.view import strided_view
from shardwise.planning.moves.parcels import Parcel, Round
from shardwise.tensors import Box

Room = Callable[[str, Box], torch.Tensor]
"""Flat memory for the elements of a tensor's box, in the dtype in which they are wanted."""


def assemble(
    world: World,
    rounds: Sequence[Round],
    giver: Giver,
    room: Room,
    dtype_of: Mapping[str, torch.dtype],
    device: torch.device,
) -> Generator[Round]:
    """Put boxes together in the memory that ``room`` has for them on their targets; yields each complete round.

    A generator that all ranks go through alike. Closing it on all ranks after the same round is no fault.

    Args:
        world: the ranks.
        rounds: the same on every rank.
        giver: this rank's shares.
        room: called for each parcel that this rank gets, before the parcel's round is yielded.
        dtype_of: by key, the dtype in which a tensor travels and arrives; what is given is cast.
        device: where staging lies: of the kind that the process group's backend moves.

    Collective: yes.
    Memory: two buckets of those that the rounds were planned for.

    Raises:
        CheckpointError: (or a subclass) the same on every rank, when packing, ``room`` or putting together failed.
        RankLostError: a rank has been lost, or has left.
    """
    return Exchange(world, rounds, giver.give, into(room), dtype_of).run(device, world.together)


def into(room: Room) -> TakePieces:
    """Puts the pieces of a parcel where they belong in the room of its box."""

    def take(parcel: Parcel, pieces: Iterator[torch.Tensor]) -> None:
        memory = room(parcel.tensor, parcel.box)
        for piece, values in zip(parcel.pieces, pieces, strict=True):
            strided_view(memory, piece.target).copy_(values)

    return take


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The elements of a box in its tensor, which is contiguous, where they follow each other."""
    start = sum(at * stride for at, stride in zip(box.offsets, tensor.stride(), strict=True))
    return tensor.view(-1)[start : start + box.numel]
