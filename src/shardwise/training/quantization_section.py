"""``shardwise train``'s configuration: a base in four bits."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict

from shardwise.models.quantization import FourBit, Fp4, NestedScales, Nf4, PlainScales
from shardwise.training.config_types import Float, Several


class QuantizationSection(BaseModel):
    """The weights of linear layers are kept in four bits; ``nf4`` alone is ``form: nf4``.

    The fields are those of ``shardwise.options.Nf4``; ``scales: nested`` is double quantisation.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    form: Literal["nf4", "fp4"] = "nf4"
    block_size: Literal[32, 64, 128, 256, 512, 1024, 2048, 4096] = 64
    scales: Literal["plain", "nested"] = "plain"
    compute_dtype: Float | None = None
    stay: Several = []


def _form_alone(value: Any) -> Any:
    return {"form": value} if isinstance(value, str) else value


OneQuantization: TypeAlias = Annotated[QuantizationSection, BeforeValidator(_form_alone)]


def quantization_of(section: QuantizationSection | None) -> FourBit | None:
    """What a model is asked for."""
    if section is None:
        return None
    return (Nf4 if section.form == "nf4" else Fp4)(
        block_size=section.block_size,
        scales=NestedScales() if section.scales == "nested" else PlainScales(),
        compute_dtype=None if section.compute_dtype is None else getattr(torch, section.compute_dtype),
        stay=tuple(section.stay),
    )
