"""A stored tensor that is one run of bytes of a file: what all else is made of."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.tensors import ByteRange, DType, numel


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A stored tensor: the bytes ``start <= i < stop`` of ``file``, row-major, little-endian."""

    key: str
    dtype: DType
    shape: tuple[int, ...]
    file: str
    start: int
    stop: int

    @property
    def range(self) -> ByteRange:
        return ByteRange(self.start, self.stop)

    @property
    def numel(self) -> int:
        return numel(self.shape)

    @property
    def nbytes(self) -> int:
        return self.stop - self.start
