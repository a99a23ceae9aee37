"""Numbers kept in blocks: a byte or half a one for each, and one scale for every block of them.

Blocks are runs of a shard's own elements in the order of memory, from its first on; the last one may be short. So
what a code means depends on how the tensor was cut, and codes alone cannot be dealt anew: they are turned into
numbers by the old blocks, and these into codes by the new ones.
"""

from __future__ import annotations

import itertools
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch.distributed.tensor import DTensor, Placement, Shard

from shardwise.models._torch_private import splitting_dim
from shardwise.models.view import boxes_at
from shardwise.tensors import Box, contiguous_strides

_AT_ONCE = 1 << 20
"""Elements that are computed together: what is needed for that beside them is a few times as large."""

_SMALLEST = 1e-12
"""A block of zeros has this scale while it is divided by it."""

_FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class BlockCodec:
    """How numbers become codes. ``values`` are those of the codes, growing, of at most 1; None: of float8 (e4m3).

    ``per_byte`` codes are in a byte, the first in its upper half.
    """

    block: int
    values: torch.Tensor | None
    per_byte: int = 1

    @cached_property
    def label(self) -> str:
        """What must be the same for codes to mean the same."""
        how = "float8"
        if self.values is not None:
            how = f"map {zlib.crc32(self.values.detach().cpu().numpy().tobytes()):08x}"
        return f"{8 // self.per_byte} bits, {how}, blocks of {self.block}"

    def blocks(self, count: int) -> int:
        """How many blocks so many numbers have."""
        return -(-count // self.block)

    def relative(self, codes: torch.Tensor) -> torch.Tensor:
        """What codes mean, but for their blocks' scales; the last dimension is as long as there are numbers."""
        if self.values is None:
            return codes.view(_FLOAT8).float()
        if self.per_byte == 2:
            codes = torch.stack([codes >> 4, codes & 0b1111], dim=-1).flatten(-2)
        return self.values.to(codes.device)[codes.int()]

    def encode(self, numbers: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> None:
        """Put numbers, flat float32, into codes (flat) and the scales of their blocks."""
        step = max(_AT_ONCE // self.block, 1) * self.block
        for start in range(0, numbers.numel(), step):
            part = numbers[start : start + step]
            count = part.numel()
            rows = self.blocks(count)
            padded = torch.zeros(rows * self.block, dtype=torch.float32, device=part.device)
            padded[:count] = part
            blocked = padded.view(rows, self.block)
            largest = blocked.abs().amax(-1).clip(_SMALLEST)
            if self.values is None:
                largest = largest / torch.finfo(_FLOAT8).max
            found = self._nearest((blocked / largest[:, None]).flatten()[:count])
            if self.per_byte == 2:
                found = (found[::2] << 4) | found[1::2]
            codes[start // self.per_byte : start // self.per_byte + found.numel()] = found
            scale[start // self.block : start // self.block + rows] = largest

    def _nearest(self, numbers: torch.Tensor) -> torch.Tensor:
        if self.values is None:
            return numbers.to(_FLOAT8).view(torch.uint8)
        values = self.values.to(numbers.device)
        return torch.bucketize(numbers, (values[1:] + values[:-1]) / 2, right=True).to(torch.uint8)


@dataclass(frozen=True, slots=True)
class Cuts:
    """How a tensor is cut: for each axis of a mesh that shards it, the dimension, and over how many ranks.

    ``text`` says so, also of shardings that cannot be told in this way (``cuts`` None).
    """

    cuts: tuple[tuple[int, int], ...] | None
    text: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Cuts:
        """As a tensor is cut now."""
        if not isinstance(tensor, DTensor):
            return cls((), _WHOLE)
        found = [
            (placement, int(dim), int(size))
            for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True)
            if (dim := splitting_dim(placement)) is not None
        ]
        if all(type(placement) is Shard for placement, _, _ in found):
            cuts = tuple((dim, size) for _, dim, size in found)
            return cls(cuts, ", ".join(f"{dim}/{size}" for dim, size in cuts) or _WHOLE)
        return cls(None, ", ".join(f"{placement}/{size}" for placement, _, size in found))

    @classmethod
    def parse(cls, text: str) -> Cuts:
        """As one was cut that says so."""
        if text == _WHOLE:
            return cls((), text)
        if not re.fullmatch(r"\d{1,3}/\d{1,7}(, \d{1,3}/\d{1,7})*", text):
            return cls(None, text)
        pairs = [part.split("/") for part in text.split(", ")]
        return cls(tuple((int(dim), int(size)) for dim, size in pairs), text)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks along each axis."""
        return tuple(size for _, size in self.cuts or ())

    def boxes(self, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Box]]:
        """What each place of the mesh holds of a tensor, and that place; nothing where it holds nothing."""
        assert self.cuts is not None
        placements = tuple(Shard(dim) for dim, _ in self.cuts)
        for place in itertools.product(*(range(size) for size in self.sizes)):
            for held in boxes_at(shape, placements, self.sizes, place, contiguous_strides(shape), "a moment"):
                if held.box.numel:
                    yield place, held.box


_WHOLE = "whole"


def counts_of_shards(tensor: torch.Tensor) -> frozenset[int]:
    """How many elements the shards of a tensor have, on all ranks."""
    if not isinstance(tensor, DTensor):
        return frozenset({tensor.numel()})
    return _counts(tuple(tensor.shape), tuple(tensor.placements), tuple(tensor.device_mesh.shape))


@lru_cache(maxsize=1024)
def _counts(
    shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]
) -> frozenset[int]:
    places = (
        range(size) if splitting_dim(placement) is not None else range(1)
        for placement, size in zip(placements, mesh_shape, strict=True)
    )
    strides = contiguous_strides(shape)
    return frozenset(
        sum(part.box.numel for part in boxes_at(shape, placements, mesh_shape, place, strides, "a moment"))
        for place in itertools.product(*places)
    )


def decoded(
    codec: BlockCodec,
    codes: torch.Tensor,
    box: Box,
    scale: torch.Tensor,
    shape: tuple[int, ...],
    before: Cuts,
) -> torch.Tensor:
    """The numbers of a box of a tensor, float32, from codes that were made of other shards.

    ``codes`` are those of the box; ``scale``, one row for each shard there was, is whole.
    """
    out = torch.empty(box.sizes, dtype=torch.float32, device=codes.device)
    for place, held in before.boxes(shape):
        shared = held.intersect(box)
        if shared is None:
            continue
        scales = scale[place] if place else scale
        inner = tuple(
            slice(start - first, start - first + size)
            for start, first, size in zip(shared.offsets, box.offsets, shared.sizes, strict=True)
        )
        source, target = codes[_packed(inner, codec.per_byte)], out[inner]
        lines = max(_AT_ONCE // max(math.prod(shared.sizes[1:]), 1), 1)
        for start in range(0, shared.sizes[0], lines):
            stop = min(start + lines, shared.sizes[0])
            block_of = _position(shared, held, start, stop, codes.device) // codec.block
            target[start:stop] = codec.relative(source[start:stop]) * scales[block_of]
    return out


def scales_kept(
    codec: BlockCodec, box: Box, scale: torch.Tensor, shape: tuple[int, ...], before: Cuts
) -> torch.Tensor | None:
    """The scales of a box whose blocks are those there were, so that codes mean the same; None where others are.

    So they are where rows are dealt, and each old and new shard begins with a block of the whole.
    """
    if any(dim for dim, _ in before.cuts or ()) or box.sizes[1:] != shape[1:]:
        return None
    row = math.prod(shape[1:])
    first, last = box.offsets[0] * row, (box.offsets[0] + box.sizes[0]) * row
    if first % codec.block:
        return None
    found = torch.empty(codec.blocks(last - first), dtype=scale.dtype, device=scale.device)
    for place, held in before.boxes(shape):
        start, stop = held.offsets[0] * row, (held.offsets[0] + held.sizes[0]) * row
        low, high = max(start, first), min(stop, last)
        if low >= high:
            continue
        if start % codec.block:
            return None
        own, to = (low - start) // codec.block, (low - first) // codec.block
        count = codec.blocks(high - low)
        found[to : to + count] = (scale[place] if place else scale)[own : own + count]
    return found


def _position(shared: Box, held: Box, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Where elements are in a shard, counted from its first; of so many lines of what is shared with it."""
    found = torch.zeros((), dtype=torch.int64, device=device)
    for dim, stride in enumerate(contiguous_strides(held.sizes)):
        first = shared.offsets[dim] - held.offsets[dim]
        own = torch.arange(shared.sizes[dim], device=device) if dim else torch.arange(start, stop, device=device)
        found = found[..., None] + (own + first) * stride
    return found


def _packed(inner: Sequence[slice], per_byte: int) -> tuple[slice, ...]:
    last = inner[-1]
    return (*inner[:-1], slice(last.start // per_byte, last.stop // per_byte))
