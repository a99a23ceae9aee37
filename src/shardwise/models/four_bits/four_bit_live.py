"""Puts a model into four bits where it stands: what has values is packed, what is on meta waits for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from shardwise.conversion.four_bit import quantise_rows
from shardwise.conversion.nested_scales import nest
from shardwise.errors import ConfigError
from shardwise.models.four_bits.four_bit_base import Chosen, about_speed, choose_layers, mark_in_four_bits, notes_of
from shardwise.models.four_bits.four_bit_experts import put_experts_into_four_bits, scales_of
from shardwise.models.four_bits.four_bit_linear import NESTED, OFFSET, SCALES, WEIGHT, put_into_four_bits
from shardwise.models.four_bits.quantization import FourBit, to_transformers
from shardwise.models.selection import has_adapters

_SHOWN = 20


def choose_to_pack(model: nn.Module, quantization: FourBit, optimizers: Sequence[Optimizer]) -> Chosen:
    """What of a model that is not sharded is put into four bits. Changes nothing.

    Memory: a byte for each number of a weight.

    Raises:
        ConfigError: the model has adapters already, or an optimizer has what is packed; values are not finite; as
            of ``choose_layers``.
    """
    if has_adapters(model):
        raise ConfigError(
            "quantization packs what adapters are put on; call shard before them, or from_pretrained with both"
        )
    chosen = choose_layers(model, quantization, lambda _name: True)
    trained = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    weights = {f"{name}.{WEIGHT}": layer.weight for name, layer in chosen.layers.items()}
    weights |= {fqn: module.get_parameter(local) for fqn, (module, local) in chosen.stacks.items()}
    faults = [
        fault
        for name, weight in weights.items()
        if (fault := _why_not(weight, is_trained=id(weight) in trained, name=name))
    ]
    if faults:
        raise ConfigError("the model cannot be put into four bits:\n  " + "\n  ".join(faults[:_SHOWN]))
    return chosen


def _why_not(weight: torch.Tensor, *, is_trained: bool, name: str) -> str | None:
    if is_trained:
        return (
            f"{name} is in an optimizer, and not trained in four bits; make the optimizer of what is, after shard"
        )
    if weight.is_meta:
        return None
    bad = (~weight.detach().isfinite()).flatten(0, -2).any(-1).nonzero()
    return f"{name}: row {int(bad[0])} has values that are not finite" if len(bad) else None


def pack_model(model: nn.Module, chosen: Chosen, quantization: FourBit) -> tuple[str, ...]:
    """Put what has been chosen of a model into four bits, in place; what stays, in words.

    A weight with values is packed at once, on the CPU, one after the other; one on meta gets its bytes by ``load``.

    Memory: one weight as float32, beside the model.
    """
    for layer in chosen.layers.values():
        weight = layer.weight.detach()
        put_into_four_bits(layer, quantization)
        if not weight.is_meta:
            _give_values(layer, weight, quantization)
    stacks: dict[nn.Module, dict[str, FourBit]] = {}
    for module, local in chosen.stacks.values():
        stacks.setdefault(module, {})[local] = quantization
    for module, kinds in stacks.items():
        values = {local: getattr(module, local).detach() for local in kinds}
        put_experts_into_four_bits(module, kinds)
        for local, weight in values.items():
            if not weight.is_meta:
                packed, raw = _packed(weight, quantization)
                _install(module, {local: packed, scales_of(local): raw}, weight.device)
    if isinstance(model, PreTrainedModel):
        mark_in_four_bits(model, to_transformers(quantization, tuple(sorted(chosen.stay)), model.dtype))
    return *notes_of(chosen, quantization), *about_speed()


def pack_again(layer: Any, numbers: torch.Tensor) -> None:
    """Put other numbers (out, in) into a layer in four bits that is not sharded.

    Raises:
        ConfigError: some are not finite; the layer is as it was.
    """
    if why := _why_not(numbers, is_trained=False, name="the merged weight"):
        raise ConfigError(f"it cannot be put into four bits: {why}")
    _give_values(layer, numbers, layer.quantization)


def _give_values(layer: Any, weight: torch.Tensor, quantization: FourBit) -> None:
    packed, raw = _packed(weight, quantization)
    values = {WEIGHT: packed, SCALES: raw}
    if layer.is_nested:
        codes, nested, offset = nest(raw.view(torch.float32))
        values[SCALES] = codes
        layer.register_buffer(NESTED, nested.to(weight.device))
        layer.register_buffer(OFFSET, offset.reshape(1).to(weight.device))
    _install(layer, values, weight.device)


def _packed(weight: torch.Tensor, quantization: FourBit) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed bytes, and the bytes of scales."""
    numbers = weight.cpu().contiguous()
    *outer, columns = numbers.shape
    packed = torch.empty(*outer, columns // 2, dtype=torch.uint8)
    scales = torch.empty(*outer, columns // quantization.block_size, dtype=torch.float32)
    quantise_rows(numbers, quantization.block_size, quantization.form, packed, scales)
    return packed, scales.view(torch.uint8)


def _install(module: nn.Module, values: Mapping[str, torch.Tensor], device: torch.device) -> None:
    for name, value in values.items():
        made = nn.Parameter(value.to(device), requires_grad=False)
        made.__dict__.update(module.get_parameter(name).__dict__)  # what PEFT asks a weight for
        module.register_parameter(name, made)
