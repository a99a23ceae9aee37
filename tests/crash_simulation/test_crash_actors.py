"""Crashes with several actors: what a kill leaves, folders that are lost, which saves may be found, recording."""

from pathlib import Path

import pytest
from tests.support.crashes import (
    BEFORE,
    Called,
    CrashState,
    Created,
    Effect,
    EffectLog,
    Entry,
    Failed,
    FolderMade,
    FolderRemoved,
    Killed,
    NamesSynced,
    Partly,
    Removed,
    ReplacedFile,
    Returned,
    Synced,
    Wrote,
    assert_nothing_is_lost,
    may_be_found,
    recorded,
    states_after_crash,
    states_after_kill,
)

from shardwise.files.local_writer import LocalWriter


def of_file(name: str, content: bytes, writer: int = 0) -> list[Effect]:
    """Made, written and synced, but for its name."""
    return [Created(writer, name, len(content)), Wrote(writer, name, 0, content), Synced(writer, name)]


def ends(entries: list[Entry], **how: object) -> set[tuple[str, ...]]:
    """The files that there may be after all entries."""
    states = states_after_crash({}, entries, since=len(entries), **how)  # type: ignore[arg-type]
    return {tuple(state.files) for state in states}


# Folders


def test_a_folder_is_lost_with_all_that_is_in_it() -> None:
    made: list[Entry] = [FolderMade(0, "step-1"), *of_file("step-1/a", b"1"), NamesSynced(0, "step-1")]
    assert ends(made) == {(), ("step-1/a",)}
    assert ends([*made, NamesSynced(0)]) == {("step-1/a",)}


def test_an_empty_folder_is_found_and_one_that_was_removed_may_come_back() -> None:
    before = {"step-1/a": b"1"}
    entries = [Removed(0, "step-1/a"), NamesSynced(0, "step-1"), FolderRemoved(0, "step-1")]
    found = {tuple(state.files) for state in states_after_crash(before, entries, since=3)}
    assert found == {(), ("step-1/",)}


# Kills


def test_a_kill_leaves_what_was_done_and_the_first_steps_of_the_last_effect() -> None:
    entries = [Created(0, "a", 1), ReplacedFile(0, "b", b"2")]
    found = [(killed.done, dict(killed.state.files)) for killed in states_after_kill({"b": b"1"}, entries)]
    [interim] = [name for name in found[2][1] if name.endswith(".incomplete")]
    assert found[0] == ((), {"b": b"1"})
    assert found[1] == ((entries[0],), {"a": b"\0", "b": b"1"})
    assert found[4] == ((entries[0], Partly(entries[1], 3)), {"a": b"\0", "b": b"1", interim: b"2"})
    assert found[-1] == (tuple(entries), {"a": b"\0", "b": b"2"})


def test_unsynced_writes_of_a_killed_save_are_lost_after_another_syncs() -> None:
    left: list[Entry] = [FolderMade(0, "")]
    follows: list[Entry] = [*of_file("a", b"1", writer=1), NamesSynced(1)]
    values = {BEFORE: False, "second": True}

    def look(state: CrashState) -> bool:
        return state.files.get("a") == b"1"

    turns: list[Entry] = [Called("second"), *follows, Returned("second")]
    with pytest.raises(AssertionError, match="leaves before, and not second"):
        assert_nothing_is_lost({}, [*left, *turns], look, values)
    assert assert_nothing_is_lost({}, [*left, NamesSynced(1, ".."), *turns], look, values) > 5


# Histories


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ([], {BEFORE}),
        ([Called("a")], {BEFORE, "a"}),
        ([Called("a"), Returned("a")], {"a"}),
        ([Called("a"), Failed("a")], {BEFORE}),
        ([Called("a"), Killed("a")], {BEFORE, "a"}),
        ([Called("a"), Killed("a"), Called("b"), Returned("b")], {"b"}),
        ([Called("a"), Called("b"), Returned("b")], {"a", "b"}),
        ([Called("a"), Called("b"), Returned("b"), Returned("a")], {"a", "b"}),
        ([Called("a"), Called("b"), Returned("b"), Failed("a")], {"b"}),
        ([Called("a"), Called("b"), Returned("b"), Killed("a"), Called("c"), Failed("c")], {"a", "b"}),
        ([Called("a"), Returned("a"), Called("b"), Killed("b")], {"a", "b"}),
        ([Called("a"), Returned("a"), Killed("a")], {"a"}),
    ],
)
def test_which_saves_may_be_found(entries: list[Entry], found: set[str]) -> None:
    assert may_be_found(entries) == found


def test_other_outcomes_are_reported_with_the_moment() -> None:
    entries: list[Entry] = [Called("a"), Removed(0, "x"), *of_file("x", b"2"), NamesSynced(0), Returned("a")]

    def look(state: CrashState) -> bytes | None:
        return state.files.get("x")

    values = {BEFORE: b"1", "a": b"2"}
    with pytest.raises(AssertionError, match=r"a crash after Removed.* leaves no save that is whole, and not a or"):
        assert_nothing_is_lost({"x": b"1"}, entries, look, values)
    with pytest.raises(AssertionError, match=r"after Returned.* leaves before, and not a"):
        assert_nothing_is_lost({"x": b"1"}, [Called("a"), Returned("a")], look, values)


# Recording


def test_opening_a_writer_is_recorded_with_the_folders_that_are_made(tmp_path: Path) -> None:
    log, root = EffectLog(tmp_path / "log"), tmp_path / "runs" / "out"
    before: list[int] = []
    with recorded(log, root, writer=3, before=lambda: before.append(len(log.entries()))):
        with LocalWriter(root) as writer:
            writer.create("a", 1)
            writer.write("a", 0, [memoryview(b"1")])
            writer.sync("a")
        with LocalWriter(root / "step-1") as writer:
            writer.replace("b", b"2")
            writer.sync_names()
            writer.remove("b")
        (root / "step-1").rmdir()
        with LocalWriter(tmp_path / "elsewhere") as writer:
            writer.replace("c", b"3")
    assert log.entries() == [
        FolderMade(3, ""),
        NamesSynced(3, ".."),
        Created(3, "a", 1),
        Wrote(3, "a", 0, b"1"),
        Synced(3, "a"),
        NamesSynced(3, ".."),  # by the next writer, whoever made the folder
        FolderMade(3, "step-1"),
        NamesSynced(3, ""),
        ReplacedFile(3, "step-1/b", b"2"),
        NamesSynced(3, "step-1"),
        Removed(3, "step-1/b"),
        FolderRemoved(3, "step-1"),
    ]
    assert before == [0, 3, 4, 5, 9, 10, 11]
    with LocalWriter(root) as writer:
        writer.replace("d", b"4")
    assert len(log.entries()) == 12
