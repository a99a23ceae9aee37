"""Configs of adapters: made, read from a folder, and written to one, by PEFT."""

from __future__ import annotations

from shardwise.tuning.peft_compat import config_in, lora_config, save_config

__all__ = ["config_in", "lora_config", "save_config"]
