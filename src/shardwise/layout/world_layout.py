"""What all ranks hold of a model that is, or would be, sharded on a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwise.layout.model_layout import LocalBox, ModelLayout
from shardwise.tensors import numel


@dataclass(frozen=True, slots=True)
class MeshShape:
    """The axes of a mesh, without its processes: names and sizes, one axis (shard) or two (replicate, shard).

    Ranks are dealt in row-major order, as ``init_device_mesh`` does it.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def flat(cls, ranks: int) -> MeshShape:
        """All ranks in one axis, under the name that a mesh has when none is given."""
        return cls(("fsdp",), (ranks,))

    @property
    def ranks(self) -> int:
        return numel(self.sizes)

    @property
    def shard_size(self) -> int:
        """The number of ranks that share one copy of the model."""
        return self.sizes[-1]

    def position(self, rank: int) -> int:
        """The coordinate of a rank on the axis that shards; ranks of one position hold the same."""
        return rank % self.shard_size

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """How a tensor lies over the positions of a mesh: the boxes held at each, and the elements of memory.

    ``padded_numel`` is what a rank's memory for the tensor holds at every position: FSDP2 pads all shards to the
    size of the first. Tensors of one shape and placement share one spread: these are compared by identity.
    """

    boxes: tuple[tuple[LocalBox, ...], ...]
    padded_numel: int


@dataclass(frozen=True)
class WorldLayout:
    """Every tensor of a model with what each rank holds of it. ``first`` is the layout of rank 0."""

    mesh: MeshShape
    first: ModelLayout
    spreads: Mapping[str, Spread]
    """By FQN (the first name of each tensor)."""

    def at(self, rank: int) -> ModelLayout:
        """The layout of one rank."""
        position = self.mesh.position(rank)
        return ModelLayout(
            tuple(replace(item, boxes=self.spreads[item.fqn].boxes[position]) for item in self.first.tensors)
        )
