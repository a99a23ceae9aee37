"""Takes in a state that ranks bring: what each has of it, agreed upon, and resharded to where it belongs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.conversion.expression import Expression, key_of
from shardwise.errors import ConfigError, CoverageError, PlacementError, StorageError
from shardwise.execution.audit import are_equal
from shardwise.execution.checkpoint_copies import require_one_checkpoint
from shardwise.execution.memory import require_budget
from shardwise.execution.moving import (
    Handover,
    LocalTensor,
    TensorFacts,
    Traffic,
    boxes_of,
    facts_of,
    hand_over,
    require_same_tensors,
)
from shardwise.execution.patience import Patience
from shardwise.execution.reading import Destination, Placer, arrange
from shardwise.execution.world import World
from shardwise.formats.contract import CheckpointIndex
from shardwise.models.torch_words import in_memory, to_torch
from shardwise.models.view import canonical, local_boxes, local_tensor, raw_bytes
from shardwise.planning.matching import Brought, Match, Taken
from shardwise.report.names import few_names
from shardwise.storage.contract import StorageReader
from shardwise.tensors import Box


@dataclass(frozen=True, slots=True)
class StateOptions:
    """How a state is gathered or set; none of it changes the values.

    Attributes:
        budget_bytes: staging memory of each rank, on the device that the ranks' backend moves.
        process_group: the ranks that act together; None is the default group, or this process alone.
        patience: how long ranks wait for each other.
    """

    budget_bytes: int = 64 << 20
    process_group: dist.ProcessGroup | None = None
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        require_budget(self.budget_bytes)


def require_same_call(world: World, *modes: object, options: StateOptions) -> None:
    """Raise when ranks ask for different things. Collective: yes.

    Raises:
        DisagreementError: naming the ranks.
    """
    world.require_equal((repr(modes), options.budget_bytes), "the list of arguments (modes, budget)")


def by_canonical_names(state: Mapping[str, Any] | None, what: str) -> dict[str, Any]:
    """A rank's part of a state under names without wrappers; nothing for None.

    Raises:
        ConfigError: it is no mapping, or two names become one.
    """
    given: object = {} if state is None else state
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ConfigError(f"{what} is a mapping from names, or None on a rank that has none; got {_kind(given)}")
    found: dict[str, Any] = {}
    for name, value in given.items():
        plain = canonical(name)
        if plain in found and found[plain] is not value:
            raise ConfigError(
                f"{what} has {plain} twice, with and without the names of wrappers; leave one of them"
            )
        found[plain] = value
    return found


def brought(tensors: Mapping[str, Any]) -> dict[str, Brought]:
    """What this rank has of tensors.

    Raises:
        ConfigError: a value is no tensor.
        PlacementError: a tensor is on meta, or is not placed as shards.
    """
    others = [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ConfigError(f"{others[0]} in the state is a {_kind(tensors[others[0]])}; only tensors can be set")
    refuse_meta(tensors, "the state that was given")
    return {
        name: Brought(tuple(tensor.shape), in_memory(tensor.dtype), boxes_of(tensor, name))
        for name, tensor in tensors.items()
    }


def refuse_meta(tensors: Mapping[str, torch.Tensor], what: str) -> None:
    """Raise for tensors without values.

    Raises:
        PlacementError: naming them.
    """
    found = [name for name, tensor in tensors.items() if tensor.is_meta]
    if found:
        raise PlacementError(f"{len(found)} tensors of {what} are on meta and have no values: {few_names(found)}")


class Values(Protocol):
    """The values of a state, by name, wherever they are: on ranks, or in files."""

    def told(self, world: World) -> list[dict[str, Brought]]:
        """What there is of the state, by who brings it. Collective: yes."""
        ...

    def require_ties(self, world: World, ties: Sequence[Sequence[str]]) -> None:
        """Raise when names of one tensor have different values. Collective: yes.

        Raises:
            CoverageError: naming two.
        """
        ...

    def bring(
        self,
        world: World,
        match: Match,
        targets: Mapping[str, torch.Tensor],
        *,
        budget_bytes: int,
        device: torch.device,
    ) -> Traffic:
        """Bring what has been matched into ``targets``, by the first names of the places. Collective: yes."""
        ...


@dataclass(frozen=True, slots=True)
class BroughtValues:
    """Tensors that ranks have: whole ones or shards, on this rank these."""

    tensors: Mapping[str, Any]

    def told(self, world: World) -> list[dict[str, Brought]]:
        """Raises as :func:`brought`."""
        return world.each(lambda: brought(self.tensors))

    def require_ties(self, world: World, ties: Sequence[Sequence[str]]) -> None:
        world.together(lambda: require_ties(self.tensors, ties))

    def bring(
        self,
        world: World,
        match: Match,
        targets: Mapping[str, torch.Tensor],
        *,
        budget_bytes: int,
        device: torch.device,
    ) -> Traffic:
        return bring(world, match, self.tensors, targets, budget_bytes=budget_bytes, device=device)


def require_ties(tensors: Mapping[str, torch.Tensor], ties: Iterable[Sequence[str]]) -> None:
    """Raise when names of one tensor come with different values. What has been matched has one shape.

    Raises:
        CoverageError: naming the first two.
    """
    for names in ties:
        first, *others = [name for name in names if name in tensors] or [""]
        for other in others:
            if not _is_same(tensors[first], tensors[other]):
                raise untied(first, other)


def untied(first: str, other: str) -> CoverageError:
    """What to say of names of one tensor that come with two values."""
    return CoverageError(
        f"{first} and {other} are one tensor in the model, and two with different values in the state; "
        "leave out the one that does not count"
    )


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other:
        return True
    if isinstance(one, DTensor) != isinstance(other, DTensor) or one.dtype != other.dtype:
        return False
    mine, its = local_tensor(one), local_tensor(other)
    return mine.shape == its.shape and torch.equal(raw_bytes(mine).to(its.device), raw_bytes(its))


def bring(
    world: World,
    match: Match,
    tensors: Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    *,
    budget_bytes: int,
    device: torch.device,
) -> Traffic:
    """Bring what has been matched from ``tensors`` into ``targets``, which are by the first names of the places.

    Collective: yes.
    Memory: ``budget_bytes``.

    Raises:
        DisagreementError: ranks have different targets.
    """
    told = world.each(lambda: {name: facts_of(target, name) for name, target in targets.items()})
    world.together(lambda: require_same_tensors(told))
    items = world.together(lambda: [_handover(item, told, tensors, targets) for item in match.taken])
    return hand_over(world, items, budget_bytes=budget_bytes, device=device)


def _handover(
    item: Taken,
    told: Sequence[Mapping[str, TensorFacts]],
    tensors: Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
) -> Handover:
    name = item.place.names[0]
    target = targets[name]
    mine = LocalTensor.of(tensors[item.name], item.name) if item.name in tensors else None
    wanted = tuple(found[name].boxes for found in told)
    into = LocalTensor.of(target, name)
    return Handover(name, target.shape, target.dtype, item.held, wanted, mine, into)


def _kind(value: object) -> str:
    return type(value).__name__


@dataclass
class StoredValues:
    """The tensors of a state that was saved: the :class:`~shardwise.execution.agreed.Values` of files.

    Attributes:
        reader: of the files, which every rank sees.
        index: the same on every rank.
        expressions: what each tensor is made of, by the name that it is to have.
        budget_bytes: for staging.
        read_bytes: what this rank has read.
    """

    reader: StorageReader
    index: CheckpointIndex
    expressions: Mapping[str, Expression]
    budget_bytes: int
    read_bytes: int = 0

    def told(self, world: World) -> list[dict[str, Brought]]:
        """All of it, as if one brought it. The ranks' files are one checkpoint, see checkpoint_copies."""
        require_one_checkpoint(world, self.reader, self.index)
        return [
            {
                name: Brought(item.shape, item.dtype, (Box.whole(item.shape),))
                for name, item in self.expressions.items()
            }
        ]

    def require_ties(self, world: World, ties: Sequence[Sequence[str]]) -> None:
        pairs = [
            (present[0], other)
            for names in ties
            if len(present := [name for name in names if name in self.expressions]) > 1
            for other in present[1:]
            if not self._is_same_place(present[0], other)
        ]
        if not pairs:
            return

        def unequal() -> list[tuple[str, str]]:
            placer = self._placer(world)
            found = [pair for pair in pairs if not self._are_equal(pair, placer, world)]
            self.read_bytes += placer.read_bytes
            return found

        for found in world.each(unequal):
            if found:
                raise untied(*found[0])

    def _is_same_place(self, one: str, other: str) -> bool:
        """Whether two names are stored as one tensor."""
        keys = [key_of(self.expressions[name]) for name in (one, other)]
        if None in keys:
            return False
        first, second = (self.index.entries[key] for key in keys if key is not None)
        return (first.file, first.range, first.dtype, first.shape) == (
            second.file,
            second.range,
            second.dtype,
            second.shape,
        )

    def _are_equal(self, pair: tuple[str, str], placer: Placer, world: World) -> bool:
        one, other = (self.expressions[name] for name in pair)
        return one.dtype is other.dtype and are_equal(one, other, one.dtype, placer, world.rank, world.size)

    def bring(
        self,
        world: World,
        match: Match,
        targets: Mapping[str, torch.Tensor],
        *,
        budget_bytes: int,
        device: torch.device,  # noqa: ARG002 - values are read to where the targets are
    ) -> Traffic:
        """Read this rank's boxes. Memory: the budget.

        Raises:
            StorageError: bytes could not be read, or a file was replaced meanwhile.
        """
        placer = self._placer(world)

        def read() -> None:
            items = []
            for item in match.taken:
                name = item.place.names[0]
                target = targets[name]
                boxes = tuple(part for part in local_boxes(target, name) if part.box.numel)
                local = local_tensor(target)
                items.append(Destination(name, self.expressions[item.name], boxes, local.dtype, local.device))
            policy = self.reader.policy
            arrangement = arrange(items, self.index, policy, budget_bytes, world.place)
            placer.place(arrangement, [local_tensor(targets[item.fqn]) for item in arrangement.destinations])
            for destination in arrangement.destinations:
                wanted = sum(part.box.numel for part in destination.boxes)
                if (written := placer.written.get(destination.fqn, 0)) != wanted:
                    raise StorageError(
                        f"{destination.fqn}: {written} of {wanted} elements were read from "
                        f"{self.index.root}; it is damaged: save it again"
                    )

        world.together(read)
        self.read_bytes += placer.read_bytes
        return Traffic()

    def whole(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Small tensors, whole. Collective: no."""
        wanted = [(self.expressions[name], Box.whole(self.expressions[name].shape)) for name in names]
        placer = self._placer(World(0, 1))
        found = placer.values_of([(item, box, to_torch(item.dtype)) for item, box in wanted])
        self.read_bytes += placer.read_bytes
        return found

    def _placer(self, world: World) -> Placer:
        return Placer(self.reader, self.index, self.budget_bytes, _Silent(), world)


class _Silent:
    def advance(self, nbytes: int) -> None:
        pass
