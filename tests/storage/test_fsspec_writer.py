"""Writing streams to what fsspec knows: what is seen when, what fails how, and what is never shown."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from tests.storage.object_store import ObjectStore

from shardwise.errors import ConfigError, StorageError
from shardwise.storage.policies import LOCAL_WRITES
from shardwise.storage.reading.remote_reader import RemoteReader
from shardwise.storage.writing import fsspec_writer
from shardwise.storage.writing.fsspec_writer import FsspecWriter
from shardwise.storage.writing.local_writer import LocalWriter
from shardwise.storage.writing.opening import open_writer

CONTENT = bytes(range(256)) * (130 << 10)  # 32.5 MiB: three parts


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[ObjectStore]]:
    monkeypatch.setattr(fsspec_writer, "_SHOWN_WHEN_CLOSED", frozenset({"objects"}))
    ObjectStore.objects.clear()
    ObjectStore.uploads.clear()
    yield ObjectStore
    ObjectStore.failure = None


@pytest.fixture
def writer(objects: type[ObjectStore]) -> Iterator[FsspecWriter]:
    with FsspecWriter("objects://bucket/folder", storage_options={"token": "tok_secret"}) as writer:
        yield writer


def test_a_large_file_goes_up_in_parts_and_is_seen_when_complete(
    writer: FsspecWriter, objects: type[ObjectStore]
) -> None:
    writer.create("a", len(CONTENT))
    for start in range(0, len(CONTENT), 5 << 20):
        writer.write("a", start, [memoryview(CONTENT)[start : start + (5 << 20)]])
    (upload,) = objects.uploads
    assert [len(part) for part in upload.parts] == [20 << 20]
    assert objects.objects == {}
    writer.sync("a")
    assert objects.contents() == {"a": CONTENT}
    assert objects.uploads == []
    assert writer.bytes_written == len(CONTENT)


@pytest.mark.parametrize("end", ["close", "remove", "forget"])
def test_what_is_not_completed_is_never_seen(writer: FsspecWriter, objects: type[ObjectStore], end: str) -> None:
    abandoned = FsspecWriter("objects://bucket/folder")
    abandoned.create("a", len(CONTENT))
    abandoned.write("a", 0, [memoryview(CONTENT)[: 20 << 20]])
    assert len(objects.uploads) == 1
    if end == "close":
        abandoned.close()
    elif end == "remove":
        abandoned.remove("a")
    if end != "forget":
        assert objects.uploads == []
    objects.uploads.clear()
    del abandoned
    gc.collect()
    assert objects.objects == {}


def test_a_write_that_failed_is_not_completed(writer: FsspecWriter, objects: type[ObjectStore]) -> None:
    writer.create("a", len(CONTENT))
    ObjectStore.failure = ConnectionResetError("reset")
    with pytest.raises(
        StorageError, match=r"a in objects://bucket/folder: writing at byte 0 failed, .*reset.*save again"
    ):
        writer.write("a", 0, [memoryview(CONTENT)])
    ObjectStore.failure = None
    with pytest.raises(StorageError, match="a in .*an earlier write to it failed"):
        writer.sync("a")
    with pytest.raises(StorageError, match="a in .*an earlier write to it failed"):
        writer.write("a", 0, [memoryview(CONTENT)])
    assert objects.objects == {}
    writer.remove("a")
    writer.create("a", 1)
    writer.write("a", 0, [memoryview(b"1")])
    writer.sync("a")
    assert objects.contents() == {"a": b"1"}


def test_a_completion_that_failed_is_not_tried_again_by_itself(
    writer: FsspecWriter, objects: type[ObjectStore]
) -> None:
    writer.create("a", 1)
    writer.write("a", 0, [memoryview(b"1")])
    ObjectStore.failure = PermissionError("forbidden")
    with pytest.raises(StorageError, match="completing it failed, access is refused .*credentials") as caught:
        writer.sync("a")
    assert isinstance(caught.value.__cause__, PermissionError)
    ObjectStore.failure = None
    with pytest.raises(StorageError, match="an earlier write to it failed"):
        writer.sync("a")
    assert objects.objects == {}


def test_a_bucket_that_is_not_there_is_not_made(writer: FsspecWriter) -> None:
    ObjectStore.failure = FileNotFoundError("The specified bucket does not exist")
    with pytest.raises(StorageError, match="a in .*no such bucket or folder; check the URL"):
        writer.replace("a", b"1")


def test_credentials_in_the_errors_of_others_are_not_shown(writer: FsspecWriter) -> None:
    ObjectStore.failure = OSError("PUT https://user:pass@h/x?token=tok_secret failed")
    with pytest.raises(StorageError) as caught:
        writer.replace("a", b"1")
    error: BaseException | None = caught.value
    while error is not None:
        assert "tok_secret" not in repr(error)
        assert "user:pass" not in repr(error)
        error = error.__cause__ or error.__context__


def test_secrets_of_the_url_are_not_shown(objects: type[ObjectStore]) -> None:
    with FsspecWriter("memory://user:hidden@bucket/folder?sig=hidden") as writer:
        assert writer.root == "memory://bucket/folder"
        with pytest.raises(StorageError) as caught:
            writer.write("a", 0, [memoryview(b"1")])
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("nbytes", "part_mib"), [(0, 16), (1, 16), (156 << 30, 16), (157 << 30, 17), (5 << 40, 525)]
)
def test_no_file_has_more_parts_than_s3_takes(nbytes: int, part_mib: int) -> None:
    part = fsspec_writer._part_bytes(nbytes)
    assert part == part_mib << 20
    assert -(-nbytes // part) <= 10_000


def test_a_policy_that_streams_cannot_keep_is_refused() -> None:
    with pytest.raises(ConfigError, match="has_random_writes=False"):
        FsspecWriter("memory://folder", policy=LOCAL_WRITES)


def test_what_is_written_can_be_read(objects: type[ObjectStore]) -> None:
    files = fsspec.filesystem("memory")
    try:
        with FsspecWriter("memory://written/below") as writer:
            writer.create("a", 3)
            writer.write("a", 0, [memoryview(b"abc")])
            assert [path for path in files.find("/written") if not path.endswith(".incomplete")] == []
            writer.sync("a")
        assert files.find("/written") == ["/written/below/a"]
        with RemoteReader("memory://written/below") as reader:
            assert reader.read("a", 0, 3) == b"abc"
    finally:
        files.rm("/written", recursive=True)


@pytest.mark.parametrize(("url", "package"), [("s3://bucket/folder", "s3fs"), ("gs://bucket/folder", "gcsfs")])
def test_a_package_that_is_missing_is_named(url: str, package: str) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(StorageError, match=f"{url}: writing to .*needs {package}, .*pip install"):
        open_writer(url)


# ── from a target to a writer ─────────────────────────────────────────────────────────────────────


def test_a_path_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for target in (tmp_path / "new", str(tmp_path / "new"), "~/new"):
        with open_writer(target) as writer:
            assert isinstance(writer, LocalWriter)
            assert writer.root == str(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_url_is_what_fsspec_knows() -> None:
    with open_writer("memory://folder", storage_options={"global_store": True}) as writer:
        assert isinstance(writer, FsspecWriter)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            "hf://organisation/name",
            r"hf://organisation/name: the hub is not written to; .*then upload it \(hf upload",
        ),
        (
            "https://user:hidden@host/folder",
            r"https://host/folder: .*cannot be written to; save into a local folder",
        ),
        ("file:///folder", "pass the path without file://"),
        ("nonsense://folder", "no kind of storage that is known here"),
    ],
)
def test_what_cannot_be_written_to_is_refused(target: str, words: str) -> None:
    with pytest.raises(StorageError, match=words) as caught:
        open_writer(target)
    assert "hidden" not in str(caught.value)


def test_options_are_for_urls(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="storage_options are for URLs"):
        open_writer(tmp_path, storage_options={"key": "x"})
