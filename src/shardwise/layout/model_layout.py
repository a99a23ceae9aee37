"""The tensors of a model and the boxes of them that one rank holds."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

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
