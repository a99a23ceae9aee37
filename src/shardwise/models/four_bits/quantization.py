"""How the weights of a base are kept in four bits, as types."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import torch
from transformers.utils.quantization_config import QuantizationConfigMixin

from shardwise.errors import ConfigError
from shardwise.tensors import Code, Form4, FourBitForm

COMPUTED_IN = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of which numbers are packed, and in which they are made of four bits."""

_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Those of bitsandbytes."""


@dataclass(frozen=True, slots=True)
class PlainScales:
    """The scale of a block is a float32."""


@dataclass(frozen=True, slots=True)
class NestedScales:
    """Scales are kept in eight bits, in blocks of 256 of their own (double quantisation)."""


Scales: TypeAlias = PlainScales | NestedScales


@dataclass(frozen=True, slots=True)
class _FourBit:
    block_size: int = 64
    scales: Scales = field(default_factory=PlainScales)
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
class AsNumbers:
    """What is stored in few bits becomes numbers of the model's dtype, whatever the checkpoint's config says."""


@dataclass(frozen=True, slots=True)
class AsStored:
    """What is stored in four bits stays so, fused experts too: the stored bytes are taken as they are.

    For checkpoints of bitsandbytes and of MXFP4 (gpt-oss). What they store as numbers stays numbers.
    """


@dataclass(frozen=True, slots=True)
class Mxfp4(_FourBit):
    """Experts as MXFP4 stores them: floats of four bits, an exponent for each block. Never packed here."""

    block_size: int = 32

    form: ClassVar[Code] = Code.E2M1


FourBit: TypeAlias = Nf4 | Fp4
KeptForm: TypeAlias = Nf4 | Fp4 | Mxfp4
Quantization: TypeAlias = Nf4 | Fp4 | AsStored | AsNumbers


def form_name(form: FourBitForm) -> str:
    """The name of a form: NF4, FP4, MXFP4."""
    return "MXFP4" if isinstance(form, Code) else form.name


def of_form(stored: tuple[FourBitForm, int], quantization: KeptForm) -> KeptForm:
    """The same in the form, and in blocks of the size, that weights are stored in."""
    form, block_size = stored
    kind = next(kind for kind in (Nf4, Fp4, Mxfp4) if kind.form is form)
    return kind(block_size, quantization.scales, quantization.compute_dtype, quantization.stay)


def is_mxfp4(config: Any) -> bool:
    """Whether a ``quantization_config`` of a model's config is that of MXFP4."""
    return isinstance(config, Mapping) and config.get("quant_method") == "mxfp4"


def of_transformers(config: Any) -> FourBit | AsStored | AsNumbers:
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
        return AsNumbers() if told.get("dequantize", getattr(config, "dequantize", False)) else AsStored()
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
        scales=NestedScales() if told.get("bnb_4bit_use_double_quant") else PlainScales(),
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
        "bnb_4bit_use_double_quant": isinstance(quantization.scales, NestedScales),
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": list(stay) or None,
        "llm_int8_threshold": 6.0,
    }
