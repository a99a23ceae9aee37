"""Storages in memory, for tests."""

import threading
import zlib
from collections.abc import Mapping, Sequence

from shardwise.errors import StorageError
from shardwise.storage.contract import (
    LOCAL_WRITES,
    ReadPolicy,
    StorageReader,
    StorageWriter,
    WritePolicy,
    ends_early,
)
from shardwise.storage.names import nested_name_reason, shown, unsafe_name_reason

MEMORY = ReadPolicy(max_gap_bytes=0, request_bytes=1 << 30, concurrency=1, is_remote=False, bytes_per_s=1e10)
"""Bytes this process holds already: a request costs nothing, and a gap only its copy."""


class MemoryReader(StorageReader):
    """Reads from a mapping of names to bytes; see :class:`~shardwise.storage.contract.StorageReader`.

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


class _MemoryStream:
    """A file that is written from its first byte to its last, and seen once it is whole."""

    def __init__(self, nbytes: int) -> None:
        self.content = bytearray(nbytes)
        self.position = 0


class MemoryWriter(StorageWriter):
    """Writes into a dictionary of bytearrays; see :class:`~shardwise.storage.contract.StorageWriter`.

    ``policy`` says what it pretends to be: a disk that takes ranges in any order (``LOCAL_WRITES``), or a store
    that takes whole files, each from one writer (``OBJECT_STORE_WRITES``). Writers of one ``files`` write to one
    storage, as processes do; what they have written is read with ``MemoryReader(writer.contents())``.

    Memory: all bytes of all files.
    """

    def __init__(
        self,
        files: dict[str, bytearray] | None = None,
        *,
        root: str = "<memory>",
        policy: WritePolicy = LOCAL_WRITES,
    ) -> None:
        self._root = root
        self._policy = policy
        self._files = {} if files is None else files
        self._streams: dict[str, _MemoryStream] = {}
        self._lock = threading.Lock()
        self._closed = False

    @property
    def root(self) -> str:
        return self._root

    @property
    def policy(self) -> WritePolicy:
        return self._policy

    def contents(self) -> dict[str, bytes]:
        """A copy of all files that are seen."""
        return {file: bytes(content) for file, content in sorted(self._files.copy().items())}

    def sizes(self) -> dict[str, int]:
        self._require_open(None)
        return {file: len(content) for file, content in sorted(self._files.copy().items())}

    def read(self, file: str) -> bytes | None:
        self._require_name(file)
        content = self._files.get(file)
        return None if content is None else bytes(content)

    def create(self, file: str, nbytes: int) -> None:
        self._require_name(file)
        if nbytes < 0:
            raise StorageError(f"{self._named(file)}: cannot be created with {nbytes} bytes. Pass 0 or more")
        fresh = _MemoryStream(nbytes)
        with self._lock:
            if self._policy.has_random_writes:
                # In one step: another writer of the same files may be creating it.
                is_new = self._files.setdefault(file, fresh.content) is fresh.content
            else:
                is_new = file not in self._files and self._streams.setdefault(file, fresh) is fresh
        if not is_new:
            raise StorageError(
                f"{self._named(file)}: creating it failed: it exists already. Remove it first, or use another name"
            )

    def write(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        self._require_name(file)
        flat = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        stop = start + sum(buffer.nbytes for buffer in flat)
        with self._lock:
            stream = self._streams.get(file)
            content = stream.content if stream is not None else None
            if self._policy.has_random_writes:
                content = self._files.get(file)
            if content is None:
                raise StorageError(f"{self._named(file)}: no such file is being written. Create it first")
            if not 0 <= start <= stop <= len(content):
                raise StorageError(
                    f"{self._named(file)}: bytes {start}..{stop} are to be written, but it was created with "
                    f"{len(content)} bytes. Create it with the size it will have"
                )
            if stream is not None:
                if start != stream.position:
                    raise StorageError(
                        f"{self._named(file)}: is written from its first byte to its last, and byte {start} does "
                        f"not follow on byte {stream.position}. Write in order"
                    )
                stream.position = stop
            view = memoryview(content)
            for buffer in flat:
                view[start : start + buffer.nbytes] = buffer
                start += buffer.nbytes

    def sync(self, file: str) -> None:
        self._require_name(file)
        with self._lock:
            stream = self._streams.get(file)
            if stream is None:
                return
            if stream.position < len(stream.content):
                raise StorageError(
                    f"{self._named(file)}: only {stream.position} of {len(stream.content)} bytes were written. "
                    "Write all of them before syncing it"
                )
            self._files[file] = self._streams.pop(file).content

    def rename(self, file: str, name: str) -> None:
        self._require_name(file)
        self._require_name(name)
        if not self._policy.can_rename:
            raise StorageError(f"{self._named(file)}: cannot be renamed in such a storage. Write it under its name")
        self._rename(file, name)

    def publish(self, file: str, name: str) -> None:
        self._require_name(file)
        self._require_name(name)
        self._rename(file, name)

    def _rename(self, file: str, name: str) -> None:
        with self._lock:
            if file not in self._files:
                raise StorageError(
                    f"{self._named(file)}: renaming it failed, no such file. Create and sync it first"
                )
            self._files[name] = self._files.pop(file)

    def replace(self, file: str, content: bytes) -> None:
        self._require_name(file)
        self._files[file] = bytearray(content)

    def remove(self, file: str) -> None:
        self._require_name(file)
        with self._lock:
            self._streams.pop(file, None)
            self._files.pop(file, None)

    def sync_names(self) -> None:
        self._require_open(None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._streams.clear()

    def _require_name(self, file: str) -> None:
        self._require_open(file)
        fault = nested_name_reason(file)
        if fault is not None:
            raise StorageError(
                f"{shown(file)}: refused as the name of a file in {self._root}, {fault}. Name a file of that folder"
            )

    def _require_open(self, file: str | None) -> None:
        if self._closed:
            raise StorageError(f"{self._named(file)}: the writer is closed. Open another one")

    def _named(self, file: str | None) -> str:
        return self._root if file is None else f"{shown(file)} in {self._root}"
