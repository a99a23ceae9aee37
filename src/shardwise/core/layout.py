"""Layout of a model on one rank or on all ranks, and the memory of a step, as data. No torch."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from shardwise.core.errors import ConfigError
from shardwise.core.tensors import Box, DType, Strided, numel


class TensorKind(enum.Enum):
    """Kind of a tensor: parameter or buffer."""

    PARAMETER = "parameter"
    PERSISTENT_BUFFER = "persistent buffer"
    NON_PERSISTENT_BUFFER = "non-persistent buffer"

    @property
    def is_saved(self) -> bool:
        """True if the tensor belongs to a state dict, so that a checkpoint is expected to hold it."""
        return self is not TensorKind.NON_PERSISTENT_BUFFER


class Origin(enum.Enum):
    """Source of a tensor's values if the checkpoint lacks it."""

    INIT_WEIGHTS = "the model's _init_weights"
    RESET_PARAMETERS = "its module's reset_parameters"
    CALLABLE = "the callable given"
    TUNING = "the initializer of the adapter it belongs to"
    AS_IT_IS = "its present value"
    NOWHERE = "nowhere"


@dataclass(frozen=True, slots=True)
class LocalBox:
    """A box of the global tensor, and the layout of its elements in this rank's local tensor."""

    box: Box
    local: Strided


def locate_box(box: Box, boxes: Sequence[LocalBox]) -> Strided:
    """Return the memory layout of a box that lies within one of a rank's boxes."""
    for piece in boxes:
        if piece.box.intersect(box) == box:
            strides = piece.local.strides
            # Rows 5 and 6 of a box of rows 4 to 7, with strides (10, 1), begin after 10 of its elements.
            steps = zip(box.offsets, piece.box.offsets, strides, strict=True)
            start = piece.local.offset + sum((offset - first) * stride for offset, first, stride in steps)
            return Strided(start, box.sizes, strides)
    raise ValueError(f"{box} is not within {[piece.box for piece in boxes]}")


def last_rows(boxes: Iterable[LocalBox], start: int) -> list[LocalBox]:
    """Return the parts of boxes in the rows from ``start`` on."""
    parts: list[LocalBox] = []
    for item in boxes:
        # The rows from ``start`` on, however many there are, and the columns of the box.
        rows = item.box.narrow(0, start, sys.maxsize - start)
        if (inside := item.box.intersect(rows)) is not None:
            parts.append(LocalBox(inside, locate_box(inside, [item])))
    return parts


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One tensor of a model.

    ``names`` has more than one entry if modules share it. ``shape`` is global. ``boxes`` are those of this rank,
    none for an empty shard.
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
    """All tensors of a model in the order of the modules, shared ones once."""

    tensors: tuple[TensorLayout, ...]

    @cached_property
    def by_name(self) -> dict[str, TensorLayout]:
        """Tensors by all of their names."""
        return {name: tensor for tensor in self.tensors for name in tensor.names}

    def saved(self) -> Iterator[TensorLayout]:
        """Parameters and persistent buffers."""
        return (tensor for tensor in self.tensors if tensor.kind.is_saved)

    @property
    def local_nbytes(self) -> int:
        """Bytes of parameters and persistent buffers on this rank."""
        return sum(tensor.local_numel * tensor.dtype.bits // 8 for tensor in self.saved())


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """FQNs of the LoRA matrices of one adapted weight: ``weight + scaling * (lora_B @ lora_A)``.

    Attributes:
        lora_A: (r, in), or (experts * r, in) for stacked experts, expert by expert.
        lora_B: (out, r), or (out, r * experts), rank by rank.
        scaling: of the product.
        experts: number of stacked experts, 0 for a weight (out, in).
        is_transposed: whether stacked experts are (experts, in, out) instead of (experts, out, in).
    """

    lora_A: str
    lora_B: str
    scaling: float
    experts: int = 0
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of activations of one micro-batch on one rank.

    Gradients of the root group are included once they are computed, those of blocks are not.

    Attributes:
        kept: saved by the forward pass up to the end of the last block.
        loss: peak after the last block, forward and backward, minus ``kept``.
        backward: peak in the backward pass of blocks, minus ``kept``.
        last: peak after the backward pass of the first block.
    """

    kept: int = 0
    loss: int = 0
    backward: int = 0
    last: int = 0


_AXES = ("replicate", "shard")


NamedPolicy: TypeAlias = Literal["auto", "model_plan", "no_split_modules", "module_list", "whole_model"]
"""Names of the policies that choose FSDP2 groups."""


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Names and sizes of the axes of a mesh, one (shard) or two (replicate, shard), without its processes.

    Ranks are in row-major order, as in ``init_device_mesh``.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def flat(cls, ranks: int) -> MeshShape:
        """Return the mesh of one axis, with the name of the default mesh."""
        return cls(("fsdp",), (ranks,))

    @classmethod
    def from_axes(cls, ranks: int, axes: Mapping[str, int]) -> MeshShape:
        """Return the mesh of so many ranks with these axes, by name.

        Raises:
            ConfigError: an axis is neither ``replicate`` nor ``shard``, or the axes do not make ``ranks``.
        """
        if unknown := [name for name in axes if name not in _AXES]:
            raise ConfigError(f"mesh={dict(axes)}: a mesh has no axis {unknown[0]!r}. Use {' and '.join(_AXES)}")
        if "shard" not in axes or min(axes.values()) < 1:
            raise ConfigError(f"mesh={dict(axes)}: a mesh needs an axis shard, and a rank or more in every axis")
        mesh = cls(*zip(*((name, axes[name]) for name in _AXES if name in axes), strict=True))
        if mesh.ranks != ranks:
            raise ConfigError(f"the mesh {mesh} has {mesh.ranks} ranks, not {ranks}. Change one of them")
        return mesh

    @property
    def ranks(self) -> int:
        return numel(self.sizes)

    @property
    def shard_size(self) -> int:
        """The number of ranks that share one copy of the model."""
        return self.sizes[-1]

    def position(self, rank: int) -> int:
        """Return the coordinate of a rank on the shard axis. Ranks of equal coordinates hold the same shards."""
        return rank % self.shard_size

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """The boxes of a tensor at each coordinate of the shard axis, and the elements of memory at all of them.

    ``padded_numel`` is the same on all ranks, because FSDP2 pads all shards to the size of the first. Tensors of
    one shape and placement have the same ``Spread`` object.
    """

    boxes: tuple[tuple[LocalBox, ...], ...]
    padded_numel: int


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """FQNs of parameters that are gathered together, and the modules of the group ("" for the root)."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class WorldLayout:
    """All tensors of a model with their boxes on each rank, and the FSDP2 groups.

    ``rank0`` is the layout of rank 0, ``spreads`` is by FQN (the first name of a tensor). The last of ``groups`` is
    the root's. ``whole`` has the parameters that stay unsharded, with the reason.
    """

    mesh: MeshShape
    rank0: ModelLayout
    spreads: Mapping[str, Spread]
    groups: tuple[GroupLayout, ...]
    whole: Mapping[str, str]
