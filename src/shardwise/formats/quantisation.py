"""Quantised checkpoints: who knows the form that a ``quantization_config`` names, and the tensors of the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeAlias

from shardwise._face import found_at
from shardwise.formats.checkpoint_index import CheckpointIndex
from shardwise.formats.contract import QuantisedForm, is_there, unknown_form
from shardwise.storage.contract import StorageReader
from shardwise.storage.names import shown
from shardwise.tensors import DType

_CONFIG: Final = "config.json"
_OF_MODELOPT: Final = "hf_quant_config.json"
_MOST_CONFIG_BYTES: Final = 16 << 20
_ELEMENT_DTYPES: Final = (DType.F8_E4M3, DType.F8_E5M2, DType.U8, DType.I8, DType.I32)

FormOf: TypeAlias = Callable[[Mapping[str, Any]], QuantisedForm]
"""The form that a ``quantization_config`` means; a ConfigError where it makes no sense."""

_WITH_SCALES: Final = "shardwise.formats.quantised:form_of"

QUANTISED: Final[dict[str, str]] = {
    "fp8": _WITH_SCALES,
    "fbgemm_fp8": _WITH_SCALES,
    "mxfp4": _WITH_SCALES,
    "compressed-tensors": _WITH_SCALES,
    "modelopt": _WITH_SCALES,
    "bitsandbytes": "shardwise.formats.four_bit_tensors:form_of",
    "awq": "shardwise.formats.grouped_integers:awq",
    "gptq": "shardwise.formats.grouped_integers:gptq",
}
"""By ``quant_method``, where its :data:`FormOf` is, as ``package.module:name``. A form of one's own is a line here,
and, where what it makes is a new kind of :class:`~shardwise.formats.checkpoint_index.Coded`, one in
``planning.load_memory.NODES``."""


def form_of(config: Mapping[str, Any]) -> QuantisedForm:
    """How weights are stored, as a ``quantization_config`` says.

    Raises:
        ConfigError: it is a kind that is not known here, or makes no sense.
    """
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in QUANTISED:
        raise unknown_form(f"quant_method {shown(repr(method))}")
    known: FormOf = found_at(QUANTISED[method])
    return known(config)


def quantization_config_of(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The ``quantization_config`` of a model's config, or of a part of it, such as ``text_config``; None without.

    Raises:
        ConfigError: several parts have different ones.
    """
    parts = [content, *(part for part in content.values() if isinstance(part, Mapping))]
    told = [part["quantization_config"] for part in parts if isinstance(part.get("quantization_config"), Mapping)]
    found: list[Mapping[str, Any]] = [config for number, config in enumerate(told) if config not in told[:number]]
    if len(found) > 1:
        raise unknown_form("several quantization_configs that differ")
    return found[0] if found else None


def as_the_model_has_it(reader: StorageReader, index: CheckpointIndex) -> CheckpointIndex:
    """A checkpoint whose config says that it is quantised: with the tensors of its model; else as it is.

    That is ``config.json`` (see :func:`quantization_config_of`), or modelopt's ``hf_quant_config.json``.

    Raises:
        ConfigError, FormatError: it is quantised in a way that is not known; tensors do not belong together.
        StorageError: the config cannot be read.
    """
    if not any(entry.dtype in _ELEMENT_DTYPES for entry in index.entries.values()):
        return index  # nobody opens a file for that
    config = quantization_config_of(_content(reader, _CONFIG))
    if config is None and (told := _content(reader, _OF_MODELOPT)):
        config = {"quant_method": "modelopt", **told}
    if config is None:
        return index
    return replace(form_of(config).as_numbers(reader, index), quantised=str(config.get("quant_method")))


def _content(reader: StorageReader, name: str) -> dict[str, Any]:
    """What a small file of JSON says; nothing where it is not there, or is not such a file."""
    if not is_there(reader, name) or not 0 < (nbytes := reader.size(name)) <= _MOST_CONFIG_BYTES:
        return {}
    try:
        content = json.loads(reader.read(name, 0, nbytes))
    except (ValueError, RecursionError):
        return {}  # whoever builds the model says what is wrong with it
    return content if isinstance(content, dict) else {}
