"""Every reader keeps the promises of its protocol."""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

import pytest
from tests.support.http_store import HttpStore
from tests.support.memory_storage import MemoryReader
from tests.support.storage_suite import MakeReader, StorageReaderSuite

from shardwise.files import objects
from shardwise.files.local_reader import LocalReader
from shardwise.files.objects import RemoteReader
from shardwise.files.storage import StorageReader

_numbers = itertools.count()


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


class TestMemoryAtUrl(StorageReaderSuite):
    @pytest.fixture
    def make_reader(self) -> MakeReader:
        folder = f"contract-{next(_numbers)}"

        def make(files: Mapping[str, bytes]) -> StorageReader:
            for name, content in files.items():
                objects._memory().put(f"{folder}/{name}", content)
            return RemoteReader(f"memory://{folder}")

        return make


class TestBucket(StorageReaderSuite):
    @pytest.fixture
    def make_reader(self, tmp_path: Path) -> Iterator[MakeReader]:
        from obstore.store import LocalStore

        # obstore's store of a folder has the interface of its S3 store.
        store = LocalStore(prefix=tmp_path)
        with mock.patch.object(objects, "_bucket", return_value=store):

            def make(files: Mapping[str, bytes]) -> StorageReader:
                for name, content in files.items():
                    store.put(name, content)
                return RemoteReader("s3://bucket")

            yield make
