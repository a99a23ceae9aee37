"""4-bit weights: requested forms, packing, and products with packed weights."""

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

from shardwise.conversion.four_bit import NESTED_BLOCK, dynamic_numbers
from shardwise.errors import ConfigError
from shardwise.tensors import Code, Form4, FourBitForm


def frozen_bytes(*shape: int) -> nn.Parameter:
    """Return a parameter of bytes on meta that is not trained."""
    return nn.Parameter(torch.empty(shape, dtype=torch.uint8, device="meta"), requires_grad=False)


COMPUTED_IN = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of which numbers are packed, and in which they are made of four bits."""


_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Those of bitsandbytes."""


@dataclass(frozen=True, slots=True)
class _FourBit:
    block_size: int = 64
    double_quant: bool = False
    compute_dtype: torch.dtype | None = None
    skip_modules: tuple[str, ...] = ()

    form: ClassVar[FourBitForm]

    def __post_init__(self) -> None:
        size: object = self.block_size
        if not isinstance(size, int) or size not in _BLOCK_SIZES:
            raise ConfigError(f"block_size={self.block_size!r}: is one of {', '.join(map(str, _BLOCK_SIZES))}")
        dtype: object = self.compute_dtype
        if dtype is not None and dtype not in COMPUTED_IN:
            known = ", ".join(map(str, COMPUTED_IN))
            raise ConfigError(f"compute_dtype={dtype!r}: is one of {known}, or None for that of the input")
        names: object = self.skip_modules
        if not (isinstance(names, tuple) and all(isinstance(name, str) for name in names)):
            raise ConfigError(f"skip_modules={names!r}: is a tuple of names, as in skip_modules=('lm_head',)")


@dataclass(frozen=True, slots=True)
class Nf4(_FourBit):
    """Weights of linear layers in four bits, on the quantiles of a normal distribution (QLoRA's NF4).

    And those of fused experts that are computed one after the other, whose scales stay plain ones.

    Attributes:
        block_size: elements of a row with one scale, their largest magnitude.
        double_quant: quantize the scales as well, to 8 bits.
        compute_dtype: dtype of the products. None for the dtype of the input.
        skip_modules: modules that keep their weights, by name: its start, its end, or a regex, like transformers'
            ``llm_int8_skip_modules``. The output layer is never quantized.
    """

    form: ClassVar[Form4] = Form4.NF4


@dataclass(frozen=True, slots=True)
class Fp4(_FourBit):
    """The same in floats of four bits, as bitsandbytes has them. Attributes as of :class:`Nf4`."""

    form: ClassVar[Form4] = Form4.FP4


@dataclass(frozen=True, slots=True)
class Mxfp4(_FourBit):
    """Experts as MXFP4 stores them: floats of four bits, an exponent for each block. Never packed here."""

    block_size: int = 32

    form: ClassVar[Code] = Code.E2M1


FourBit: TypeAlias = Nf4 | Fp4


KeptForm: TypeAlias = Nf4 | Fp4 | Mxfp4


Quantization: TypeAlias = Nf4 | Fp4 | Literal["as_stored", "dequantize"]
"""Form of the base weights.

``"as_stored"`` keeps what is stored in four bits (bitsandbytes, MXFP4), fused experts too, byte for byte.
``"dequantize"`` converts quantized weights to the model's dtype, whatever the checkpoint's config says.
"""


def form_name(form: FourBitForm) -> str:
    """The name of a form: NF4, FP4, MXFP4."""
    return "MXFP4" if isinstance(form, Code) else form.name


def of_form(stored: tuple[FourBitForm, int], quantization: KeptForm) -> KeptForm:
    """The same in the form, and in blocks of the size, that weights are stored in."""
    form, block_size = stored
    kind = next(kind for kind in (Nf4, Fp4, Mxfp4) if kind.form is form)
    return kind(block_size, quantization.double_quant, quantization.compute_dtype, quantization.skip_modules)


def is_mxfp4(config: Any) -> bool:
    """Return whether a ``quantization_config`` of a model's config is that of MXFP4."""
    return isinstance(config, Mapping) and config.get("quant_method") == "mxfp4"


def of_transformers(config: Any) -> Quantization:
    """Return the quantization of a ``BitsAndBytesConfig``, ``Mxfp4Config``, or model's ``quantization_config``.

    Raises:
        ConfigError: it is neither, another kind of quantization, or makes no sense.
    """
    if not isinstance(config, (dict, QuantizationConfigMixin)):
        raise ConfigError(
            f"quantization_config is {config!r:.80}, and neither a BitsAndBytesConfig nor a dict. Pass "
            "BitsAndBytesConfig(load_in_4bit=True), or quantization=Nf4()"
        )
    told = config if isinstance(config, dict) else config.to_dict()
    given = told.get("quant_method", "bitsandbytes" if "load_in_4bit" in told or "load_in_8bit" in told else None)
    method = "a config without quant_method" if given is None else str(getattr(given, "value", given))
    if method == "mxfp4":
        # Mxfp4Config leaves it out of what it says as a dict.
        return "dequantize" if told.get("dequantize", getattr(config, "dequantize", False)) else "as_stored"
    if method != "bitsandbytes":
        raise ConfigError(
            f"quantization_config: {method} is not known for a base that is quantized while it is read. Pass "
            "quantization=Nf4(), or a BitsAndBytesConfig(load_in_4bit=True)"
        )
    if told.get("load_in_8bit") or not told.get("load_in_4bit"):
        raise ConfigError("quantization_config: load_in_8bit is not known here. Pass load_in_4bit=True")
    kind = told.get("bnb_4bit_quant_type", "fp4")
    if kind not in ("nf4", "fp4"):
        raise ConfigError(f"quantization_config: bnb_4bit_quant_type={kind!r} is neither nf4 nor fp4")
    storage = str(told.get("bnb_4bit_quant_storage") or "uint8").removeprefix("torch.")
    if storage != "uint8":
        warnings.warn(
            f"bnb_4bit_quant_storage={storage}: packed bytes are kept as uint8, which is sharded as it is",
            stacklevel=2,
        )
    named = told.get("bnb_4bit_compute_dtype") or "float32"
    dtype: Any = named
    if not isinstance(named, torch.dtype):
        dtype = getattr(torch, str(named).removeprefix("torch."), named)
    skip_modules = told.get("llm_int8_skip_modules") or ()
    made = Nf4 if kind == "nf4" else Fp4
    return made(
        block_size=told.get("bnb_4bit_blocksize") or 64,
        double_quant=bool(told.get("bnb_4bit_use_double_quant")),
        compute_dtype=dtype,
        skip_modules=tuple(skip_modules) if isinstance(skip_modules, list) else skip_modules,
    )


def to_transformers(quantization: KeptForm, skip_modules: tuple[str, ...], dtype: torch.dtype) -> dict[str, Any]:
    """The ``quantization_config`` of a model's config, as transformers writes it.

    ``skip_modules`` are modules, by name. ``dtype`` is the model's, which its layers compute in by default.
    """
    dtype = quantization.compute_dtype or dtype
    return {
        "quant_method": "bitsandbytes",
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": form_name(quantization.form).lower(),
        "bnb_4bit_use_double_quant": quantization.double_quant,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": list(skip_modules) or None,
        "llm_int8_threshold": 6.0,
    }


@dataclass(frozen=True, slots=True)
class Packing:
    """Packed form of a matrix.

    Attributes:
        form: 4-bit data type.
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
        """Bytes of the scale of a block."""
        return 1 if isinstance(self.form, Code) else 4

    def dequantize(self, packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The matrix (.., out, in) of packed bytes (.., out, in / 2) and of scales, float32 (.., out, in / block).

        ``code[nibble] * scale`` in float32, rounded once: ``dequantize_4bit`` of bitsandbytes. In memory a
        transposed matrix is as the model has it, so that its products are the same bits.
        """
        known = dtype if dtype in COMPUTED_IN else torch.float32  # kernels know no others
        made: torch.Tensor = dequantize_four_bits(packed, scales, self.block_size, self.form.value, known)
        made = made.to(dtype)
        return made.mT.contiguous().mT if self.is_transposed else made


@cache
def has_bitsandbytes() -> bool:
    """Return whether bitsandbytes is installed."""
    return importlib.util.find_spec("bitsandbytes") is not None


# Tables are copied to a device once: the host waits for such a copy. They are asked for inside of torch's
# operations only, where tensors are real. A fake one would be kept as well.


@cache
def _numbers_of(form: FourBitForm, device: torch.device) -> torch.Tensor:
    return torch.tensor(form.numbers, dtype=torch.float32, device=device)


@cache
def _nested_numbers(device: torch.device) -> torch.Tensor:
    return torch.tensor(dynamic_numbers(), dtype=torch.float32, device=device)


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
        # By its kernel for the device: the same bits, several times as quick.
        import bitsandbytes  # noqa: F401 - which makes the operation known

        dequantize = torch.ops.bitsandbytes.dequantize_4bit.default
        flat, factors = packed.reshape(-1, 1), scales.reshape(-1)
        made: torch.Tensor = dequantize(flat, factors, block_size, form, shape, dtype)
        return made
    table = _numbers_of(kind, packed.device)
    upper, lower = packed >> 4, packed & 15
    halves = torch.stack([lower, upper] if isinstance(kind, Code) else [upper, lower], dim=-1)
    numbers = table[halves.int()].view(*packed.shape[:-1], -1, block_size)
    return numbers.mul_(scales.unsqueeze(-1)).view(shape).to(dtype)


@torch.library.custom_op("shardwise::unnested_scales", mutates_args=())
def unnested_scales(codes: torch.Tensor, start: int, nested: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """The float32 scales that are kept in a byte each, the first of which is a matrix' ``start``-th.

    See [Note: Nested scales]. ``nested`` and ``offset`` are those of the whole matrix.
    """
    numbers = _nested_numbers(codes.device)[codes.int()]
    places = torch.arange(start, start + codes.numel(), device=codes.device) // NESTED_BLOCK
    return numbers.mul_(nested[places].view(codes.shape)).add_(offset)


@dataclass(frozen=True, slots=True)
class KeptScales:
    """The scales of a gathered matrix as they are kept.

    Attributes:
        kept: uint8 (out, 4 * in / block), the bytes of float32, or codes, or exponents (out, in / block).
        nested: the scales of the codes, float32, one for 256, or None.
        offset: of codes, float32 (1,).
    """

    kept: torch.Tensor
    nested: torch.Tensor | None = None
    offset: torch.Tensor | None = None

    def floats(self, form: FourBitForm, start: int = 0) -> torch.Tensor:
        """Return float32 (out, in / block). For bytes of float32, a view. The first is ``start``."""
        if isinstance(form, Code):
            exponents = (self.kept.int() << 23).clamp_(min=1 << 22)  # of a float32; the smallest is subnormal
            return exponents.masked_fill_(self.kept == 255, _NAN_BITS).view(torch.float32)
        if self.nested is None:
            return self.kept.view(torch.float32)
        made: torch.Tensor = unnested_scales(self.kept, start, self.nested, self.offset)
        return made


class FourBitProduct(torch.autograd.Function):
    """``rows @ weight.T + bias``. The weight is frozen, and dequantized whenever it is needed.

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
        return functional.linear(rows, packing.dequantize(packed, scales, rows.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        packed, *kept = ctx.saved_tensors
        of_rows = of_bias = None
        if ctx.needs_input_grad[5]:
            of_bias = gradient.flatten(0, -2).sum(0)
        if ctx.needs_input_grad[0]:
            scales = KeptScales(*kept).floats(ctx.packing.form)
            numbers = ctx.packing.dequantize(packed, scales, ctx.packing.dtype)
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


@dequantize_four_bits.register_fake
def _(
    packed: torch.Tensor, _scales: torch.Tensor, _block_size: int, _form: str, dtype: torch.dtype
) -> torch.Tensor:
    return packed.new_empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=dtype)


@unnested_scales.register_fake
def _(codes: torch.Tensor, _start: int, _nested: torch.Tensor, _offset: torch.Tensor) -> torch.Tensor:
    return codes.new_empty(codes.shape, dtype=torch.float32)
