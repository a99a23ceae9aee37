"""A folder of accelerate's is as torch writes and reads it. Crashes and two saves at once: `tests/torture`."""

import os
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from tests import zoo
from torch import nn

import shardwise
from shardwise.files.distributed import read_metadata

FORMS = {"one file": "full", "folder": "sharded", "files of ranks": "local"}


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 40), nn.Linear(40, 3))


def save(seed: int, root: Path, form: str) -> None:
    shardwise.save_accelerate_model(model(seed), root, FORMS[form])


def seed_in(root: Path) -> int:
    """Which model there is."""
    found = model(99)
    shardwise.load_accelerate_model(found, root)
    return next(seed for seed in range(9) if all(map(torch.equal, found.parameters(), model(seed).parameters())))


def test_a_folder_names_its_files_as_torch_does_and_torch_reads_it(tmp_path):
    save(1, tmp_path, "folder")
    save(2, tmp_path, "folder")
    folder = tmp_path / "pytorch_model_fsdp_0"
    data = sorted(path.name for path in folder.glob("__*_*.distcp"))
    assert len(data) == 1
    assert sorted(os.listdir(folder)) == sorted([".metadata", *data])
    with shardwise.storage.LocalReader(folder) as reader:
        found = [place.file for item in read_metadata(reader).tensors.values() for _, place in item.chunks]
    assert set(found) == set(data)
    state = {"model": {name: torch.zeros_like(value) for name, value in model(2).state_dict().items()}}
    with zoo.silenced():
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(value, model(2).state_dict()[name]) for name, value in state["model"].items())


def test_a_folder_of_torch_s_own_is_replaced(tmp_path):
    folder = tmp_path / "pytorch_model_fsdp_0"
    with zoo.silenced():
        dcp.save({"model": model(1).state_dict()}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    (folder / "notes.txt").write_text("mine")
    save(2, tmp_path, "folder")
    assert seed_in(tmp_path) == 2
    assert "__0_0.distcp" not in os.listdir(folder)
    assert (folder / "notes.txt").read_text() == "mine"
