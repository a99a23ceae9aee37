"""``shardwise train``'s configuration: what kinds of values there are, and which other ways they may be written."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field

from shardwise.errors import ConfigError
from shardwise.tensors.byte_sizes import in_bytes_of


def _number(value: Any) -> Any:
    """A number that was written as text: ``"1e-4"`` in quotes, or by a reader of YAML 1.1, for which it is text."""
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def _several(value: Any) -> Any:
    """One name for a list of one, names with commas for a list of them."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


def _names_or_pattern(value: Any) -> Any:
    """Names where a text can be nothing else: PEFT takes any text for a pattern of whole paths."""
    return _several(value) if isinstance(value, str) and _NAMES.fullmatch(value) else value


_NAMES = re.compile(r"[\w.]+(\s*,\s*[\w.]+)*")


def _size(value: str) -> str:
    try:
        in_bytes_of(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return value


def _dtype_name(value: Any) -> Any:
    return _DTYPES.get(value, value) if isinstance(value, str) else value


_DTYPES = {
    short: name
    for name, others in {
        "bfloat16": ("bf16",),
        "float16": ("fp16", "half"),
        "float32": ("fp32", "float", "full"),
    }.items()
    for short in (*others, f"torch.{name}")
}
"""What dtypes are called elsewhere."""

Count: TypeAlias = Annotated[int, Field(ge=1)]

Fraction: TypeAlias = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)]

BelowOne: TypeAlias = Annotated[float, BeforeValidator(_number), Field(ge=0, lt=1)]

NotNegative: TypeAlias = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]

Share: TypeAlias = Annotated[float, BeforeValidator(_number), Field(gt=0, lt=1)]

Positive: TypeAlias = Annotated[float, BeforeValidator(_number), Field(gt=0)]

Finite: TypeAlias = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]

Words: TypeAlias = Annotated[str, Field(min_length=1)]

Size: TypeAlias = Annotated[str, AfterValidator(_size)]

Several: TypeAlias = Annotated[list[Words], BeforeValidator(_several)]

OneOrMore: TypeAlias = Annotated[Annotated[list[Words], Field(min_length=1)], BeforeValidator(_several)]

NamesOrPattern: TypeAlias = Annotated[list[Words] | Words, BeforeValidator(_names_or_pattern)]

Float: TypeAlias = Annotated[Literal["float32", "bfloat16", "float16"], BeforeValidator(_dtype_name)]

Often: TypeAlias = Count | Literal["epoch"]
"""Every so many steps, or at the end of each pass over the data."""
