"""Checkpoints as bitsandbytes stores them, beside bitsandbytes itself in each process."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.files.test_four_bit_blocks import dequantized, quantized
from tests.peers import use_peers
from tests.quantized import quantizing
from tests.quantized.four_bits import layers_of, sharding_on, whole
from tests.saving.adapters import tensors_of
from tests.support.files import change_json

import shardwise
from shardwise.core.tensors import Form4

SKIPPED = ["lm_head", "multi_modal_projector", "model.layers.1.mlp.gate_proj"]
"""As in Unsloth's dynamic quants: modules of other models, too."""


Packed = tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]
"""Packed bytes, what lies beside them, and the numbers of both."""


def by_bitsandbytes(tensor: torch.Tensor, *, is_nested: bool) -> Packed:
    import bitsandbytes.functional as bnb

    packed, state = bnb.quantize_4bit(tensor, blocksize=64, quant_type="nf4", compress_statistics=is_nested)
    return packed, state.as_dict(packed=True), bnb.dequantize_4bit(packed, state)


def by_hand(tensor: torch.Tensor, *, is_nested: bool = False) -> Packed:
    """All elements as one row, which is filled up to whole blocks; scales are plain."""
    assert not is_nested
    blocks = -(-tensor.numel() // 64)
    row = torch.zeros(64 * blocks, dtype=tensor.dtype)
    row[: tensor.numel()] = tensor.view(-1)
    packed, absmax = quantized(row, 64, Form4.NF4)
    row = dequantized(packed, absmax, 64, Form4.NF4, tensor.dtype)
    told = {"shape": list(tensor.shape), "blocksize": 64, "quant_type": "nf4", "dtype": "bfloat16"}
    beside = {
        "absmax": absmax,
        "quant_map": torch.tensor(Form4.NF4.codebook),
        "quant_state.bitsandbytes__nf4": torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8),
    }
    bytes_of = packed[: -(-tensor.numel() // 2)].clone().view(-1, 1)
    return bytes_of, beside, row[: tensor.numel()].view(tensor.shape).clone()


def pack_by_bitsandbytes(folders: list[str]) -> None:
    use_peers("bitsandbytes")
    for folder in folders:
        pack(folder, by_bitsandbytes)


def pack(folder: str, pack_one: Callable[..., Packed]) -> None:
    """Pack the matrices of a checkpoint but for the skipped ones, and put their numbers beside it."""
    out = f"{folder}-packed"
    stored: dict[str, torch.Tensor] = {}
    numbers: dict[str, torch.Tensor] = {}
    for key, tensor in tensors_of(Path(folder)).items():
        stored[key] = numbers[key] = tensor
        if not quantizing.is_quantized(key, tensor) or key.removesuffix(".weight") in SKIPPED:
            continue
        is_nested = "layers.0" in key and pack_one is by_bitsandbytes
        stored[key], beside, numbers[key] = pack_one(tensor, is_nested=is_nested)
        stored |= {f"{key}.{name}": value for name, value in beside.items()}
    Path(out).mkdir()
    save_file(stored, Path(out, "model.safetensors"), metadata={"format": "pt"})
    save_file(numbers, Path(out, "numbers"), metadata={"format": "pt"})
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    shutil.copy(Path(folder, "config.json"), out)
    change_json(Path(out, "config.json"), quantization_config=config | {"llm_int8_skip_modules": SKIPPED})


def go_through(folder: str, mesh: str) -> list[str]:
    """Bring a checkpoint up on these ranks as numbers and as it is stored; what is wrong."""
    numbers = load_file(Path(folder, "numbers"))
    options = shardwise.options.LoadOptions(budget_bytes=1 << 16, progress=False)
    how: dict[str, Any] = {"options": options, "sharding": sharding_on(mesh)}
    faults = quantizing.differing(shardwise.from_pretrained(folder, quantization="dequantize", **how), numbers)
    model, report = shardwise.from_pretrained(folder, output_loading_info=True, **how)
    packed = {f"{name}.weight" for name, _ in layers_of(model)}
    for name, layer in layers_of(model):
        found = layer.packing.dequantize(
            whole(layer.weight), layer.get_scales(whole(layer.weight_scales), 0), torch.bfloat16
        )
        if not torch.equal(found, numbers[f"{name}.weight"]):
            faults.append(f"{name} has other numbers in four bits")
    for name, parameter in model.named_parameters():
        if name in numbers and name not in packed and not torch.equal(whole(parameter), numbers[name]):
            faults.append(f"{name} has other numbers")
    wanted = {
        key for key, tensor in numbers.items() if f"{key}.absmax" in stored_in(folder) and tensor.shape[1] % 64 == 0
    }
    if packed != wanted:
        faults.append(f"in four bits are also, or not: {sorted(packed ^ wanted)}")
    told = " ".join(report.notes)
    faults += [f"the report does not say: {what}" for what in wanted_notes(numbers) if what not in told]
    return faults


def stored_in(folder: str) -> set[str]:
    return set(load_file(Path(folder, "model.safetensors")))


def wanted_notes(numbers: dict[str, torch.Tensor]) -> list[str]:
    columns = {tensor.shape[1] for key, tensor in numbers.items() if quantizing.is_quantized(key, tensor)}
    uneven = [f"{count} columns, not a multiple of block_size=64" for count in columns if count % 64]
    return [*uneven, "names modules that the model does not have: multi_modal_projector"]
