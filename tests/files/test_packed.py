"""Numbers of packed bytes, and bytes of scales: any box of them, in blocks of any size, by its own indices."""

import itertools
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.core.test_leaves import evaluated as moved
from tests.files.test_dequantize import part

from shardwise.core.computed import Computed
from shardwise.core.expression import (
    Expression,
    Stored,
    concat,
    iter_leaves,
    permute,
    reshape,
    slice_dim,
    stack,
)
from shardwise.core.tensors import Box, Code, DType, Form4, FourBitForm
from shardwise.files.checkpoint_index import Whole
from shardwise.files.coded import FourBits
from shardwise.files.dequantize import POWERS, dequantize
from shardwise.files.dequantize_expressions import dequantize_four_bits
from shardwise.files.packed import (
    as_bytes,
    dequantize_scales,
    find_quant_type,
    find_stored_nested,
    find_stored_rows,
    pack,
)

DTYPES = {DType.F32: torch.float32, DType.BF16: torch.bfloat16, DType.F16: torch.float16}


def four_bits(
    values: Expression, scales: Expression, shape: tuple[int, ...], form: Form4, block: int, dtype: DType
) -> Expression:
    """Numbers in four bits, by the node that a load evaluates."""
    leaves = {"w": values, "s": scales}
    return dequantize_four_bits(FourBits(Whole("w"), Whole("s"), shape, block, form, dtype), leaves.__getitem__)


def evaluated(node: Computed, inputs: list[torch.Tensor], box: Box, most: int) -> torch.Tensor:
    """A box of a node, put together of its blocks; inputs are its sources, as they are."""
    found: torch.Tensor | None = None
    for block in node.operation.blocks({node.output: [box]}, most):
        values = [part(value, needed).contiguous() for value, needed in zip(inputs, block.inputs, strict=True)]
        made = node.operation.evaluate(block, values)[node.output]
        found = torch.empty(node.shape, dtype=made.dtype) if found is None else found
        part(found, block.outputs[node.output]).copy_(made)
    assert found is not None
    return part(found, box)


@st.composite
def boxes(draw, shape):
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    return Box(
        tuple(starts), tuple(draw(st.integers(1, size - at)) for size, at in zip(shape, starts, strict=True))
    )


@given(st.data())
def test_any_box_of_numbers(data):
    draw = data.draw
    form, dtype = draw(st.sampled_from(list(Form4))), draw(st.sampled_from(list(DTYPES)))
    outer = [draw(st.integers(1, 4)) for _ in range(draw(st.integers(1, 2)))]
    shape = (*outer, 32 * draw(st.integers(1, 3)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    values = torch.randint(0, 256, (*outer, shape[-1] // 2), generator=generator, dtype=torch.uint8)
    scales = torch.rand((*outer, shape[-1] // 32), generator=generator)
    stored = Stored("w", (values.numel(), 1), DType.U8), Stored("s", (scales.numel(),), DType.F32)
    node = four_bits(*stored, shape, form, 32, dtype)
    assert isinstance(node, Computed)
    assert find_quant_type(node) == (form, 32)
    wanted = torch.empty(shape)
    for place in itertools.product(*map(range, shape)):
        *rows, column = place
        byte = int(values[(*rows, column // 2)])
        wanted[place] = form.codebook[byte & 15 if column % 2 else byte >> 4] * scales[(*rows, column // 32)]
    box = draw(boxes(shape))
    found = evaluated(node, [values, scales], box, draw(st.sampled_from([1, 200, 100_000])))
    assert found.dtype == DTYPES[dtype]
    assert torch.equal(found, part(wanted.to(DTYPES[dtype]), box))


@given(st.data())
def test_blocks_that_continue_from_row_to_row(data):
    """Of any box of the flat numbers."""
    draw = data.draw
    shape = (draw(st.integers(1, 9)), draw(st.integers(1, 90)))
    count = math.prod(shape)
    assume(shape[1] % 32)
    blocks = -(-count // 32)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    values = torch.randint(0, 256, (-(-count // 2),), generator=generator, dtype=torch.uint8)
    scales = torch.rand(blocks, generator=generator)
    stored = Stored("w", (values.numel(), 1), DType.U8), Stored("s", (blocks,), DType.F32)
    made = four_bits(*stored, shape, Form4.NF4, 32, DType.BF16)
    assert find_quant_type(made) is None
    (node,) = iter_leaves(made)
    assert isinstance(node, Computed)
    codes = torch.stack([values >> 4, values & 15], -1).flatten()[:count]
    wanted = torch.tensor(Form4.NF4.codebook)[codes.int()] * scales.repeat_interleave(32)[:count]
    box = draw(boxes((count,)))
    found = evaluated(node, [values, scales], box, draw(st.sampled_from([1, 200, 100_000])))
    assert torch.equal(found, part(wanted.bfloat16(), box))


@given(st.data())
def test_any_of_the_scales_that_are_bytes(data):
    draw = data.draw
    count = draw(st.sampled_from([1, 255, 256, 257, 700]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    codes = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
    nested, numbers = torch.rand(-(-count // 256), generator=generator), torch.rand(256, generator=generator)
    node = dequantize_scales(
        Stored("c", (count,), DType.U8), Stored("n", tuple(nested.shape), DType.F32), 0.25, tuple(numbers.tolist())
    )
    assert isinstance(node, Computed)
    wanted = numbers[codes.long()] * nested.repeat_interleave(256)[:count] + 0.25
    box = draw(boxes((count,)))
    assert torch.equal(
        evaluated(node, [codes, nested], box, draw(st.sampled_from([1, 3000, 1 << 20]))), part(wanted, box)
    )


@given(st.data())
def test_any_of_the_bytes_of_numbers(data):
    draw = data.draw
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 5)))
    numbers = torch.rand(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    node = as_bytes(Stored("s", shape, DType.F32))
    assert isinstance(node, Computed)
    box = draw(boxes(node.shape))
    found = evaluated(node, [numbers], box, draw(st.sampled_from([1, 16, 1 << 20])))
    assert torch.equal(found, part(numbers.view(torch.uint8), box))


def test_rows_stored_in_the_same_form_are_copied():
    values, scales = Stored("w", (256, 1), DType.U8), Stored("s", (8,), DType.F32)
    numbers = four_bits(values, scales, (8, 64), Form4.NF4, 64, DType.BF16)
    weight, raw = pack(numbers, Form4.NF4, 64, rounds_to=DType.BF16)
    assert weight == reshape(values, (8, 32))
    assert isinstance(raw, Computed)
    assert raw.operation.label == "reinterpreting"
    for form, block in ((Form4.FP4, 64), (Form4.NF4, 32)):
        again, _ = pack(numbers, form, block, rounds_to=DType.BF16)
        assert isinstance(again, Computed)
        assert again.operation.label == "quantizing"
    assert find_stored_nested(numbers, Form4.NF4, 64) is None


class Stacks:
    """Weights that are stored in four bits, as expressions, with their numbers."""

    def __init__(self, form: FourBitForm, seed: int) -> None:
        self.form, self.bytes = form, {}
        self.generator = torch.Generator().manual_seed(seed)

    def leaf(self, shape: tuple[int, ...]) -> tuple[Expression, torch.Tensor]:
        number, counts = len(self.bytes), (*shape[:-1], shape[-1] // 32)
        values = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), generator=self.generator, dtype=torch.uint8)
        scales = torch.randint(0, 255, counts, generator=self.generator, dtype=torch.uint8)
        self.bytes |= {f"w{number}": values.numpy(), f"s{number}": scales.numpy()}
        w, s = Stored(f"w{number}", tuple(values.shape), DType.U8), Stored(f"s{number}", counts, DType.U8)
        if isinstance(self.form, Code):
            node = dequantize(w, s, shape, (*(1 for _ in shape[:-1]), 32), self.form, has_exponents=True)
        else:
            node = four_bits(w, s, shape, self.form, 32, DType.F32)
        return node, self.numbers(values, scales)

    def numbers(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Of bytes; scales of any form are exponents here."""
        halves = [values & 15, values >> 4] if isinstance(self.form, Code) else [values >> 4, values & 15]
        numbers = torch.tensor(self.form.codebook)[torch.stack(halves, -1).flatten(-2).int()]
        return numbers * torch.tensor(POWERS)[scales.int()].repeat_interleave(32, -1)


@given(st.data())
def test_rows_that_are_put_together_are_so_as_bytes(data):
    draw = data.draw
    stacks = Stacks(draw(st.sampled_from([*Form4, Code.E2M1])), draw(st.integers(0, 99)))
    shape = (draw(st.integers(1, 3)), draw(st.sampled_from([2, 4])), 32 * draw(st.integers(1, 2)))
    node, numbers = stacks.leaf(shape)
    for _ in range(draw(st.integers(0, 4))):
        last = numbers.ndim - 1
        dim = draw(st.integers(0, max(0, last - 1)))
        match draw(st.sampled_from(["concat", "stack", "slice", "swap", "flat"])):
            case "concat" if last:
                other, more = stacks.leaf(tuple(numbers.shape))
                node, numbers = concat([node, other], dim), torch.cat([numbers, more], dim)
            case "stack":
                other, more = stacks.leaf(tuple(numbers.shape))
                node, numbers = stack([node, other], dim), torch.stack([numbers, more], dim)
            case "slice" if last:
                start = draw(st.integers(0, numbers.shape[dim] - 1))
                size = numbers.shape[dim] - start
                node, numbers = slice_dim(node, dim, start, size), numbers.narrow(dim, start, size)
            case "swap" if last:
                order = [dim, *(other for other in range(last) if other != dim), last]
                node, numbers = permute(node, order), numbers.permute(order)
            case _:
                numbers = numbers.reshape(-1, numbers.shape[-1])
                node = reshape(node, tuple(numbers.shape))
    found = find_stored_rows(node)
    assert found is not None
    assert (found.form, found.block_size) == (stacks.form, 32)
    bytes_of = [torch.from_numpy(moved(item, stacks.bytes)).byte() for item in (found.values, found.scales)]
    assert torch.equal(stacks.numbers(*bytes_of), numbers)


def test_rows_of_two_forms_or_taken_apart_are_numbers():
    first, _ = Stacks(Form4.NF4, 0).leaf((2, 64))
    second, _ = Stacks(Form4.FP4, 0).leaf((2, 64))
    assert find_stored_rows(concat([first, second], 0)) is None
    assert find_stored_rows(concat([first, Stored("n", (2, 64), DType.F32)], 0)) is None
    for taken_apart in (concat([first, first], 1), slice_dim(first, 1, 32, 32), permute(first, (1, 0))):
        assert find_stored_rows(taken_apart) is None
    assert find_stored_rows(reshape(first, (4, 32))) is None
    with pytest.raises(ValueError, match="only kept as it is stored"):
        pack(first, Code.E2M1, 32, rounds_to=DType.F32)
