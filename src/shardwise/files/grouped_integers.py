"""Layers of AWQ and GPTQ: integers packed in words, with scales and zero points by group.

In place of ``weight`` a linear layer (out, in) has ``qweight`` and ``qzeros`` (I32), ``scales`` (groups, out) and,
in GPTQ, ``g_idx`` (in,), the group of each input. A word of AWQ has eight outputs (``version: gemm``, AutoAWQ's
``awq/modules/linear/gemm.py``): ``qweight`` is (in, out / 8). A word of GPTQ has inputs: (in * bits / 32, out).
``qzeros`` is (groups, out * bits / 32) in both. A layer that is not quantized has its ``weight``.

``g_idx`` is read, because it usually follows from the group size, and no table is needed. All zeros mean none, as
in ExLlama's kernels. If ``dynamic`` of GPTQModel gives some layers other sizes, they follow from the shapes.
"""

import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from shardwise.core.errors import FormatError
from shardwise.core.tensors import DType
from shardwise.files import checkpoint_index
from shardwise.files.checkpoint_index import (
    CheckpointIndex,
    Composed,
    FormatFaults,
    QuantizedForm,
    TensorEntry,
    Whole,
)
from shardwise.files.coded import GroupedIntegers, words_as_bytes
from shardwise.files.storage import StorageReader
from shardwise.files.urls import shown

_VALUES: Final = "qweight"
_ZEROS: Final = "qzeros"
_SCALES: Final = "scales"
_GROUPS: Final = "g_idx"
_WEIGHT: Final = "weight"
_SCALE_DTYPES: Final = (DType.F16, DType.BF16, DType.F32)
_WORD_BITS: Final = 32
_ALL: Final = -1
"""Group size that means one group of all inputs."""
_MAX_GROUP_BYTES: Final = 4 << 20
_FAULTS: Final = "quantized layers whose tensors do not match"


@dataclass(frozen=True, slots=True)
class _LayersInWords:
    """Storage form of layers packed into words.

    Attributes:
        sizes: bits of an integer and inputs of a group, as layers may have them.
        in_rows: True if a word has several inputs of an output, as in GPTQ.
        is_less_one: True if zero points are stored less 1.
    """

    sizes: frozenset[tuple[int, int]]
    in_rows: bool = False
    is_less_one: bool = False
    is_kept: bool = False

    def dequantized(self, reader: StorageReader, index: CheckpointIndex) -> CheckpointIndex:
        found = {key: dict[str, TensorEntry]() for key in index.entries if _last(key) == _VALUES}
        faults, composed, entries = (
            FormatFaults(index.root),
            dict(index.composed),
            dict(index.entries),
        )
        for key, entry in index.entries.items():
            values = f"{key.removesuffix(_last(key))}{_VALUES}"
            if values in found:
                found[values][_last(key)] = entry
            elif _last(key) in (_ZEROS, _GROUPS):
                faults.add(_FAULTS, f"{shown(key)}: its {_VALUES} is missing")
        stored = [layer[_GROUPS] for layer in found.values() if _GROUPS in layer]
        groups = checkpoint_index.contents(
            reader, [item for item in stored if item.dtype is DType.I32 and 0 < item.nbytes <= _MAX_GROUP_BYTES]
        )
        for key, layer in found.items():
            try:
                weight = self._weight(layer, groups)
            except FormatError as error:
                faults.add(_FAULTS, f"{shown(key)}: {error}")
                continue
            composed[f"{key.removesuffix(_VALUES)}{_WEIGHT}"] = Composed(weight.dtype, weight.shape, weight)
            for name in (_VALUES, _ZEROS):
                entries[layer[name].key] = words_as_bytes(layer[name])
            if weight.group_indices is None and _GROUPS in layer:
                del entries[layer[_GROUPS].key]
        faults.raise_if_any()
        return replace(index, entries=entries, composed=composed)

    def _weight(self, layer: Mapping[str, TensorEntry], groups: Mapping[str, bytes]) -> GroupedIntegers:
        """Return the weight of a layer. Raises FormatError if its entries do not match."""
        if _WEIGHT in layer:
            raise FormatError(f"{_WEIGHT} is stored, too")
        for name, dtypes in ((_VALUES, (DType.I32,)), (_ZEROS, (DType.I32,)), (_SCALES, _SCALE_DTYPES)):
            if name not in layer:
                raise FormatError(f"{name} is not stored")
            if layer[name].dtype not in dtypes or len(layer[name].shape) != 2 or not layer[name].numel:
                wanted = ", ".join(dtype.label for dtype in dtypes)
                raise FormatError(f"{name} is {_describe(layer[name])}. It should be a matrix of {wanted}")
        values, zeros, scales = (layer[name] for name in (_VALUES, _ZEROS, _SCALES))
        candidates = (self._fitting(values.shape, zeros.shape, scales.shape, *size) for size in self.sizes)
        fitting = {found for found in candidates if found is not None}
        if len(fitting) != 1:
            sizes = " or ".join(f"{bits} bits in groups of {size}" for bits, size in sorted(self.sizes))
            raise FormatError(
                f"it is {values.shape}, {_ZEROS} {zeros.shape} and {_SCALES} {scales.shape}, which is "
                f"{'more than one' if fitting else 'none'} of what quantization_config says: {sizes}"
            )
        ((bits, group, shape),) = fitting
        return GroupedIntegers(
            Whole(values.key),
            Whole(zeros.key),
            Whole(scales.key),
            shape,
            group,
            scales.dtype,
            bits,
            self.in_rows,
            self.is_less_one,
            self._numbers(layer.get(_GROUPS), groups, shape[1], group),
        )

    def _fitting(
        self, values: tuple[int, ...], zeros: tuple[int, ...], scales: tuple[int, ...], bits: int, size: int
    ) -> tuple[int, int, tuple[int, int]] | None:
        """Return bits, group size, and the shape (out, in) of a layer, or None if it does not have these sizes."""
        per_word = _WORD_BITS // bits
        out, columns = (values[1], values[0] * per_word) if self.in_rows else (values[1] * per_word, values[0])
        group = columns if size == _ALL else size
        count = -(-columns // group)
        fits = zeros == (count, out // per_word) and scales == (count, out) and out % per_word == 0
        return (bits, group, (out, columns)) if fits else None

    def _numbers(
        self, entry: TensorEntry | None, texts: Mapping[str, bytes], columns: int, group: int
    ) -> Whole | None:
        """Return the stored group of each input, or None if it follows from its position.

        Raises:
            FormatError: the stored groups are invalid.
        """
        if entry is None:
            return None
        groups = texts.get(entry.key)
        if groups is None or not self.in_rows or entry.shape != (columns,):
            raise FormatError(f"{_GROUPS} is {_describe(entry)}. GPTQ has I32 ({columns},), and AWQ none.")
        if groups == _consecutive_groups(columns, group) or not any(groups):
            return None
        numbers, count = struct.unpack(f"<{columns}i", groups), -(-columns // group)
        if min(numbers) < 0 or max(numbers) >= count:
            raise FormatError(
                f"{_GROUPS} has groups {min(numbers)} to {max(numbers)}, and there are scales for 0 to {count - 1}"
            )
        return Whole(entry.key)


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _describe(entry: TensorEntry) -> str:
    return f"{entry.dtype.label} {entry.shape}"


@lru_cache(maxsize=8)
def _consecutive_groups(columns: int, group: int) -> bytes:
    """Return the table of inputs in consecutive groups."""
    return struct.pack(f"<{columns}i", *(column // group for column in range(columns)))


def _sizes(config: Mapping[str, Any], what: str, known: Collection[int]) -> tuple[int, int]:
    """Return bits and group size of a config.

    Raises:
        ConfigError: they are missing or not supported.
    """
    bits = config.get("bits", config.get("w_bit"))
    size = config.get("group_size", config.get("q_group_size", 128))
    if type(bits) is not int or bits not in known:
        raise checkpoint_index.unknown_form(f"{what} of bits={shown(repr(bits))}")
    if type(size) is not int or (size != _ALL and (size < 1 or size % 8)):
        raise checkpoint_index.unknown_form(f"{what} with group_size={shown(repr(size))}")
    return bits, size


def awq(config: Mapping[str, Any]) -> QuantizedForm:
    """Return the form of AWQ's ``quantization_config``.

    Raises:
        ConfigError: it is not of 4 bits and ``version: gemm``.
    """
    version = config.get("version") or config.get("format") or config.get("checkpoint_format") or "gemm"
    if str(version).lower() != "gemm" or config.get("backend") == "llm-awq":
        raise checkpoint_index.unknown_form(f"AWQ with version={shown(repr(version))}, not 'gemm'")
    return _LayersInWords(frozenset({_sizes(config, "AWQ", (4,))}))


def gptq(config: Mapping[str, Any]) -> QuantizedForm:
    """Return the form of GPTQ's ``quantization_config``.

    Raises:
        ConfigError: it is not of 4 or 8 bits and ``gptq`` or ``gptq_v2``.
    """
    version = config.get("checkpoint_format") or config.get("format") or "gptq"
    if version not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
        raise checkpoint_index.unknown_form(
            f"GPTQ with checkpoint_format={shown(repr(version))}, not gptq or gptq_v2"
        )
    if config.get("pack_dtype", "int32") != "int32":
        raise checkpoint_index.unknown_form(f"GPTQ with pack_dtype={shown(repr(config['pack_dtype']))}")
    rules = config.get("dynamic") or {}
    if not isinstance(rules, Mapping) or not all(isinstance(rule, Mapping) for rule in rules.values()):
        raise checkpoint_index.unknown_form(f"GPTQ with dynamic={shown(repr(rules))}")
    configs = [config, *({**config, **rule} for name, rule in rules.items() if not name.startswith("-:"))]
    sizes = frozenset(_sizes(item, "GPTQ", (4, 8)) for item in configs)
    return _LayersInWords(sizes, in_rows=True, is_less_one=version == "gptq")


_AUTO_ROUND: Final = {
    "auto": (True, True),
    "auto_round:auto_gptq": (True, True),
    "auto_round:gptq": (True, True),
    "auto_round": (True, False),
    "auto_round:gptqmodel": (True, False),
    "auto_round:auto_awq": (False, False),
    "auto_round:awq": (False, False),
}
"""Whether words are in rows, and zero points less 1, by ``packing_format`` (``inference/backend.py``)."""


def auto_round(config: Mapping[str, Any]) -> QuantizedForm:
    """Return the form of auto-round's ``quantization_config``, which packs layers as GPTQ or AWQ does.

    Layers in ``extra_config`` have other settings. Those of 16 bits are not packed.

    Raises:
        ConfigError: the packing or the numbers of bits are not supported.
    """
    packing, kind = str(config.get("packing_format", "auto")), str(config.get("data_type", "int"))
    if packing not in _AUTO_ROUND or kind != "int":
        raise checkpoint_index.unknown_form(f"auto-round with packing_format={shown(packing)} of {shown(kind)}")
    if rotation := [name for name in ("rotation_config", "spinquant_config") if config.get(name)]:
        raise checkpoint_index.unknown_form(f"auto-round with {rotation[0]}")
    in_rows, is_less_one = _AUTO_ROUND[packing]
    rules = config.get("extra_config") or {}
    if not isinstance(rules, Mapping) or not all(isinstance(rule, Mapping) for rule in rules.values()):
        raise checkpoint_index.unknown_form(f"auto-round with extra_config={shown(repr(rules))}")
    configs = [config, *({**config, **rule} for rule in rules.values() if rule.get("bits") not in (16, 32))]
    sizes = frozenset(_sizes(item, "auto-round", (4, 8) if in_rows else (4,)) for item in configs)
    return _LayersInWords(sizes, in_rows, is_less_one)
