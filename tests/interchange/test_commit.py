"""accelerate's files begin to count in one step: whatever dies when, one save is there, whole, and nothing else."""

import os
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests import zoo
from tests.support.crashes import (
    BEFORE,
    Called,
    EffectLog,
    Returned,
    assert_nothing_is_lost,
    recorded,
    states_after_crash,
)
from tests.support.files import contents
from torch import nn

import shardwise
from shardwise import StorageError
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


def last_mark_removed(root: Path) -> None:
    for mark in root.rglob(MARK):
        mark.unlink()  # whose process lives on in this test


@pytest.mark.parametrize("older", [True, False], ids=["over an older one", "the first"])
@pytest.mark.parametrize("form", FORMS)
def test_a_crash_leaves_one_model_or_the_other_and_the_next_save_leaves_nothing_else(tmp_path, form, older):
    root, log = tmp_path / "out", EffectLog(tmp_path / "log")
    root.mkdir()
    if older:
        save(1, root, form)
    before = contents(root)
    with recorded(log, root):
        save(2, root, form)
    assert seed_in(root) == 2
    effects = log.effects()
    seen = set()
    for number, state in enumerate(states_after_crash(before, effects, samples=1)):
        place = tmp_path / str(number)
        state.put_into(place)
        last_mark_removed(place)
        found = seed_in(place)
        seen.add(found)
        assert found in ((1, 2) if older else (None, 2)), state.what
        assert found == 2 or state.completed < len(effects), state.what
        if number % 20 == 0:
            save(3, place, form)
            assert seed_in(place) == 3, state.what
            left = {name.rpartition("/")[2] for name in contents(place)}
            assert not [name for name in left if name.startswith(".") and name != ".metadata"], state.what
            assert len(left) == len(contents(root)), (state.what, left)
    assert seen == {1 if older else None, 2}


def optimizer_of(net: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "SGD":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        net(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        return optimizer
    return torch.optim.AdamW(net.parameters(), lr=0.5)  # before its first step


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_a_file_without_tensors_is_synced_before_it_is_named(tmp_path, kind):
    """No byte of a tensor is written, and all the same there is something to be lost."""
    root, log = tmp_path / "out", EffectLog(tmp_path / "log")
    net = model(1)
    optimizer = optimizer_of(net, kind)
    with recorded(log, root):
        shardwise.save_accelerate_optimizer(net, optimizer, root, "full")
    whole = (root / "optimizer.bin").read_bytes()
    assert torch.load(root / "optimizer.bin", weights_only=True)["param_groups"][0]["lr"] == 0.5

    entries = [Called("save"), *log.entries(), Returned("save")]
    saves = {BEFORE: None, "save": whole}
    assert (
        assert_nothing_is_lost({}, entries, lambda state: state.files.get("optimizer.bin"), saves, samples=4) > 10
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_second_save_is_refused_while_one_continues(tmp_path, form):
    save(1, tmp_path, form)
    told = []

    def second():
        with pytest.raises(StorageError, match="another save is writing here"):
            save(3, tmp_path, form)
        told.append(True)

    with meanwhile(lambda name, file="", *_: name == "sync" and file != MARK, second):
        save(2, tmp_path, form)
    assert told
    assert seed_in(tmp_path) == 2


@pytest.mark.parametrize("form", FORMS)
def test_one_that_lost_its_mark_is_reported_and_the_other_counts(tmp_path, form):
    save(1, tmp_path, form)

    def other():
        last_mark_removed(tmp_path)
        save(3, tmp_path, form)

    is_last_step = lambda name, *files: name == "rename" and files[0].endswith(".new")  # noqa: E731
    with meanwhile(is_last_step, other), pytest.raises(StorageError):
        save(2, tmp_path, form)
    assert seed_in(tmp_path) == 3


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
