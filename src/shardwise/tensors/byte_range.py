"""Half-open ranges of bytes in a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class ByteRange:
    """The bytes ``start <= i < stop`` of a file."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"not a byte range: {self.start}..{self.stop}")

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def coalesce(ranges: Iterable[ByteRange], *, max_gap_bytes: int) -> list[ByteRange]:
    """Sorted ranges that cover all of ``ranges``, joined where at most ``max_gap_bytes`` lie between them."""
    joined: list[ByteRange] = []
    for item in sorted(ranges):
        if joined and item.start - joined[-1].stop <= max_gap_bytes:
            joined[-1] = ByteRange(joined[-1].start, max(joined[-1].stop, item.stop))
        else:
            joined.append(item)
    return joined
