"""What all ranks hold of a model that is, or would be, sharded on a mesh."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwise.errors import ConfigError
from shardwise.layout.model_layout import LocalBox, ModelLayout
from shardwise.tensors import numel

_AXES = ("replicate", "shard")


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

    @classmethod
    def of(cls, ranks: int, axes: Mapping[str, int]) -> MeshShape:
        """The mesh with these axes, by name, for so many ranks.

        Raises:
            ConfigError: an axis is neither ``replicate`` nor ``shard``, or the axes do not make ``ranks``.
        """
        for name, size in axes.items():
            if name not in _AXES:
                near = difflib.get_close_matches(name, _AXES, n=1, cutoff=0.0)[0]
                raise ConfigError(
                    f"a mesh has no axis {name!r}; did you mean {near}? There are {' and '.join(_AXES)}"
                )
            if size < 1:
                raise ConfigError(f"the mesh axis {name}={size} has no ranks; every axis has at least one")
        if "shard" not in axes:
            rest = max(1, ranks // numel([*axes.values()]))
            raise ConfigError(f"a mesh needs an axis that shards; add shard={rest}")
        mesh = cls(*zip(*((name, axes[name]) for name in _AXES if name in axes), strict=True))
        if mesh.ranks != ranks:
            replicas = axes.get("replicate", 1)
            fitting = f"{mesh.ranks} ranks" if ranks % replicas else f"shard={ranks // replicas}"
            raise ConfigError(f"the mesh {mesh} is of {mesh.ranks} ranks, not of {ranks}; take {fitting}")
        return mesh

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


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Parameters that are gathered at once, by FQN, and the modules of the group ("" for the root)."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class WorldLayout:
    """Every tensor of a model with what each rank holds of it, and what is gathered together.

    ``first`` is the layout of rank 0. ``spreads`` is by FQN (the first name of each tensor). Of ``groups`` the last
    is the root's. ``whole`` are the parameters that stay whole on every rank, with the reason.
    """

    mesh: MeshShape
    first: ModelLayout
    spreads: Mapping[str, Spread]
    groups: tuple[GroupLayout, ...]
    whole: Mapping[str, str]

    def at(self, rank: int) -> ModelLayout:
        """The layout of one rank."""
        position = self.mesh.position(rank)
        return ModelLayout(
            tuple(replace(item, boxes=self.spreads[item.fqn].boxes[position]) for item in self.first.tensors)
        )
