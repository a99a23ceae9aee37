"""Marks and files that another save has left, or takes away. Two saves at once: `tests/torture`."""

import os
import shutil
import threading
import time
from unittest import mock

import pytest
import torch
from tests.saving.hard_models import linear, mark
from tests.support.crashes import EffectLog, recorded

import shardwise
import shardwise.saving.save
from shardwise.core import machine
from shardwise.core.errors import StorageError
from shardwise.files.local_writer import open_writer
from shardwise.saving import commit, saving_lock
from shardwise.saving.locked_folder import LockedFolder

ONE, SEVERAL = "1GB", "6KB"
MARK = "shardwise.saving"


def save(seed, target, size=ONE):
    return shardwise.save(linear(seed), target, max_shard_size=size)


def seed_in(target):
    """Which model there is, whole, as a reader finds it."""
    model = linear(99)
    shardwise.load(model, target)
    return next(seed for seed in range(9) if torch.equal(model[0].weight, linear(seed)[0].weight))


def names(target):
    with open_writer(target) as writer:
        return writer.list()


@pytest.fixture
def target(tmp_path):
    return tmp_path / "saved"


@pytest.fixture
def before_commit(monkeypatch):
    """``before_commit(act)``: ``act()`` happens before each commit from now on."""
    commit_save = shardwise.saving.save.commit_save

    def patch(act):
        commit = lambda *arguments: (act(), commit_save(*arguments))[1]  # noqa: E731
        monkeypatch.setattr(shardwise.saving.save, "commit_save", commit)

    return patch


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(saving_lock, "RENEWAL_S", 0.02)


@pytest.mark.parametrize("counts", [True, False])
def test_of_weights_that_were_set_aside_at_most_one_is_ever_there(tmp_path, counts):
    """A save that died after its last step leaves older weights aside. They go before the next sets others aside:
    nobody could tell which are the newer. Where nothing counts, those aside are kept until something does.
    """
    save(1, tmp_path, ONE)
    aside = tmp_path / "model.0123abcd.older"
    shutil.copy(tmp_path / "model.safetensors", aside)
    if not counts:
        (tmp_path / "model.safetensors").unlink()
    seen = []
    with recorded(EffectLog(tmp_path / "log"), tmp_path, before=lambda: seen.append(os.listdir(tmp_path))):
        save(2, tmp_path, SEVERAL)
    assert all(len([name for name in there if name.endswith(".older")]) <= 1 for there in seen)
    assert counts or all(aside.name in there or "model.safetensors.index.json" in there for there in seen)
    assert seed_in(tmp_path) == 2
    assert not [name for name in names(tmp_path) if name.endswith(".older")]


@pytest.mark.parametrize("size", [ONE, SEVERAL])
def test_files_that_vanish_before_the_commit_are_missed(target, size, before_commit):
    save(1, target, SEVERAL)
    before = set(names(target))

    def vanish():
        with open_writer(target) as writer:
            for name in set(writer.list()) - before:
                if "safetensors" in name or name.startswith("model."):
                    writer.remove(name)

    before_commit(vanish)
    with pytest.raises(StorageError, match="now it is gone"):
        save(2, target, size)
    assert seed_in(target) == 1


@pytest.mark.parametrize("gone", [{}, {"process": os.getpid(), "born": "long ago"}, {"process": 2**40}])
def test_the_mark_of_a_process_that_is_gone_is_taken_over(target, gone):
    save(1, target, SEVERAL)
    with open_writer(target) as writer:
        writer.replace(MARK, mark(renewed_s=5.0, **gone))
        writer.replace("model-0123abcd-00001-of-00002.safetensors", b"half")
        writer.replace(".model-0123abcd-00002-of-00002.safetensors.89abcdef.incomplete", b"half")
    save(2, target, SEVERAL)
    assert seed_in(target) == 2
    assert not [name for name in names(target) if "0123abcd" in name or MARK in name]


@pytest.mark.parametrize("is_renewed", [True, False])
def test_containers_with_one_host_name_do_not_take_each_other_for_dead(target, is_renewed, monkeypatch):
    """The other's process has a number that here is nobody's; it lives as long as its mark is renewed."""
    save(1, target)
    with monkeypatch.context() as elsewhere, open_writer(target) as writer:
        elsewhere.setattr(machine, "namespace_id", lambda kind: "another container")
        elsewhere.setattr(machine, "process_start_time", lambda process: "1")
        held = LockedFolder(writer, "0123abcd")
        if not is_renewed:
            held._ended.set()
            held._thread.join()
        elsewhere.undo()
        if is_renewed:
            monkeypatch.setattr(saving_lock, "_MAX_MISSED", 10**6)
            with pytest.raises(StorageError, match="another save is writing here"):
                save(2, target)
            held.require()
        else:
            save(2, target)
        held.release()
    assert seed_in(target) == (1 if is_renewed else 2)


@pytest.mark.parametrize("again", ["the removal of files", "the end of the thread"])
def test_a_save_that_is_interrupted_twice_does_not_keep_its_mark(target, monkeypatch, again):
    """By Ctrl-C, and again while it is undone, in a process that lives on."""
    struck = mock.Mock(side_effect=KeyboardInterrupt)
    with monkeypatch.context() as patch:
        patch.setattr(shardwise.saving.save, "commit_save", struck)
        if again == "the removal of files":
            patch.setattr(commit, "_find_valid_trainings", struck)
        else:
            patch.setattr(LockedFolder, "_renew", lambda self: None)
            patch.setattr(threading, "Thread", InterruptedJoin)
        with pytest.raises(KeyboardInterrupt):
            save(1, target)
        assert struck.called
    save(2, target)
    assert seed_in(target) == 2


class InterruptedJoin(threading.Thread):
    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        if self.name == "shardwise-lock":
            raise KeyboardInterrupt


def test_every_save_renews_its_mark(target, before_commit):
    """So that one of a container that is gone can be told from one that is slow."""
    seen = set()

    def look():
        with open_writer(target) as writer:
            while len(seen) < 3:
                seen.add(saving_lock._read_mtime_ns(writer))
                time.sleep(0.005)

    before_commit(look)
    save(1, target, SEVERAL)
    assert len(seen) == 3
    assert not [name for name in names(target) if MARK in name]


def test_a_folder_is_made_to_last_by_its_finder(tmp_path, monkeypatch):
    """Who made it may have died before that."""
    (tmp_path / "run").mkdir()
    synced = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda number: (synced.append(os.readlink(f"/proc/self/fd/{number}")), real(number))
    )
    save(1, tmp_path / "run")
    assert str(tmp_path) in synced
