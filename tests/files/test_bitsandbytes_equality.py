"""Weights in 4 bits, and their scales in 8, as bitsandbytes has them on a CPU: every bit."""

import os

import pytest
import torch
from tests.files.test_four_bit_blocks import DTYPES, dequantized, quantized, same
from tests.files.test_nested_scales import nested_scales, unnest
from tests.peers import use_peers
from tests.support.world import run_forked

from shardwise.core.tensors import Form4
from shardwise.files.four_bit_blocks import BLOCKS, bounds_and_order, dynamic_codebook


def inputs(dtype: torch.dtype, width: int) -> torch.Tensor:
    """Rows of all kinds: of every size, subnormal, huge, zero, with zeros of both signs, on the bounds."""
    generator = torch.Generator().manual_seed(width)
    rows = [torch.randn(width, generator=generator) * 10.0**power for power in range(-44, 39, 5)]
    bounds = torch.tensor([*(bound for form in Form4 for bound in bounds_and_order(form)[0].tolist()), 1.0, -0.0])
    rows += [bounds.repeat(width // 32) * factor for factor in (1.0, 3.0, 0.7, 1e-40, 3e38)]
    rows += [torch.zeros(width), -torch.zeros(width), torch.full((width,), 1e-45)]
    rows += [torch.where(torch.rand(width, generator=generator) < 0.3, -0.0, rows[0])]
    biggest = torch.finfo(dtype).max
    return torch.stack(rows).clamp(-biggest, biggest).to(dtype)


def compare_weights() -> list[str]:
    """What is not as bitsandbytes has it."""
    import bitsandbytes.functional as bnb
    from bitsandbytes.backends.default.ops import _get_4bit_quantize_bounds

    faults, count = [], 0
    for form in Form4:
        numbers = bnb.get_4bit_type(form.value, device="cpu")
        bounds, order = _get_4bit_quantize_bounds(form.value, torch.device("cpu"))
        if not (
            same(torch.tensor(form.codebook), numbers) and same(torch.from_numpy(bounds_and_order(form)[0]), bounds)
        ):
            faults.append(f"{form}: numbers")
        if order.tolist() != bounds_and_order(form)[1].tolist():
            faults.append(f"{form}: order")
        for dtype in DTYPES:
            cases = [(inputs(dtype, block), block) for block in BLOCKS]
            cases += [(torch.randn(2, 300, 384).to(dtype), 128), (torch.randn(7, 19200).to(dtype), 64)]
            for values, block in cases:
                count += 1
                name = f"{form}, {dtype}, {block}"
                packed, absmax = quantized(values, block, form)
                theirs, state = bnb.quantize_4bit(values, blocksize=block, quant_type=form.value)
                if not (torch.equal(packed.flatten(), theirs.flatten()) and same(absmax.flatten(), state.absmax)):
                    faults.append(f"{name}: quantized")
                small = dequantized(packed, absmax, block, form, torch.float32).abs() < 2.0**-126
                for wide in DTYPES:
                    state.dtype = wide
                    mine, other = dequantized(packed, absmax, block, form, wide), bnb.dequantize_4bit(theirs, state)
                    if not torch.equal(mine.masked_fill_(small, 0), other.masked_fill_(small, 0)):
                        faults.append(f"{name}: dequantized to {wide}")
    return [*faults, f"{count} weights"]


def compare_scales() -> list[str]:
    """What is not as bitsandbytes has it."""
    import bitsandbytes.functional as bnb

    faults = []
    if not same(torch.tensor(dynamic_codebook()), bnb.create_dynamic_map()):
        faults.append("numbers")
    generator = torch.Generator().manual_seed(0)
    places = torch.arange(-65600, 65600, dtype=torch.float64).mul(2.0**-16).float()  # more than there are codes for
    cases = [torch.rand(count, generator=generator) for count in (1, 255, 256, 257, 100_003)]
    cases += [torch.rand(600, generator=generator) * factor for factor in (1e-30, 1e-38, 1e-40, 1e-44, 1e30)]
    cases += [torch.full((300,), 0.25), torch.zeros(300), torch.tensor([1.0, *[0.0] * 511]), places.abs()]
    for number, absmax in enumerate(cases):
        codes, nested, offset = nested_scales(absmax)
        theirs, state = bnb.quantize_blockwise(absmax - absmax.mean(), blocksize=256)
        if not (same(offset, absmax.mean()) and torch.equal(codes, theirs) and same(nested, state.absmax)):
            faults.append(f"{number}: nested {(codes != theirs).sum()}")
        back = bnb.dequantize_blockwise(theirs, state)
        back += offset
        if not same(unnest(codes, nested, offset), back):
            faults.append(f"{number}: back")
    weight = torch.randn(70, 640, generator=generator).bfloat16()
    _, plain = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    _, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    codes, nested, offset = nested_scales(plain.absmax)
    if not (same(codes, state.absmax) and same(nested, state.state2.absmax) and same(offset, state.offset)):
        faults.append("of a weight")
    return [*faults, f"{len(cases)} vectors of scales"]


def compare() -> list[str]:
    """What is not as bitsandbytes has it, and how much was compared."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # what bitsandbytes would compile takes long, and says the same
    use_peers("bitsandbytes")
    return compare_weights() + compare_scales()


@pytest.mark.distributed
def test_every_bit():
    assert run_forked(1, compare) == [["60 weights", "14 vectors of scales"]]
