"""Layout of a model on one rank or on all ranks, and the memory of a step, as data. No torch."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardwise.errors import ConfigError
from shardwise.tensors import Box, DType, Strided, numel


class TensorKind(enum.Enum):
    """Kind of a tensor: parameter or buffer."""

    PARAMETER = "parameter"
    PERSISTENT_BUFFER = "persistent buffer"
    BUFFER = "non-persistent buffer"

    @property
    def is_saved(self) -> bool:
        """True if the tensor belongs to a state dict, so that a checkpoint is expected to hold it."""
        return self is not TensorKind.BUFFER


class Origin(enum.Enum):
    """Source of a tensor's values if no checkpoint holds it."""

    INIT_WEIGHTS = "the model's _init_weights"
    RESET_PARAMETERS = "its module's reset_parameters"
    CALLABLE = "the callable given"
    TUNING = "the initializer of the adapter it belongs to"
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
    """Return the memory layout of a box that lies within one of a rank's boxes."""
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
    """One tensor of a model. ``names`` has more than one entry if modules share it.

    ``shape`` is global, ``boxes`` are those of this rank (none for an empty shard).
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


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of activations of one micro-batch on one rank.

    Gradients of the root group are included from the moment they are computed. Those of blocks are not.

    Attributes:
        kept: saved by the forward pass up to the end of the last block.
        loss: most that is added to ``kept`` after the last block, forward and backward.
        backward: most that is added to ``kept`` in the backward pass of blocks.
        last: most that is alive after the backward pass of the first block.
    """

    kept: int = 0
    loss: int = 0
    backward: int = 0
    last: int = 0


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
        if unknown := [name for name in axes if name not in _AXES]:
            raise ConfigError(f"a mesh has no axis {unknown[0]!r}. There are {' and '.join(_AXES)}")
        if "shard" not in axes or min(axes.values()) < 1:
            raise ConfigError(f"mesh={dict(axes)}: a mesh needs an axis shard, and a rank or more in every axis")
        mesh = cls(*zip(*((name, axes[name]) for name in _AXES if name in axes), strict=True))
        if mesh.ranks != ranks:
            raise ConfigError(f"the mesh {mesh} is of {mesh.ranks} ranks, not of {ranks}. Change one of them")
        return mesh

    @property
    def ranks(self) -> int:
        return numel(self.sizes)

    @property
    def shard_size(self) -> int:
        """The number of ranks that share one copy of the model."""
        return self.sizes[-1]

    def position(self, rank: int) -> int:
        """Return the coordinate of a rank on the sharding axis. Ranks of one position hold the same shards."""
        return rank % self.shard_size

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """Distribution of a tensor over the positions of a mesh: the boxes and the elements of memory at each.

    ``padded_numel`` is the size of the tensor's memory at every position, because FSDP2 pads all shards to the size
    of the first. Tensors of one shape and placement share one spread: these are compared by identity.
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
    """Every tensor of a model with its boxes on each rank, and the FSDP2 groups.

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
