"""Two runs that save into one folder, and checkpoints that lost files: nothing that counts is lost with them."""

import os
from pathlib import Path

import pytest
from tests.checkpoints.tiny import Training, differences
from tests.support.meanwhile import meanwhile, unmark

from shardwise import Checkpointer, FormatError, StorageError
from shardwise.checkpoints import write
from shardwise.state.digests import compute_digest


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Training]:
    """A run with a good step."""
    training = Training()
    training.step()
    Checkpointer(tmp_path).save(1, training.state)
    return tmp_path, training


def other_run(root: Path, step: int) -> Training:
    """Another run takes the folder over, and saves; its training."""
    unmark(root)
    training = Training(seed=7)
    Checkpointer(root, keep=None).save(step, training.state)
    return training


def restored(root: Path, step: int) -> dict:
    training = Training(seed=3)
    assert Checkpointer(root).restore(training.state, step).step == step
    return training.taken()


MOMENTS = {
    "while writing": lambda name, file="", *_: name == "write" and file.endswith("distcp"),
    "before the last look": lambda name, file="", *_: name == "create" and ".metadata" in file,
    "at the last step": lambda name, *_: name == "rename" or (name == "replace" and _[0] == ".metadata"),
}


@pytest.mark.parametrize("step", [3, 5], ids=["the same step", "a later step"])
@pytest.mark.parametrize("at", MOMENTS)
def test_one_that_lost_its_mark_harms_neither_the_other_nor_the_older(saved, at, step):
    root, training = saved
    good = training.taken()
    others: list[Training] = []
    checkpointer = Checkpointer(root, keep=1)
    with meanwhile(MOMENTS[at], lambda: others.append(other_run(root, step))), pytest.raises(StorageError):
        checkpointer.save(3, training.state)
    assert Checkpointer(root).steps() == [1, step]
    assert differences(restored(root, step), others[0].taken()) == []
    assert differences(restored(root, 1), good) == []


def test_one_that_was_taken_over_once_it_counts_removes_nothing(saved, monkeypatch):
    """Its own good step, least of all, for not being among the newest any more."""
    root, training = saved
    original = write.publish

    def taken_over(*arguments):
        monkeypatch.setattr(write, "publish", original)
        removed = original(*arguments)
        other_run(root, 9)
        return removed

    monkeypatch.setattr(write, "publish", taken_over)
    report = Checkpointer(root, keep=1).save(3, training.state)
    assert report.removed == ()
    assert Checkpointer(root).steps() == [1, 3, 9]
    assert differences(restored(root, 3), training.taken()) == []


def test_what_counts_by_the_time_it_is_tidied_up_stays(saved, monkeypatch):
    """One that was left goes on after all, just before its folder is emptied."""
    root, training = saved
    Checkpointer(root, keep=None).save(2, training.state)
    metadata = root / "step-2" / ".metadata"
    ready = root / "step-2" / "..metadata.0123abcd.incomplete"
    os.rename(metadata, ready)
    incomplete_steps = write.step_folders.incomplete_steps

    def goes_on(place):
        found = incomplete_steps(place)
        os.rename(ready, metadata)
        return found

    checkpointer = Checkpointer(root)
    monkeypatch.setattr(write.step_folders, "incomplete_steps", goes_on)
    with pytest.raises(StorageError, match="another run has saved step 2 there"):
        checkpointer.save(3, training.state)
    monkeypatch.undo()
    assert Checkpointer(root).steps() == [1, 2]
    assert restored(root, 2)


@pytest.mark.parametrize("fault", ["gone", "cut", "no facts"])
def test_the_latest_is_the_newest_that_is_whole(saved, fault):
    root, training = saved
    good = training.taken()
    checkpointer = Checkpointer(root, keep=None)
    training.step()
    checkpointer.save(2, training.state)
    file = root / "step-2" / "__0_0.distcp"
    if fault == "gone":
        file.unlink()
    elif fault == "cut":
        os.truncate(file, file.stat().st_size - 1)
    else:
        (root / "step-2" / "shardwise.checkpoint.json").write_text("{")
    again = Training(seed=3)
    resumed = Checkpointer(root, keep=None)
    assert resumed.latest() == 1
    report = resumed.restore(again.state)
    assert (report.step, report.skipped_steps) == (1, (2,))
    assert "skipped, because files are missing or truncated, or may not be read: step 2" in str(report)
    assert differences(again.taken(), good) == []
    with pytest.raises((FormatError, StorageError), match="step-2"):
        resumed.restore(again.state, 2)
    again.step()
    resumed.save(2, again.state)
    assert resumed.latest() == 2
    assert differences(restored(root, 2), again.taken()) == []


def test_faults_are_reported_if_no_checkpoint_is_complete(saved):
    root, training = saved
    (root / "step-1" / "__0_0.distcp").unlink()
    with pytest.raises(FormatError, match="is missing. Copy it there too"):
        Checkpointer(root).restore(training.state)


@pytest.mark.parametrize("keep", [1, 2])
def test_damaged_steps_do_not_count(saved, keep):
    """Neither a later one, which a run that resumed has skipped, nor an earlier one."""
    root, training = saved
    for step in (10, 20, 40):
        Checkpointer(root, keep=None).save(step, training.state)
    for step in (20, 40):
        file = next((root / f"step-{step}").glob("*.distcp"))
        os.truncate(file, file.stat().st_size - 1)
    checkpointer = Checkpointer(root, keep=keep)
    assert checkpointer.restore(training.state).step == 10
    checkpointer.save(30, training.state)
    assert checkpointer.latest() == 30
    assert Checkpointer(root).steps() == ([30, 40] if keep == 1 else [10, 20, 30, 40])


def test_digests_tell_sets_and_bytes_apart():
    """Positions in the data of ranks are stored once if they are equal."""
    values = [
        {1, 2},
        {1, 3},
        frozenset({1, 2}),
        bytearray(b"a"),
        bytearray(b"b"),
        1j,
        2j,
        {"ids": {"a"}},
        {"ids": {"b"}},
    ]
    assert len({compute_digest(value) for value in values}) == len(values)
    assert compute_digest({"a", "b", "c"}) == compute_digest({"c", "b", "a"})
