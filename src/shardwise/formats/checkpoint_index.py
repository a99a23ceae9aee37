"""Which tensors a checkpoint holds, and where: plain data, the same for all formats."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shardwise.formats.composed import Composed, ComposedPart, Joined, View, Whole
from shardwise.formats.entries import TensorEntry
from shardwise.tensors import DType, coalesce, numel


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint, and the entries that it is made of: one, for most."""

    key: str
    dtype: DType
    shape: tuple[int, ...]
    entries: tuple[TensorEntry, ...]

    @property
    def numel(self) -> int:
        return numel(self.shape)

    @property
    def nbytes(self) -> int:
        """Of its own elements; those of its entries may be more."""
        return self.numel * self.dtype.bits // 8


@dataclass(frozen=True)
class CheckpointIndex:
    """All that a checkpoint stores, without a byte of its tensors. Plain data: ranks send it to each other.

    ``files`` are the files with tensors in name order, with their sizes in bytes; ``entries`` what lies in one run,
    by key, file by file in the order of their bytes; ``metadata`` that of the files' headers and of the index file,
    whose values count where both have one. ``composed`` are the tensors that are made of several entries, or of
    parts of one; these entries are no tensors by themselves. ``wrapper`` is where in a nest of dicts the model was
    found, as in "model"; ``ignored`` is what else was there, which is not loaded.
    """

    root: str
    files: Mapping[str, int]
    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    layout: str
    composed: Mapping[str, Composed] = field(default_factory=dict)
    wrapper: str = ""
    ignored: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors, those that several share counted once, headers not counted."""
        by_file = defaultdict(list)
        for entry in self.entries.values():
            by_file[entry.file].append(entry.range)
        return sum(item.nbytes for ranges in by_file.values() for item in coalesce(ranges, max_gap_bytes=0))

    def is_scaled(self, key: str) -> bool:
        """Whether a tensor is stored in few bits, with scales: its dtype is that of the numbers."""
        return key in self.composed and not isinstance(self.composed[key].part, Whole | View | Joined)

    def tensors(self) -> list[StoredTensor]:
        """Every tensor, in the order of the entries; composed ones last."""
        parts = {key for item in self.composed.values() for key in entries_of(item.part)}
        simple = [
            StoredTensor(key, entry.dtype, entry.shape, (entry,))
            for key, entry in self.entries.items()
            if key not in parts
        ]
        return simple + [
            StoredTensor(key, item.dtype, item.shape, tuple(self.entries[part] for part in entries_of(item.part)))
            for key, item in self.composed.items()
        ]


def entries_of(part: ComposedPart) -> Iterator[str]:
    """The keys of the entries that a part of a tensor is made of."""
    match part:
        case Whole(key) | View(key):
            yield key
        case Joined(parts):
            for inner in parts:
                yield from entries_of(inner)
        case _:
            yield from part.keys
