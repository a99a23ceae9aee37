"""Storages that take a file from one writer only: the same tensors, by one rank a file."""

import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import shardwise
import shardwise.engines.saving
from shardwise.storage.contract import WritePolicy
from shardwise.storage.writing import LocalWriter, open_writer

STREAMS = WritePolicy(
    has_random_writes=False, can_rename=False, block_bytes=1, request_bytes=1 << 20, concurrency=1
)
"""Of an object store."""


class Streamed(LocalWriter):
    """A folder that is written to like an object store."""

    opened: list[str] = []  # noqa: RUF012 - of one process

    def __init__(self, root):
        super().__init__(root, policy=STREAMS)
        Streamed.opened.clear()

    def create(self, file, nbytes):
        Streamed.opened.append(file)
        super().create(file, nbytes)


def save_on_rank(checkpoint: str, folder: str, max_shard_size: str) -> tuple[list[str], dict]:
    model = shardwise.from_pretrained(checkpoint, dtype=torch.float32)
    shardwise.engines.saving.open_writer = Streamed
    try:
        report = shardwise.save(
            model,
            folder,
            max_shard_size=max_shard_size,
            dtype="bfloat16",
            verify=True,
            options=shardwise.options.SaveOptions(budget_bytes=1 << 17),
        )
    finally:
        shardwise.engines.saving.open_writer = open_writer
    dist.barrier()
    return list(Streamed.opened), report.to_dict()


@pytest.mark.distributed
@pytest.mark.parametrize("max_shard_size", ["50GB", "20KB"])
def test_one_rank_writes_each_file(worlds, qwen3, tmp_path, max_shard_size):
    folder = tmp_path / "out"
    found = worlds(3).run(save_on_rank, str(qwen3), str(folder), max_shard_size)
    weights = sorted(path.name for path in folder.glob("*.safetensors"))
    created = [name for opened, _ in found for name in opened if name.endswith(".safetensors")]
    assert sorted(created) == weights  # nobody else has opened any of them
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(weights)
    assert (len(weights) == 1) == (max_shard_size == "50GB")
    reference = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32)
    tensors = {key: value for name in weights for key, value in load_file(folder / name).items()}
    wanted = {name: value.to(torch.bfloat16) for name, value in reference.state_dict().items() if name in tensors}
    assert len(wanted) == len(tensors)
    assert all(torch.equal(tensors[name], value) for name, value in wanted.items())
    assert shardwise.verify(folder).is_sound
    assert shardwise.verify(folder).compared == len(tensors)
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


@pytest.mark.distributed
def test_the_older_save_is_gone_once_the_new_one_counts(worlds, qwen3, tmp_path):
    folder = tmp_path / "out"
    for size in ("20KB", "50GB", "20KB"):
        worlds(2).run(save_on_rank, str(qwen3), str(folder), size)
        named = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values()
        assert {path.name for path in folder.glob("*.safetensors")} == set(named)
