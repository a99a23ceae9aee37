"""LoRA with PEFT's modules, on meta, before the model is sharded."""

from shardwise.core.errors import require_versions

require_versions()
