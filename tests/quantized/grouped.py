"""AWQ and GPTQ, written out: words of layers, and their numbers, element by element.

After the sources of the packages: AWQ after ``awq/modules/linear/gemm.py`` and ``awq/utils/packing_utils.py`` of
AutoAWQ 0.2.9, GPTQ after ``auto_gptq/nn_modules/qlinear/qlinear_cuda.py`` of AutoGPTQ 0.7 and
``gptqmodel/nn_modules/qlinear/__init__.py`` of GPTQModel 7.7. ``grouped.safetensors`` beside this has layers that
these have packed, and the numbers that they make of them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tests.quantized.quantizing import Made

GROUP = 8
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column, of eight, that each half byte of AWQ's words is of, the lowest first."""


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Words of 32 bits (n,) of codes (n, 32 / bits), the first in the lowest bits."""
    summed = (codes.long() << (bits * torch.arange(32 // bits))).sum(-1)
    return torch.where(summed >= 2**31, summed - 2**32, summed).to(torch.int32)


def _drawn(shape: torch.Size, seed: int, bits: int, dtype: torch.dtype, least: int) -> tuple[torch.Tensor, ...]:
    """Codes (in, out), zero points from ``least`` on and scales (groups, out)."""
    generator = torch.Generator().manual_seed(seed)
    (out, columns), most = shape, 2**bits
    codes = torch.randint(0, most, (columns, out), generator=generator)
    zeros = torch.randint(least, most, (-(-columns // GROUP), out), generator=generator)
    return codes, zeros, (torch.rand(zeros.shape, generator=generator) / 7 + 0.001).to(dtype)


def _numbers(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """(out, in): products in the dtype of the scales."""
    return ((codes - zeros[groups]).to(scales.dtype) * scales[groups]).t().contiguous().float()


def awq(shape: torch.Size, seed: int) -> Made:
    codes, zeros, scales = _drawn(shape, seed, 4, torch.float16, 0)
    packed = {
        name: words(matrix.view(len(matrix), -1, 8)[..., ORDER], 4)
        for name, matrix in (("qweight", codes), ("qzeros", zeros))
    }
    groups = torch.arange(shape[1]) // GROUP
    return Made({**packed, "scales": scales}, _numbers(codes, zeros, scales, groups))


def gptq(
    shape: torch.Size,
    seed: int,
    *,
    bits: int = 4,
    less: int = 1,
    order: str = "by place",
    dtype: torch.dtype = torch.float16,
) -> Made:
    """``less`` is 1 where zero points are stored less 1; ``order`` is what ``g_idx`` says."""
    codes, zeros, scales = _drawn(shape, seed, bits, dtype, less)
    (columns, out), per_word = codes.shape, 32 // bits
    groups = torch.arange(columns) // GROUP
    if order == "any":
        groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(seed))]
    stored = {
        "qweight": words(codes.view(-1, per_word, out).transpose(1, 2), bits),
        "qzeros": words((zeros - less).view(len(zeros), -1, per_word), bits),
        "scales": scales,
    }
    if order != "absent":
        stored["g_idx"] = (groups if order != "zeros" else torch.zeros(columns)).to(torch.int32)
    return Made(stored, _numbers(codes, zeros, scales, groups))


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": True}

KINDS: dict[str, tuple[Callable[[torch.Size, int], Made], dict[str, Any]]] = {
    "awq": (awq, AWQ),
    "gptq": (gptq, {**GPTQ, "checkpoint_format": "gptq"}),
    "gptq v2": (partial(gptq, less=0, order="absent"), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq in any order": (partial(gptq, order="any"), GPTQ),
    "gptq of 8 bits": (partial(gptq, bits=8, order="zeros", dtype=torch.bfloat16), {**GPTQ, "bits": 8}),
}
