"""Every writer keeps the promises of its protocol."""

from pathlib import Path

import pytest
from tests.support.writer_suite import StorageWriterSuite, WritableStorage

from shardwise.files.local_writer import LocalWriter


class TestLocalWriter(StorageWriterSuite):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> WritableStorage:
        folder = tmp_path / "not" / "yet"

        def contents() -> dict[str, bytes]:
            return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}

        return WritableStorage(lambda: LocalWriter(folder), contents)
