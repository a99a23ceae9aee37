"""4-bit weights: their forms, their configuration in transformers, and products with them."""

import importlib.util
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Final, Literal, TypeAlias

import torch
from torch import nn
from torch.nn import functional
from transformers.utils.quantization_config import QuantizationConfigMixin

from shardwise.core.errors import ConfigError
from shardwise.core.tensors import Code, Form4, FourBitForm
from shardwise.files.four_bit_blocks import BLOCKS, NESTED_BLOCK, dynamic_codebook


def frozen_bytes(*shape: int) -> nn.Parameter:
    """Return a parameter of bytes on meta that is not trained."""
    return nn.Parameter(torch.empty(shape, dtype=torch.uint8, device="meta"), requires_grad=False)


COMPUTED_IN = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that can be quantized, and dequantized to."""


@dataclass(frozen=True, slots=True)
class _FourBit:
    block_size: int = 64
    double_quant: bool = False
    compute_dtype: torch.dtype | None = None
    skip_modules: tuple[str, ...] = ()

    form: ClassVar[FourBitForm]

    def __post_init__(self) -> None:
        size: object = self.block_size
        if not isinstance(size, int) or size not in BLOCKS:
            raise ConfigError(f"block_size={self.block_size!r}: is one of {', '.join(map(str, BLOCKS))}")
        dtype: object = self.compute_dtype
        if dtype is not None and dtype not in COMPUTED_IN:
            known = ", ".join(map(str, COMPUTED_IN))
            raise ConfigError(f"compute_dtype={dtype!r}: is one of {known}, or None for that of the input")
        names: object = self.skip_modules
        if not (isinstance(names, tuple) and all(isinstance(name, str) for name in names)):
            raise ConfigError(f"skip_modules={names!r}: is a tuple of names, as in skip_modules=('lm_head',)")


@dataclass(frozen=True, slots=True)
class Nf4(_FourBit):
    """NF4 of QLoRA: weights of linear layers and fused experts in four bits, on quantiles of a normal distribution.

    Attributes:
        block_size: elements of a row with one scale, their largest magnitude.
        double_quant: quantize the scales of linear layers to 8 bits.
        compute_dtype: dtype of the products. None for the dtype of the input.
        skip_modules: modules that keep their weights, by the start or the end of their names, or a regex, like
            transformers' ``llm_int8_skip_modules``. The output layer is never quantized.
    """

    form: ClassVar[Form4] = Form4.NF4


@dataclass(frozen=True, slots=True)
class Fp4(_FourBit):
    """FP4 of bitsandbytes. Attributes as in :class:`Nf4`."""

    form: ClassVar[Form4] = Form4.FP4


@dataclass(frozen=True, slots=True)
class Mxfp4(_FourBit):
    """MXFP4: floats of four bits with an exponent for each block. Only for experts that are stored so."""

    block_size: int = 32

    form: ClassVar[Code] = Code.E2M1


KeptForm: TypeAlias = Nf4 | Fp4 | Mxfp4


Quantization: TypeAlias = Nf4 | Fp4 | Literal["as_stored", "dequantize"]
"""Form of the base weights.

``"as_stored"`` keeps what is stored in four bits (bitsandbytes, MXFP4), fused experts too, byte for byte.
``"dequantize"`` converts quantized weights to the model's dtype, whatever the checkpoint's config says.
"""


def quant_type_name(form: FourBitForm) -> str:
    """Return the name of a form: NF4, FP4, MXFP4."""
    return "MXFP4" if isinstance(form, Code) else form.name


def with_stored_form(stored: tuple[FourBitForm, int] | None, quantization: KeptForm) -> KeptForm:
    """Return the quantization with the form and the block size of stored weights, if they are stored in 4 bits."""
    if stored is None:
        return quantization
    form, block_size = stored
    kind = next(kind for kind in (Nf4, Fp4, Mxfp4) if kind.form is form)
    return kind(block_size, quantization.double_quant, quantization.compute_dtype, quantization.skip_modules)


def is_mxfp4(config: Any) -> bool:
    """Return whether a ``quantization_config`` is that of MXFP4."""
    return isinstance(config, Mapping) and config.get("quant_method") == "mxfp4"


def from_transformers(config: Any) -> Quantization:
    """Convert a ``BitsAndBytesConfig``, an ``Mxfp4Config``, or a ``quantization_config`` as a dict.

    Raises:
        ConfigError: it is another kind of quantization, or has invalid values.
    """
    if not isinstance(config, (dict, QuantizationConfigMixin)):
        raise ConfigError(
            f"quantization_config is {config!r:.80}, and neither a BitsAndBytesConfig nor a dict. Pass "
            "BitsAndBytesConfig(load_in_4bit=True), or quantization=Nf4()"
        )
    values = config if isinstance(config, dict) else config.to_dict()
    # A dict that a user writes often has no quant_method.
    default = "bitsandbytes" if "load_in_4bit" in values or "load_in_8bit" in values else None
    name = values.get("quant_method", default)
    method = "a config without quant_method" if name is None else str(getattr(name, "value", name))
    if method == "mxfp4":
        # to_dict() of Mxfp4Config leaves dequantize out.
        return "dequantize" if values.get("dequantize", getattr(config, "dequantize", False)) else "as_stored"
    if method != "bitsandbytes":
        raise ConfigError(
            f"quantization_config: {method} is not known for a base that is quantized while it is read. Pass "
            "quantization=Nf4(), or a BitsAndBytesConfig(load_in_4bit=True)"
        )
    if values.get("load_in_8bit") or not values.get("load_in_4bit"):
        raise ConfigError("quantization_config: load_in_8bit is not known here. Pass load_in_4bit=True")
    kind = values.get("bnb_4bit_quant_type", "fp4")
    if kind not in ("nf4", "fp4"):
        raise ConfigError(f"quantization_config: bnb_4bit_quant_type={kind!r} is neither nf4 nor fp4")
    storage = str(values.get("bnb_4bit_quant_storage") or "uint8").removeprefix("torch.")
    if storage != "uint8":
        warnings.warn(f"bnb_4bit_quant_storage={storage}: codes are kept and sharded as uint8", stacklevel=2)
    dtype: Any = values.get("bnb_4bit_compute_dtype") or torch.float32
    if not isinstance(dtype, torch.dtype):
        dtype = getattr(torch, str(dtype).removeprefix("torch."), dtype)
    skip_modules = values.get("llm_int8_skip_modules") or ()
    quantization_class = Nf4 if kind == "nf4" else Fp4
    return quantization_class(
        block_size=values.get("bnb_4bit_blocksize") or 64,
        double_quant=bool(values.get("bnb_4bit_use_double_quant")),
        compute_dtype=dtype,
        skip_modules=tuple(skip_modules) if isinstance(skip_modules, list) else skip_modules,
    )


def to_transformers(quantization: KeptForm, skip_modules: tuple[str, ...], dtype: torch.dtype) -> dict[str, Any]:
    """Return the ``quantization_config`` of a model's config, as transformers writes it.

    ``skip_modules`` are names of modules. ``dtype`` is the model's, in which layers compute by default.
    """
    dtype = quantization.compute_dtype or dtype
    # Not a field of BitsAndBytesConfig, which assumes blocks of 64 elements.
    blocks = {} if quantization.block_size == 64 else {"bnb_4bit_blocksize": quantization.block_size}
    return {
        "quant_method": "bitsandbytes",
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": quant_type_name(quantization.form).lower(),
        "bnb_4bit_use_double_quant": quantization.double_quant,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": list(skip_modules) or None,
        "llm_int8_threshold": 6.0,
        **blocks,
    }


@dataclass(frozen=True, slots=True)
class Packing:
    """Form of a matrix in 4 bits.

    Attributes:
        form: 4-bit data type.
        block_size: elements of a row with one scale.
        dtype: of the weights before they were quantized.
        is_transposed: the model has the matrix as (in, out).
    """

    form: FourBitForm
    block_size: int
    dtype: torch.dtype
    is_transposed: bool = False

    def dequantize(self, packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize codes (.., out, in / 2) and float32 scales (.., out, in / block) to a matrix (.., out, in).

        Products are float32, rounded once, as in ``dequantize_4bit`` of bitsandbytes. The memory of a transposed
        matrix has the model's layout, so that products with it are bitwise equal.
        """
        computed_in = dtype if dtype in COMPUTED_IN else torch.float32  # kernels support no others
        weights: torch.Tensor = dequantize_four_bits(packed, scales, self.block_size, self.form.value, computed_in)
        weights = weights.to(dtype)
        return weights.mT.contiguous().mT if self.is_transposed else weights


@cache
def has_bitsandbytes() -> bool:
    """Return whether bitsandbytes is installed."""
    return importlib.util.find_spec("bitsandbytes") is not None


@cache
def _table(codebook: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Copy a codebook to a device once, because the host waits for the copy.

    Only custom operators call this. Elsewhere, a fake tensor might be cached.
    """
    return torch.tensor(codebook, dtype=torch.float32, device=device)


_NAN_BITS: Final = 0x7FC00000


@torch.library.custom_op("shardwise::dequantize_four_bits", mutates_args=())
def dequantize_four_bits(
    packed: torch.Tensor, scales: torch.Tensor, block_size: int, form: str, dtype: torch.dtype
) -> torch.Tensor:
    """Dequantize like :meth:`Packing.dequantize`. ``form`` is the value of a ``FourBitForm``."""
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    if not packed.numel():
        return packed.new_empty(shape, dtype=dtype)
    kind = Code.E2M1 if form == Code.E2M1.value else Form4(form)
    if has_bitsandbytes() and isinstance(kind, Form4):
        # Its kernels are several times as fast, and bitwise equal.
        import bitsandbytes  # noqa: F401 - registers the operator

        dequantize = torch.ops.bitsandbytes.dequantize_4bit.default
        flat, factors = packed.reshape(-1, 1), scales.reshape(-1)
        result: torch.Tensor = dequantize(flat, factors, block_size, form, shape, dtype)
        return result
    return look_up(packed, scales, block_size, kind, dtype)


def look_up(
    packed: torch.Tensor, scales: torch.Tensor, block_size: int, kind: FourBitForm, dtype: torch.dtype
) -> torch.Tensor:
    """Dequantize on any device. Memory: the matrix, and :func:`scratch_bytes`."""
    pairs = _pairs(kind, packed.device)
    weights = packed.new_empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=dtype)
    # Blocks do not cross rows, so a matrix is its blocks one after the other: codes (blocks * block_size / 2),
    # scales (blocks, 1), weights (blocks, block_size).
    codes = packed.reshape(-1).split(_PART_BYTES)
    factors = scales.reshape(-1, 1).split(2 * _PART_BYTES // block_size)
    targets = weights.view(-1, block_size).split(2 * _PART_BYTES // block_size)
    for code, factor, target in zip(codes, factors, targets, strict=True):
        # Without a name, which would keep the weights of a part until the next one has its own.
        target.copy_(pairs.index_select(0, code.int()).view(torch.float32).view(-1, block_size).mul_(factor))
    return weights


_PART_BYTES: Final = 1 << 22
"""Packed bytes that are dequantized at once. A multiple of every block."""


def scratch_bytes(packed: torch.Tensor) -> int:
    """Return the memory beside its result that dequantizing takes: an index and two float32 weights for a byte."""
    return (4 + 8) * min(packed.numel(), _PART_BYTES)


@cache
def _pairs(kind: FourBitForm, device: torch.device) -> torch.Tensor:
    """Return the two float32 weights of each byte, viewed as one int64 (256,), on a device. As :func:`_table`."""
    book = kind.codebook
    # The first of two elements is in the upper four bits of a byte in bitsandbytes, and in the lower ones in MXFP4.
    pairs = [(book[byte >> 4], book[byte & 15]) for byte in range(256)]
    if isinstance(kind, Code):
        pairs = [(second, first) for first, second in pairs]
    return torch.tensor(pairs, dtype=torch.float32, device=device).view(torch.int64).view(256)


@torch.library.custom_op("shardwise::unnest_scales", mutates_args=())
def unnest_scales(codes: torch.Tensor, start: int, nested: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Dequantize scales of a matrix, beginning with its ``start``-th, from 8 bits.

    See [Note: Nested scales] in ``files/four_bit_blocks.py``. ``nested`` and ``offset`` are those of the full
    matrix.
    """
    values = _table(dynamic_codebook(), codes.device)[codes.int()]
    # Blocks of 256 scales run on from row to row, so a block may begin in the middle of one.
    blocks = torch.arange(start, start + codes.numel(), device=codes.device) // NESTED_BLOCK
    return values.mul_(nested[blocks].view(codes.shape)).add_(offset)


@dataclass(frozen=True, slots=True)
class LocalScales:
    """The scales of a gathered matrix, as they are stored in the model.

    Attributes:
        stored: uint8: bytes of float32 (out, 4 * in / block), codes, or exponents (out, in / block).
        nested: scales of the codes, float32, one for 256, or None.
        offset: the mean of the scales, which is added to the values of the codes, float32 (1,).
    """

    stored: torch.Tensor
    nested: torch.Tensor | None = None
    offset: torch.Tensor | None = None

    def floats(self, form: FourBitForm, start: int = 0) -> torch.Tensor:
        """Return float32 scales (out, in / block), beginning with the matrix's ``start``-th. Bytes are viewed."""
        if isinstance(form, Code):
            # A byte e is the scale 2 ** (e - 127): the exponent bits of a float32. e = 0 is 2 ** -127, which is
            # subnormal, with the highest bit of the mantissa set.
            exponents = (self.stored.int() << 23).clamp_(min=1 << 22)
            return exponents.masked_fill_(self.stored == 255, _NAN_BITS).view(torch.float32)
        if self.nested is None:
            return self.stored.view(torch.float32)
        scales: torch.Tensor = unnest_scales(self.stored, start, self.nested, self.offset)
        return scales


class FourBitProduct(torch.autograd.Function):
    """``rows @ weight.T + bias``. The weight is frozen, and dequantized in the forward and in the backward pass.

    As in bitsandbytes, the forward pass dequantizes to the dtype of the rows. The backward pass dequantizes to the
    original dtype first. Only the model's own tensors are saved for it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        packed: torch.Tensor,
        stored: torch.Tensor,
        nested: torch.Tensor | None,
        offset: torch.Tensor | None,
        bias: torch.Tensor | None,
        packing: Packing,
    ) -> torch.Tensor:
        ctx.save_for_backward(packed, stored, nested, offset)
        ctx.packing = packing
        scales = LocalScales(stored, nested, offset).floats(packing.form)
        return functional.linear(rows, packing.dequantize(packed, scales, rows.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        packed, *scale_tensors = ctx.saved_tensors
        # gradient is (.., out), and bias its sum over all rows. Codes and scales take none.
        of_rows = of_bias = None
        if ctx.needs_input_grad[5]:
            of_bias = gradient.flatten(0, -2).sum(0)
        if ctx.needs_input_grad[0]:
            # Dequantized again rather than saved: a saved weight would be four times as large as its codes.
            scales = LocalScales(*scale_tensors).floats(ctx.packing.form)
            weights = ctx.packing.dequantize(packed, scales, ctx.packing.dtype)
            of_rows = gradient @ weights.to(gradient.dtype)
        return of_rows, None, None, None, None, of_bias, None


def product(
    rows: torch.Tensor, packed: torch.Tensor, scales: LocalScales, bias: torch.Tensor | None, packing: Packing
) -> torch.Tensor:
    """Compute ``rows (.., in) @ weight (out, in).T + bias``, like ``bitsandbytes.matmul_4bit``."""
    result: torch.Tensor = FourBitProduct.apply(  # type: ignore[no-untyped-call]
        rows, packed, scales.stored, scales.nested, scales.offset, bias, packing
    )
    return result


@dequantize_four_bits.register_fake
def _(
    packed: torch.Tensor, _scales: torch.Tensor, _block_size: int, _form: str, dtype: torch.dtype
) -> torch.Tensor:
    return packed.new_empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=dtype)


@unnest_scales.register_fake
def _(codes: torch.Tensor, _start: int, _nested: torch.Tensor, _offset: torch.Tensor) -> torch.Tensor:
    return codes.new_empty(codes.shape, dtype=torch.float32)
