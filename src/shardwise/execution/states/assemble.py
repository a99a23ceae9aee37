"""Assembles tensors of a checkpoint out of what all ranks hold: on every rank, or once for those of a machine.

What :func:`assemble` brings to every rank, which puts it together for itself, is in memory that ranks share written
once for all of them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch

from shardwise.execution.memory.host_memory import Address, CommonMemory, Entered, enter
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


_SMALL_BYTES = 1 << 20
"""Tensors up to this size lie together and are handed out as copies; others are handed out as they lie."""

_ALIGNMENT = 64

_MOST_LENT = 256
"""Pieces of memory that are in use and may be used again; more than one round has, and few open files."""


@dataclass(frozen=True, slots=True)
class _PlaceInRoom:
    """Where a tensor lies: in which piece of memory, and at which byte of it."""

    piece: int
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def in_(self, memory: torch.Tensor) -> torch.Tensor:
        return memory[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(slots=True)
class _RoomPiece:
    """A piece of memory: its size, and the first and the last of the rounds that write to it."""

    nbytes: int
    first: int
    last: int
    is_tray: bool


def lay_out(
    rounds: Sequence[Round], shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
) -> tuple[list[_RoomPiece], dict[str, _PlaceInRoom]]:
    """A piece of memory for each large tensor, and one for all the small ones that a round begins. Pure."""
    pieces: list[_RoomPiece] = []
    places: dict[str, _PlaceInRoom] = {}
    for number, items in enumerate(rounds):
        tray: int | None = None
        for key in dict.fromkeys(parcel.tensor for parcel in items.parcels):
            if key in places:
                pieces[places[key].piece].last = number
                continue
            place = _PlaceInRoom(len(pieces), 0, shapes[key], dtypes[key])
            if place.nbytes > _SMALL_BYTES or tray is None:
                is_tray = place.nbytes <= _SMALL_BYTES
                tray = len(pieces) if is_tray else tray
                pieces.append(_RoomPiece(place.nbytes, number, number, is_tray))
            else:
                start = -(-pieces[tray].nbytes // _ALIGNMENT) * _ALIGNMENT
                place = _PlaceInRoom(tray, start, shapes[key], dtypes[key])
                pieces[tray].nbytes = start + place.nbytes
            places[key] = place
    return pieces, places


class CommonRooms:
    """The memory in which the tensors of some rounds are put together, as this rank sees it.

    Memory is used again for later tensors of its size once no rank has anything in it: what is fresh has to be
    cleared by the system, page by page, which takes longer than filling it.

    Memory: what one round, or a tensor that takes more, needs, and ``spare_bytes``; once for all ranks of the
    machine.
    """

    def __init__(
        self,
        rounds: Sequence[Round],
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        *,
        is_target: bool,
        spare_bytes: int,
    ) -> None:
        self.spare_bytes = spare_bytes
        self._is_target = is_target
        self._pieces, self._places = lay_out(rounds, shapes, dtypes)
        self._entered: dict[int, Entered] = {}
        self._known: dict[Address, Entered] = {}
        self._lent: dict[int, Callable[[], bool]] = {}
        self._own: dict[int, torch.Tensor] = {}

    def begun_by(self, number: int) -> dict[int, int]:
        """Bytes of the pieces that a round is the first to write to, by piece."""
        return {index: piece.nbytes for index, piece in enumerate(self._pieces) if piece.first == number}

    def enter(self, addresses: Mapping[int, Address]) -> None:
        """Go into the memory of a round."""
        for piece, address in addresses.items():
            known = address in self._known
            self._entered[piece] = self._known.pop(address) if known else enter(address)
            if self._is_target and not self._pieces[piece].is_tray:
                self._own[piece], self._lent[piece] = self._entered[piece].lend()

    def room(self, key: str, box: Box) -> torch.Tensor:
        """The elements of a tensor's box, for all ranks."""
        place = self._places[key]
        return part_of(place.in_(self._entered[place.piece].shared), box)

    def take(self, key: str) -> torch.Tensor:
        """A tensor that is complete, for this rank: what it writes there concerns no other."""
        place = self._places[key]
        if self._pieces[place.piece].is_tray:
            return place.in_(self._entered[place.piece].shared).clone()
        return place.in_(self._own.pop(place.piece))

    def leave(self, number: int) -> None:
        """Let go of what no round after this one writes to."""
        for index in [index for index in self._entered if self._pieces[index].last <= number]:
            left = self._entered.pop(index)
            self._known[left.address] = left
            self._lent.setdefault(index, lambda: False)
        while sum(address.nbytes for address in self._known) > self.spare_bytes:
            del self._known[next(iter(self._known))]

    def let_go(self) -> list[int]:
        """The pieces that this rank has left and in which it has nothing any more; each is told once."""
        found = [index for index, is_there in self._lent.items() if index not in self._entered and not is_there()]
        for index in found:
            del self._lent[index]
        return found


@dataclass(frozen=True, slots=True)
class _RoomWords:
    """What ranks tell each other in a round: where the first one has made memory, and what they have let go of."""

    addresses: Mapping[int, Address]
    let_go: Sequence[int]


def put_together(world: World, rounds: Sequence[Round], giver: Giver, rooms: CommonRooms) -> Generator[Round]:
    """Fill the rooms, round by round; yields each complete round, whose tensors can then be taken.

    A generator that all ranks go through alike. Closing it on all ranks after the same round is no fault. All ranks
    see one memory (:func:`shardwise.execution.memory.host_memory.is_common`).

    Collective: yes.
    Memory: as of :class:`CommonRooms`.

    Raises:
        CheckpointError: (or a subclass) the same on every rank, when anything raised on any.
        RankLostError: a rank has been lost, or has left.
    """
    told: list[_RoomWords] = []
    met = 0

    def meet(step: Callable[[], None]) -> None:
        nonlocal told, met
        told = world.each(partial(work, step))
        met += 1

    def work(step: Callable[[], None]) -> _RoomWords:
        if told:
            rooms.enter(told[0].addresses)
        step()
        if world.rank:
            return _RoomWords({}, rooms.let_go())
        keeper.take_back([piece for one in told for piece in one.let_go])
        return _RoomWords(keeper.open(rooms.begun_by(met)), rooms.let_go())

    own = [items.kept_by(world.rank) for items in rounds]
    filling = Exchange(world, own, giver.give, into(rooms.room), {}).run(torch.device("cpu"), meet)
    with _RoomAllocator(world.size, rooms.spare_bytes) as keeper, contextlib.closing(filling):
        for number, (items, _) in enumerate(zip(rounds, filling, strict=True)):
            yield items
            rooms.leave(number)


class _RoomAllocator:
    """Makes the memory of rooms, on one rank, and knows which of it is free."""

    def __init__(self, ranks: int, spare_bytes: int) -> None:
        self._ranks = ranks
        self._spare_bytes = spare_bytes
        self._used: dict[int, CommonMemory] = {}
        self._left: Counter[int] = Counter()
        self._spare: list[CommonMemory] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for memory in [*self._used.values(), *self._spare]:
            memory.close()

    def take_back(self, pieces: Sequence[int]) -> None:
        """Each of these has been let go of by one more rank."""
        self._left.update(pieces)
        for piece in [piece for piece, ranks in self._left.items() if ranks == self._ranks]:
            del self._left[piece]
            if piece in self._used:
                self._spare.append(self._used.pop(piece))
        while sum(memory.address.nbytes for memory in self._spare) > self._spare_bytes:
            self._spare.pop(0).close()

    def open(self, sizes: Mapping[int, int]) -> dict[int, Address]:
        """Memory for pieces of these sizes."""
        for piece, nbytes in sizes.items():
            fits = (memory for memory in self._spare if memory.address.nbytes == nbytes)
            memory = next(fits, None)
            if memory is None:
                memory = CommonMemory(nbytes)
            else:
                self._spare.remove(memory)
            self._used[piece] = memory
        while len(self._used) > len(sizes) + _MOST_LENT:  # somebody keeps the tensors
            self._used.pop(next(iter(self._used))).close()
        return {piece: self._used[piece].address for piece in sizes}
