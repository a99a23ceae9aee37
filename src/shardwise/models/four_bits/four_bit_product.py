"""Multiplies by weights that are kept in four bits: one at a time exists as numbers."""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from shardwise.conversion import four_bit
from shardwise.conversion.dequantise import POWERS
from shardwise.conversion.nested_scales import NESTED_BLOCK, dynamic_numbers, unnest
from shardwise.models.four_bits.quantization import COMPUTED_IN
from shardwise.tensors import Code, Form4, FourBitForm


@dataclass(frozen=True, slots=True)
class Packing:
    """How the numbers of a matrix are kept.

    Attributes:
        form: what four bits stand for.
        block_size: elements of a row with one scale.
        dtype: that the numbers had before they were packed.
        is_transposed: the model has the matrix as (in, out).
    """

    form: FourBitForm
    block_size: int
    dtype: torch.dtype
    is_transposed: bool = False

    @property
    def scale_bytes(self) -> int:
        """Of the scale of a block."""
        return 1 if isinstance(self.form, Code) else 4

    def numbers(self, packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The matrix (.., out, in) of packed bytes (.., out, in / 2) and of scales, float32 (.., out, in / block).

        ``code[nibble] * scale`` in float32, rounded once: ``dequantize_4bit`` of bitsandbytes. In memory a
        transposed matrix is as the model has it, so that its products are the same bits.
        """
        made: torch.Tensor = numbers_of_four_bits(packed, scales, self.block_size, self.form.value, _kernels(dtype))
        made = made.to(dtype)
        return made.mT.contiguous().mT if self.is_transposed else made


@cache
def has_bitsandbytes() -> bool:
    """Whether bitsandbytes is installed."""
    return importlib.util.find_spec("bitsandbytes") is not None


def _kernels(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers are made: others than these, kernels do not know."""
    return dtype if dtype in COMPUTED_IN else torch.float32


# Both are operations of torch's, so that what compiles, or traces without values, knows their shapes and does not
# look into them.


@torch.library.custom_op("shardwise::numbers_of_four_bits", mutates_args=())
def numbers_of_four_bits(
    packed: torch.Tensor, scales: torch.Tensor, block_size: int, form: str, dtype: torch.dtype
) -> torch.Tensor:
    """As :meth:`Packing.numbers`; ``form`` is the value of a ``FourBitForm``."""
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    if not packed.numel():
        return packed.new_empty(shape, dtype=dtype)
    kind = Code.E2M1 if form == Code.E2M1.value else Form4(form)
    if has_bitsandbytes() and isinstance(kind, Form4):
        # By its kernel for the device; on a CPU the same bits, several times as quick.
        import bitsandbytes  # noqa: F401 - which makes the operation known

        dequantise = torch.ops.bitsandbytes.dequantize_4bit.default
        flat, factors = packed.reshape(-1, 1), scales.reshape(-1)
        made: torch.Tensor = dequantise(flat, factors, block_size, form, shape, dtype)
        return made
    if packed.device.type == "cpu":
        out = torch.empty(shape, dtype=dtype)
        count = packed.numel() // packed.shape[-1]
        four_bit.dequantise_rows(
            _alias(packed).view(count, -1),
            _alias(scales).view(count, -1),
            block_size,
            kind,
            out.view(count, -1),
        )
        return out
    table = torch.tensor(kind.numbers, dtype=torch.float32, device=packed.device)
    upper, lower = packed >> 4, packed & 15
    halves = torch.stack([lower, upper] if isinstance(kind, Code) else [upper, lower], dim=-1)
    numbers = table[halves.int()].view(*packed.shape[:-1], -1, block_size)
    return numbers.mul_(scales.unsqueeze(-1)).view(shape).to(dtype)


@numbers_of_four_bits.register_fake
def _(
    packed: torch.Tensor, _scales: torch.Tensor, _block_size: int, _form: str, dtype: torch.dtype
) -> torch.Tensor:
    return packed.new_empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=dtype)


@torch.library.custom_op("shardwise::unnested_scales", mutates_args=())
def unnested_scales(codes: torch.Tensor, start: int, nested: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """The float32 scales that are kept in a byte each, the first of which is a matrix' ``start``-th.

    See [Note: Nested scales]. ``nested`` and ``offset`` are those of the whole matrix.
    """
    if codes.device.type == "cpu":
        found: torch.Tensor = unnest(_alias(codes).view(codes.shape), start, nested, offset)
        return found
    numbers = torch.tensor(dynamic_numbers(), dtype=torch.float32, device=codes.device)[codes.int()]
    places = torch.arange(start, start + codes.numel(), device=codes.device) // NESTED_BLOCK
    return numbers.mul_(nested[places].view(codes.shape)).add_(offset)


@unnested_scales.register_fake
def _(codes: torch.Tensor, _start: int, _nested: torch.Tensor, _offset: torch.Tensor) -> torch.Tensor:
    return codes.new_empty(codes.shape, dtype=torch.float32)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements of a contiguous tensor, behind a storage of its own.

    A storage that numpy has seen is not resized any more, and FSDP2 resizes those of gathered parameters.
    """
    assert tensor.is_contiguous()
    lent = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(lent, dtype=tensor.dtype)


@dataclass(frozen=True, slots=True)
class KeptScales:
    """The scales of a gathered matrix as they are kept.

    Attributes:
        kept: uint8 (out, 4 * in / block), the bytes of float32; or codes, or exponents (out, in / block).
        nested: what codes are scaled by, float32, one for 256; None where there are none.
        offset: of codes, float32 (1,).
    """

    kept: torch.Tensor
    nested: torch.Tensor | None = None
    offset: torch.Tensor | None = None

    def floats(self, form: FourBitForm) -> torch.Tensor:
        """Float32 (out, in / block); of bytes of float32, in the same memory."""
        if isinstance(form, Code):
            powers = torch.tensor(POWERS, dtype=torch.float32, device=self.kept.device)
            return powers[self.kept.int()]
        if self.nested is None:
            return self.kept.view(torch.float32)
        made: torch.Tensor = unnested_scales(self.kept, 0, self.nested, self.offset)
        return made


class FourBitProduct(torch.autograd.Function):
    """``rows @ weight.T + bias``; the weight is frozen, and is made of its bytes whenever it is needed.

    As bitsandbytes has it: numbers are in the dtype of the rows on the way forward, and on the way back are first
    rounded to the dtype that they had before they were packed. Between the two nothing is kept that the model has
    not, so that nested scales are unpacked twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        packed: torch.Tensor,
        kept: torch.Tensor,
        nested: torch.Tensor | None,
        offset: torch.Tensor | None,
        bias: torch.Tensor | None,
        packing: Packing,
    ) -> torch.Tensor:
        ctx.save_for_backward(packed, kept, nested, offset)
        ctx.packing = packing
        scales = KeptScales(kept, nested, offset).floats(packing.form)
        return functional.linear(rows, packing.numbers(packed, scales, rows.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        packed, *kept = ctx.saved_tensors
        of_rows = of_bias = None
        if ctx.needs_input_grad[5]:
            of_bias = gradient.flatten(0, -2).sum(0)
        if ctx.needs_input_grad[0]:
            scales = KeptScales(*kept).floats(ctx.packing.form)
            numbers = ctx.packing.numbers(packed, scales, ctx.packing.dtype)
            of_rows = gradient @ numbers.to(gradient.dtype)
        return of_rows, None, None, None, None, of_bias, None


def product(
    rows: torch.Tensor, packed: torch.Tensor, scales: KeptScales, bias: torch.Tensor | None, packing: Packing
) -> torch.Tensor:
    """``rows (.., in) @ weight (out, in).T + bias``, as ``bitsandbytes.matmul_4bit`` on the same bytes."""
    made: torch.Tensor = FourBitProduct.apply(  # type: ignore[no-untyped-call]
        rows, packed, scales.kept, scales.nested, scales.offset, bias, packing
    )
    return made
