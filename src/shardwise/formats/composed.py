"""Tensors that are not one run of bytes: views of a storage, and chunks that make up a whole. Plain data.

What is stored row-major in one run is an entry by itself. Any other tensor is made of entries, by a small tree
whose leaves are entries, whole or seen through strides, and whose nodes put parts one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from shardwise.tensors import DType, Strided


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

    ``planning.loads.stored`` has a table of what makes an expression of it, by ``kind``.
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
