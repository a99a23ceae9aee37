"""A storage of one's own, as small as it can be: the files inside of a zip archive, stored as they are."""

from __future__ import annotations

import os
import threading
import zipfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from shardwise.errors import StorageError
from shardwise.storage import LOCAL, ReadPolicy
from shardwise.storage.names import shown, why_unsafe


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
        return sorted(self._opened("the list").namelist())

    def size(self, file: str) -> int:
        return self._about(file).file_size

    def identity(self, file: str) -> str:
        about = self._about(file)
        return f"{about.CRC} {about.file_size}"

    def read_into(self, file: str, start: int, buffer: memoryview) -> None:
        self.read_vectored(file, start, [buffer])

    def read_vectored(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        flat = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        about = self._range(file, start, start + sum(buffer.nbytes for buffer in flat))
        with self._turn, self._opened(file).open(about) as stream:
            stream.seek(start)
            for buffer in flat:
                buffer[:] = stream.read(buffer.nbytes)

    def read(self, file: str, start: int, stop: int) -> bytes:
        about = self._range(file, start, stop)
        with self._turn, self._opened(file).open(about) as stream:
            stream.seek(start)
            return stream.read(stop - start)

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

    def _opened(self, file: str) -> zipfile.ZipFile:
        if self._archive is None:
            raise StorageError(f"{shown(file)} in {self.root}: the reader is closed; open another one")
        return self._archive

    def _range(self, file: str, start: int, stop: int) -> zipfile.ZipInfo:
        about = self._about(file)
        if not 0 <= start <= stop <= about.file_size:
            raise StorageError(
                f"{shown(file)} in {self.root}: bytes {start}..{stop} were asked for, of {about.file_size}; "
                "it is truncated: provide it again"
            )
        return about

    def _about(self, file: str) -> zipfile.ZipInfo:
        archive = self._opened(file)
        if (fault := why_unsafe(file)) is not None:
            raise StorageError(f"{shown(file)}: refused as a file name below {self.root}, {fault}")
        try:
            return archive.getinfo(file)
        except KeyError:
            raise StorageError(f"{shown(file)} in {self.root}: no such file") from FileNotFoundError(file)


def open_zipped(url: str, storage_options: Mapping[str, Any]) -> ZipReader:
    """The archive that ``zipped:///path/to/archive`` names; a line of ``SCHEMES`` leads here."""
    if storage_options:
        raise StorageError(f"{shown(url)}: takes no storage_options; leave {sorted(storage_options)} out")
    return ZipReader(url.removeprefix("zipped://"))
