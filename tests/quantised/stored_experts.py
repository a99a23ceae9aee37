"""Experts that come up as they are stored, beside the same experts as numbers: on ranks, and alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from tests import zoo
from tests.quantised.four_bits import local_of, whole
from transformers import AutoModelForCausalLM, GptOssConfig

import shardwise
from shardwise.options import AsNumbers, AsStored

EXPERTS = 4
STACKS = ("gate_up_proj", "down_proj")


def make_gpt_oss(folder: Path) -> None:
    """A small gpt-oss, its experts in MXFP4."""
    config = GptOssConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        dtype="bfloat16",
    )
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    zoo.fill(model)
    zoo.save_original(model, folder, max_shard_size="1GB")
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    for key in [key for key in tensors if key.endswith(STACKS)]:
        experts, columns, rows = tensors.pop(key).shape
        shape = (experts, rows, columns // 32)
        tensors[f"{key}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{key}_scales"] = torch.randint(116, 125, shape, generator=generator, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    told = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}
    content = json.loads((folder / "config.json").read_text()) | {"quantization_config": told}
    (folder / "config.json").write_text(json.dumps(content))
