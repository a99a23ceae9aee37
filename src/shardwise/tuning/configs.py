"""Configs of adapters, made, read and written by PEFT; and what PEFT has done to a model."""

from __future__ import annotations

from shardwise.tuning.peft_compat import (
    adapter_doors,
    config_in,
    copied_names,
    layer_among,
    lora_config,
    save_config,
    tensors_of_layer,
)

__all__ = [
    "adapter_doors",
    "config_in",
    "copied_names",
    "layer_among",
    "lora_config",
    "save_config",
    "tensors_of_layer",
]
