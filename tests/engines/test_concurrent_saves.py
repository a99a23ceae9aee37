"""Two saves of one folder, at any moment of each other: one of them counts, whole, and the other one is told."""

import itertools
import os
import shutil
from contextlib import contextmanager

import pytest
import torch
from tests.engines.saving import linear, mark
from tests.torture import objects

import shardwise
import shardwise.engines.saving
from shardwise.errors import CheckpointError, StorageError
from shardwise.execution import saving_lock
from shardwise.execution.locked_folder import LockedFolder
from shardwise.storage import machine
from shardwise.storage.writing import open_writer

ONE, SEVERAL = "1GB", "6KB"
MARK = "shardwise.saving"
_numbers = itertools.count()


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


def unmark(target):
    with open_writer(target) as writer:
        for name in writer.list():
            if name.startswith(MARK):
                writer.remove(name)


class Before:
    """A writer before some call of which something else happens, once."""

    def __init__(self, inner, call, act):
        self._inner, self._call, self._act = inner, call, act

    def __getattr__(self, name):
        method = getattr(self._inner, name)

        def called(*arguments):
            if self._act is not None and self._call(name, *arguments):
                act, self._act = self._act, None
                act()
            return method(*arguments)

        return called if callable(method) else method

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._inner.close()


@contextmanager
def meanwhile(monkeypatch, call, act):
    """``act`` happens in the middle of the next save."""
    with monkeypatch.context() as patched:

        def opened(target):
            patched.undo()
            return Before(open_writer(target), call, act)

        patched.setattr(shardwise.engines.saving, "open_writer", opened)
        yield


def is_last_step(name, *arguments):
    """The call after which a save counts, or that which gives it a name that only the absence of another hides."""
    return name in ("rename", "publish") and arguments[1] in ("model.safetensors", "model.safetensors.index.json")


def is_write(name, *_):
    return name == "write"


@pytest.fixture(params=["folder", "memory", "bucket"])
def target(request, tmp_path):
    if request.param == "folder":
        yield tmp_path / "saved"
    elif request.param == "memory":
        yield f"memory://two-saves-{next(_numbers)}"
    else:
        with objects.bucket("s3") as url:
            yield f"{url}/saved"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(saving_lock, "RENEWAL_S", 0.02)


@pytest.mark.parametrize("size", [ONE, SEVERAL])
def test_the_second_is_refused_and_the_first_counts(target, size, monkeypatch):
    """Also where nothing but a list tells who came first."""
    save(1, target, size)
    refused = []

    def second():
        with pytest.raises(StorageError, match=f"another save is writing here .process {os.getpid()} on"):
            save(3, target, SEVERAL)
        refused.append(True)

    with meanwhile(monkeypatch, lambda name, file="", *_: name == "sync" and file != MARK, second):
        save(2, target, size)
    assert refused
    assert seed_in(target) == 2
    assert shardwise.verify(target).compared
    assert [name for name in names(target) if MARK in name or "incomplete" in name] == []


@pytest.mark.parametrize("at", [is_write, is_last_step], ids=["while writing", "at the last step"])
@pytest.mark.parametrize("older", [ONE, pytest.param(SEVERAL, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("size", "theirs"), [(ONE, ONE), (ONE, SEVERAL), (SEVERAL, ONE), (SEVERAL, SEVERAL)])
def test_one_whose_mark_was_taken_away_does_not_harm_the_one_that_counts(
    target, older, size, theirs, at, monkeypatch
):
    """The mark is removed by hand, too early, and the other save begins and ends within a moment of this one."""
    save(1, target, older)

    def other():
        unmark(target)
        save(3, target, theirs)

    marks = []
    with (
        meanwhile(monkeypatch, lambda name, file="", *_: MARK not in str(file) and at(name, file, *_), other),
        pytest.raises(StorageError),
    ):
        marks.append(save(2, target, size))
    assert marks == []
    assert seed_in(target) == 3
    assert shardwise.verify(target).compared
    save(4, target, size)
    assert seed_in(target) == 4
    weights = [name for name in names(target) if name.endswith((".safetensors", ".older", ".incomplete"))]
    assert len(weights) == (1 if size == ONE and "//" not in str(target) else len(weights))
    assert not [name for name in weights if name.endswith((".older", ".incomplete"))]


@pytest.mark.parametrize("theirs", [ONE, SEVERAL])
def test_files_of_another_save_that_were_set_aside_are_restored(tmp_path, theirs, monkeypatch):
    """Several files take the place of a single one in two steps, and the other save comes between them."""
    save(1, tmp_path, ONE)

    def other():
        unmark(tmp_path)
        save(3, tmp_path, theirs)

    with (
        meanwhile(monkeypatch, lambda name, *_: name == "rename" and _[1].endswith(".older"), other),
        pytest.raises(StorageError),
    ):
        save(2, tmp_path, SEVERAL)
    assert seed_in(tmp_path) == 3
    assert shardwise.verify(tmp_path).compared
    save(4, tmp_path, ONE)
    assert sorted(names(tmp_path)) == ["model.fingerprints.json", "model.safetensors"]


@pytest.mark.parametrize("counts", [True, False])
def test_of_weights_that_were_set_aside_at_most_one_is_ever_there(tmp_path, counts, monkeypatch):
    """A save that died after its last step leaves older weights aside. They go before the next sets others aside:
    nobody could tell which are the newer. Where nothing counts, those aside are kept until something does.
    """
    save(1, tmp_path, ONE)
    aside = tmp_path / "model.0123abcd.older"
    shutil.copy(tmp_path / "model.safetensors", aside)
    if not counts:
        (tmp_path / "model.safetensors").unlink()
    found = []

    def look():
        found.extend(name for name in names(tmp_path) if name.endswith(".older"))

    with meanwhile(monkeypatch, lambda name, *_: name == "sync" and MARK not in str(_[0]), look):
        save(2, tmp_path, SEVERAL)
    assert found == ([] if counts else [aside.name])
    assert seed_in(tmp_path) == 2
    assert not [name for name in names(tmp_path) if name.endswith(".older")]


@pytest.mark.parametrize("size", [ONE, SEVERAL])
def test_a_committed_save_is_reported_although_another_took_over_and_died(target, size, monkeypatch):
    """Whoever is told of a failure looks for the older save, and would find this one."""
    save(1, target, size)
    taken = []

    def other():
        unmark(target)
        with open_writer(target) as writer:
            saving_lock.take_lock(writer, "0123abcd")
        taken.append(True)

    with meanwhile(monkeypatch, is_last_step, other):
        save(2, target, size)
    assert taken
    assert seed_in(target) == 2
    unmark(target)
    save(4, target, size)
    assert seed_in(target) == 4


def test_files_that_an_index_is_about_to_make_count_are_left_by_one_that_takes_over_and_dies(tmp_path, monkeypatch):
    """Several files over a single one count when that is out of the way, the step after their index."""
    save(1, tmp_path, ONE)

    def other():
        unmark(tmp_path)
        with (
            meanwhile(monkeypatch, lambda name, file="", *_: name == "write" and MARK not in file, fail),
            pytest.raises(CheckpointError, match="dies"),
        ):
            save(3, tmp_path, SEVERAL)

    def fail():
        raise RuntimeError("dies")

    with meanwhile(monkeypatch, lambda name, *_: name == "rename" and _[1].endswith(".older"), other):
        save(2, tmp_path, SEVERAL)
    assert seed_in(tmp_path) == 2
    assert shardwise.verify(tmp_path).compared


@pytest.mark.parametrize("size", [ONE, SEVERAL])
def test_files_that_vanish_before_the_commit_are_missed(target, size, monkeypatch):
    save(1, target, SEVERAL)
    before = set(names(target))

    def vanish():
        with open_writer(target) as writer:
            for name in set(writer.list()) - before:
                if "safetensors" in name or name.startswith("model."):
                    writer.remove(name)

    original = shardwise.engines.saving.commit_save

    def commit(*arguments):
        vanish()
        return original(*arguments)

    monkeypatch.setattr(shardwise.engines.saving, "commit_save", commit)
    with pytest.raises(StorageError, match="now it is gone"):
        save(2, target, size)
    assert seed_in(target) == 1


@pytest.mark.parametrize("gone", [{}, {"process": os.getpid(), "born": "long ago"}, {"process": 2**40}])
def test_the_mark_of_a_process_that_is_gone_is_taken_over_on_a_store_too(target, gone):
    save(1, target, SEVERAL)
    own = MARK if "//" not in str(target) else f"{MARK}.0123abcd"
    with open_writer(target) as writer:
        writer.replace(own, mark(renewed_s=5.0, **gone))
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
        elsewhere.setattr(machine, "pid_namespace", lambda: "another container")
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


def test_every_save_renews_its_mark(target, monkeypatch):
    """So that one of a container that is gone can be told from one that is slow."""
    seen = set()

    def look():
        with open_writer(target) as writer:
            file = next(name for name in writer.list() if name.startswith(MARK) and not name.endswith(".beat"))
            while len(seen) < 3:
                seen.add(saving_lock._changed_at(writer, file))
                saving_lock.time.sleep(0.005)

    with meanwhile(monkeypatch, lambda name, file="", *_: name == "sync" and file != MARK, look):
        save(1, target, SEVERAL)
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


@pytest.fixture(autouse=True, scope="module")
def _tidy():
    yield
    shutil.rmtree("two-saves", ignore_errors=True)
