"""A writer to a folder and to folders in it, as one."""

import os
import shutil

import pytest

from shardwise.core.errors import StorageError
from shardwise.files.folders import folders_in, remove_folder
from shardwise.files.local_writer import LocalWriter
from shardwise.files.storage import StorageWriter


def put(writer, name, content):
    writer.create(name, len(content))
    writer.write(name, 0, [memoryview(content)])
    writer.sync(name)


def test_names_have_their_folder_in_front(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "x").write_text("1")
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "y").write_text("1")
    with LocalWriter(tmp_path, folders=["old"]) as writer:
        assert isinstance(writer, StorageWriter)
        put(writer, "new/inner/z", b"zz")
        writer.rename("new/inner/z", "new/inner/a")
        writer.replace("b", b"bbb")
        writer.sync_names()
        assert writer.sizes() == {"b": 3, "new/inner/a": 2, "old/x": 1}
        assert writer.list() == ["b", "new/inner/a", "old/x"]
        assert writer.read("new/inner/a") == b"zz"
        assert writer.read("nowhere/a") is None
        writer.remove("old/x")
        assert writer.list() == ["b", "new/inner/a"]
    assert folders_in(tmp_path) == ["new", "new/inner", "old", "unknown"]


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "a//b", ""])
def test_paths_out_of_the_folder_are_refused(tmp_path, name):
    with (
        LocalWriter(tmp_path / "in", folders=()) as writer,
        pytest.raises(StorageError, match="refused as a file name"),
    ):
        writer.replace(name, b"")
    assert list(tmp_path.iterdir()) == []


def test_a_file_moves_from_one_folder_to_another(tmp_path):
    (tmp_path / "b").mkdir()
    with LocalWriter(tmp_path, folders=()) as writer:
        put(writer, "a/x", b"x")
        writer.rename("a/x", "b/x")
        assert writer.list() == ["b/x"]


def test_a_folder_is_removed_with_links_and_not_what_they_lead_to(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "x").write_text("1")
    (tmp_path / "out" / "inner").mkdir(parents=True)
    (tmp_path / "out" / "inner" / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "out" / "file").symlink_to(tmp_path / "kept" / "x")
    remove_folder(tmp_path / "out")
    remove_folder(tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["kept", "x"]


def test_a_folder_that_another_process_removes_meanwhile_is_removed(tmp_path, monkeypatch):
    (tmp_path / "out" / "inner").mkdir(parents=True)
    (tmp_path / "out" / "inner" / "file").write_text("1")

    def unlink(_path: str) -> None:
        monkeypatch.undo()
        shutil.rmtree(tmp_path / "out")
        raise FileNotFoundError

    monkeypatch.setattr(os, "unlink", unlink)
    remove_folder(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
