"""Turns linear layers, on meta, into ones whose weights are in four bits; and knows them again.

[Note: A layer in four bits] The layer keeps its place, its name and its class's methods; its weight is a uint8
parameter (out, in / 2), beside which its scales are, as the bytes of float32: a parameter ``weight_scales`` (out, 4
* in / block) of uint8. Both are frozen, and sharded by rows in the group of the layer's block. FSDP2 casts floats
to the dtype of the mixed precision, and leaves integers alone: that is why scales are bytes. Where bitsandbytes is
installed the layer is one of its ``Linear4bit``, by which PEFT chooses its own 4-bit layers; what that class does
with a ``quant_state`` is not used.

Nested scales are codes, a uint8 parameter ``weight_scales`` (out, in / block); what they are scaled by is whole on
every rank: the buffers ``weight_nested_scales`` (float32, one for 256) and ``weight_nested_offset`` (float32, one).
While such a layer is loaded, its scales are there as they are for a moment, as ``weight_whole_scales``
(``engines/nesting.py``).
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, TypeAlias, TypeGuard

import torch
from torch import nn
from torch.nn import functional
from transformers.utils.quantization_config import QuantizationConfigMixin

from shardwise.conversion.dequantise import POWERS
from shardwise.conversion.expression import Expression
from shardwise.conversion.four_bit import NESTED_BLOCK, dynamic_numbers
from shardwise.errors import ConfigError
from shardwise.tensors import Code, Form4, FourBitForm

WEIGHT = "weight"
SCALES = "weight_scales"
NESTED = "weight_nested_scales"
OFFSET = "weight_nested_offset"
WHOLE_SCALES = "weight_whole_scales"

_SUFFIX = "InFourBits"


class InFourBits:
    """What a layer in four bits is beside a linear one; see [Note: A layer in four bits].

    Attributes:
        packing: how its weight is kept.
        quantization: what was asked for.
        whole_scales: while it is loaded, what its scales are read from before they are nested.
    """

    kept_as: ClassVar[str] = "four bits"

    weight: nn.Parameter
    weight_scales: nn.Parameter
    weight_nested_scales: torch.Tensor
    weight_nested_offset: torch.Tensor
    bias: nn.Parameter | None
    in_features: int
    out_features: int
    packing: Packing
    quantization: KeptForm
    compute_dtype: torch.dtype | None
    whole_scales: tuple[Expression, ...]

    def numbers(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight (out, in), of gathered parameters; in the dtype it had, if no other is given."""
        return self.packing.numbers(self.weight, self.scales(), dtype or self.packing.dtype)

    def scales(self) -> torch.Tensor:
        """The scales, float32 (out, in / block), of gathered parameters."""
        return self._kept_scales().floats(self.packing.form)

    def scales_of(self, kept: torch.Tensor, row: int) -> torch.Tensor:
        """The scales, float32, of rows of ``weight_scales``, the first of which is the matrix' ``row``-th."""
        if not self.is_nested:
            return kept.view(torch.float32)
        start = row * (self.in_features // self.packing.block_size)
        made: torch.Tensor = unnested_scales(kept, start, self.weight_nested_scales, self.weight_nested_offset)
        return made

    def _kept_scales(self) -> KeptScales:
        if not self.is_nested:
            return KeptScales(self.weight_scales)
        return KeptScales(self.weight_scales, self.weight_nested_scales, self.weight_nested_offset)

    @property
    def is_nested(self) -> bool:
        """Whether its scales are kept in a byte each."""
        return self.quantization.double_quant

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        dtype = self.compute_dtype or rows.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return product(rows.to(dtype), self.weight, self._kept_scales(), bias, self.packing).to(rows.dtype)

    def tell_peft(self) -> None:
        """Put down what PEFT asks the weight of a 4-bit layer for, before it is sharded."""
        self.weight.compress_statistics = self.is_nested  # type: ignore[attr-defined]
        self.weight.quant_type = form_name(self.packing.form).lower()  # type: ignore[attr-defined]

    def __setstate__(self, state: Any) -> None:
        """Of a copy: torch copies parameters without what is put on them."""
        super().__setstate__(state)  # type: ignore[misc]
        self.tell_peft()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Its class is made anew where it is read: of bitsandbytes there, if that is installed there."""
        kind: type = type(self)
        if kind is not _class():  # with FSDP2's in front
            return super().__reduce_ex__(protocol)
        return _without_values, (), self.__dict__

    def extra_repr(self) -> str:
        form, block = form_name(self.packing.form).lower(), self.packing.block_size
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{form} in blocks of {block}"
        )

    def _apply(self, function: Any, recurse: bool = True) -> Any:  # noqa: FBT001, FBT002 - as torch has it
        """What moves a model moves it all; a cast to another dtype passes over what numbers are made of."""
        own: Any = self
        floats = {name: own._buffers.pop(name) for name in (NESTED, OFFSET) if name in own._buffers}
        super()._apply(function, recurse)  # type: ignore[misc]
        for name, buffer in floats.items():
            own._buffers[name] = function(buffer.view(torch.uint8)).view(buffer.dtype)
        return self

    _save_to_state_dict = nn.Module._save_to_state_dict
    _load_from_state_dict = nn.Module._load_from_state_dict


@cache
def _class() -> type[nn.Linear]:
    """The class of the layers: of bitsandbytes where that is installed, which PEFT asks for."""
    if has_bitsandbytes():
        from bitsandbytes.nn import Linear4bit

        return type("Linear4bitInFourBits", (InFourBits, Linear4bit), {})
    return type("LinearInFourBits", (InFourBits, nn.Linear), {})


def _without_values() -> nn.Module:
    kind = _class()
    return kind.__new__(kind)


def is_in_four_bits(module: nn.Module) -> TypeGuard[Any]:
    """Whether a module is a layer in four bits."""
    return isinstance(module, InFourBits)


def why_it_stays(module: nn.Linear, quantization: KeptForm) -> str | None:
    """Why a linear layer cannot be kept in four bits; None where it can."""
    if module.weight.dtype not in COMPUTED_IN:
        return f"is of {module.weight.dtype}, of which nothing is packed"
    if module.in_features % quantization.block_size:
        return f"has {module.in_features} columns, no multiple of the block of {quantization.block_size}"
    return None


def put_into_four_bits(module: nn.Linear, quantization: KeptForm) -> None:
    """Make a linear layer on meta one whose weight is in four bits; in place, so that hooks and names stay."""
    form, block, dtype = quantization.form, quantization.block_size, module.weight.dtype
    rows, columns = module.weight.shape
    is_nested = quantization.double_quant
    weight = frozen_bytes(rows, columns // 2)
    del module.weight
    module.__class__ = _class()
    layer: Any = module
    layer.register_parameter(WEIGHT, weight)
    blocks = columns // block
    layer.register_parameter(SCALES, frozen_bytes(rows, blocks if is_nested else 4 * blocks))
    if is_nested:
        nested = torch.empty(-(-rows * blocks // NESTED_BLOCK), dtype=torch.float32, device="meta")
        layer.register_buffer(NESTED, nested)
        layer.register_buffer(OFFSET, torch.empty(1, dtype=torch.float32, device="meta"))
    layer.packing = Packing(form, block, dtype)
    layer.quantization = quantization
    layer.compute_dtype = quantization.compute_dtype
    layer.quant_state = None
    layer.whole_scales = ()
    layer.tell_peft()
    for parameter in layer.parameters(recurse=False):
        parameter.requires_grad_(False)


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
    stay: tuple[str, ...] = ()

    form: ClassVar[FourBitForm]

    def __post_init__(self) -> None:
        size: object = self.block_size
        if not isinstance(size, int) or size not in _BLOCK_SIZES:
            raise ConfigError(f"block_size={self.block_size!r}: is one of {', '.join(map(str, _BLOCK_SIZES))}")
        dtype: object = self.compute_dtype
        if dtype is not None and dtype not in COMPUTED_IN:
            known = ", ".join(map(str, COMPUTED_IN))
            raise ConfigError(f"compute_dtype={dtype!r}: is one of {known}, or None for that of the input")
        names: object = self.stay
        if not (isinstance(names, tuple) and all(isinstance(name, str) for name in names)):
            raise ConfigError(f"stay={names!r}: is a tuple of names of modules, as in stay=('lm_head',)")


@dataclass(frozen=True, slots=True)
class Nf4(_FourBit):
    """Weights of linear layers in four bits, on the quantiles of a normal distribution (QLoRA's NF4).

    And those of fused experts that are computed one after the other, whose scales stay plain ones.

    Attributes:
        block_size: so many elements of a row have one scale, their largest magnitude. scales: how these are kept.
        compute_dtype: of the products; None for the dtype of what comes in. stay: modules that keep their weights
        as they are, by name: from the beginning, at the end, or as a regex, as
            ``llm_int8_skip_modules`` of transformers has it. What computes logits stays in any case.
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
    return kind(block_size, quantization.double_quant, quantization.compute_dtype, quantization.stay)


def is_mxfp4(config: Any) -> bool:
    """Whether a ``quantization_config`` of a model's config is that of MXFP4."""
    return isinstance(config, Mapping) and config.get("quant_method") == "mxfp4"


def of_transformers(config: Any) -> Quantization:
    """What a ``BitsAndBytesConfig``, an ``Mxfp4Config``, or the ``quantization_config`` of a model, asks for.

    Raises:
        ConfigError: it is neither, another kind of quantisation, or makes no sense.
    """
    if not isinstance(config, (dict, QuantizationConfigMixin)):
        raise ConfigError(
            f"quantization_config is {config!r:.80}, and neither a BitsAndBytesConfig nor a dict; pass "
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
            f"quantization_config: {method} is not known for a base that is quantised while it is read; pass "
            "quantization=Nf4(), or a BitsAndBytesConfig(load_in_4bit=True)"
        )
    if told.get("load_in_8bit") or not told.get("load_in_4bit"):
        raise ConfigError("quantization_config: load_in_8bit is not known here; pass load_in_4bit=True")
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
    stay = told.get("llm_int8_skip_modules") or ()
    made = Nf4 if kind == "nf4" else Fp4
    return made(
        block_size=told.get("bnb_4bit_blocksize") or 64,
        double_quant=bool(told.get("bnb_4bit_use_double_quant")),
        compute_dtype=dtype,
        stay=tuple(stay) if isinstance(stay, list) else stay,
    )


def to_transformers(quantization: KeptForm, stay: tuple[str, ...], dtype: torch.dtype) -> dict[str, Any]:
    """The ``quantization_config`` of a model's config, as transformers writes it.

    ``stay`` are modules, by name; ``dtype`` is the model's, in which its layers compute if nothing else is said.
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
        "llm_int8_skip_modules": list(stay) or None,
        "llm_int8_threshold": 6.0,
    }


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
        known = dtype if dtype in COMPUTED_IN else torch.float32  # kernels know no others
        made: torch.Tensor = numbers_of_four_bits(packed, scales, self.block_size, self.form.value, known)
        made = made.to(dtype)
        return made.mT.contiguous().mT if self.is_transposed else made


@cache
def has_bitsandbytes() -> bool:
    """Whether bitsandbytes is installed."""
    return importlib.util.find_spec("bitsandbytes") is not None


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
        # By its kernel for the device: the same bits, several times as quick.
        import bitsandbytes  # noqa: F401 - which makes the operation known

        dequantise = torch.ops.bitsandbytes.dequantize_4bit.default
        flat, factors = packed.reshape(-1, 1), scales.reshape(-1)
        made: torch.Tensor = dequantise(flat, factors, block_size, form, shape, dtype)
        return made
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
    numbers = torch.tensor(dynamic_numbers(), dtype=torch.float32, device=codes.device)[codes.int()]
    places = torch.arange(start, start + codes.numel(), device=codes.device) // NESTED_BLOCK
    return numbers.mul_(nested[places].view(codes.shape)).add_(offset)


@unnested_scales.register_fake
def _(codes: torch.Tensor, _start: int, _nested: torch.Tensor, _offset: torch.Tensor) -> torch.Tensor:
    return codes.new_empty(codes.shape, dtype=torch.float32)


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
