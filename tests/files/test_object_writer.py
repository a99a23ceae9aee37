"""Writing streams to object stores: what is seen when, what fails how, and what is never shown."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.torture import objects

from shardwise.core.errors import ConfigError, StorageError
from shardwise.files.local_writer import LocalWriter, open_writer
from shardwise.files.objects import ObjectWriter, _part_bytes
from shardwise.files.remote import RemoteReader
from shardwise.files.storage import LOCAL_WRITES

CONTENT = bytes(range(256)) * (130 << 10)  # 32.5 MiB: three parts


@pytest.fixture
def bucket() -> Iterator[str]:
    with objects.bucket("s3") as url:
        yield url


def seen(url: str) -> dict[str, bytes]:
    with RemoteReader(url) as reader:
        return {file: reader.read(file, 0, reader.size(file)) for file in reader.list()}


def test_a_large_file_goes_up_in_parts_and_is_seen_when_complete(bucket: str) -> None:
    with ObjectWriter(bucket) as writer:
        writer.create("a", len(CONTENT))
        for start in range(0, len(CONTENT), 5 << 20):
            writer.write("a", start, [memoryview(CONTENT)[start : start + (5 << 20)]])
        assert seen(bucket) == {}
        writer.sync("a")
        assert seen(bucket) == {"a": CONTENT}


@pytest.mark.parametrize("end", ["close", "remove", "forget"])
def test_incomplete_uploads_are_not_visible(bucket: str, end: str) -> None:
    abandoned = ObjectWriter(bucket)
    abandoned.create("a", len(CONTENT))
    abandoned.write("a", 0, [memoryview(CONTENT)[: 20 << 20]])
    if end == "close":
        abandoned.close()
    elif end == "remove":
        abandoned.remove("a")
    del abandoned
    gc.collect()
    assert seen(bucket) == {}


def test_a_write_that_failed_is_not_completed(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = objects.behind(bucket)
    with ObjectWriter(bucket) as writer:
        writer.create("a", len(CONTENT))
        folder.rmdir()
        folder.write_bytes(b"")  # nothing can be written below a file
        with pytest.raises(StorageError, match=rf"a in {bucket}: writing at byte 0 failed, .*Check the URL"):
            writer.write("a", 0, [memoryview(CONTENT)])
        folder.unlink()
        folder.mkdir()
        for doing in (lambda: writer.sync("a"), lambda: writer.write("a", 0, [memoryview(CONTENT)])):
            with pytest.raises(StorageError, match="a in .*an earlier write to it failed"):
                doing()
        assert seen(bucket) == {}
        writer.remove("a")
        writer.create("a", 1)
        writer.write("a", 0, [memoryview(b"1")])
        writer.sync("a")
    assert seen(bucket) == {"a": b"1"}


def test_secrets_are_not_shown() -> None:
    options = {"secret_access_key": "hidden22", "nonsense": "x"}
    for make in (ObjectWriter, RemoteReader):
        with pytest.raises(StorageError) as caught:
            make("s3://user:hidden21@bucket/folder?sig=hidden23", storage_options=options)
        assert "hidden" not in str(caught.value)
        assert str(caught.value).startswith("s3://bucket/folder: ")


@pytest.mark.parametrize(
    ("nbytes", "part_mib"), [(0, 16), (1, 16), (156 << 30, 16), (157 << 30, 17), (5 << 40, 525)]
)
def test_no_file_has_more_parts_than_s3_takes(nbytes: int, part_mib: int) -> None:
    part = _part_bytes(nbytes)
    assert part == part_mib << 20
    assert -(-nbytes // part) <= 10_000


def test_a_policy_that_streams_cannot_keep_is_refused() -> None:
    with pytest.raises(ConfigError, match="has_random_writes=False"):
        ObjectWriter("memory://folder", policy=LOCAL_WRITES)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore.store", None)
    for make, doing in ((open_writer, "writing to"), (RemoteReader, "reading")):
        with pytest.raises(StorageError, match=rf"{doing} s3:// needs obstore. .*shardwise\[remote\]"):
            make("s3://bucket/folder")


# ── from a target to a writer ─────────────────────────────────────────────────────────────────────


def test_a_path_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for target in (tmp_path / "new", str(tmp_path / "new"), "~/new"):
        with open_writer(target) as writer:
            assert isinstance(writer, LocalWriter)
            assert writer.root == os.fspath(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_url_is_an_object_store() -> None:
    with open_writer("memory://folder") as writer:
        assert isinstance(writer, ObjectWriter)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("hf://organization/name", r"hf://organization/name: the hub is not written to. .*upload it \(hf upload"),
        ("https://user:hidden@host/folder", r"https://host/folder: .*cannot be written to. Save into a local"),
        ("file:///folder", "Pass the path without file://"),
        ("nonsense://folder", "writing to nonsense:// failed"),
    ],
)
def test_targets_that_cannot_be_written_are_refused(target: str, words: str) -> None:
    with pytest.raises(StorageError, match=words) as caught:
        open_writer(target)
    assert "hidden" not in str(caught.value)
