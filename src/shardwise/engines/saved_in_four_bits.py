"""Has linear layers of a model that is made from files put into four bits, in the files of bitsandbytes.

They are packed as a base is that is brought up with ``quantization=``, from numbers rounded to the dtype of the
outcome: the bytes are those of a save of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from shardwise.conversion import Computed, Expression, Stored, WholeOperation, reshape
from shardwise.conversion.packed import from_bytes, packed
from shardwise.engines.offline import OfflineModel
from shardwise.errors import ConfigError
from shardwise.models.conversions.revert import Output
from shardwise.models.four_bits.four_bit_base import choose_layers, notes_of
from shardwise.models.four_bits.four_bit_files import ABSMAX, constants_of
from shardwise.models.four_bits.four_bit_linear import WEIGHT
from shardwise.models.four_bits.four_bit_product import Packing
from shardwise.models.four_bits.quantization import FourBit, Fp4, NestedScales, Nf4, to_transformers
from shardwise.models.torch_words import from_torch, to_torch
from shardwise.tensors import DType, numel

_NO_FORM = "files of bitsandbytes have no form for fused experts"

_BY_NAME: Mapping[str, FourBit] = {"nf4": Nf4(), "fp4": Fp4()}

Made: TypeAlias = Mapping[str, tuple[DType, Expression]]
"""What a save is made of: dtype and expression, by key."""


@dataclass(frozen=True, slots=True)
class FourBitSave:
    """A save with layers in four bits: its tensors, what its config says of them, and notes for the report."""

    made: Made
    config: Mapping[str, Any]
    notes: tuple[str, ...]


def four_bits_of(asked: object) -> FourBit | None:
    """How layers are packed, by what is asked for: a type, its name, or None.

    Raises:
        ConfigError: it is none of these; or its scales are nested, which one process that sees a block at a time
            cannot write.
    """
    found = _BY_NAME.get(asked, asked) if isinstance(asked, str) else asked
    if found is None:
        return None
    if not isinstance(found, FourBit):
        raise ConfigError(f"quantization={asked!r}: is Nf4(...), Fp4(...), or None for numbers")
    if isinstance(found.scales, NestedScales):
        raise ConfigError(
            "quantization: nested scales need the mean of all scales of a weight before its first byte is written; "
            "pass PlainScales(), or bring the outcome up with quantization=Nf4(scales=NestedScales()) and save it"
        )
    return found


def in_four_bits(
    source: OfflineModel, outputs: Mapping[str, Output], made: Made, quantization: FourBit
) -> FourBitSave:
    """Put the layers of a save into four bits that a load with this ``quantization`` would choose.

    Layers whose weight is not one tensor of the file keep their numbers, as fused experts do.

    Raises:
        ConfigError: there is no such layer, or a name in ``stay`` matches none.
    """
    keys = {item.expression.key: key for key, item in outputs.items() if isinstance(item.expression, Stored)}
    chosen = choose_layers(source.built.model, quantization, keys.__contains__)
    if not chosen.layers:
        raise ConfigError(f"nothing of {type(source.built.model).__name__} can be put into four bits: {_NO_FORM}")
    chosen = replace(chosen, stacks={}, stay={**chosen.stay, **dict.fromkeys(chosen.stacks, _NO_FORM)})
    layers = {keys[f"{name}.{WEIGHT}"] for name in chosen.layers}
    found: dict[str, tuple[DType, Expression]] = {}
    for key, (dtype, numbers) in made.items():
        if key in layers:
            found |= _packed(key, numbers, Packing(quantization.form, quantization.block_size, to_torch(dtype)))
        else:
            found[key] = dtype, numbers
    config = to_transformers(quantization, tuple(sorted(chosen.stay)), source.built.model.dtype)
    return FourBitSave(found, config, notes_of(chosen, quantization))


def _packed(key: str, numbers: Expression, packing: Packing) -> Iterator[tuple[str, tuple[DType, Expression]]]:
    """A weight and what lies beside it, by key."""
    rounds_to = from_torch(packing.dtype, key)
    weight, scales = packed(numbers, packing.form, packing.block_size, rounds_to=rounds_to)
    yield key, (DType.U8, reshape(weight, (numel(weight.shape), 1)))
    floats = from_bytes(scales)
    yield f"{key}.{ABSMAX}", (DType.F32, reshape(floats, (numel(floats.shape),)))
    for name, tensor in constants_of(packing, numbers.shape, None).items():
        constant = _constant(tensor, f"{key}.{name}")
        yield f"{key}.{name}", (constant.dtype, constant)


def _constant(tensor: torch.Tensor, key: str) -> Computed:
    """Values that are known, as what is computed of nothing."""
    shape = tuple(tensor.shape)
    known = WholeOperation("a constant", (), {"value": shape}, lambda _: {"value": tensor}, tensor.nbytes)
    return Computed(known, "value", shape, from_torch(tensor.dtype, key), ())
