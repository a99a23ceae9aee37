"""Reads a state from files: on every rank what it holds, and no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwise.conversion import Expression, key_of
from shardwise.errors import StorageError
from shardwise.execution.moving.exchange import Traffic
from shardwise.execution.ranks.world import World
from shardwise.execution.reading.audit import are_equal
from shardwise.execution.reading.checkpoint_copies import require_one_checkpoint
from shardwise.execution.reading.place import Destination, Placer, arrange
from shardwise.execution.states.agreed import untied
from shardwise.formats.checkpoint_index import CheckpointIndex
from shardwise.models.torch_words import to_torch
from shardwise.models.view import local_boxes, local_tensor
from shardwise.planning.loads.comparing import SampledBlocks
from shardwise.planning.states.matching import Brought, Match
from shardwise.storage.contract import StorageReader
from shardwise.tensors import Box


@dataclass
class StoredValues:
    """The tensors of a state that was saved: the :class:`~shardwise.execution.states.agreed.Values` of files.

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
        require_one_checkpoint(world, self.reader, self.index, SampledBlocks(), self.budget_bytes)
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
