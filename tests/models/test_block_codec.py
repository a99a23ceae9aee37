"""Numbers in blocks: what codes mean wherever a tensor was cut, and how near they are to their numbers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.models.optimizers.block_codec import BlockCodec, Cuts, decoded, scales_kept
from shardwise.tensors import Box

EIGHT = torch.cat([-torch.logspace(0, -6, 127), torch.logspace(-6, 0, 129)]).sort().values
FOUR = torch.linspace(-1, 1, 16)
CODECS = [BlockCodec(4, EIGHT), BlockCodec(4, FOUR, per_byte=2), BlockCodec(8, None)]


@st.composite
def tensors(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    shape = (*shape[:-1], 2 * shape[-1])  # codes of which two are in a byte are cut in pairs
    rows = st.tuples(st.integers(0, max(len(shape) - 2, 0)), st.integers(1, 4))
    cut = st.lists(rows, max_size=1 if len(shape) < 3 else 2, unique_by=lambda each: each[0])
    if len(shape) == 1:
        cut = st.just([])
    return shape, tuple(draw(cut)), tuple(draw(cut))


def in_words(cuts: tuple[tuple[int, int], ...]) -> Cuts:
    return Cuts.parse(", ".join(f"{dim}/{size}" for dim, size in cuts) or "whole")


def cut_out(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))]


@pytest.mark.parametrize("codec", CODECS)
@given(found=tensors(), seed=st.integers(0, 99))
def test_codes_mean_the_same_whatever_they_are_cut_into(codec, found, seed):
    """Each element by the block that it is in, counted in the shard that it was in."""
    shape, before, after = found
    torch.manual_seed(seed)
    whole = torch.randn(shape) * torch.logspace(-3, 3, shape[-1])
    old, new = in_words(before), in_words(after)
    pieces = list(old.boxes(shape))
    length = max(codec.blocks(box.numel) for _, box in pieces)
    scale = torch.zeros((*old.sizes, length))
    packed = (*shape[:-1], shape[-1] // codec.per_byte)
    codes, meant = torch.zeros(packed, dtype=torch.uint8), torch.zeros(shape)
    for place, box in pieces:
        part = cut_out(whole, box)
        own = torch.zeros((*part.shape[:-1], part.shape[-1] // codec.per_byte), dtype=torch.uint8)
        scales = torch.zeros(codec.blocks(part.numel()))
        codec.encode(part.flatten(), own.view(-1), scales)
        cut_out(codes, _packed(box, codec.per_byte)).copy_(own)
        scale[place][: scales.numel()] = scales
        each = scales.repeat_interleave(codec.block)[: part.numel()].view(part.shape)
        cut_out(meant, box).copy_(codec.relative(own) * each)
        assert_near(codec, part.flatten(), codec.relative(own).flatten())
    for _, box in new.boxes(shape):
        own = cut_out(codes, _packed(box, codec.per_byte))
        assert torch.equal(decoded(codec, own, box, scale, shape, old), cut_out(meant, box))
        kept = scales_kept(codec, box, scale, shape, old)
        if kept is not None:
            each = kept.repeat_interleave(codec.block)[: box.numel].view(box.sizes)
            assert torch.equal(codec.relative(own) * each, cut_out(meant, box))


def assert_near(codec: BlockCodec, numbers: torch.Tensor, relative: torch.Tensor) -> None:
    """No other code is nearer."""
    if codec.values is None:
        return
    for start in range(0, numbers.numel(), codec.block):
        block = numbers[start : start + codec.block]
        scaled = block / block.abs().max()
        off = (scaled[:, None] - codec.values).abs().amin(1)
        torch.testing.assert_close((scaled - relative[start : start + codec.block]).abs(), off, atol=1e-6, rtol=0)


def _packed(box: Box, per_byte: int) -> Box:
    last = -1
    offsets, sizes = box.offsets[:last], box.sizes[:last]
    return Box((*offsets, box.offsets[last] // per_byte), (*sizes, box.sizes[last] // per_byte))


def test_scales_are_kept_where_all_shards_begin_with_a_block():
    codec, shape = BlockCodec(4, EIGHT), (6, 4)
    scale = torch.arange(6.0).view(2, 3)
    for rows, first in itertools.product((1, 2, 6), (0, 2)):
        box = Box((first, 0), (min(rows, 6 - first), 4))
        kept = scales_kept(codec, box, scale, shape, Cuts.parse("0/2"))
        assert torch.equal(kept, torch.arange(float(first), first + box.sizes[0]))
    assert scales_kept(codec, Box((0, 0), (6, 2)), scale, shape, Cuts.parse("0/2")) is None
    assert scales_kept(BlockCodec(8, EIGHT), Box((1, 0), (2, 4)), scale, shape, Cuts.parse("whole")) is None


@pytest.mark.parametrize("text", ["", "x", "0/", "0/2,1/2", "-1/2", "0/2; drop", "0/99999999"])
def test_what_says_no_cut_is_none(text):
    assert Cuts.parse(text).cuts is None


def test_zeros_are_zeros():
    for codec in CODECS[::2]:
        codes, scale = torch.ones(10, dtype=torch.uint8), torch.ones(math.ceil(10 / codec.block))
        codec.encode(torch.zeros(10), codes, scale)
        each = scale.repeat_interleave(codec.block)[:10]
        assert float((codec.relative(codes) * each).abs().max()) < 1e-12
