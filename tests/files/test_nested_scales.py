"""Scales in a byte each, as bitsandbytes has them, in whole and in parts."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.files.test_four_bit_blocks import same

from shardwise.core.computed import Computed
from shardwise.core.expression import Stored
from shardwise.core.tensors import Box, DType
from shardwise.files.four_bit_blocks import (
    compute_nested_codes,
    compute_nested_scales,
    compute_offset,
    dynamic_codebook,
)
from shardwise.files.packed import dequantize_scales


def nested_scales(absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, largest magnitudes and offset of scales."""
    offset = compute_offset(absmax)
    nested = compute_nested_scales(absmax, offset)
    return compute_nested_codes(absmax, 0, nested, offset), nested, offset


def unnest(codes: torch.Tensor, nested: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """The scales that codes stand for, by the node that a load evaluates."""
    node = dequantize_scales(
        Stored("codes", tuple(codes.shape), DType.U8),
        Stored("nested", tuple(nested.shape), DType.F32),
        float(offset),
        dynamic_codebook(),
    )
    assert isinstance(node, Computed)
    (block,) = node.operation.blocks({node.output: [Box.whole(node.shape)]}, 1 << 30)
    return node.operation.evaluate(block, [codes.flatten(), nested])[node.output].view(codes.shape)


@given(st.integers(1, 900), st.integers(0, 99), st.integers(-8, 8), st.data())
def test_parts_are_those_of_the_whole(count, seed, power, data):
    absmax = torch.rand(count, generator=torch.Generator().manual_seed(seed)) * 10.0**power
    codes, nested, offset = nested_scales(absmax)
    scales = unnest(codes, nested, offset)
    moved = absmax - absmax.mean()
    numbers = torch.tensor(dynamic_codebook())
    for block, start in enumerate(range(0, count, 256)):
        part = moved[start : start + 256]
        assert nested[block] == part.abs().max()
        found = numbers[codes[start : start + 256].long()]
        assert same(scales[start : start + 256], found * nested[block] + offset)
        if nested[block]:
            nearest = (part[:, None] / nested[block] - numbers).abs().min(1).values
            distance = (part / nested[block] - found).abs()
            assert bool((distance <= nearest + 2 / 65535).all())
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    assert same(compute_nested_codes(absmax[start:stop], start, nested, offset), codes[start:stop])


def test_another_offset():
    absmax = torch.rand(600)
    codes, _, offset = nested_scales(absmax)
    assert same(compute_offset(absmax), offset)
    nested = compute_nested_scales(absmax, offset + 0.25)
    moved = compute_nested_codes(absmax, 0, nested, offset + 0.25)
    assert not torch.equal(moved, codes)
    torch.testing.assert_close(unnest(moved, nested, offset + 0.25), absmax, rtol=0, atol=0.02)
