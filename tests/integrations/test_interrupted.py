"""A save killed when it counted, and before its files had their names: loads read it, and change nothing."""

import json
import os
from pathlib import Path

import pytest
import torch
from tests.integrations.test_accelerate_commit import FORMS, model, save, seed_in
from tests.support.files import contents
from tests.torture.libraries import accelerated, save_by_accelerate
from torch import nn

import shardwise
from shardwise.core.errors import FormatError, StorageError
from shardwise.saving import rename_journal
from shardwise.saving.locked_folder import lock_here

TOKEN = "0123abcd"
LIST = f".shardwise.{TOKEN}.renames.json"


def optimizer_of(net: nn.Module, seed: int) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=float(seed))


def save_both(seed: int, root: Path, form: str) -> None:
    net = model(seed)
    shardwise.save_accelerate_model(net, root, FORMS[form])
    shardwise.save_accelerate_optimizer(net, optimizer_of(net, seed), root, FORMS[form])


def listed(root: Path, names: list[str], older: list[str], token: str = TOKEN) -> None:
    (root / LIST).write_text(json.dumps({"token": token, "names": names, "older": older}))


def interrupted(root: Path, form: str, done: int) -> None:
    """The state of seed 2 over that of seed 1, after so many renames; of an older one in another form, too."""
    save_both(1, root, form)
    older = contents(root)
    save_both(2, root, form)
    inner = [name for name in contents(root) if "distcp" not in name]
    for name in sorted(inner)[done:]:
        place = root / name
        place.rename(place.with_name(f".{place.name}.{TOKEN}.new"))
        place.write_bytes(older[name])
    others = [name for name in older if not (root / name).exists()]
    for name in others:
        (root / name).write_bytes(older[name])
    (root / "pytorch_model_fsdp_0_rank7.bin").write_text("of more ranks")
    listed(root, sorted(inner), [*others, "pytorch_model_fsdp_0_rank7.bin"])


def rate_in(root: Path) -> float:
    net = model(99)
    found = optimizer_of(net, 99)
    shardwise.load_accelerate_optimizer(net, found, root)
    return found.param_groups[0]["lr"]


@pytest.mark.parametrize("done", [0, 1])
@pytest.mark.parametrize("form", FORMS)
def test_a_load_reads_the_committed_files_and_the_next_save_finishes_the_renames(tmp_path, form, done):
    interrupted(tmp_path, form, done)
    before = contents(tmp_path)
    assert seed_in(tmp_path) == 2
    assert rate_in(tmp_path) == 2.0
    for inner in (path for path in tmp_path.glob("pytorch_model_fsdp*") if "rank7" not in path.name):
        assert seed_in(inner) == 2
    with pytest.raises(StorageError, match="its last save was interrupted"):
        shardwise.merge_weights(tmp_path / next(iter(before)), tmp_path / "merged")
    assert contents(tmp_path) == before
    net = model(3)
    shardwise.save_accelerate_optimizer(net, optimizer_of(net, 3), tmp_path, FORMS[form])
    assert seed_in(tmp_path) == 2
    assert rate_in(tmp_path) == 3.0
    assert not [name for name in contents(tmp_path) if name.endswith((".new", ".json")) or "rank7" in name]


def test_a_load_that_looks_while_another_finishes_looks_again(tmp_path, monkeypatch):
    interrupted(tmp_path, "one file", 0)
    link, looked = rename_journal._link, []

    def finish_first(*arguments):
        monkeypatch.setattr(rename_journal, "_link", link)
        with lock_here(tmp_path) as saving:
            rename_journal.clean_up(saving)
        looked.append(True)
        return link(*arguments)

    monkeypatch.setattr(rename_journal, "_link", finish_first)
    assert seed_in(tmp_path) == 2
    assert looked


def test_links_in_a_rename_list_are_refused(tmp_path):
    """A folder of strangers: what it calls the folder of its model is a link to that of another checkpoint."""
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    save(1, mine, "folder")
    save(2, theirs, "one file")
    (theirs / "pytorch_model_fsdp_0").symlink_to(mine / "pytorch_model_fsdp_0")
    inner = [f"pytorch_model_fsdp_0/{name}" for name in os.listdir(mine / "pytorch_model_fsdp_0")]
    before = contents(mine)
    for names, older in (([], inner), (["pytorch_model_fsdp_0/x"], [])):
        (mine / "pytorch_model_fsdp_0" / f".x.{TOKEN}.new").write_text("")
        listed(theirs, names, older)
        with pytest.raises(FormatError, match="pytorch_model_fsdp_0, which is a link"):
            shardwise.load_accelerate_model(model(99), theirs / "pytorch_model_fsdp.bin")
        with pytest.raises(FormatError, match="pytorch_model_fsdp_0, which is a link"):
            save(3, theirs, "one file")
    (theirs / LIST).unlink()
    with pytest.raises(StorageError, match="pytorch_model_fsdp_0 in .*leads out by a link"):
        save(3, theirs, "folder")
    (mine / "pytorch_model_fsdp_0" / f".x.{TOKEN}.new").unlink()
    assert contents(mine) == before


@pytest.mark.parametrize(
    "content",
    [
        {"names": "x"},
        {"names": ["../mine/notes.txt"]},
        {"names": ["/etc/hosts"]},
        {"names": ["\ud800"]},
        {"names": ["a/" * 3000 + "b"]},
        {"names": [f"{number}/{'x' * 250}" for number in range(1000)]},
        {"token": "89abcdef"},
        {"more": "x" * (1 << 24)},
    ],
    ids=lambda content: next(iter(content)),
)
def test_a_list_of_strangers_is_one_error_of_a_load_and_of_a_save(tmp_path, content):
    save(1, tmp_path, "one file")
    (tmp_path / LIST).write_text(json.dumps({"token": TOKEN, "names": [], "older": []} | content))
    before = contents(tmp_path)
    with pytest.raises(FormatError, match="is not a rename journal of an interrupted save. Remove it"):
        seed_in(tmp_path)
    with pytest.raises(FormatError, match="is not a rename journal of an interrupted save. Remove it"):
        shardwise.save_accelerate_model(model(2), tmp_path, "full")
    assert contents(tmp_path) == before


def test_a_rename_list_of_missing_files_fails_a_load(tmp_path):
    interrupted(tmp_path, "one file", 0)
    (tmp_path / f".optimizer.bin.{TOKEN}.new").unlink()
    (tmp_path / "optimizer.bin").unlink()
    with pytest.raises(FormatError, match="lists optimizer.bin, which is gone"):
        seed_in(tmp_path)


@pytest.mark.parametrize("is_numbered", [True, False])
def test_a_state_of_accelerate_is_loaded_as_it_counts(tmp_path, is_numbered):
    """Of the second of two saves: what accelerate reads itself, what hooks read, and the model."""
    root = tmp_path / "checkpoints" / "checkpoint_0"
    save_by_accelerate(str(root), 1, tmp_path)
    older = contents(root)
    save_by_accelerate(str(root), 2, tmp_path)
    given = [name for name in contents(root) if "distcp" not in name]
    for name in given[1:]:
        place = root / name
        place.rename(place.with_name(f".{place.name}.{TOKEN}.new"))
    for name in {*older} - {*contents(root)}:
        (root / name).write_bytes(older[name])
    listed(root, given, [name for name in older if name not in given])
    before, told = contents(root), []
    with accelerated(3, "SHARDED_STATE_DICT") as (accelerator, counter):
        accelerator.project_configuration.set_directories(str(tmp_path))
        accelerator.project_configuration.automatic_checkpoint_naming = is_numbered
        accelerator.register_load_state_pre_hook(
            lambda _, place: told.append(Path(place, "more/seed.txt").read_text())
        )
        accelerator.load_state(*([] if is_numbered else [str(root)]))
        [model] = accelerator._models
        assert int(model.steps) == accelerator.step == counter.value == 2
        assert accelerator._optimizers[0].param_groups[0]["lr"] == 0.02
    assert told == ["2"]
    assert contents(root) == before
