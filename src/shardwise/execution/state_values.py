"""Values of a state, on ranks or in files, and how they get into tensors of a model.

The values come from ranks (:class:`BroughtValues`) or from files (:class:`StoredValues`), and are resharded to
their targets.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.conversion.expression import Expression
from shardwise.errors import ConfigError, KeyMismatchError, ShardingError, StorageError
from shardwise.execution import Timeouts, moving, tensor_facts
from shardwise.execution.audit import are_equal, require_one_checkpoint
from shardwise.execution.memory import require_budget
from shardwise.execution.reading import ReadExecutor, ReadTarget, plan_reads
from shardwise.execution.world import World
from shardwise.formats.contract import CheckpointIndex
from shardwise.models import torch_api
from shardwise.models.view import canonical, local_boxes, local_tensor, raw_bytes
from shardwise.planning import matching
from shardwise.report.names import few_names
from shardwise.storage.contract import StorageReader
from shardwise.tensors import Box


@dataclass(frozen=True, slots=True)
class StateOptions:
    """Settings for getting or setting a state. None of them changes the values.

    Attributes:
        budget_bytes: staging memory of each rank, on the device that the ranks' backend moves.
        process_group: the ranks that act together. None is the default group, or this process alone.
        timeouts: how long ranks wait for each other.
    """

    budget_bytes: int = 64 << 20
    process_group: dist.ProcessGroup | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        require_budget(self.budget_bytes)


def require_same_call(world: World, *modes: object, options: StateOptions) -> None:
    """Raise if ranks pass different arguments. Collective: yes.

    Raises:
        RankMismatchError: naming the ranks.
    """
    world.require_equal((repr(modes), options.budget_bytes), "the list of arguments (modes, budget)")


def by_canonical_names(state: Mapping[str, Any] | None, what: str) -> dict[str, Any]:
    """Return a rank's part of a state under names without wrapper prefixes. Empty for None.

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
                f"{what} has {plain} twice, with and without the names of wrappers. Leave one of them"
            )
        found[plain] = value
    return found


def brought(tensors: Mapping[str, Any]) -> dict[str, matching.Brought]:
    """Return a description of the tensors that this rank passes.

    Raises:
        ConfigError: a value is no tensor.
        ShardingError: a tensor is on meta, or is not placed as shards.
    """
    others = [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ConfigError(f"{others[0]} in the state is a {_kind(tensors[others[0]])}. Only tensors can be set")
    reject_meta(tensors, "the state that was given")
    return {
        name: matching.Brought(
            tuple(tensor.shape), torch_api.in_memory(tensor.dtype), tensor_facts.boxes_of(tensor, name)
        )
        for name, tensor in tensors.items()
    }


def reject_meta(tensors: Mapping[str, torch.Tensor], what: str) -> None:
    """Raise for tensors without values.

    Raises:
        ShardingError: naming them.
    """
    found = [name for name, tensor in tensors.items() if tensor.is_meta]
    if found:
        raise ShardingError(f"{len(found)} tensors of {what} are on meta and have no values: {few_names(found)}")


@dataclass(frozen=True, slots=True)
class BroughtValues:
    """Tensors that ranks have: whole ones or shards, on this rank these."""

    tensors: Mapping[str, Any]

    def told(self, world: World) -> list[dict[str, matching.Brought]]:
        """Return the description of the state on each rank. Collective: yes. Raises as :func:`brought`."""
        return world.all_gather(brought, self.tensors)

    def require_ties(self, world: World, ties: Sequence[Sequence[str]]) -> None:
        """Raise when names of one tensor come with different values. Collective: yes.

        Raises:
            KeyMismatchError: naming the first two.
        """
        pairs = _pairs(ties, self.tensors)

        def compare() -> None:
            _refuse_untied([(one, two) for one, two in pairs if not _is_same(self.tensors[one], self.tensors[two])])

        world.run_all(compare)

    def bring(
        self,
        world: World,
        match: matching.Match,
        targets: Mapping[str, torch.Tensor],
        *,
        budget_bytes: int,
        device: torch.device,
    ) -> moving.Traffic:
        """Move matched values into ``targets``, by the first names of the places.

        Collective: yes.
        Memory: ``budget_bytes``.

        Raises:
            RankMismatchError: ranks have different targets.
        """
        told = world.all_gather(
            lambda: {name: tensor_facts.facts_of(target, name) for name, target in targets.items()}
        )
        world.run_all(tensor_facts.require_same_tensors, told)

        def handover(item: matching.Taken) -> moving.Handover:
            name = item.place.names[0]
            target = targets[name]
            mine = moving.LocalTensor.of(self.tensors[item.name], item.name) if item.name in self.tensors else None
            wanted = tuple(found[name].boxes for found in told)
            into = moving.LocalTensor.of(target, name)
            return moving.Handover(name, target.shape, target.dtype, item.held, wanted, mine, into)

        items = world.run_all(lambda: list(map(handover, match.taken)))
        return moving.hand_over(world, items, budget_bytes=budget_bytes, device=device)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other:
        return True
    if isinstance(one, DTensor) != isinstance(other, DTensor) or one.dtype != other.dtype:
        return False
    mine, its = local_tensor(one), local_tensor(other)
    return mine.shape == its.shape and torch.equal(raw_bytes(mine).to(its.device), raw_bytes(its))


def _pairs(ties: Sequence[Sequence[str]], present: Collection[str]) -> list[tuple[str, str]]:
    """Names of one tensor that are both there: the first one with each of the others."""
    found = [[name for name in names if name in present] for names in ties]
    return [(names[0], other) for names in found for other in names[1:]]


def _refuse_untied(odd: Sequence[tuple[str, str]]) -> None:
    for first, other in odd:
        raise KeyMismatchError(
            f"{first} and {other} are one tensor in the model, and two with different values in the state. "
            "Leave out one of them"
        )


def _kind(value: object) -> str:
    return type(value).__name__


@dataclass
class StoredValues:
    """The tensors of a state that was saved: the :class:`~shardwise.execution.state_values.Values` of files.

    Attributes:
        reader: of the files, which every rank sees.
        index: the same on every rank.
        expressions: expression of each tensor, by its target name.
        budget_bytes: for staging.
        read_bytes: bytes read by this rank.
    """

    reader: StorageReader
    index: CheckpointIndex
    expressions: Mapping[str, Expression]
    budget_bytes: int
    read_bytes: int = 0

    def told(self, world: World) -> list[dict[str, matching.Brought]]:
        """All of it, as if one brought it. The ranks' files are one checkpoint, see [Note: One checkpoint]."""
        require_one_checkpoint(world, self.reader, self.index)
        return [
            {
                name: matching.Brought(item.shape, item.dtype, (Box.whole(item.shape),))
                for name, item in self.expressions.items()
            }
        ]

    def require_ties(self, world: World, ties: Sequence[Sequence[str]]) -> None:
        pairs = _pairs(ties, self.expressions)
        if not pairs:
            return

        def unequal() -> list[tuple[str, str]]:
            placer = self._placer(world)
            found = [pair for pair in pairs if not self._are_equal(pair, placer, world)]
            self.read_bytes += placer.read_bytes
            return found

        _refuse_untied([pair for found in world.all_gather(unequal) for pair in found])

    def _are_equal(self, pair: tuple[str, str], placer: ReadExecutor, world: World) -> bool:
        one, other = (self.expressions[name] for name in pair)
        return one.dtype is other.dtype and are_equal(one, other, one.dtype, placer, world.rank, world.size)

    def bring(
        self,
        world: World,
        match: matching.Match,
        targets: Mapping[str, torch.Tensor],
        *,
        budget_bytes: int,
        device: torch.device,  # noqa: ARG002 - values are read to where the targets are
    ) -> moving.Traffic:
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
                items.append(ReadTarget(name, self.expressions[item.name], boxes, local.dtype, local.device))
            policy = self.reader.policy
            arrangement = plan_reads(items, self.index, policy, budget_bytes, world.rank / world.size)
            placer.place(arrangement, [local_tensor(targets[item.fqn]) for item in arrangement.destinations])
            for destination in arrangement.destinations:
                wanted = sum(part.box.numel for part in destination.boxes)
                if (written := placer.written.get(destination.fqn, 0)) != wanted:
                    raise StorageError(
                        f"{destination.fqn}: {written} of {wanted} elements were read from "
                        f"{self.index.root}. It is damaged: save it again"
                    )

        world.run_all(read)
        self.read_bytes += placer.read_bytes
        return moving.Traffic()

    def whole(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Small tensors, whole. Collective: no."""
        wanted = [(self.expressions[name], Box.whole(self.expressions[name].shape)) for name in names]
        placer = self._placer(World(0, 1))
        found = placer.values_of([(item, box, torch_api.to_torch(item.dtype)) for item, box in wanted])
        self.read_bytes += placer.read_bytes
        return found

    def _placer(self, world: World) -> ReadExecutor:
        return ReadExecutor(self.reader, self.index, self.budget_bytes, world)


Values: TypeAlias = BroughtValues | StoredValues
"""The values of a state, by name, wherever they are: on ranks, or in files."""
