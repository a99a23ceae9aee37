"""A storage of one's own, as small as it can be: the files inside of a zip archive, stored as they are."""

from __future__ import annotations

import os
import threading
import zipfile
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from shardwise.errors import StorageError
from shardwise.storage import LOCAL, ReadPolicy
from shardwise.storage.names import why_unsafe


class ZipReader:
    """Reads files of an archive that was made without compression; see ``shardwise.storage.StorageReader``."""

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
        return sorted(self._opened().namelist())

    def size(self, file: str) -> int:
        return self._about(file).file_size

    def identity(self, file: str) -> str:
        about = self._about(file)
        return f"{about.CRC} {about.file_size}"

    def read_into(self, file: str, start: int, buffer: memoryview) -> None:
        about, wanted = self._about(file), buffer.cast("B")
        with self._turn, self._opened().open(about) as stream:
            stream.seek(start)
            if start + wanted.nbytes > about.file_size or stream.readinto(wanted) != wanted.nbytes:
                raise StorageError(f"{file} in {self.root}: ends before byte {start + wanted.nbytes}")

    def read_vectored(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            self.read_into(file, start, buffer)
            start += buffer.nbytes

    def read(self, file: str, start: int, stop: int) -> bytes:
        found = bytearray(stop - start)
        self.read_into(file, start, memoryview(found))
        return bytes(found)

    def close(self) -> None:
        if self._archive is not None:
            self._archive.close()
        self._archive = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self) -> zipfile.ZipFile:
        if self._archive is None:
            raise StorageError(f"{self.root}: is closed")
        return self._archive

    def _about(self, file: str) -> zipfile.ZipInfo:
        fault = why_unsafe(file)
        if fault is not None:
            raise StorageError(f"{file!r} in {self.root}: {fault}")
        try:
            return self._opened().getinfo(file)
        except KeyError:
            raise StorageError(f"{file} in {self.root}: is not there") from FileNotFoundError(file)
