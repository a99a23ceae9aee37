"""Checkpoints to load: the shapes of real models, random values, the layout that models have on the hub."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

_BLOCK_BYTES = 32 << 20
_FORMAT = 1
"""Raise it when what is written changes: folders of another format are written again."""


@dataclass(frozen=True)
class Shape:
    """A checkpoint to write.

    Attributes:
        name: of its folder.
        config: what goes into ``config.json``; a Qwen3 or Qwen3-MoE config.
        file_bytes: a file is closed before it grows beyond this; one file gets no index.
        stores_head: whether a tied ``lm_head.weight`` is stored too, as the hub's small Qwen3 models have it.
        seed: of the values.
    """

    name: str
    config: Mapping[str, Any] = field(hash=False)
    file_bytes: int
    stores_head: bool = False
    seed: int = 0

    @property
    def is_moe(self) -> bool:
        return bool(self.config["model_type"] == "qwen3_moe")

    @property
    def is_tied(self) -> bool:
        return bool(self.config["tie_word_embeddings"])

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes by key, in the order of the model."""
        return dict(_tensors(self))

    def files(self) -> list[dict[str, tuple[int, ...]]]:
        """Shapes by key, by file: filled in the model's order, sorted within a file, as safetensors does."""
        files: list[dict[str, tuple[int, ...]]] = [{}]
        used = 0
        for key, sizes in _tensors(self):
            if used and used + _nbytes(sizes) > self.file_bytes:
                files.append({})
                used = 0
            files[-1][key] = sizes
            used += _nbytes(sizes)
        return [dict(sorted(file.items())) for file in files]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(_nbytes(shape) for shape in self.tensors().values())

    def tiny(self) -> Shape:
        """The same architecture in a size that loads in a blink."""
        small = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 512,
        }
        if self.is_moe:
            small |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        several = self.file_bytes < self.nbytes
        config = {**self.config, **small}
        return replace(self, name=f"{self.name}-tiny", config=config, file_bytes=100_000 if several else 1 << 40)


def _config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    } | changes


_ONE_FILE = 1 << 40

SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-0.6b", _config(), _ONE_FILE),
        Shape("qwen3-0.6b-hub", _config(), _ONE_FILE, stores_head=True),
        Shape("qwen3-1.7b", _config(hidden_size=2048, intermediate_size=6144), 2_000_000_000),
        Shape(
            "qwen3-moe",
            _config(
                architectures=["Qwen3MoeForCausalLM"],
                model_type="qwen3_moe",
                num_hidden_layers=8,
                max_window_layers=8,
                vocab_size=32768,
                tie_word_embeddings=False,
                decoder_sparse_step=1,
                mlp_only_layers=[],
                moe_intermediate_size=384,
                norm_topk_prob=True,
                num_experts=64,
                num_experts_per_tok=8,
                router_aux_loss_coef=0.001,
            ),
            400_000_000,
        ),
    )
}


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    config = shape.config
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
        if shape.is_moe:
            yield f"{layer}.mlp.gate.weight", (config["num_experts"], hidden)
            for expert in range(config["num_experts"]):
                yield from _mlp(f"{layer}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
        else:
            yield from _mlp(f"{layer}.mlp", hidden, config["intermediate_size"])
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if shape.stores_head or not shape.is_tied:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _mlp(name: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.gate_proj.weight", (inner, hidden)
    yield f"{name}.up_proj.weight", (inner, hidden)
    yield f"{name}.down_proj.weight", (hidden, inner)


def _nbytes(shape: tuple[int, ...]) -> int:
    count = 2
    for size in shape:
        count *= size
    return count


def write(shape: Shape, root: Path) -> Path:
    """The checkpoint's folder below ``root``; written now unless it is there already, whole and the same."""
    folder = root / shape.name
    stamp = folder / "written.json"
    wanted = {"format": _FORMAT, "seed": shape.seed, "head": shape.stores_head, "config": dict(shape.config)}
    wanted["file_bytes"] = shape.file_bytes
    if stamp.is_file() and json.loads(stamp.read_text()) == wanted:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape.config, indent=2) + "\n")
    files = shape.files()
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    if len(files) == 1:
        names = ["model.safetensors"]
    rng = np.random.Generator(np.random.SFC64(shape.seed))
    for name, tensors in zip(names, files, strict=True):
        _write_file(folder / name, tensors, rng, shape.stores_head and shape.is_tied)
    if len(files) > 1:
        where = {key: name for name, keys in zip(names, files, strict=True) for key in keys}
        index = {"metadata": {"total_size": shape.nbytes}, "weight_map": dict(sorted(where.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    stamp.write_text(json.dumps(wanted))  # last: what is half written has no stamp
    return folder


def _write_file(
    path: Path, tensors: Mapping[str, tuple[int, ...]], rng: np.random.Generator, ties_head: bool
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for key, sizes in tensors.items():
        stop = start + _nbytes(sizes)
        header[key] = {"dtype": "BF16", "shape": list(sizes), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key, sizes in tensors.items():
            # The tied matrix gets values of its own, the same wherever it is stored.
            tied = ties_head and key in ("lm_head.weight", "model.embed_tokens.weight")
            source = np.random.Generator(np.random.SFC64(1)) if tied else rng
            left = _nbytes(sizes)
            while left:
                count = min(left, _BLOCK_BYTES)
                file.write(_finite(source, count))
                left -= count
        file.flush()
        os.fsync(file.fileno())  # else its pages cannot be dropped from the cache


def _finite(rng: np.random.Generator, nbytes: int) -> memoryview:
    """Random bf16 values, all finite: the highest bit of the exponent is cleared, so that they are below 2."""
    words = rng.integers(0, 1 << 64, size=-(-nbytes // 8), dtype=np.uint64)
    words &= np.uint64(0xBFFF_BFFF_BFFF_BFFF)
    return memoryview(words.view(np.uint8)[:nbytes])
