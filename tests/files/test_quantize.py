"""The node that puts weights into 4 bits: any rows, in blocks of any size, as the weight whole."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.files.test_dequantize import part
from tests.files.test_four_bit_blocks import quantized as by_kernel
from tests.files.test_four_bit_blocks import same

from shardwise.core.computed import Computed, ComputeTask
from shardwise.core.errors import FormatError
from shardwise.core.expression import Stored
from shardwise.core.tensors import Box, DType, Form4
from shardwise.files.four_bit_blocks import bounds_and_order, scales_in
from shardwise.files.packed import quantize_to_packed_rows

DTYPES = {
    DType.F64: torch.float64,
    DType.F32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.F16: torch.float16,
    DType.F8_E5M2: torch.float8_e5m2,
}


def node(shape, stored=DType.BF16, dtype=DType.BF16, block=64, form=Form4.NF4) -> tuple[Computed, Computed]:
    packed, absmax = quantize_to_packed_rows(Stored("layer.weight", tuple(shape), stored), block, form, dtype)
    assert isinstance(packed, Computed)
    assert isinstance(absmax, Computed)
    assert packed.operation == absmax.operation
    return packed, absmax


@st.composite
def cases(draw):
    shape = (*(draw(st.integers(1, 6)) for _ in range(draw(st.integers(1, 2)))), 32 * draw(st.integers(1, 3)))
    stored = draw(st.sampled_from(list(DTYPES)))
    dtype = draw(st.sampled_from([DType.F32, DType.BF16, DType.F16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    values = torch.randn(shape, generator=generator).to(DTYPES[stored])
    leaves = node(shape, stored, dtype, 32, draw(st.sampled_from(list(Form4))))
    wanted: dict[str, list[Box]] = {}
    for leaf in leaves[: draw(st.integers(1, 2))]:
        starts = [draw(st.integers(0, size - 1)) for size in leaf.shape]
        sizes = [draw(st.integers(1, size - at)) for size, at in zip(leaf.shape, starts, strict=True)]
        wanted[leaf.output] = [Box(tuple(starts), tuple(sizes))]
    return values, leaves, wanted, draw(st.integers(1, 10_000)), dtype


@given(cases())
def test_any_rows_in_any_blocks(case):
    values, leaves, wanted, most, dtype = case
    operation = leaves[0].operation
    packed, absmax = by_kernel(values.to(DTYPES[dtype]), operation.block, operation.form)
    whole = {"packed": packed, "absmax": absmax.view(torch.uint8)}
    found = {leaf.output: torch.full(leaf.shape, 99, dtype=torch.uint8) for leaf in leaves}
    times = {leaf.output: torch.zeros(leaf.shape) for leaf in leaves}
    for block in operation.blocks(wanted, most):
        (needed,) = block.inputs
        assert block.nbytes <= most or needed.numel == values.shape[-1]
        given_values = part(values, needed).contiguous().clone()
        before = given_values.clone()
        made = operation.evaluate(block, [given_values])
        assert same(before, given_values)
        on_device, is_bad = operation.evaluate_on_device(block, [given_values], most)
        assert not is_bad
        assert all(same(on_device[name], made[name]) for name in made)
        for name, box in block.outputs.items():
            part(found[name], box).copy_(made[name])
            part(times[name], box).add_(1)
    for name, boxes in wanted.items():
        for box in boxes:
            assert bool((part(times[name], box) == 1).all())
            assert torch.equal(part(found[name], box), part(whole[name], box))


def test_values_are_rounded_first():
    values = torch.randn(3, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = {}
    for dtype in (DType.F32, DType.BF16, DType.F16):
        packed, _ = node((3, 64), DType.F64, dtype)
        (block,) = packed.operation.blocks({"absmax": [Box.whole((3, 4))]}, 1 << 20)
        found[dtype] = scales_in(packed.operation.evaluate(block, [values])["absmax"])
        assert same(found[dtype], values.to(DTYPES[dtype]).float().abs().amax(-1, keepdim=True))
    assert not torch.equal(found[DType.F32], found[DType.BF16])


@pytest.mark.parametrize(
    ("dtype", "value", "shape", "at", "told"),
    [
        (DType.BF16, math.nan, (5, 64), [(3, 7)], "row 3 has values that are not finite in BF16"),
        (DType.F16, 1e30, (5, 64), [(1, 7), (4, 0)], "rows 1, 4 have values that are not finite in F16"),
        (DType.F32, math.inf, (2, 3, 64), [(1, 2, 0)], r"row \(1, 2\) has values that are not finite in F32"),
        (DType.F32, math.inf, (9, 64), [(n, 0) for n in range(5)], "rows 0, 1, 2, 3, 4 have"),
        (DType.F32, math.inf, (9, 64), [(n, 0) for n in range(8)], "rows 0, 1, 2, 3, 4 and 3 more have"),
    ],
)
def test_values_that_are_not_finite_are_named(dtype, value, shape, at, told):
    values = torch.ones(shape)
    for place in at:
        values[place] = value
    packed, _ = node(shape, DType.F32, dtype)
    blocks = list(packed.operation.blocks({"packed": [Box.whole(packed.shape)]}, 1 << 20))
    task = ComputeTask(packed.operation, packed.sources, blocks[0], ())
    with pytest.raises(FormatError, match=f"^layer.weight: quantizing: {told}.*leave this weight"):
        task.evaluate([values])
    assert packed.operation.evaluate_on_device(blocks[0], [values], 1 << 20)[1]


@pytest.mark.parametrize("form", list(Form4))
def test_codes_on_a_device_at_the_bounds_and_of_small_scales(form):
    """Values at, below and above each bound, and blocks whose scale has no normal reciprocal."""
    bounds = torch.from_numpy(bounds_and_order(form)[0])
    near = [torch.nextafter(bounds, torch.full_like(bounds, end)) for end in (-2.0, 2.0)]
    row = torch.cat([torch.ones(1), bounds, *near, -torch.ones(18)])
    rows = torch.stack([row * scale for scale in (1.0, 3.0, 1e-37, 3e-39, 1e-45, 0.0, -0.0, 3e38)])
    packed, _ = node(tuple(rows.shape), DType.F32, DType.F32, 64, form)
    (block,) = packed.operation.blocks({"packed": [Box.whole(packed.shape)]}, 1 << 20)
    made = packed.operation.evaluate(block, [rows])
    on_device, is_bad = packed.operation.evaluate_on_device(block, [rows], 1 << 20)
    assert not is_bad
    assert all(same(on_device[name], made[name]) for name in made)


def test_rows_are_named_by_their_places_in_the_whole():
    packed, _ = node((2, 300, 64), DType.F32, DType.F32)
    (block,) = packed.operation.blocks({"packed": [Box((1, 200, 0), (1, 50, 32))]}, 1 << 20)
    values = torch.ones(block.inputs[0].sizes)
    values[0, 7, 0] = math.nan
    with pytest.raises(FormatError, match=r"row \(1, 207\) has"):
        packed.operation.evaluate(block, [values])
