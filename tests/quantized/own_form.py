"""A quantized form of one's own, in one file: bytes, of which each stands for itself less 128."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from shardwise.core.computed import Computed, ComputedBlock, split_aligned
from shardwise.core.errors import ConfigError
from shardwise.core.expression import Expression
from shardwise.core.tensors import Box, DType
from shardwise.files.checkpoint_index import CheckpointIndex, Composed, QuantizedForm, Whole
from shardwise.files.storage import StorageReader


@dataclass(frozen=True)
class OffsetBytes:
    """What is stored of a tensor."""

    values: Whole
    offset: int
    kind: ClassVar[str] = "offset bytes"


@dataclass(frozen=True)
class OwnForm:
    offset: int
    is_kept: bool = False

    def dequantize(self, _reader: StorageReader, index: CheckpointIndex) -> CheckpointIndex:
        made = {
            key: Composed(DType.F32, entry.shape, OffsetBytes(Whole(key), self.offset))
            for key, entry in index.entries.items()
            if entry.dtype is DType.U8
        }
        return replace(index, composed={**index.composed, **made})


def form_of(config: Mapping[str, Any]) -> QuantizedForm:
    if not isinstance(config.get("offset"), int):
        raise ConfigError("quantization_config: wants an offset")
    return OwnForm(config["offset"])


@dataclass(frozen=True)
class Subtract:
    shape: tuple[int, ...]
    offset: int
    label: str = "subtracting"

    def blocks(self, requested: Mapping[str, Sequence[Box]], max_block_bytes: int) -> Iterator[ComputedBlock]:
        for box in split_aligned(
            requested["values"], self.shape, tuple(1 for _ in self.shape), max_block_bytes // 5
        ):
            yield ComputedBlock((box,), {"values": box}, 5 * box.numel)

    def evaluate(self, _block: ComputedBlock, values: Sequence[Any]) -> Mapping[str, Any]:
        return {"values": values[0].float() - self.offset}


def numbers(part: OffsetBytes, leaf: Callable[[str], Expression]) -> Expression:
    stored = leaf(part.values.key)
    return Computed(Subtract(stored.shape, part.offset), "values", stored.shape, DType.F32, (stored,))
