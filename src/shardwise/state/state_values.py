"""Values of a state, in the memory of ranks (:class:`ProvidedValues`) or in files (:class:`StoredValues`).

Either kind is resharded into tensors of a model or an optimizer.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.core.errors import ConfigError, KeyMismatchError, ShardingError, ShardwiseError, StorageError
from shardwise.core.expression import Expression
from shardwise.core.formatting import canonical_name, few_names
from shardwise.core.tensors import Box
from shardwise.files.checkpoint_index import CheckpointIndex
from shardwise.files.storage import StorageReader
from shardwise.fsdp import torch_private
from shardwise.fsdp.named_tensors import are_bitwise_equal, local_boxes, local_tensor
from shardwise.loading.audit import are_equal
from shardwise.loading.one_checkpoint import require_one_checkpoint
from shardwise.ranks.call_arguments import check_options, comparing_arguments, get_hints
from shardwise.ranks.timeouts import Timeouts
from shardwise.ranks.world import World
from shardwise.transfer import matching, move, tensor_metadata
from shardwise.transfer.memory import require_budget
from shardwise.transfer.read import ReadExecutor, ReadItem, plan_reads


@dataclass(frozen=True, slots=True)
class StateOptions:
    """Settings for getting or setting a state, for sharding a model, and for checkpoints.

    None of them changes the values.

    Attributes:
        budget_bytes: staging memory of each rank, on the device that the ranks' backend moves. A checkpoint uses it
            for strided tensors, and copies to and from an accelerator, besides the copies of ``mode="async"``.
        process_group: the ranks that act together. None is the default group, or this process alone.
        timeouts: how long ranks wait for each other. None for the timeout of the process group, if it was given
            one.
    """

    budget_bytes: int = 64 << 20
    process_group: dist.ProcessGroup | None = None
    timeouts: Timeouts | None = None

    def __post_init__(self) -> None:
        require_budget(self.budget_bytes)


def agree_on_arguments(
    world: World, call: object, arguments: Mapping[str, object], options: StateOptions, **others: object
) -> None:
    """Raise if arguments are not supported, or if ranks pass different ones. Collective: yes.

    ``arguments`` are those of the public function ``call``, by name, that its annotations describe. ``others`` are
    compared only.

    Raises:
        ConfigError: an argument has the wrong type.
        RankMismatchError: naming the ranks and the arguments.
    """
    with comparing_arguments(world) as exchange:
        check_options(get_hints(call), {**arguments, "options": options})
        compared = {**others, **arguments, "budget_bytes": options.budget_bytes}
        exchange.local = {name: repr(value) for name, value in compared.items()}


def by_canonical_names(
    state: Mapping[str, Any] | None, what: str, error: type[ShardwiseError] = ConfigError
) -> dict[str, Any]:
    """Return a rank's part of a state, or a checkpoint's tensors, without wrapper prefixes. Empty for None.

    Raises:
        ConfigError: the state is no mapping.
        ShardwiseError: (the class ``error``) two names are the same without prefixes.
    """
    tensors: object = {} if state is None else state
    if not isinstance(tensors, Mapping) or not all(isinstance(name, str) for name in tensors):
        raise ConfigError(
            f"{what}: is a {type(tensors).__name__}. Pass a mapping from names, or None on a rank without a state"
        )
    by_name: dict[str, Any] = {}
    # "layer.weight" and "_orig_mod.layer.weight" are one name. The same tensor may be under both.
    for name, value in tensors.items():
        if by_name.setdefault(canonical_name(name), value) is not value:
            raise error(
                f"{what}: has {canonical_name(name)} twice, with and without the names of wrappers. Leave out one"
            )
    return by_name


def describe_tensors(tensors: Mapping[str, Any]) -> dict[str, matching.SourceTensor]:
    """Return a description of the tensors that this rank passes.

    Raises:
        ConfigError: a value is no tensor.
        ShardingError: a tensor is on meta, or is not placed as shards.
    """
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            kind = value.layout if isinstance(value, torch.Tensor) else type(value).__name__
            raise ConfigError(f"{name} in the state is a {kind}. Pass dense tensors only")
    require_values(tensors, "the given state")
    describe = cache(matching.SourceTensor)  # one object for equal tensors, which a message has once
    provided: dict[str, matching.SourceTensor] = {}
    for name, tensor in tensors.items():
        dtype = torch_private.from_torch_or_other(tensor.dtype)
        provided[name] = describe(tuple(tensor.shape), dtype, tensor_metadata.get_boxes(tensor, name))
    return provided


def require_values(tensors: Mapping[str, torch.Tensor], what: str) -> None:
    """Raise for tensors without values.

    Raises:
        ShardingError: naming them.
    """
    on_meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if on_meta:
        raise ShardingError(
            f"{len(on_meta)} tensors of {what} are on meta and have no values: {few_names(on_meta)}"
        )


@dataclass(frozen=True, slots=True)
class ProvidedValues:
    """Full tensors or shards that ranks hold. ``tensors`` are this rank's."""

    tensors: Mapping[str, Any]

    def describe(self, world: World) -> dict[str, matching.SourceTensors]:
        """Return the description of the state on all ranks. Collective: yes. Raises as :func:`describe_tensors`.

        The first rank collects it, so that each rank gets a layout once, not the descriptions of all ranks.
        """
        with world.all_reduce("describe tensors", matching.collect_sources) as exchange:
            exchange.local = describe_tensors(self.tensors)
        result: dict[str, matching.SourceTensors] = exchange.result
        return result

    def require_ties(self, world: World, ties: Sequence[Sequence[str]]) -> None:
        """Raise when names of one tensor come with different values. Collective: yes.

        Raises:
            KeyMismatchError: naming the first two.
        """
        with world.collective("check ties"):
            pairs = _pair_ties(ties, self.tensors)
            _require_no_unequal([pair for pair in pairs if not _is_same(*(self.tensors[name] for name in pair))])

    def copy_into(
        self,
        world: World,
        match: matching.Match,
        targets: Mapping[str, torch.Tensor],
        *,
        budget_bytes: int,
        device: torch.device,
    ) -> move.Traffic:
        """Move matched values into ``targets``, by the first names of the places.

        Collective: yes.
        Memory: ``budget_bytes``.

        Raises:
            RankMismatchError: ranks have different targets.
        """
        collect_boxes = partial(tensor_metadata.collect_boxes, global_ranks=world.global_ranks)
        with world.all_reduce("describe tensors", collect_boxes) as exchange:
            exchange.local = tensor_metadata.metadata_by_name(targets)
        boxes = exchange.result
        items: list[move.Transfer] = []
        with world.collective("plan the transfers"):
            for item in match.tensors:
                name = item.slot.names[0]
                target, into = targets[name], move.LocalTensor.from_tensor(targets[name], name)
                source = None  # on ranks that provide nothing of this tensor
                if item.name in self.tensors:
                    source = move.LocalTensor.from_tensor(self.tensors[item.name], item.name)
                items.append(
                    move.Transfer(name, target.shape, target.dtype, item.source_boxes, boxes[name], source, into)
                )
        return move.transfer(world, items, budget_bytes=budget_bytes, device=device)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other:
        return True
    if isinstance(one, DTensor) != isinstance(other, DTensor):
        return False
    return are_bitwise_equal(one, other)


def _pair_ties(ties: Sequence[Sequence[str]], present: Collection[str]) -> list[tuple[str, str]]:
    """Return pairs of names of one tensor that are both present: the first present name with each other one."""
    # Of names (a, b, c) of one tensor, of which a and c are present: (a, c).
    tied = [[name for name in names if name in present] for names in ties]
    return [(names[0], other) for names in tied for other in names[1:]]


def _require_no_unequal(unequal: Sequence[tuple[str, str]]) -> None:
    for first, other in unequal:
        raise KeyMismatchError(
            f"{first} and {other}: are one tensor in the model, and have different values in the state. Leave out "
            "one of them"
        )


@dataclass
class StoredValues:
    """The tensors of a saved state.

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

    def describe(self, world: World) -> dict[str, matching.SourceTensors]:
        """Return a description of all tensors, as if one rank held them whole. Collective: yes.

        The ranks' files are compared, see [Note: One checkpoint] in ``loading/one_checkpoint.py``.
        """
        require_one_checkpoint(world, self.reader, self.index)
        provided: dict[str, matching.SourceTensors] = {}
        for name, item in self.expressions.items():
            provided[name] = (matching.SourceTensor(item.shape, item.dtype, (Box.whole(item.shape),)),)
        return provided

    def require_ties(self, world: World, ties: Sequence[Sequence[str]]) -> None:
        """Raise when names of one tensor have different values in the files. Collective: yes.

        Raises:
            KeyMismatchError: naming the first two.
        """
        if pairs := _pair_ties(ties, self.expressions):
            with world.all_gather("compare tied values") as exchange:
                exchange.local = self._find_unequal(world, pairs)
            unequal: list[list[tuple[str, str]]] = exchange.result
            # Each rank compares a part of the rows, so one rank may find what others do not.
            _require_no_unequal([pair for pairs_of_rank in unequal for pair in pairs_of_rank])

    def _find_unequal(self, world: World, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return the pairs that differ in this rank's part of the rows."""
        executor = ReadExecutor(self.reader, self.index, self.budget_bytes, world)
        unequal: list[tuple[str, str]] = []
        for pair in pairs:
            one, other = (self.expressions[name] for name in pair)
            # The same numbers in two dtypes would be cast differently.
            if one.dtype is not other.dtype or not are_equal(one, other, one.dtype, executor):
                unequal.append(pair)
        self.read_bytes += executor.read_bytes
        return unequal

    def copy_into(
        self,
        world: World,
        match: matching.Match,
        targets: Mapping[str, torch.Tensor],
        *,
        budget_bytes: int,
        device: torch.device,  # noqa: ARG002 - values are read to where the targets are
    ) -> move.Traffic:
        """Read this rank's boxes. Memory: the budget.

        Raises:
            StorageError: bytes could not be read, or a file was replaced meanwhile.
        """
        executor = ReadExecutor(self.reader, self.index, budget_bytes, world)
        with world.collective("read values"):
            expressions = {item.slot.names[0]: self.expressions[item.name] for item in match.tensors}
            read_tensors(executor, expressions, {name: targets[name] for name in expressions})
        self.read_bytes += executor.read_bytes
        return move.Traffic()


def read_tensors(
    executor: ReadExecutor, expressions: Mapping[str, Expression], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Read this rank's boxes of tensors into its memory, and check that every element was read. Collective: no.

    ``expressions`` are those of the tensors, by name. Memory: the executor's budget.

    Raises:
        StorageError: bytes could not be read, or a file was replaced meanwhile.
    """
    items: list[ReadItem] = []
    for name, tensor in tensors.items():
        # Shards of a rank may be empty: 2 rows on 4 ranks.
        boxes = tuple(piece for piece in local_boxes(tensor, name) if piece.box.numel)
        local = local_tensor(tensor)
        items.append(ReadItem(name, expressions[name], boxes, local.dtype, local.device))
    # Each rank begins at another part of the files, which spreads the load on a remote storage.
    start_at = executor.world.rank / executor.world.size  # a fraction of the plan, which only such a storage uses
    plan = plan_reads(items, executor.index, executor.reader.policy, executor.budget_bytes, start_at)
    executor.read_into(plan, [local_tensor(tensors[item.fqn]) for item in plan.items])
    # No copy writes an element twice, so equal counts mean that all of it was read.
    for item in items:
        expected = sum(piece.box.numel for piece in item.boxes)
        if (count := executor.written.get(item.fqn, 0)) != expected:
            raise StorageError(
                f"{item.fqn}: {count} of {expected} elements could be read from {executor.index.root}. Do not use "
                "the values, and read them again"
            )


K = TypeVar("K")


def read_numbers(executor: ReadExecutor, expressions: Mapping[K, Expression]) -> dict[K, torch.Tensor]:
    """Return tensors on meta, except for those of one element (step counts, settings), which have their values.

    Collective: no.
    """
    values: dict[K, torch.Tensor] = {}
    for key, item in expressions.items():
        values[key] = torch.empty(item.shape, dtype=torch_private.to_torch(item.dtype), device="meta")
    numbers = [key for key, value in values.items() if value.numel() == 1]
    reads = [(expressions[key], Box.whole(values[key].shape), values[key].dtype) for key in numbers]
    return values | dict(zip(numbers, executor.read_values(reads), strict=True))


Values: TypeAlias = ProvidedValues | StoredValues
"""The values of a state, by name."""
