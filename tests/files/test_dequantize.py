"""Elements times their scales: any box of them, in blocks of any size, as by each element's own indices."""

import itertools
import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.core.computed import Computed, compute_tasks, copies_and_computed
from shardwise.core.errors import FormatError
from shardwise.core.expression import Expression, Stored
from shardwise.core.regions import Region
from shardwise.core.tensors import Box, Code, DType, Form4, Strided
from shardwise.files import dequantize as dequantize_module
from shardwise.files.dequantize import dequantize

FLOATS = {DType.F32: torch.float32, DType.BF16: torch.bfloat16, DType.F16: torch.float16}


@st.composite
def cases(draw):
    """A node, its inputs, what it stands for, and a box of it."""
    code, dtype = draw(st.sampled_from([*Code, *Form4])), draw(st.sampled_from(list(FLOATS)))
    per_byte = code.per_byte
    shape = [draw(st.integers(1, 7)) for _ in range(draw(st.integers(0, 2)))]
    shape.append(per_byte * draw(st.integers(1, 7)))
    unit = [draw(st.integers(1, size + 2)) for size in shape]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    packed = torch.randint(0, 256, (*shape[:-1], shape[-1] // per_byte), generator=generator, dtype=torch.uint8)
    halves = [packed >> 4, packed & 15] if isinstance(code, Form4) else [packed & 15, packed >> 4]
    codes = torch.stack(halves, -1).flatten(-2) if per_byte == 2 else packed
    numbers = torch.tensor(code.codebook)[codes.long()]
    counts = [-(-size // step) for size, step in zip(shape, unit, strict=True)]
    exponents = draw(st.booleans())
    scales = torch.randint(100, 150, counts, generator=generator, dtype=torch.uint8)
    factors = 2.0 ** (scales.float() - 127) if exponents else torch.rand(counts, generator=generator)
    power = draw(st.sampled_from([0, 1, -1]))
    whole = torch.tensor([3.0])
    zeros = torch.randint(-8, 9, counts, generator=generator, dtype=torch.int8)
    has_zeros = draw(st.booleans())
    inputs = [packed, scales if exponents else factors]
    inputs += [whole] * bool(power) + [zeros] * has_zeros
    dtypes = {torch.uint8: DType.U8, torch.float32: DType.F32, torch.int8: DType.I8, torch.int32: DType.I32}
    stored = [Stored(str(n), tuple(t.shape), dtypes[t.dtype]) for n, t in enumerate(inputs)]
    rest = stored[2:]
    node = dequantize(
        *stored[:2],
        shape,
        unit,
        code,
        has_exponents=exponents,
        overall=(rest.pop(0), power) if power else None,
        zeros=rest.pop(0) if has_zeros else None,
        dtype=dtype,
    )
    factors = factors * whole if power > 0 else factors / whole if power else factors
    wanted = torch.empty(shape)
    for place in itertools.product(*map(range, shape)):
        at = tuple(at // step for at, step in zip(place, unit, strict=True))
        wanted[place] = (numbers[place] - zeros[at] * has_zeros) * factors[at]
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(1, size - at)) for size, at in zip(shape, starts, strict=True)]
    return (
        node,
        inputs,
        wanted.to(FLOATS[dtype]),
        Box(tuple(starts), tuple(sizes)),
        draw(st.sampled_from([1, 50, 10_000])),
    )


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))]


@given(cases(), st.sampled_from([1, 3, 8, 1 << 18]))
def test_any_box_in_any_blocks(case, strip):
    node, inputs, wanted, box, most = case
    assert isinstance(node, Computed)
    found = torch.full(wanted.shape, math.nan, dtype=wanted.dtype)
    for block in node.operation.blocks({node.output: [box]}, most):
        given_values = [
            part(value, needed).contiguous().clone() for value, needed in zip(inputs, block.inputs, strict=True)
        ]
        before = [value.clone() for value in given_values]
        with mock.patch.object(dequantize_module, "_STRIP_ELEMENTS", strip):
            made = node.operation.evaluate(block, given_values)[node.output]
            on_device, is_bad = node.operation.evaluate_on_device(block, given_values, most)
        assert made.dtype == wanted.dtype
        torch.testing.assert_close(on_device[node.output], made, rtol=0, atol=0, equal_nan=True)
        assert bool(is_bad) == bool(made.isnan().any())
        part(found, block.outputs[node.output]).copy_(made)
        assert all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, given_values, strict=True)
        )
    torch.testing.assert_close(part(found, box), part(wanted, box), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("code", "dtype"),
    [(Code.F8_E4M3, torch.float8_e4m3fn), (Code.F8_E5M2, torch.float8_e5m2), (Code.INT8, torch.int8)],
)
def test_codes_are_those_of_torch(code, dtype):
    found, wanted = torch.tensor(code.codebook), torch.arange(256).to(torch.uint8).view(dtype).float()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale", [1.0, 3e-39, 2.0**120, 3e38, -0.0])
@pytest.mark.parametrize(("code", "dtype"), [("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)])
def test_every_byte_with_scales_at_the_ends(code, dtype, scale):
    stored = torch.arange(256).to(torch.uint8).repeat(3)
    node = dequantize(Stored("v", (768,), DType.U8), Stored("s", (1,), DType.F32), (768,), (768,), Code[code])
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
        made = block.outputs[node.output]
        assert block.nbytes <= most or made.numel <= node.operation.code.per_byte
        held = sum(needed.numel for needed in block.inputs) + 4 * made.numel
        assert held <= block.nbytes


U8, F32 = (lambda *values: torch.tensor(values, dtype=torch.uint8)), (lambda *values: torch.tensor(values))


@pytest.mark.parametrize(
    ("scales", "overall", "beside", "told"),
    [
        (F32(1.0, 2.0), None, F32(0.0, math.nan), "z: dequantizing: a zero point is NaN or infinite"),
        (F32(1.0, 2.0), (3.0, 1), F32(0.0, math.inf), "z: dequantizing: a zero point is NaN or infinite"),
        (U8(127, 255), None, None, "s: dequantizing: a scale is NaN or infinite"),
        (F32(1.0, math.nan), None, None, "s: dequantizing: a scale is NaN or infinite"),
        (F32(math.inf, 1.0), None, None, "s: dequantizing: a scale is NaN or infinite"),
        (F32(1.0, 2.0), (0.0, -1), None, "o: dequantizing: the scale of the whole tensor is 0.0"),
        (F32(1.0, 2.0), (0.0, 1), None, "o: dequantizing: the scale of the whole tensor is 0.0"),
        (F32(1.0, 2.0), (math.nan, 1), None, "o: dequantizing: the scale of the whole tensor is nan"),
    ],
)
def test_scales_that_are_none_are_an_error_that_names_them(scales, overall, beside, told):
    """``beside`` are zero points."""
    dtype = DType.U8 if scales.dtype is torch.uint8 else DType.F32
    node = dequantize(
        Stored("v", (2,), DType.U8),
        Stored("s", (2,), dtype),
        (4,),
        (2,),
        Code.E2M1,
        has_exponents=dtype is DType.U8,
        overall=None if overall is None else (Stored("o", (1,), DType.F32), overall[1]),
        zeros=Stored("z", (2,), DType.F32) if beside is not None else None,
    )
    (task,) = compute_tasks([(0, node, Region.from_box(Box.whole((4,)), Strided.contiguous((4,))))], 1 << 20)
    values = [U8(1, 2), scales]
    values += [] if overall is None else [F32(overall[0])]
    values += [] if beside is None else [beside]
    with pytest.raises(FormatError, match=told):
        task.evaluate(values)
    assert task.fits_devices
    assert task.operation.evaluate_on_device(task.block, values, 1 << 20)[1]


def strided(tensor: torch.Tensor, place: Strided) -> torch.Tensor:
    return tensor.view(-1).as_strided(place.sizes, place.strides, place.offset)


def evaluated(expression: Expression, tensors: dict[str, torch.Tensor], box: Box, most: int) -> torch.Tensor:
    """A box of an expression, blocks of what it computes within ``most`` bytes."""
    dtypes = {DType.U8: torch.uint8, DType.I32: torch.int32, DType.F32: torch.float32}
    out = torch.full(box.sizes, 99, dtype=dtypes[expression.dtype])
    copied, computed = copies_and_computed(expression, box)
    for copy in copied:
        strided(out, copy.target).copy_(strided(tensors[copy.leaf.key], copy.source))
    for task in compute_tasks([(0, leaf, region) for leaf, region in computed], most):
        values = [
            evaluated(source, tensors, need, most)
            for source, need in zip(task.inputs, task.block.inputs, strict=True)
        ]
        made = task.evaluate(values)
        if task.fits_devices:
            on_device, is_bad = task.operation.evaluate_on_device(task.block, values, most)
            assert not is_bad
            assert all(torch.equal(on_device[name], made[name]) for name in made)
        for move in task.moves:
            strided(out, move.place).copy_(strided(made[move.output].contiguous(), move.source))
    return out


def stored_as(tensors: dict[str, torch.Tensor]) -> dict[str, Stored]:
    dtypes = {torch.uint8: DType.U8, torch.float32: DType.F32, torch.int32: DType.I32}
    return {key: Stored(key, tuple(tensor.shape), dtypes[tensor.dtype]) for key, tensor in tensors.items()}


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
    with pytest.raises(ValueError, match="has|reshape"):
        dequantize(Stored("v", values, DType.U8), Stored("s", scales, DType.F32), shape, unit, code)


@pytest.mark.parametrize("exponents", [False, True])
@given(data=st.data())
@settings(max_examples=30)
def test_a_group_for_each_column(exponents, data):
    shape = [data.draw(st.integers(1, 4)) for _ in range(data.draw(st.integers(1, 2)))] + [8]
    unit = [*(data.draw(st.integers(1, size)) for size in shape[:-1]), data.draw(st.sampled_from([2, 3, 8]))]
    counts = [-(-size // step) for size, step in zip(shape, unit, strict=True)]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    tensors = {
        "v": torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8),
        "s": torch.randint(100, 150, counts, generator=generator, dtype=torch.uint8),
        "z": torch.randint(-8, 9, counts, generator=generator, dtype=torch.int32),
        "g": torch.randint(0, counts[-1], (8,), generator=generator, dtype=torch.int32),
    }
    tensors["s"] = tensors["s"] if exponents else tensors["s"].float()
    leaf = stored_as(tensors)
    made = dequantize(
        leaf["v"], leaf["s"], shape, unit, Code.INT8, has_exponents=exponents, zeros=leaf["z"], groups=leaf["g"]
    )
    factors = 2.0 ** (tensors["s"].float() - 127) if exponents else tensors["s"]
    wanted = torch.empty(shape)
    for place in itertools.product(*map(range, shape)):
        at = *(at // step for at, step in zip(place[:-1], unit, strict=False)), int(tensors["g"][place[-1]])
        wanted[place] = (tensors["v"].view(torch.int8)[place] - tensors["z"][at]) * factors[at]
    starts = [data.draw(st.integers(0, length - 1)) for length in shape]
    sizes = [data.draw(st.integers(1, length - at)) for length, at in zip(shape, starts, strict=True)]
    box = Box(tuple(starts), tuple(sizes))
    found = evaluated(made, tensors, box, data.draw(st.sampled_from([1, 500, 10_000])))
    assert torch.equal(found, part(wanted, box))
    tensors["g"][data.draw(st.integers(0, 7))] = data.draw(st.sampled_from([-1, counts[-1]]))
    with pytest.raises(FormatError, match="g: choosing rows: groups are .* and there are scales for 0 to"):
        evaluated(made, tensors, Box.whole(shape), 10_000)
