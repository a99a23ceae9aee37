"""Keys, shapes and metadata that layers in four bits have in files: those of bitsandbytes, and MXFP4 experts.

Files of bitsandbytes have, in addition to ``weight``, codes (n, 1), ``weight.absmax``, a float32 for each block,
``weight.quant_map``, the values of the sixteen codes, and ``weight.quant_state.bitsandbytes__nf4``, JSON with the
shape, the dtype and the block size. Nested scales are uint8, with ``weight.nested_absmax`` and
``weight.nested_quant_map``, and their offset is in the JSON. (``QuantState.as_dict`` of bitsandbytes.)
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwise.core.errors import ConfigError
from shardwise.core.expression import Stored, iter_stored_leaves, reshape
from shardwise.core.layout import ModelLayout, TensorKind, TensorLayout
from shardwise.core.tensors import Code, numel
from shardwise.files.four_bit_blocks import NESTED_BLOCK, dynamic_codebook
from shardwise.fsdp.named_tensors import Slot, TensorRef, place_like
from shardwise.fsdp.torch_private import from_torch
from shardwise.models.four_bit import layers
from shardwise.models.four_bit.config import Packing
from shardwise.models.revert import Output

ABSMAX = "absmax"
QUANT_MAP = "quant_map"
NESTED_ABSMAX = "nested_absmax"
NESTED_MAP = "nested_quant_map"
QUANT_STATE = "quant_state.bitsandbytes__"
_CODES_SUFFIX = "_blocks"


def has_four_bits(model: nn.Module) -> bool:
    """Return whether any layer or experts of a model are in four bits."""
    return any(layers.get_packings(module) for module in model.modules())


def collect_file_tensors(tensors: Sequence[TensorRef]) -> list[TensorRef]:
    """Return a model's tensors as files have them, with scales as floats and the metadata.

    Raises:
        ConfigError: experts are in four bits.
    """
    for slot in (item.slots[0] for item in tensors):
        is_packed = layers.are_experts_in_four_bits(slot.module) and slot.name in slot.module.packings
        if is_packed and not _is_mxfp4(slot.module, slot.name):
            raise ConfigError(
                f"{slot.fqn}: its experts are in four bits, and files of bitsandbytes have no form for them. Pass "
                "names='internal', which from_pretrained reads, or load dequantized experts: "
                'quantization=Nf4(skip_modules=("experts",)), or "dequantize"'
            )
    # weight_scales becomes weight.absmax, as floats if it is not nested, and weight_nested_scales
    # weight.nested_absmax. weight_nested_offset is a number in the metadata, which follows its weight.
    in_files: list[TensorRef] = []
    names_in_files = {layers.SCALES: f"{layers.WEIGHT}.{ABSMAX}", layers.NESTED: f"{layers.WEIGHT}.{NESTED_ABSMAX}"}
    for item in rename_mxfp4_codes(tensors):
        module: Any = item.slots[0].module
        name = item.slots[0].name
        is_packed = layers.is_in_four_bits(module)
        if is_packed and name in names_in_files:
            values = item.tensor
            if name == layers.SCALES and not module.is_nested:  # the bytes of float32
                values = place_like(values, item.local.view(torch.float32), values.shape[1] // 4)
            in_files.append(_rename(item, values, item.kind, name, names_in_files[name]))
        elif not is_packed or name != layers.OFFSET:
            in_files.append(item)
        if is_packed and name == layers.WEIGHT:
            offset = module.weight_nested_offset.item() if module.is_nested else None
            metadata = build_metadata(module.packing, (module.out_features, module.in_features), offset)
            in_files += [
                _rename(item, tensor, TensorKind.PERSISTENT_BUFFER, name, f"{name}.{suffix}")
                for suffix, tensor in metadata.items()
            ]
    return in_files


def rename_mxfp4_codes(tensors: Sequence[TensorRef]) -> list[TensorRef]:
    """Return the tensors, with codes of MXFP4 under the names that checkpoints have for them: ``.._blocks``."""
    renamed: list[TensorRef] = []
    for item in tensors:
        slot = item.slots[0]
        if _is_mxfp4(slot.module, slot.name):
            item = _rename(item, item.tensor, item.kind, slot.name, f"{slot.name}{_CODES_SUFFIX}")
        renamed.append(item)
    return renamed


def _is_mxfp4(module: nn.Module, stack: str) -> bool:
    return (
        layers.are_experts_in_four_bits(module)
        and stack in module.packings
        and isinstance(module.packings[stack].form, Code)
    )


def require_scales(tensors: Sequence[TensorRef]) -> None:
    """Raise ConfigError for weights of bitsandbytes' own layers, whose scales are not tensors of the model."""
    for item in tensors:
        kind = type(item.tensor)
        if kind.__module__.partition(".")[0] == "bitsandbytes":
            raise ConfigError(
                f"{item.fqn} is a {kind.__name__} of bitsandbytes, whose scales are not tensors of the model. "
                "Save it with its own save_pretrained, or load it with quantization=Nf4()"
            )


def build_metadata(packing: Packing, shape: Sequence[int], offset: float | None) -> dict[str, torch.Tensor]:
    """Return the metadata of a weight as tensors, by the suffix after ``weight.`` in their keys.

    ``shape`` is the shape of the dequantized weight. ``offset`` belongs to nested scales, and is None without them.
    """
    form = packing.form
    state: dict[str, Any] = {
        "quant_type": form.value,
        "blocksize": packing.block_size,
        "dtype": str(packing.dtype).removeprefix("torch."),
        "shape": list(shape),
    }
    metadata = {QUANT_MAP: torch.tensor(form.codebook, dtype=torch.float32, device="cpu")}
    if offset is not None:
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
        metadata[NESTED_MAP] = torch.tensor(dynamic_codebook(), dtype=torch.float32, device="cpu")
    text = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    return metadata | {f"{QUANT_STATE}{form.value}": text}


def _rename(item: TensorRef, tensor: torch.Tensor, kind: TensorKind, old: str, new: str) -> TensorRef:
    slots = [Slot(slot.module, new, f"{slot.fqn.removesuffix(old)}{new}") for slot in item.slots]
    return TensorRef(tensor, kind, slots)


def dequantize_layout(layout: ModelLayout, tensors: Sequence[TensorRef]) -> ModelLayout:
    """Return the layout with dequantized weights in place of 4-bit weights and their scales.

    The dequantized weights have no boxes.
    """
    slots = {item.fqn: item.slots[0] for item in tensors}
    layouts: list[TensorLayout] = []
    for tensor in layout.tensors:
        module, name = slots[tensor.fqn].module, slots[tensor.fqn].name
        packings = layers.get_packings(module)
        if packings and name in (layers.NESTED, layers.OFFSET, *map(layers.scales_name, packings)):
            continue
        packing = packings.get(name)
        if packing is not None:
            # Two codes are in a byte: (out, in / 2) is (out, in), and of experts (experts, out, in / 2) is
            # (experts, in, out).
            *outer, half = tensor.shape
            shape = (*outer, 2 * half)
            if packing.is_transposed:
                shape = (*shape[:-2], shape[-1], shape[-2])
            tensor = replace(tensor, shape=shape, dtype=from_torch(packing.dtype, tensor.fqn), boxes=())
        layouts.append(tensor)
    return ModelLayout(tuple(layouts))


def reshape_for_files(tensors: Sequence[TensorRef], outputs: Mapping[str, Output]) -> dict[str, Output]:
    """Return the outputs with the shapes of files: codes (n, 1) and scales (n,).

    Codes of MXFP4 are (experts, out, in / 32, 16). Outputs of other forms are unchanged.

    Raises:
        ConfigError: files have 4-bit layers joined or split.
    """
    slots = {item.fqn: item.slots[0] for item in tensors}
    scales = f"{layers.WEIGHT}.{ABSMAX}"
    packed_modules = {slot.module for slot in slots.values() if slot.name == scales}
    in_files: dict[str, Output] = {}
    for key, output in outputs.items():
        expression = output.expression
        slot = slots.get(expression.key) if isinstance(expression, Stored) else None
        if slot is None:
            parts = [slots[leaf.key] for leaf in iter_stored_leaves(expression) if leaf.key in slots]
            _require_unpacked(key, parts, packed_modules)
        if slot is not None and slot.module in packed_modules and slot.name in (layers.WEIGHT, scales):
            count = numel(expression.shape)
            shape = [count, 1] if slot.name == layers.WEIGHT else [count]
            output = replace(output, expression=reshape(expression, shape))
        elif (
            slot is not None
            and slot.name.endswith(_CODES_SUFFIX)
            and _is_mxfp4(slot.module, slot.name.removesuffix(_CODES_SUFFIX))
        ):
            # 32 numbers are 16 bytes: (experts, out, in / 2) become (experts, out, in / 32, 16).
            shape = [*expression.shape[:-1], expression.shape[-1] // 16, 16]
            output = replace(output, expression=reshape(expression, shape))
        in_files[key] = output
    return in_files


def _require_unpacked(key: str, parts: Iterable[Slot], packed_modules: Collection[nn.Module]) -> None:
    """Raise ConfigError if parts of a joined or split tensor of the files belong to 4-bit layers."""
    for slot in parts:
        if slot.module in packed_modules:
            raise ConfigError(
                f"{slot.fqn}: is in four bits, and files of this model have it joined or split ({key}), for which "
                "bitsandbytes has no form. Pass names='internal', which from_pretrained reads"
            )
