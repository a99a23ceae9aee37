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
from shardwise.conversion.nested_scales import NESTED_BLOCK, dynamic_numbers, unnest
from shardwise.tensors import Form4


@dataclass(frozen=True, slots=True)
class Packing:
    """How the numbers of a matrix are kept.

    Attributes:
        form: what four bits stand for.
        block_size: elements of a row with one scale.
        dtype: that the numbers had before they were packed.
    """

    form: Form4
    block_size: int
    dtype: torch.dtype

    def numbers(self, packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The matrix (.., out, in) of packed bytes (.., out, in / 2) and of scales, float32 (.., out, in / block).

        ``code[nibble] * scale`` in float32, rounded once: ``dequantize_4bit`` of bitsandbytes.
        """
        shape = (*packed.shape[:-1], 2 * packed.shape[-1])
        if not packed.numel() or packed.is_meta or type(packed) not in (torch.Tensor, torch.nn.Parameter):
            return packed.new_empty(shape, dtype=dtype)  # nothing to make, or traced without values
        if has_bitsandbytes():
            return _by_bitsandbytes(packed, scales, self, shape, dtype)
        if packed.device.type == "cpu":
            out = torch.empty(shape, dtype=dtype)
            count = packed.numel() // packed.shape[-1]
            four_bit.dequantise_rows(
                _alias(packed).view(count, -1),
                _alias(scales).view(count, -1),
                self.block_size,
                self.form,
                out.view(count, -1),
            )
            return out
        table = torch.tensor(self.form.numbers, dtype=torch.float32, device=packed.device)
        halves = torch.stack([packed >> 4, packed & 15], dim=-1).int()
        numbers = table[halves].view(*packed.shape[:-1], -1, self.block_size)
        return numbers.mul_(scales.unsqueeze(-1)).view(shape).to(dtype)


@cache
def has_bitsandbytes() -> bool:
    """Whether bitsandbytes is installed."""
    return importlib.util.find_spec("bitsandbytes") is not None


def _by_bitsandbytes(
    packed: torch.Tensor, scales: torch.Tensor, packing: Packing, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """By its kernel for the device; on a CPU the same bits, several times as quick."""
    import bitsandbytes  # noqa: F401 - which makes the operation known

    dequantise = torch.ops.bitsandbytes.dequantize_4bit.default
    flat, factors = packed.reshape(-1, 1), scales.reshape(-1)
    made: torch.Tensor = dequantise(flat, factors, packing.block_size, packing.form.value, shape, dtype)
    return made


def unnested_scales(codes: torch.Tensor, start: int, nested: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """The float32 scales that are kept in a byte each, the first of which is a matrix' ``start``-th.

    See [Note: Nested scales]. ``nested`` and ``offset`` are those of the whole matrix.
    """
    if codes.is_meta or type(codes) not in (torch.Tensor, torch.nn.Parameter):
        return codes.new_empty(codes.shape, dtype=torch.float32)  # traced without values
    if codes.device.type == "cpu":
        found: torch.Tensor = unnest(_alias(codes).view(codes.shape), start, nested, offset)
        return found
    numbers = torch.tensor(dynamic_numbers(), dtype=torch.float32, device=codes.device)[codes.int()]
    places = torch.arange(start, start + codes.numel(), device=codes.device) // NESTED_BLOCK
    return numbers.mul_(nested[places].view(codes.shape)).add_(offset)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements of a contiguous tensor, behind a storage of its own.

    A storage that numpy has seen is not resized any more, and FSDP2 resizes those of gathered parameters.
    """
    assert tensor.is_contiguous()
    lent = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(lent, dtype=tensor.dtype)


class FourBitProduct(torch.autograd.Function):
    """``rows @ weight.T + bias``; the weight is frozen, and is made of its bytes whenever it is needed.

    As bitsandbytes has it: numbers are in the dtype of the rows on the way forward, and on the way back are first
    rounded to the dtype that they had before they were packed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        packed: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        packing: Packing,
    ) -> torch.Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.packing = packing
        return functional.linear(rows, packing.numbers(packed, scales, rows.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        packed, scales = ctx.saved_tensors
        of_rows = of_bias = None
        if ctx.needs_input_grad[3]:
            of_bias = gradient.flatten(0, -2).sum(0)
        if ctx.needs_input_grad[0]:
            numbers = ctx.packing.numbers(packed, scales, ctx.packing.dtype)
            of_rows = gradient @ numbers.to(gradient.dtype)
        return of_rows, None, None, of_bias, None


def product(
    rows: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, packing: Packing
) -> torch.Tensor:
    """``rows (.., in) @ weight (out, in).T + bias``, as ``bitsandbytes.matmul_4bit`` on the same bytes."""
    made: torch.Tensor = FourBitProduct.apply(rows, packed, scales, bias, packing)  # type: ignore[no-untyped-call]
    return made
