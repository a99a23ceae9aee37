"""Every writer keeps the promises of its protocol."""

import gc
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import StorageWriterSuite, WritableStorage
from tests.torture import objects

from shardwise.files.local_writer import LocalWriter
from shardwise.files.objects import ObjectWriter
from shardwise.files.remote import RemoteReader

_numbers = itertools.count()


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


class TestLocalWriter(StorageWriterSuite):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> WritableStorage:
        folder = tmp_path / "not" / "yet"
        return WritableStorage(lambda: LocalWriter(folder), lambda: files_of(folder))


class TestMemoryAtUrl(StorageWriterSuite):
    @pytest.fixture
    def storage(self) -> WritableStorage:
        url = f"memory://writers-{next(_numbers)}"

        def contents() -> dict[str, bytes]:
            with RemoteReader(url) as reader:
                return {file: reader.read(file, 0, reader.size(file)) for file in reader.list()}

        return WritableStorage(lambda: ObjectWriter(url), contents)


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    gc.collect()
    gc.freeze()  # a collection after each test is then quick
    with objects.bucket("s3") as url:
        yield url
    gc.unfreeze()


class TestBucket(StorageWriterSuite):
    @pytest.fixture
    def storage(self, bucket: str) -> Iterator[WritableStorage]:
        url = f"{bucket}/{next(_numbers)}"

        def contents() -> dict[str, bytes]:
            # A file on its way is named so in a folder; in a bucket it has no name.
            return {k: v for k, v in files_of(objects.behind(url)).items() if not k.endswith("#1")}

        yield WritableStorage(lambda: ObjectWriter(url), contents)
        gc.collect()
        assert contents() == files_of(objects.behind(url))
