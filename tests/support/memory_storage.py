"""Storages in memory, for tests."""

import zlib
from collections.abc import Mapping, Sequence

from shardwise.core.errors import StorageError
from shardwise.files.storage import ReadPolicy, StorageReader, ends_early
from shardwise.files.urls import shown, unsafe_name_reason

MEMORY = ReadPolicy(max_gap_bytes=0, request_bytes=1 << 30, concurrency=1, is_remote=False)
"""Bytes this process holds already: a request costs nothing, and a gap only its copy."""


class MemoryReader(StorageReader):
    """Reads from a mapping of names to bytes; see :class:`~shardwise.files.storage.StorageReader`.

    ``bytes_read`` and ``reads`` count what has been asked for so far (not exact when several threads read).
    """

    def __init__(self, files: Mapping[str, bytes], *, root: str = "<memory>", policy: ReadPolicy = MEMORY) -> None:
        self._root = root
        self._policy = policy
        self._files = dict(files)
        self._closed = False
        self.bytes_read = 0
        self.reads = 0

    @property
    def root(self) -> str:
        return self._root

    @property
    def policy(self) -> ReadPolicy:
        return self._policy

    def list(self) -> list[str]:
        return sorted(self._files)

    def size(self, file: str) -> int:
        return len(self._content(file))

    def identity(self, file: str) -> str:
        content = self._content(file)
        return f"crc32 {zlib.crc32(content):08x}, {len(content)} bytes"

    def read_vectored(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        flat = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        stop = start + sum(buffer.nbytes for buffer in flat)
        source = memoryview(self._range(file, start, stop))
        position = 0
        for buffer in flat:
            buffer[:] = source[position : position + buffer.nbytes]
            position += buffer.nbytes

    def read(self, file: str, start: int, stop: int) -> bytes:
        return self._range(file, start, stop)

    def close(self) -> None:
        self._closed = True

    def _range(self, file: str, start: int, stop: int) -> bytes:
        content = self._content(file)
        if not 0 <= start <= stop <= len(content):
            raise ends_early(self._root, file, (start, stop), len(content))
        self.reads += 1
        self.bytes_read += stop - start
        return content[start:stop]

    def _content(self, file: str) -> bytes:
        if self._closed:
            raise StorageError(f"{shown(file)} in {self._root}: the reader is closed. Open another one")
        fault = unsafe_name_reason(file)
        if fault is not None:
            raise StorageError(
                f"{shown(file)}: refused as a file name below {self._root}, {fault}; "
                "Name files relative to the checkpoint's folder"
            )
        if file not in self._files:
            raise StorageError(
                f"{shown(file)} in {self._root}: no such file. Check the name"
            ) from FileNotFoundError(file)
        return self._files[file]
