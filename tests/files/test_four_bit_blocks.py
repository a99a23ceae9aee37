"""Weights in 4 bits: as each element by itself, and as bitsandbytes has them on a CPU."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.computed import Computed
from shardwise.core.expression import Stored
from shardwise.core.tensors import Box, DType, Form4
from shardwise.files.dequantize import dequantize
from shardwise.files.four_bit_blocks import bounds_and_order, quantize_rows

DTYPES = {torch.float32: DType.F32, torch.bfloat16: DType.BF16, torch.float16: DType.F16}


def quantized(values: torch.Tensor, block: int, form: Form4) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales, of which no row is refused."""
    packed = torch.full((*values.shape[:-1], values.shape[-1] // 2), 99, dtype=torch.uint8)
    absmax = torch.full((*values.shape[:-1], values.shape[-1] // block), math.nan)
    assert quantize_rows(values, DTYPES[values.dtype], block, form, packed, absmax) == ()
    return packed, absmax


def dequantized(
    packed: torch.Tensor, absmax: torch.Tensor, block: int, form: Form4, dtype: torch.dtype
) -> torch.Tensor:
    """The numbers of codes and scales, by the node that a load evaluates."""
    codes = Stored("codes", tuple(packed.shape), DType.U8)
    scales = Stored("scales", tuple(absmax.shape), DType.F32)
    shape, unit = (*packed.shape[:-1], 2 * packed.shape[-1]), (*(1 for _ in packed.shape[:-1]), block)
    node = dequantize(codes, scales, shape, unit, form, dtype=DTYPES[dtype])
    assert isinstance(node, Computed)
    (whole,) = node.operation.blocks({node.output: [Box.whole(shape)]}, 1 << 30)
    return node.operation.evaluate(whole, [packed, absmax])[node.output]


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """To the bit."""
    both = [tensor.reshape(-1).view(torch.uint8) for tensor in (first, second)]
    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(*both)


# As each element by itself


def code_of(value: torch.Tensor, scale: torch.Tensor, form: Form4) -> int:
    """Of one float32: the number that is nearest, by the bounds, to it times the reciprocal of its scale."""
    least = torch.tensor(1e-38)
    number = value * (torch.tensor(1.0) / torch.maximum(scale, least))
    by_size = sorted(range(16), key=lambda code: form.codebook[code])
    numbers = torch.tensor([form.codebook[code] for code in by_size])
    return by_size[int(((numbers[:-1] + numbers[1:]) / 2 < number).sum())]


@st.composite
def weights(draw):
    dtype, block = draw(st.sampled_from(list(DTYPES))), draw(st.sampled_from([32, 64]))
    shape = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 2)))]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    values = torch.randn(*shape, block * draw(st.integers(1, 3)), generator=generator)
    values *= 10.0 ** draw(st.integers(-44, 4))
    if draw(st.booleans()):
        values[torch.rand(values.shape, generator=generator) < 0.5] = draw(st.sampled_from([0.0, -0.0, 1e-45]))
    return values.to(dtype), block, draw(st.sampled_from(list(Form4)))


@given(weights())
def test_each_element_by_itself(case):
    values, block, form = case
    packed, absmax = quantized(values, block, form)
    scales = values.float().unflatten(-1, (-1, block)).abs().amax(-1)
    assert same(absmax, scales)
    codes = torch.stack([packed >> 4, packed & 15], -1).flatten(-2)
    by_element = scales.repeat_interleave(block, -1)
    wanted = [
        code_of(value, scale, form)
        for value, scale in zip(values.float().flatten(), by_element.flatten(), strict=True)
    ]
    assert codes.flatten().tolist() == wanted
    numbers = torch.tensor(form.codebook)[codes.long()] * by_element
    for dtype in DTYPES:
        assert same(dequantized(packed, absmax, block, form, dtype), numbers.to(dtype))


@pytest.mark.parametrize("block", [32, 64, 128, 256, 512, 1024, 2048, 4096])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_weights_of_several_chunks(dtype, block):
    values = torch.randn(35, 4096, generator=torch.Generator().manual_seed(block)).to(dtype)
    scales = values.float().unflatten(-1, (-1, block)).abs().amax(-1)
    numbers = values.float() * (1 / scales).repeat_interleave(block, -1)
    for form in Form4:
        packed, absmax = quantized(values, block, form)
        assert same(absmax, scales)
        bounds, order = map(torch.from_numpy, bounds_and_order(form))
        codes = order.long()[torch.bucketize(numbers, bounds)]
        assert torch.equal(packed, (codes[:, ::2] << 4 | codes[:, 1::2]).byte())
        wanted = torch.tensor(form.codebook)[codes] * scales.repeat_interleave(block, -1)
        assert same(dequantized(packed, absmax, block, form, dtype), wanted.to(dtype))


@pytest.mark.parametrize("form", list(Form4))
def test_on_the_bounds_and_beside_them(form):
    bounds, order = torch.from_numpy(bounds_and_order(form)[0]), bounds_and_order(form)[1].tolist()
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    values = torch.cat([bounds, bounds.nextafter(up), bounds.nextafter(down), torch.zeros(18), torch.tensor([1.0])])
    packed, absmax = quantized(values.view(1, 64), 64, form)
    codes = torch.stack([packed >> 4, packed & 15], -1).flatten().tolist()
    assert codes[:15] == order[:15]
    assert codes[15:30] == order[1:]
    assert codes[30:45] == order[:15]
    assert codes[63] == order[15]
    assert absmax.tolist() == [[1.0]]


@pytest.mark.parametrize("form", list(Form4))
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_all_that_is_near_a_bound(form, dtype):
    """Also where there is nothing else, so that all of a chunk has the place of one."""
    steps = torch.linspace(-2, 2, 4095) / (1 << 14)
    bounds, order = map(torch.from_numpy, bounds_and_order(form))
    rows = [torch.cat([(bound + steps).clamp(-1, 1), torch.ones(1)]) for bound in bounds]
    values = torch.stack([*rows, torch.full((4096,), float(bounds[3])).index_fill(0, torch.tensor([7]), 1.0)])
    values = values.repeat(3, 1).to(dtype)
    packed, absmax = quantized(values, 4096, form)
    assert (absmax == 1).all()
    codes = order.long()[torch.bucketize(values.float(), bounds)]
    assert torch.equal(packed, (codes[:, ::2] << 4 | codes[:, 1::2]).byte())


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_are_reported(dtype, bad):
    values = torch.ones(2, 3, 128, dtype=dtype)
    values[0, 1, 5] = values[1, 2, 127] = bad
    packed, absmax = torch.zeros(2, 3, 64, dtype=torch.uint8), torch.zeros(2, 3, 2)
    assert quantize_rows(values, DTYPES[dtype], 64, Form4.NF4, packed, absmax) == (1, 5)
    assert same(absmax[0, 0], torch.ones(2))
    assert bool((packed[0, 0] == 255).all())


def test_no_rows():
    packed, absmax = quantized(torch.empty(0, 64), 64, Form4.FP4)
    assert dequantized(packed, absmax, 64, Form4.FP4, torch.bfloat16).shape == (0, 64)
