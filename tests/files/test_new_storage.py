"""A storage added as one class, which passes the suite and is loaded from."""

import os
import threading
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.support.storage_suite import MakeReader, StorageReaderSuite
from torch import nn

import shardwise
from shardwise.core.errors import StorageError
from shardwise.files.storage import LOCAL, ReadPolicy, StorageReader, ends_early
from shardwise.files.urls import shown, unsafe_name_reason


class ZipReader(StorageReader):
    """Reads files of an archive that was made without compression."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._archive: zipfile.ZipFile | None = zipfile.ZipFile(path)
        self._turn = threading.Lock()  # an archive has one position

    @property
    def root(self) -> str:
        return self._path

    @property
    def policy(self) -> ReadPolicy:
        return LOCAL

    def list(self) -> list[str]:
        return sorted(self._opened("the list").namelist())

    def size(self, file: str) -> int:
        return self._about(file).file_size

    def identity(self, file: str) -> str:
        about = self._about(file)
        return f"{about.CRC} {about.file_size}"

    def read_vectored(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        about, flat = self._about(file), [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        if not 0 <= start <= start + sum(buffer.nbytes for buffer in flat) <= about.file_size:
            raise ends_early(
                self.root, file, (start, start + sum(buffer.nbytes for buffer in flat)), about.file_size
            )
        with self._turn, self._opened(file).open(about) as stream:
            stream.seek(start)
            for buffer in flat:
                buffer[:] = stream.read(buffer.nbytes)

    def close(self) -> None:
        if self._archive is not None:
            self._archive.close()
        self._archive = None

    def _opened(self, file: str) -> zipfile.ZipFile:
        if self._archive is None:
            raise StorageError(f"{shown(file)} in {self.root}: the reader is closed")
        return self._archive

    def _about(self, file: str) -> zipfile.ZipInfo:
        archive = self._opened(file)
        if (fault := unsafe_name_reason(file)) is not None:
            raise StorageError(f"{shown(file)}: refused as a file name below {self.root}, {fault}")
        try:
            return archive.getinfo(file)
        except KeyError:
            raise StorageError(f"{shown(file)} in {self.root}: no such file") from FileNotFoundError(file)


class TestZipReader(StorageReaderSuite):
    @pytest.fixture
    def make_reader(self, tmp_path: Path) -> MakeReader:
        numbers = iter(range(1_000))

        def make(files: Mapping[str, bytes]) -> ZipReader:
            path = tmp_path / f"{next(numbers)}.zip"
            with zipfile.ZipFile(path, "w") as archive:
                for name, content in files.items():
                    archive.writestr(name, content)
            return ZipReader(path)

        return make


def test_a_model_is_loaded_from_it(tmp_path: Path) -> None:
    stored, model = nn.Linear(5, 3), nn.Linear(5, 3)
    save_file(dict(stored.state_dict()), tmp_path / "model.safetensors")
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.write(tmp_path / "model.safetensors", "model.safetensors")
    with ZipReader(tmp_path / "model.zip") as reader:
        shardwise.load(model, reader)
    assert torch.equal(model.weight, stored.weight)
    assert torch.equal(model.bias, stored.bias)
