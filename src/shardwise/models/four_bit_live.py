"""Puts a model into four bits where it stands: what has values is packed, what is on meta waits for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.conversion.four_bit import quantise_rows
from shardwise.conversion.nested_scales import nest
from shardwise.errors import ConfigError
from shardwise.models.four_bit_base import choose_layers, mark_in_four_bits, notes_of
from shardwise.models.four_bit_experts import put_experts_into_four_bits, scales_of
from shardwise.models.four_bit_linear import NESTED, OFFSET, SCALES, WEIGHT, put_into_four_bits
from shardwise.models.quantization import FourBit, to_transformers
from shardwise.models.selection import has_adapters


def pack_model(model: nn.Module, quantization: FourBit) -> tuple[str, ...]:
    """Put linear layers and experts of a model that is not sharded into four bits, in place; what stays, in words.

    A weight with values is packed at once, on the CPU, one after the other; one on meta gets its bytes by ``load``.

    Memory: one weight as float32, beside the model.

    Raises:
        ConfigError: it has adapters already; a value is not finite; as of ``choose_layers``.
    """
    if has_adapters(model):
        raise ConfigError(
            "quantization packs what adapters are put on; call shard before them, or from_pretrained with both"
        )
    chosen = choose_layers(model, quantization, lambda _name: True)
    for name, layer in chosen.layers.items():
        weight = layer.weight.detach()
        put_into_four_bits(layer, quantization)
        if not weight.is_meta:
            _give_values(layer, name, weight, quantization)
    stacks: dict[nn.Module, dict[str, FourBit]] = {}
    for module, local in chosen.stacks.values():
        stacks.setdefault(module, {})[local] = quantization
    for module, kinds in stacks.items():
        values = {local: getattr(module, local).detach() for local in kinds}
        put_experts_into_four_bits(module, kinds)
        for local, weight in values.items():
            if not weight.is_meta:
                packed, raw = _packed(weight, f"experts' {local}", quantization)
                _install(module, {local: packed, scales_of(local): raw}, weight.device)
    if isinstance(model, PreTrainedModel):
        mark_in_four_bits(model, to_transformers(quantization, tuple(sorted(chosen.stay)), model.dtype))
    return notes_of(chosen, quantization)


def _give_values(layer: Any, name: str, weight: torch.Tensor, quantization: FourBit) -> None:
    packed, raw = _packed(weight, name, quantization)
    values = {WEIGHT: packed, SCALES: raw}
    if layer.is_nested:
        codes, nested, offset = nest(raw.view(torch.float32))
        values[SCALES] = codes
        layer.register_buffer(NESTED, nested.to(weight.device))
        layer.register_buffer(OFFSET, offset.reshape(1).to(weight.device))
    _install(layer, values, weight.device)


def _packed(weight: torch.Tensor, name: str, quantization: FourBit) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed bytes, and the bytes of scales."""
    numbers = weight.cpu().contiguous()
    *outer, columns = numbers.shape
    packed = torch.empty(*outer, columns // 2, dtype=torch.uint8)
    scales = torch.empty(*outer, columns // quantization.block_size, dtype=torch.float32)
    if bad := quantise_rows(numbers, quantization.block_size, quantization.form, packed, scales):
        raise ConfigError(f"{name}: row {bad[0]} has values that are not finite, and cannot be put into four bits")
    return packed, scales.view(torch.uint8)


def _install(module: nn.Module, values: Mapping[str, torch.Tensor], device: torch.device) -> None:
    for name, value in values.items():
        made = nn.Parameter(value.to(device), requires_grad=False)
        made.__dict__.update(module.get_parameter(name).__dict__)  # what PEFT asks a weight for
        module.register_parameter(name, made)
