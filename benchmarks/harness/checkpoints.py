"""Checkpoints to load: shapes of real models, random values, in the layout of the Hugging Face Hub."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

_BLOCK_BYTES = 32 << 20
_FORMAT = 2
"""To be raised when what is written changes: folders of another format are written again."""


@dataclass(frozen=True)
class Shape:
    """A checkpoint in bfloat16.

    Attributes:
        name: of its folder.
        config: the content of ``config.json``, of a Qwen3 or Qwen3-MoE.
        file_bytes: the most that a file takes; one file gets no index.
    """

    name: str
    config: Mapping[str, Any] = field(hash=False)
    file_bytes: int = 1 << 40

    @property
    def is_moe(self) -> bool:
        return bool(self.config["model_type"] == "qwen3_moe")

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(2 * math.prod(dims) for _, dims in self.tensors())

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Keys and shapes, in the order of the model."""
        config = self.config
        hidden, head = config["hidden_size"], config["head_dim"]
        queries, values = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
        yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
        for number in range(config["num_hidden_layers"]):
            layer = f"model.layers.{number}"
            yield f"{layer}.self_attn.q_proj.weight", (queries, hidden)
            yield f"{layer}.self_attn.k_proj.weight", (values, hidden)
            yield f"{layer}.self_attn.v_proj.weight", (values, hidden)
            yield f"{layer}.self_attn.o_proj.weight", (hidden, queries)
            yield f"{layer}.self_attn.q_norm.weight", (head,)
            yield f"{layer}.self_attn.k_norm.weight", (head,)
            inner, names = config["intermediate_size"], [f"{layer}.mlp"]
            if self.is_moe:
                yield f"{layer}.mlp.gate.weight", (config["num_experts"], hidden)
                inner = config["moe_intermediate_size"]
                names = [f"{layer}.mlp.experts.{expert}" for expert in range(config["num_experts"])]
            for name in names:
                yield f"{name}.gate_proj.weight", (inner, hidden)
                yield f"{name}.up_proj.weight", (inner, hidden)
                yield f"{name}.down_proj.weight", (hidden, inner)
            yield f"{layer}.input_layernorm.weight", (hidden,)
            yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield "model.norm.weight", (hidden,)
        if not config["tie_word_embeddings"]:
            yield "lm_head.weight", (config["vocab_size"], hidden)

    def files(self) -> list[dict[str, tuple[int, ...]]]:
        """Shapes by key, by file: filled in the order of the model, sorted within a file, as safetensors does."""
        files: list[dict[str, tuple[int, ...]]] = [{}]
        used = 0
        for key, dims in self.tensors():
            nbytes = 2 * math.prod(dims)
            if used and used + nbytes > self.file_bytes:
                files.append({})
                used = 0
            files[-1][key] = dims
            used += nbytes
        return [dict(sorted(file.items())) for file in files]

    def tiny(self) -> Shape:
        """The same architecture in a size that loads in a blink."""
        config = {**self.config, **sizes(64, 128, 2, 4, 2, 16, 512)}
        if self.is_moe:
            config |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        has_index = self.file_bytes < self.nbytes
        return replace(self, name=f"{self.name}-tiny", config=config, file_bytes=100_000 if has_index else 1 << 40)


_QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}


def smaller(name: str, **changes: Any) -> Shape:
    """The shape of Qwen3-0.6B with changes."""
    return Shape(name, {**_QWEN3_06B, **changes})


def sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head: int, vocab: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "vocab_size": vocab,
    }


_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "moe_intermediate_size": 384,
    "num_experts": 64,
    "num_experts_per_tok": 8,
}
SHAPES = {
    shape.name: shape
    for shape in (
        smaller("qwen3-8m", **sizes(256, 768, 8, 4, 2, 64, 4096)),
        smaller("qwen3-36m", **sizes(512, 1536, 8, 8, 4, 64, 16384)),
        smaller("qwen3-159m", num_hidden_layers=8, vocab_size=32768),
        smaller("qwen3-0.6b"),
        replace(smaller("qwen3-1.7b", hidden_size=2048, intermediate_size=6144), file_bytes=2_000_000_000),
        replace(
            smaller("qwen3-8b", **sizes(4096, 12288, 36, 32, 8, 128, 151936), tie_word_embeddings=False),
            file_bytes=4_000_000_000,
        ),
        replace(smaller("qwen3-moe", **sizes(1024, 3072, 8, 16, 8, 128, 32768), **_MOE), file_bytes=400_000_000),
    )
}


def write(shape: Shape, root: Path) -> Path:
    """Return the folder of the checkpoint below ``root``. It is written unless it is there already, complete."""
    folder = root / shape.name
    stamp = folder / "written.json"
    content = {"format": _FORMAT, "config": dict(shape.config), "file_bytes": shape.file_bytes}
    if stamp.is_file() and json.loads(stamp.read_text()) == content:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape.config, indent=2) + "\n")
    files = shape.files()
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    if len(files) == 1:
        names = ["model.safetensors"]
    generator = np.random.Generator(np.random.SFC64(0))
    for name, tensors in zip(names, files, strict=True):
        _write_file(folder / name, tensors, generator)
    if len(files) > 1:
        weight_map = {key: name for name, keys in zip(names, files, strict=True) for key in keys}
        index = {"metadata": {"total_size": shape.nbytes}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    stamp.write_text(json.dumps(content))  # last: an incomplete checkpoint has no stamp
    return folder


def _write_file(path: Path, tensors: Mapping[str, tuple[int, ...]], generator: np.random.Generator) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for key, dims in tensors.items():
        stop = start + 2 * math.prod(dims)
        header[key] = {"dtype": "BF16", "shape": list(dims), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while start:
            nbytes = min(start, _BLOCK_BYTES)
            words = generator.integers(0, 1 << 64, size=-(-nbytes // 8), dtype=np.uint64)
            # Without the highest bit of their exponents, all numbers are finite, and below 2.
            words &= np.uint64(0xBFFF_BFFF_BFFF_BFFF)
            file.write(memoryview(words.view(np.uint8)[:nbytes]))
            start -= nbytes
        file.flush()
        os.fsync(file.fileno())  # dirty pages cannot be dropped from the cache
