"""Network file systems and ranks on several machines: the same tensors, by one rank a file."""

import json
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests import load_cases
from tests.saving.adapters import tensors_of
from tests.support.world import attempt
from tests.truth import unlike
from transformers import AutoModelForCausalLM

import shardwise
import shardwise.saving.save
from shardwise.files.local_writer import LocalWriter
from shardwise.files.storage import WritePolicy

BLOCKS = WritePolicy(block_bytes=1 << 20, request_bytes=1 << 20, concurrency=1)
"""Of a network file system."""


def weights_in(files):
    """The files of weights, with final and with temporary names."""
    return [name for name in files if name.startswith("model") and name.endswith((".safetensors", ".incomplete"))]


class OwnedFiles(LocalWriter):
    """A folder on a network file system. A rank writes one file after another, each without gaps."""

    places: dict[str, int] = {}  # noqa: RUF012 - of one process
    fails = False

    def __init__(self, root):
        super().__init__(root, policy=BLOCKS)
        self.synced = set()
        OwnedFiles.places.clear()

    def create(self, file, nbytes):
        assert set(weights_in(OwnedFiles.places)) <= self.synced
        OwnedFiles.places[file] = 0
        super().create(file, nbytes)

    def write(self, file, start, buffers):
        assert start == OwnedFiles.places[file], f"{file} has a gap at {start}"
        OwnedFiles.places[file] += sum(len(buffer) for buffer in buffers)
        if OwnedFiles.fails and start:
            raise shardwise.StorageError(f"{file}: the disk is full")
        super().write(file, start, buffers)

    def sync(self, file):
        super().sync(file)
        self.synced.add(file)


def save_on_rank(
    checkpoint: str, folder: str, max_shard_size: str, mesh: str = "flat", failing: int | None = None
) -> tuple[list[str], str]:
    """The files that this rank has created, and the error."""
    sharding = shardwise.Sharding(mesh=load_cases.hybrid_mesh() if mesh == "hsdp" else None)
    model = shardwise.from_pretrained(checkpoint, dtype=torch.float32, sharding=sharding)
    OwnedFiles.fails = dist.get_rank() == failing
    options = shardwise.options.SaveOptions(budget_bytes=1 << 17)
    keywords = {"max_shard_size": max_shard_size, "dtype": "bfloat16", "verify": True, "options": options}
    machine = mock.Mock(boot_id=lambda: f"machine {dist.get_rank()}")
    with (
        mock.patch.object(shardwise.saving.save, "open_writer", OwnedFiles),
        mock.patch.object(shardwise.saving.save, "machine", machine),
    ):
        _, text = attempt(lambda: shardwise.save(model, folder, **keywords))
    dist.barrier()
    return list(OwnedFiles.places), text


@pytest.mark.parametrize(("max_shard_size", "size", "mesh"), [("50GB", 3, "flat"), ("20KB", 4, "hsdp")])
def test_one_rank_writes_each_file(worlds, qwen3, tmp_path, max_shard_size, size, mesh):
    folder = tmp_path / "out"
    found = worlds(size).run(save_on_rank, str(qwen3), str(folder), max_shard_size, mesh)
    assert {text for _, text in found} == {""}
    weights = sorted(path.name for path in folder.glob("*.safetensors"))
    created = [weights_in(files) for files, _ in found]
    assert sum(map(len, created)) == len(weights)  # nobody else has opened any of them
    assert sum(map(bool, created)) == min(size, len(weights))
    if max_shard_size == "50GB":
        assert weights == ["model.safetensors"]
    else:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == set(weights)
        assert sorted(name for names in created for name in names) == weights
    reference = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32)
    assert unlike(tensors_of(folder), {name: own.bfloat16() for name, own in reference.state_dict().items()}) == []
    assert shardwise.verify(folder).is_sound
    assert shardwise.verify(folder).compared == len(tensors_of(folder))
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


def test_all_ranks_raise_when_one_cannot_write(worlds, qwen3, tmp_path):
    (text,) = {text for _, text in worlds(3).run(save_on_rank, str(qwen3), str(tmp_path), "20KB", "flat", 1)}
    assert text.startswith("rank 1: ")
    assert text.endswith("the disk is full")
    assert not list(tmp_path.glob("*.safetensors"))


def test_the_older_save_is_gone_once_the_new_one_counts(worlds, qwen3, tmp_path):
    folder = tmp_path / "out"
    for size in ("20KB", "50GB"):
        worlds(2).run(save_on_rank, str(qwen3), str(folder), size)
        weights = {path.name for path in folder.glob("*.safetensors")}
        if size == "50GB":
            assert weights == {"model.safetensors"}
        else:
            index = json.loads((folder / "model.safetensors.index.json").read_text())
            assert weights == set(index["weight_map"].values())
