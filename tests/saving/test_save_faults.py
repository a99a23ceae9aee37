"""Folders that cannot be saved to, marks of other saves, and damaged indexes."""

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.saving.adapters import tensors_of
from tests.saving.hard_models import expected, full_disk, linear, mark
from tests.support.files import contents as content
from tests.support.files import small_file_system
from tests.truth import unlike
from torch import nn

import shardwise
import shardwise.saving.save
from shardwise.core import machine
from shardwise.core.errors import StorageError
from shardwise.files.local_writer import LocalWriter
from shardwise.saving import saving_lock
from shardwise.saving.locked_folder import LockedFolder
from shardwise.transfer import fingerprints

MARK = "shardwise.saving"


def holds(folder, seed):
    return (
        unlike(tensors_of(folder), {name: tensor.detach() for name, tensor in linear(seed).state_dict().items()})
        == []
    )


@pytest.fixture(params=["1GB", "6KB"], ids=["one file", "several files"])
def saved(request, tmp_path):
    """A folder with a save of ``linear(1)``."""
    folder = tmp_path / "saved"
    shardwise.save(linear(1), folder, max_shard_size=request.param)
    return folder


class TestDisk:
    @pytest.mark.parametrize(("size", "after"), [("1GB", 0), ("1GB", 1), ("1GB", 2), ("6KB", 3), ("6KB", 4)])
    def test_that_is_full_half_way(self, saved, size, after):
        """At the mark, at a header, at the first tensors or at the last."""
        before = content(saved)
        with full_disk(after=after), pytest.raises(StorageError, match="no space left on device.*Free some space"):
            shardwise.save(linear(2), saved, max_shard_size=size)
        assert content(saved) == before
        shardwise.save(linear(2), saved, max_shard_size=size)
        assert holds(saved, 2)

    def test_that_is_full_at_the_commit(self, saved, monkeypatch):
        """The config is in place, and then there is no room for the fingerprints."""
        (saved / "config.json").write_text("the older config")
        before = content(saved)
        original = LocalWriter.replace

        def replace(self, file, content):
            if file == fingerprints.fingerprint_file("model"):
                raise StorageError("the disk is full")
            original(self, file, content)

        beside = {"config.json": b"the newer config", "extra.json": b"{}"}
        monkeypatch.setattr(shardwise.saving.save, "_config_files", lambda *_: (beside, None))
        with monkeypatch.context() as patched:
            patched.setattr(LocalWriter, "replace", replace)
            with pytest.raises(StorageError, match="the disk is full"):
                shardwise.save(linear(2), saved)
        assert content(saved) == before
        shardwise.save(linear(2), saved)
        assert (saved / "config.json").read_text() == "the newer config"

    def test_that_is_really_full(self, tmp_path):
        """A file system of 256 KiB: the older save and the newer one do not fit into it together, unless cast."""
        with small_file_system(tmp_path / "disk", "256k") as disk:
            model = nn.Linear(200, 160)  # 125 KiB
            shardwise.save(model, disk)
            (disk / "other").write_bytes(bytes(30_000))
            before = content(disk)
            for size in ("1GB", "64KB"):
                with pytest.raises(StorageError, match="no space left on device.*Free some space"):
                    shardwise.save(nn.Linear(200, 160), disk, max_shard_size=size)
                assert content(disk) == before
            shardwise.save(model, disk, dtype="bfloat16")
            assert unlike(tensors_of(disk), expected(model, torch.bfloat16)) == []

    def test_that_is_read_only(self, tmp_path):
        with small_file_system(tmp_path / "disk", "256k") as disk:
            shardwise.save(linear(1), disk)
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            with pytest.raises(StorageError, match="read-only file system .*Mount it for writing"):
                shardwise.save(linear(2), disk)
            assert holds(disk, 1)


class TestFolder:
    def test_that_cannot_be_written(self, tmp_path):
        """Nobody may write there; as a user who is not allowed everything."""
        shardwise.save(linear(), tmp_path)  # everything is imported that such a user may not read
        folder = Path(tempfile.mkdtemp())
        user = os.geteuid()
        try:
            folder.chmod(0o555)
            if user == 0:
                os.seteuid(65534)
            with pytest.raises(StorageError, match="permission denied.*Change the permissions"):
                shardwise.save(linear(), folder)
        finally:
            os.seteuid(user)
            assert list(folder.iterdir()) == []
            shutil.rmtree(folder)

    def test_that_is_a_file(self, tmp_path):
        (tmp_path / "file").write_text("mine")
        with pytest.raises(StorageError, match="is a file. Pass a folder to write to"):
            shardwise.save(linear(), tmp_path / "file")
        with pytest.raises(StorageError, match="not a directory"):
            shardwise.save(linear(), tmp_path / "file" / "below")
        assert (tmp_path / "file").read_text() == "mine"

    def test_whose_files_are_folders(self, tmp_path):
        (tmp_path / "model.safetensors").mkdir()
        with pytest.raises(StorageError, match="model.safetensors"):
            shardwise.save(linear(), tmp_path)
        found = [path.name for path in tmp_path.iterdir() if path.name != fingerprints.fingerprint_file("model")]
        assert found == ["model.safetensors"]

    def test_whose_files_are_links(self, saved, tmp_path):
        """As in the hub's cache: what they lead to stays as it is."""
        elsewhere = tmp_path / "blobs"
        elsewhere.mkdir()
        for path in list(saved.iterdir()):
            path.rename(elsewhere / path.name)
            path.symlink_to(elsewhere / path.name)
        before = content(elsewhere)
        shardwise.save(linear(2), saved)
        assert holds(saved, 2)
        assert content(elsewhere) == before

    @pytest.mark.parametrize("size", ["1GB", "6KB"])
    def test_from_which_the_model_was_loaded(self, saved, size):
        model = linear(7)
        shardwise.load(model, saved)
        with torch.no_grad():
            model[0].bias += 1
        shardwise.save(model, saved, max_shard_size=size)
        found = unlike(tensors_of(saved), {name: tensor.detach() for name, tensor in model.state_dict().items()})
        assert found == []
        again = linear(8)
        shardwise.load(again, saved)
        assert torch.equal(again[0].bias, model[0].bias)


class TestMark:
    def test_of_a_process_that_was_killed_and_not_waited_for(self, saved):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        started = machine.process_start_time(child.pid)
        assert started
        (saved / MARK).write_bytes(mark(process=child.pid, born=started))
        with pytest.raises(StorageError, match=f"process {child.pid} on"):
            shardwise.save(linear(2), saved)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        shardwise.save(linear(2), saved)
        child.communicate()

    def test_that_a_failing_disk_did_not_let_go_is_taken_over_by_the_next_save_of_the_process(
        self, saved, monkeypatch, caplog
    ):
        """The save counts. That another process, or another save that goes on, is refused is tested beside this."""
        unlink = os.unlink

        def failing(path, *arguments, **keywords):
            if os.fspath(path).endswith(MARK):
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            unlink(path, *arguments, **keywords)

        with monkeypatch.context() as patched:
            patched.setattr(os, "unlink", failing)
            shardwise.save(linear(2), saved)
        assert f"{saved}: {MARK} may be left. Remove it if later saves are refused." in caplog.text
        assert holds(saved, 2)
        assert MARK in content(saved)
        shardwise.save(linear(3), saved)
        assert holds(saved, 3)
        assert MARK not in content(saved)

    def test_of_another_machine(self, saved):
        (saved / MARK).write_bytes(mark(host="elsewhere", space="elsewhere", process=os.getpid()))
        before = content(saved)
        with pytest.raises(StorageError, match=f"process {os.getpid()} on elsewhere.*remove {MARK}"):
            shardwise.save(linear(2), saved)
        assert content(saved) == before

    @pytest.mark.parametrize(
        "text", ["", "\0\0\0\0", "{", "[]", "{}", "null", '{"host": 1e999, "process": 1e999}', "[" * 5000, "\x80"]
    )
    def test_that_is_empty_or_invalid(self, saved, text, monkeypatch):
        """Left between its creation and its filling."""
        monkeypatch.setattr(saving_lock, "_MAX_UNPARSED_S", 0.01)
        (saved / MARK).write_text(text, encoding="latin-1")
        shardwise.save(linear(2), saved)
        assert holds(saved, 2)
        assert MARK not in content(saved)

    def test_that_is_filled_just_now(self, tmp_path, monkeypatch):
        monkeypatch.setattr(saving_lock, "_MAX_UNPARSED_S", 3600)
        (tmp_path / MARK).write_text("")
        looks, thread, real_sleep = [], threading.get_ident(), time.sleep

        def sleep(seconds):
            if threading.get_ident() != thread:  # that of core.machine
                real_sleep(seconds)
                return
            looks.append(seconds)
            (tmp_path / MARK).write_bytes(mark(host="elsewhere", space="elsewhere", process=os.getpid()))

        monkeypatch.setattr(saving_lock.time, "sleep", sleep)
        with pytest.raises(StorageError, match="on elsewhere"):
            shardwise.save(linear(2), tmp_path)
        assert len(looks) == 1

    def test_of_a_dead_process_that_two_take_over(self, tmp_path, monkeypatch):
        """One looks, the other one takes over in that moment: what the slow one takes away it gives back."""
        (tmp_path / MARK).write_bytes(mark(process=os.getpid(), born="long ago"))
        process_start_time = machine.process_start_time
        quick = LocalWriter(tmp_path)
        held = []

        def slow(process):
            monkeypatch.setattr(machine, "process_start_time", process_start_time)
            held.append(LockedFolder(quick, "quick"))
            return process_start_time(process)

        monkeypatch.setattr(machine, "process_start_time", slow)
        with pytest.raises(StorageError, match="another save is writing here"):
            saving_lock.take_lock(LocalWriter(tmp_path), "slow")
        saving_lock.require_lock(quick, "quick")
        assert list(content(tmp_path)) == [MARK]
        saving_lock.release_lock(quick, "slow")
        saving_lock.require_lock(quick, "quick")
        held[0].release()
        assert content(tmp_path) == {}


HOSTILE = [
    "../outside.safetensors",
    "/etc/hostname",
    "below/inner.safetensors",
    "notes.txt",
    "config.json",
    "..",
    ".",
]
HOSTILE += ["model.fingerprints.json", "", "\0", 5, None, [], {"model.safetensors": 1}]
OTHERS = ["../outside.safetensors", "below/inner.safetensors", "notes.txt", "config.json", "other.safetensors"]
OTHERS += ["pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.safetensors", "adapter_config.json"]


@pytest.fixture
def surrounded(tmp_path):
    """A folder with files that are nobody's to remove, and what is in them."""
    folder = tmp_path / "saved"
    (folder / "below").mkdir(parents=True)
    for name in OTHERS:
        (folder / name).write_text(name)
    return folder, lambda: [(folder / name).read_text() for name in OTHERS]


class TestIndex:
    @pytest.mark.parametrize("size", ["1GB", "6KB"])
    def test_an_index_that_names_files_of_others(self, surrounded, size):
        folder, around = surrounded
        (folder / "old.safetensors").write_text("older weights")
        names = {f"w{number}": name for number, name in enumerate([*HOSTILE, "old.safetensors"])}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        report = shardwise.save(linear(2), folder, max_shard_size=size)
        assert around() == OTHERS
        index = ["model.safetensors.index.json"] if size == "1GB" else []
        assert sorted(report.removed) == [*index, "old.safetensors"]
        again = linear(3)
        shardwise.load(again, folder)
        assert torch.equal(again[0].weight, linear(2)[0].weight)

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", '{"weight_map": null}', '{"weight_map": [1]}', "[" * 5000, "\x80", "\0" * 64]
    )
    def test_that_is_damaged(self, surrounded, text):
        folder, around = surrounded
        (folder / "model.safetensors.index.json").write_text(text, encoding="latin-1")
        report = shardwise.save(linear(2), folder, max_shard_size="6KB")
        assert around() == OTHERS
        assert report.removed == ()
        assert unlike(tensors_of(folder, "model-*"), dict(linear(2).state_dict())) == []


def test_a_save_that_failed_at_its_last_steps_can_be_repeated(saved, monkeypatch):
    """Named already, but not tidied up: the new save counts, and nothing stands in the way of the next one."""
    original = LocalWriter.remove

    def remove(self, file):
        if file != MARK:
            raise StorageError("cannot remove anything")
        original(self, file)

    with monkeypatch.context() as patched:
        patched.setattr(LocalWriter, "remove", remove)
        with contextlib.suppress(StorageError):  # where there is something to remove
            shardwise.save(linear(2), saved)
    model = linear(7)
    shardwise.load(model, saved)
    assert torch.equal(model[0].weight, linear(2)[0].weight)
    shardwise.save(linear(3), saved)
    assert holds(saved, 3)
    assert MARK not in content(saved)
