"""``verify=True`` finds data that was damaged on its way into a storage."""

import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support.world import agreed, attempt
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardwise
import shardwise.saving.save
import shardwise.saving.write
from shardwise.files.local_writer import LocalWriter
from shardwise.files.storage import WritePolicy

OPTIONS = shardwise.options.SaveOptions(progress=False)

NUMEL = 3000
"""Of each tensor: 12,000 bytes, which are read back 5,000 at a time."""

BLOCKS = WritePolicy(block_bytes=1 << 20, request_bytes=1 << 20, concurrency=1)

DAMAGES = {"header": "header of model", "first.0": "first", "first.4999": "first", "second.-1": "second"}


class Damaging(LocalWriter):
    """A disk that flips one bit of a file, once all of it has been written."""

    damage = ""

    def sync(self, file: str) -> None:
        super().sync(file)
        if file.endswith((".incomplete", ".safetensors")) and self.damage:
            path = Path(self.root, file)
            content = bytearray(path.read_bytes())
            start = 8 + int.from_bytes(content[:8], "little")
            tensor, _, byte = self.damage.partition(".")
            if tensor == "header":
                place = content.index(b'"first"') + 1
            else:
                begin = start + (4 * NUMEL if tensor == "second" else 0)
                place = begin + int(byte) % (4 * NUMEL)
            content[place] ^= 1
            Damaging.damage = ""  # once
            with open(path, "r+b") as written:
                os.pwrite(written.fileno(), content[place : place + 1], place)


class DamagingBlocks(Damaging):
    """The same on a network file system, where one of two machines writes a file."""

    def __init__(self, root: str) -> None:
        super().__init__(root, policy=BLOCKS)


def tensors(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Module()
    model.first, model.second = nn.Parameter(torch.randn(NUMEL)), nn.Parameter(torch.randn(NUMEL))
    return model


def save_damaged(folder: str, damage: str, verify: bool, by: type) -> tuple[str, str]:
    model = tensors(seed=1)
    rank, writer = 0, 0
    if dist.is_initialized():
        fully_shard(model)
        rank = dist.get_rank()
        if damage.startswith("second") and by is Damaging:
            writer = dist.get_world_size() - 1  # of the last bytes: what is flipped before it writes is not damaged
    shardwise.save(model, folder, options=OPTIONS)
    with torch.no_grad():
        model.first.add_(1)
    with (
        mock.patch.object(shardwise.saving.save, "open_writer", by),
        mock.patch.object(shardwise.saving.save, "machine", mock.Mock(boot_id=lambda: f"machine {rank}")),
        mock.patch.object(shardwise.saving.write, "_READ_BACK_BYTES", 5000),
        mock.patch.object(Damaging, "damage", damage if rank == writer else ""),
    ):
        return attempt(lambda: shardwise.save(model, folder, verify=verify, options=OPTIONS))


def require_found(end: tuple[str, str], folder: Path, words: str) -> None:
    kind, text = end
    assert kind == "StorageError", text
    assert f"{words}" in text
    assert "differ from memory when they are read back" in text
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    assert not list(folder.glob("*.incomplete"))
    assert shardwise.verify(folder).is_sound  # the older one


@pytest.mark.parametrize("damage", DAMAGES)
def test_one_flipped_bit_is_found_and_the_older_save_stays(tmp_path, damage):
    require_found(save_damaged(str(tmp_path), damage, True, Damaging), tmp_path, DAMAGES[damage])


def test_who_trusts_finds_out_later(tmp_path):
    assert save_damaged(str(tmp_path), "first.0", False, Damaging) == ("", "")
    assert not shardwise.verify(tmp_path).is_sound


def test_undamaged_saves_are_equal(tmp_path):
    assert save_damaged(str(tmp_path), "", True, Damaging) == ("", "")
    assert shardwise.verify(tmp_path).is_sound


@pytest.mark.parametrize("by", [Damaging, DamagingBlocks])
def test_all_ranks_are_reported(worlds, tmp_path, by):
    for number, (damage, words) in enumerate(DAMAGES.items()):
        folder = tmp_path / str(number)
        require_found(agreed(worlds(2), save_damaged, str(folder), damage, True, by), folder, words)
