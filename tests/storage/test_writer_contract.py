"""Every writer keeps the promises of its protocol."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from tests.harness import StorageWriterSuite, WritableStorage
from tests.storage.object_store import ObjectStore

from shardwise.storage.policies import OBJECT_STORE_WRITES
from shardwise.storage.writing import fsspec_writer
from shardwise.storage.writing.fsspec_writer import FsspecWriter
from shardwise.storage.writing.local_writer import LocalWriter
from shardwise.storage.writing.memory_writer import MemoryWriter

_numbers = itertools.count()


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


class TestLocalWriter(StorageWriterSuite):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> WritableStorage:
        folder = tmp_path / "not" / "yet"
        return WritableStorage(lambda: LocalWriter(folder), lambda: files_of(folder))


class TestMemoryWriter(StorageWriterSuite):
    @pytest.fixture
    def storage(self) -> WritableStorage:
        files: dict[str, bytearray] = {}
        return WritableStorage(lambda: MemoryWriter(files), MemoryWriter(files).contents)


class TestMemoryWriterOfStreams(StorageWriterSuite):
    @pytest.fixture
    def storage(self) -> WritableStorage:
        files: dict[str, bytearray] = {}
        return WritableStorage(
            lambda: MemoryWriter(files, policy=OBJECT_STORE_WRITES), MemoryWriter(files).contents
        )


class TestFsspecInMemory(StorageWriterSuite):
    @pytest.fixture
    def storage(self) -> Iterator[WritableStorage]:
        files = fsspec.filesystem("memory")
        root = f"/writers-{next(_numbers)}"

        def contents() -> dict[str, bytes]:
            # Files on their way are named as such; nobody takes them for others.
            found = {path.rpartition("/")[2]: files.cat_file(path) for path in files.find(root)}
            return {name: content for name, content in found.items() if not name.endswith(".incomplete")}

        yield WritableStorage(lambda: FsspecWriter(f"memory:/{root}"), contents)
        assert [path for path in files.find(root) if path.endswith(".incomplete")] == []
        if files.exists(root):
            files.rm(root, recursive=True)


class TestFsspecOnDisk(StorageWriterSuite):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Iterator[WritableStorage]:
        folder = tmp_path / "not" / "yet"

        def contents() -> dict[str, bytes]:
            return {k: v for k, v in files_of(folder).items() if not k.endswith(".incomplete")}

        yield WritableStorage(lambda: FsspecWriter(f"file://{folder}"), contents)
        assert contents() == files_of(folder)


class TestObjectStore(StorageWriterSuite):
    @pytest.fixture
    def storage(self, monkeypatch: pytest.MonkeyPatch) -> WritableStorage:
        monkeypatch.setattr(fsspec_writer, "_SHOWN_WHEN_CLOSED", frozenset({"objects"}))
        ObjectStore.objects.clear()
        return WritableStorage(lambda: FsspecWriter("objects://bucket/folder"), ObjectStore.contents)
