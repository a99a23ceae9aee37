"""Elements times their scales: any box of them, in blocks of any size, as by each element's own indices."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.conversion import Stored
from shardwise.conversion import dequantise as room
from shardwise.conversion.computed import Computed
from shardwise.conversion.dequantise import dequantised
from shardwise.tensors import Box, Code, DType


@st.composite
def cases(draw):
    """A node, its inputs, what it stands for, and a box of it."""
    code = draw(st.sampled_from(list(Code)))
    per_byte = code.per_byte
    shape = [draw(st.integers(1, 7)) for _ in range(draw(st.integers(0, 2)))]
    shape.append(per_byte * draw(st.integers(1, 7)))
    unit = [draw(st.integers(1, size + 2)) for size in shape]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    packed = torch.randint(0, 256, (*shape[:-1], shape[-1] // per_byte), generator=generator, dtype=torch.uint8)
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2) if per_byte == 2 else packed
    numbers = torch.tensor(code.numbers)[codes.long()]
    counts = [-(-size // step) for size, step in zip(shape, unit, strict=True)]
    exponents = draw(st.booleans())
    scales = torch.randint(100, 150, counts, generator=generator, dtype=torch.uint8)
    factors = 2.0 ** (scales.float() - 127) if exponents else torch.rand(counts, generator=generator)
    power = draw(st.sampled_from([0, 1, -1]))
    whole = torch.tensor([3.0])
    inputs = [packed, scales if exponents else factors, *([whole] if power else [])]
    dtypes = [DType.U8, DType.U8 if exponents else DType.F32, DType.F32]
    stored = [Stored(str(n), tuple(t.shape), dtypes[n]) for n, t in enumerate(inputs)]
    node = dequantised(
        *stored[:2],
        shape,
        unit,
        code,
        has_exponents=exponents,
        overall=(stored[2], power) if power else None,
    )
    factors = factors * whole if power > 0 else factors / whole if power else factors
    wanted = torch.empty(shape)
    for place in itertools.product(*map(range, shape)):
        wanted[place] = numbers[place] * factors[tuple(at // step for at, step in zip(place, unit, strict=True))]
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(1, size - at)) for size, at in zip(shape, starts, strict=True)]
    return node, inputs, wanted, Box(tuple(starts), tuple(sizes)), draw(st.sampled_from([1, 50, 10_000]))


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))]


@given(cases())
def test_any_box_in_any_blocks(case):
    node, inputs, wanted, box, most = case
    assert isinstance(node, Computed)
    found = torch.full(wanted.shape, math.nan)
    for block in node.operation.blocks({node.output: [box]}, most):
        given_values = [
            part(value, needed).contiguous().clone() for value, needed in zip(inputs, block.needs, strict=True)
        ]
        before = [value.clone() for value in given_values]
        made = node.operation.evaluate(block, given_values)[node.output]
        assert made.dtype == torch.float32
        part(found, block.gives[node.output]).copy_(made)
        assert all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, given_values, strict=True)
        )
    torch.testing.assert_close(part(found, box), part(wanted, box), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("code", "dtype"),
    [(Code.F8_E4M3, torch.float8_e4m3fn), (Code.F8_E5M2, torch.float8_e5m2), (Code.INT8, torch.int8)],
)
def test_codes_are_those_of_torch(code, dtype):
    found, wanted = torch.tensor(code.numbers), torch.arange(256).to(torch.uint8).view(dtype).float()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@given(
    cases(),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    st.sampled_from([1, 3, 8, 1 << 18]),
    st.booleans(),
)
def test_numbers_are_written_where_they_go_and_cast_once(case, dtype, strip, turned):
    node, inputs, wanted, box, most = case
    assert isinstance(node, Computed)
    before, room._STRIP_ELEMENTS = room._STRIP_ELEMENTS, strip
    try:
        for block in node.operation.blocks({node.output: [box]}, most):
            values = [part(value, needed).contiguous() for value, needed in zip(inputs, block.needs, strict=True)]
            sizes = block.gives[node.output].sizes
            out = torch.empty(sizes[::-1], dtype=dtype).permute(*reversed(range(len(sizes)))) if turned else None
            out = torch.empty(sizes, dtype=dtype) if out is None else out
            node.operation.evaluate_into(block, values, {node.output: out})
            torch.testing.assert_close(
                out, part(wanted, block.gives[node.output]).to(dtype), rtol=0, atol=0, equal_nan=True
            )
    finally:
        room._STRIP_ELEMENTS = before


@pytest.mark.parametrize("scale", [1.0, 3e-39, 2.0**120, 3e38, math.inf, math.nan, -0.0])
@pytest.mark.parametrize(("code", "dtype"), [("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)])
def test_every_byte_with_scales_at_the_ends(code, dtype, scale):
    stored = torch.arange(256).to(torch.uint8).repeat(3)
    node = dequantised(Stored("v", (768,), DType.U8), Stored("s", (1,), DType.F32), (768,), (768,), Code[code])
    (block,) = node.operation.blocks({node.output: [Box.whole((768,))]}, 1 << 20)
    found = node.operation.evaluate(block, [stored, torch.tensor([scale])])[node.output]
    wanted = stored.view(dtype).float() * torch.tensor([scale])
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    numbers = ~wanted.isnan()
    assert torch.equal(found[numbers].view(torch.int32), wanted[numbers].view(torch.int32))


@given(cases(), st.sampled_from([200, 5_000, 1 << 24]))
def test_blocks_are_no_larger_than_they_may_be(case, most):
    node, _, _, box, _ = case
    for block in node.operation.blocks({node.output: [box]}, most):
        made = block.gives[node.output]
        assert block.nbytes <= most or made.numel <= node.operation.code.per_byte
        held = sum(needed.numel for needed in block.needs) + 4 * made.numel
        assert held <= block.nbytes


def test_an_exponent_that_is_none():
    values, scales = Stored("v", (1, 2), DType.U8), Stored("s", (1, 1), DType.U8)
    node = dequantised(values, scales, (1, 4), (1, 4), Code.E2M1, has_exponents=True)
    (block,) = node.operation.blocks({node.output: [Box.whole((1, 4))]}, 1000)
    found = node.operation.evaluate(
        block, [torch.ones(1, 2, dtype=torch.uint8), torch.full((1, 1), 255, dtype=torch.uint8)]
    )
    assert found[node.output].isnan().all()


@pytest.mark.parametrize(
    ("values", "scales", "shape", "unit", "code"),
    [
        ((4, 4), (2, 3), (4, 4), (2, 2), Code.INT8),
        ((4, 3), (2, 2), (4, 4), (2, 2), Code.INT8),
        ((4, 4), (2, 2), (4, 4), (2, 2), Code.E2M1),
        ((), (), (), (), Code.INT8),
    ],
)
def test_what_does_not_go_together(values, scales, shape, unit, code):
    with pytest.raises(ValueError, match="has"):
        dequantised(Stored("v", values, DType.U8), Stored("s", scales, DType.F32), shape, unit, code)
