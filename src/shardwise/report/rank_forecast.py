"""What a load will take on one rank, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts ``start <= i < stop`` of ``total`` that a rank holds; ``is_cut`` where only a part of each."""

    start: int
    stop: int
    total: int
    is_cut: bool

    @property
    def count(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        if not self.count:
            return f"none of {self.total}"
        part = "a part of each of " if self.is_cut else ""
        if self.count == self.total:
            return f"{part or 'all '}{self.total}"
        span = f"{self.start}" if self.count == 1 else f"{self.start}..{self.stop - 1}"
        return f"{part}{self.count} of {self.total} ({span})"


@dataclass(frozen=True, slots=True)
class RankForecast:
    """What a load will take on one rank. Everything in bytes, but for counts.

    ``shard_bytes`` are those of the elements this rank holds (parameters and persistent buffers), ``padded_bytes``
    the memory they get: FSDP2 pads every rank's shards to the size of the first. ``device_bytes`` and
    ``host_bytes`` are the peak of bringing the model up, nothing of training included; ``host_bytes`` has
    staging in it. ``needed_bytes`` are the stored bytes that the shards are made of, ``read_bytes``
    those that are asked for, gaps included, in ``reads`` requests to ``files`` files; headers are not counted.
    ``experts`` is by stack of experts, equal layers under one pattern.
    """

    rank: int
    shard_bytes: int
    padded_bytes: int
    device_bytes: int
    host_bytes: int
    needed_bytes: int
    read_bytes: int
    reads: int
    files: int
    experts: Mapping[str, Experts] = field(default_factory=dict)
