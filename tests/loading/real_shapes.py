"""Large models of the hub as their configs and headers tell, without a byte of their tensors."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from tests.support.memory_storage import MemoryReader
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from shardwise.core.layout import MeshShape
from shardwise.core.tensors import DType
from shardwise.files.checkpoint_index import CheckpointIndex, TensorEntry
from shardwise.files.quantized import parse_form
from shardwise.files.storage import LOCAL
from shardwise.loading.estimate import estimate
from shardwise.loading.from_pretrained import OpenModel
from shardwise.loading.source import OpenSource
from shardwise.models.build import build_on_meta
from shardwise.report import Estimate


@dataclass(frozen=True)
class Shapes:
    """A model class, its config, and the number of files of its checkpoint."""

    model_class: type
    config: PreTrainedConfig
    files: int

    def index(self) -> CheckpointIndex:
        """Headers as on the hub: experts one by one, layer by layer, files filled one after the other."""
        model = build_on_meta(self.model_class, self.config, torch.bfloat16, Path("/nowhere"))
        stored = [
            item for name, value in model.state_dict().items() for item in _as_stored(name, tuple(value.shape))
        ]
        sizes = [2 * math.prod(shape) for _, shape in stored]
        full = math.ceil(sum(sizes) / self.files)
        entries: dict[str, TensorEntry] = {}
        files: dict[str, int] = {}
        done = 0
        for (key, shape), nbytes in zip(stored, sizes, strict=True):
            file = f"model-{done // full + 1:05d}-of-{self.files:05d}.safetensors"
            start = files.setdefault(file, 100_000)  # the header
            files[file] += nbytes
            entries[key] = TensorEntry(key, DType.BF16, shape, file, start, start + nbytes)
            done += nbytes
        return CheckpointIndex("/nowhere", files, entries, {}, "indexed")


def _as_stored(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    prefix, _, last = name.rpartition(".")
    if not prefix.endswith(".experts"):
        return [(name, shape)]
    count, rows, columns = shape
    halves = ["gate_proj", "up_proj"] if last == "gate_up_proj" else ["down_proj"]
    return [
        (f"{prefix}.{expert}.{half}.weight", (rows // len(halves), columns))
        for expert in range(count)
        for half in halves
    ]


def qwen3_235b(layers: int = 94) -> Shapes:
    sizes = {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": False}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536}
    config = Qwen3MoeConfig(**sizes, **heads, **experts)
    return Shapes(Qwen3MoeForCausalLM, config, files=max(2, 118 * layers // 94))


def deepseek_v3(layers: int = 61) -> Shapes:
    config = DeepseekV3Config(num_hidden_layers=layers)
    return Shapes(DeepseekV3ForCausalLM, config, files=max(2, 163 * layers // 61))


def in_float8(index: CheckpointIndex, block: int = 128) -> CheckpointIndex:
    """The same checkpoint as DeepSeek publishes it: matrices of layers in FP8, each beside its scales."""
    entries: dict[str, TensorEntry] = {}
    files: dict[str, int] = {}
    for entry in index.entries.values():
        matrix = entry.key.endswith("proj.weight") or "_a_proj" in entry.key or "_b_proj" in entry.key
        parts = [(entry.key, entry.dtype, entry.shape)]
        if matrix and len(entry.shape) == 2:
            counts = tuple(-(-size // block) for size in entry.shape)
            parts = [(entry.key, DType.F8_E4M3, entry.shape), (f"{entry.key}_scale_inv", DType.F32, counts)]
        for key, dtype, shape in parts:
            start = files.setdefault(entry.file, 100_000)
            files[entry.file] += math.prod(shape) * dtype.itemsize
            entries[key] = TensorEntry(key, dtype, shape, entry.file, start, files[entry.file])
    stored = CheckpointIndex(index.root, files, entries, {}, index.layout)
    return parse_form({"quant_method": "fp8", "weight_block_size": [block, block]}).dequantize(
        MemoryReader({}), stored
    )


def forecast_of(config: Any, index: CheckpointIndex, mesh: MeshShape, **options: Any) -> Estimate:
    """The estimate of a checkpoint of which there are headers alone."""
    source = OpenSource(index, MemoryReader({}, policy=LOCAL), {})
    return estimate(OpenModel(Path("/nowhere"), config, index, source, {}), mesh, cast(Any, options))
