"""What one rank, or every rank, holds of a model, and the passes of a step, as data. No torch."""

from __future__ import annotations

import difflib
import enum
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property

from shardwise.errors import ConfigError
from shardwise.tensors import Box, DType, Strided, numel


class TensorKind(enum.Enum):
    """What a tensor is to its module."""

    PARAMETER = "parameter"
    PERSISTENT_BUFFER = "persistent buffer"
    BUFFER = "non-persistent buffer"

    @property
    def is_saved(self) -> bool:
        """Whether the tensor belongs to a state dict, so that a checkpoint is expected to hold it."""
        return self is not TensorKind.BUFFER


class Origin(enum.Enum):
    """Where a tensor's values can come from when no checkpoint holds it."""

    INIT_WEIGHTS = "the model's _init_weights"
    RESET_PARAMETERS = "its module's reset_parameters"
    CALLABLE = "the callable given"
    TUNING = "the initialiser of the adapter it belongs to"
    AS_IT_IS = "its present value"
    NOWHERE = "nowhere"


@dataclass(frozen=True, slots=True)
class LocalBox:
    """A box of the global tensor, and where its elements lie in this rank's memory of the tensor.

    ``local.offset`` counts elements from the first element of the rank's own (local) tensor.
    """

    box: Box
    local: Strided


def place_of(box: Box, held: Sequence[LocalBox]) -> Strided:
    """Where a box that lies within one of the boxes that a rank holds is in the rank's memory."""
    for part in held:
        if part.box.intersect(box) == box:
            steps = (offset - first for offset, first in zip(box.offsets, part.box.offsets, strict=True))
            start = part.local.offset + sum(
                step * stride for step, stride in zip(steps, part.local.strides, strict=True)
            )
            return Strided(start, box.sizes, part.local.strides)
    raise ValueError(f"{box} is not held")


def first_rows(boxes: Iterable[LocalBox], count: int) -> list[LocalBox]:
    """The parts of boxes that are in the first ``count`` rows of their tensor."""
    return [part for item in boxes if (part := _rows(item, 0, count)) is not None]


def last_rows(boxes: Iterable[LocalBox], start: int) -> list[LocalBox]:
    """The parts of boxes that are in the rows from ``start`` on."""
    return [part for item in boxes if (part := _rows(item, start, sys.maxsize)) is not None]


def _rows(item: LocalBox, start: int, stop: int) -> LocalBox | None:
    box, local = item.box, item.local
    first, last = max(start, box.offsets[0]), min(stop, box.offsets[0] + box.sizes[0])
    if first >= last:
        return None
    inside = Box((first, *box.offsets[1:]), (last - first, *box.sizes[1:]))
    offset = local.offset + (first - box.offsets[0]) * local.strides[0]
    return LocalBox(inside, Strided(offset, inside.sizes, local.strides))


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One tensor of a model; ``names`` has more than one entry where modules share it.

    ``shape`` is global, ``boxes`` is what this rank holds of it (none for an empty shard).
    """

    names: tuple[str, ...]
    kind: TensorKind
    shape: tuple[int, ...]
    dtype: DType
    boxes: tuple[LocalBox, ...]
    placement: str
    requires_grad: bool
    origin: Origin

    @property
    def fqn(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return numel(self.shape)

    @property
    def local_numel(self) -> int:
        return sum(item.box.numel for item in self.boxes)


@dataclass(frozen=True)
class ModelLayout:
    """Every tensor of a model, shared ones once, in the order of the modules."""

    tensors: tuple[TensorLayout, ...]

    @cached_property
    def by_name(self) -> dict[str, TensorLayout]:
        """All names, aliases included."""
        return {name: tensor for tensor in self.tensors for name in tensor.names}

    def saved(self) -> Iterator[TensorLayout]:
        """Parameters and persistent buffers."""
        return (tensor for tensor in self.tensors if tensor.kind.is_saved)

    @property
    def local_nbytes(self) -> int:
        """Bytes of parameters and persistent buffers on this rank."""
        return sum(tensor.local_numel * tensor.dtype.bits // 8 for tensor in self.saved())


class PassPart(Enum):
    """Where in a step a stretch is."""

    FORWARD = auto()
    LOSS = auto()
    """After the last block: norm, head, and what losses make of logits."""
    LOSS_BACKWARD = auto()
    BACKWARD = auto()


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of the passes in which no group begins or ends. Bytes are of what operations have made.

    ``opens`` are the groups that begin with it, ``closes`` those that end with it. ``rise`` is the most over what
    was there at its beginning, ``kept`` what is left of that at its end; gradients of parameters are in both, until
    ``released`` of them are taken away when their groups close. ``block`` is -1 outside of blocks.
    """

    way: PassPart
    block: int
    opens: tuple[int, ...]
    closes: tuple[int, ...]
    rise: int
    kept: int
    released: int = 0
    flops: float = 0.0

    def extended(self, other: Stretch, times: float) -> Stretch:
        """On the line from this one to another, so many times as far as that is."""

        def along(here: float, there: float) -> float:
            return here + (there - here) * times

        return replace(
            self,
            rise=round(along(self.rise, other.rise)),
            kept=round(along(self.kept, other.kept)),
            released=round(along(self.released, other.released)),
            flops=along(self.flops, other.flops),
        )


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
