"""Every reader keeps the promises of its protocol."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from tests.harness import HttpStore, StorageReaderSuite
from tests.harness.storage_suite import MakeReader

from shardwise.storage.contract import StorageReader
from shardwise.storage.policies import OBJECT_STORE
from shardwise.storage.reading.local import LocalReader
from shardwise.storage.reading.memory import MemoryReader
from shardwise.storage.reading.remote_reader import RemoteReader

_numbers = itertools.count()
IN_PIECES = replace(OBJECT_STORE, request_bytes=777, concurrency=3)


class TestLocalReader(StorageReaderSuite):
    @pytest.fixture
    def make_reader(self, tmp_path: Path) -> MakeReader:
        def make(files: Mapping[str, bytes]) -> StorageReader:
            for name, content in files.items():
                path = tmp_path / name
                path.parent.mkdir(parents=True, exist_ok=True)
                fresh = path.with_name("fresh")
                fresh.write_bytes(content)
                fresh.replace(path)
            return LocalReader(tmp_path)

        return make


class TestMemoryReader(StorageReaderSuite):
    @pytest.fixture
    def make_reader(self) -> MakeReader:
        return MemoryReader


class TestHttp(StorageReaderSuite):
    can_list = False

    @pytest.fixture
    def make_reader(self) -> Iterator[MakeReader]:
        with HttpStore({}) as store:

            def make(files: Mapping[str, bytes]) -> StorageReader:
                for name, content in files.items():
                    store.replace(f"folder/{name}", content)
                return RemoteReader(f"{store.url}/folder/")

            yield make


class TestHttpInPieces(StorageReaderSuite):
    can_list = False

    @pytest.fixture
    def make_reader(self) -> Iterator[MakeReader]:
        with HttpStore({}) as store:

            def make(files: Mapping[str, bytes]) -> StorageReader:
                for name, content in files.items():
                    store.replace(name, content)
                return RemoteReader(store.url, policy=IN_PIECES)

            yield make


class TestFsspec(StorageReaderSuite):
    @pytest.fixture
    def make_reader(self) -> Iterator[MakeReader]:
        files_of = fsspec.filesystem("memory")
        root = f"/contract-{next(_numbers)}"

        def make(files: Mapping[str, bytes]) -> StorageReader:
            for name, content in files.items():
                files_of.pipe_file(f"{root}/{name}", content)
            return RemoteReader(f"memory:/{root}", policy=replace(OBJECT_STORE, request_bytes=5000))

        yield make
        if files_of.exists(root):
            files_of.rm(root, recursive=True)
