"""Two saves of accelerate's files at once, and saves over files of torch. Crashes: ``tests/torture``."""

import os
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import nn

import shardwise
from shardwise.formats.distributed import read_metadata
from shardwise.storage.writing import LocalWriter

FORMS = {"one file": "full", "folder": "sharded", "files of ranks": "local"}
MARK = "shardwise.saving"


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 40), nn.Linear(40, 3))


def save(seed: int, root: Path, form: str) -> None:
    shardwise.save_accelerate_model(model(seed), root, FORMS[form])


def seed_in(root: Path) -> int | None:
    """Which model there is; None for none."""
    found = model(99)
    try:
        shardwise.load_accelerate_model(found, root)
    except shardwise.FormatError as error:
        if "no model 0 of accelerate's" in str(error) or "has no .metadata" in str(error):
            return None
        raise
    return next(seed for seed in range(9) if all(map(torch.equal, found.parameters(), model(seed).parameters())))


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@contextmanager
def meanwhile(call, act):
    """``act`` happens before some call of a writer, once."""
    with ExitStack() as stack:

        def before(name):
            original = getattr(LocalWriter, name)

            def called(writer, *arguments):
                if call(name, *arguments):
                    stack.close()
                    act()
                return original(writer, *arguments)

            stack.enter_context(mock.patch.object(LocalWriter, name, called))

        for name in ("sync", "rename", "publish"):
            before(name)
        yield


def test_a_folder_names_its_files_as_torch_does_and_torch_reads_it(tmp_path):
    import warnings

    import torch.distributed.checkpoint as dcp

    save(1, tmp_path, "folder")
    save(2, tmp_path, "folder")
    folder = tmp_path / "pytorch_model_fsdp_0"
    data = sorted(path.name for path in folder.glob("__*_*.distcp"))
    assert len(data) == 1
    assert sorted(os.listdir(folder)) == sorted([".metadata", *data])
    with shardwise.storage.LocalReader(folder) as reader:
        assert {place.file for item in read_metadata(reader).tensors.values() for _, place in item.chunks} == set(
            data
        )
    found = {"model": {name: torch.zeros_like(value) for name, value in model(2).state_dict().items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(value, model(2).state_dict()[name]) for name, value in found["model"].items())


def test_a_folder_of_torch_s_own_is_replaced(tmp_path):
    import warnings

    import torch.distributed.checkpoint as dcp

    folder = tmp_path / "pytorch_model_fsdp_0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model(1).state_dict()}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    (folder / "notes.txt").write_text("mine")
    save(2, tmp_path, "folder")
    assert seed_in(tmp_path) == 2
    assert "__0_0.distcp" not in os.listdir(folder)
    assert (folder / "notes.txt").read_text() == "mine"
