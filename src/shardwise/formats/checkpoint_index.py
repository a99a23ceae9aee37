"""Which tensors a checkpoint holds, where, and what each is made of: plain data, the same for all formats.

What is stored row-major in one run is an entry by itself. Any other tensor is made of entries, by a small tree
whose leaves are entries, whole or seen through strides, and whose nodes put parts one after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from shardwise.tensors import ByteRange, DType, Strided, coalesce, numel


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


@dataclass(frozen=True, slots=True)
class Whole:
    """An entry, by key, as it is."""

    key: str


@dataclass(frozen=True, slots=True)
class View:
    """Elements of an entry that is a flat run of them."""

    key: str
    strided: Strided


@dataclass(frozen=True, slots=True)
class Joined:
    """Parts one after the other along a dimension."""

    parts: tuple[ComposedPart, ...]
    dim: int


class Coded(Protocol):
    """Numbers that are stored in few bits, with scales: plain data of a quantised form.

    ``planning.load_memory`` has a table of what makes an expression of it, by ``kind``.
    """

    @property
    def kind(self) -> str: ...

    @property
    def keys(self) -> tuple[str, ...]:
        """Of all entries that it is made of."""
        ...

    def moved(self, to: Callable[[str], str]) -> Coded:
        """The same of entries whose keys are ``to`` of those that they were."""
        ...


ComposedPart: TypeAlias = Whole | View | Joined | Coded


@dataclass(frozen=True, slots=True)
class Composed:
    """A tensor that is made of entries."""

    dtype: DType
    shape: tuple[int, ...]
    part: ComposedPart


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
    found, as in "model"; ``ignored`` is what else was there, which is not loaded. ``quantised`` is the
    ``quant_method`` of a checkpoint that is. ``spare`` are entries that are loaded into a model that has a tensor
    of that name, and ignored otherwise.
    """

    root: str
    files: Mapping[str, int]
    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    layout: str
    composed: Mapping[str, Composed] = field(default_factory=dict)
    wrapper: str = ""
    ignored: tuple[str, ...] = ()
    quantised: str = ""
    spare: frozenset[str] = frozenset()

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
            if key not in parts and key not in self.spare
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
