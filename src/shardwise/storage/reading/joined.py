"""Two storages that are read as one."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.storage.contract import ReadPolicy, StorageReader


class Beside(StorageReader):
    """A storage, and a second one whose files have names that begin with ``folder``.

    The policy is that of the first: it has nearly all of the bytes.
    """

    def __init__(self, first: StorageReader, second: StorageReader, folder: str) -> None:
        self._first = first
        self._second = second
        self._prefix = f"{folder}/"

    @property
    def root(self) -> str:
        return self._first.root

    @property
    def policy(self) -> ReadPolicy:
        return self._first.policy

    @property
    def files_opened(self) -> int:
        """Files opened of both, as far as they count them."""
        return sum(getattr(reader, "files_opened", 0) for reader in (self._first, self._second))

    def list(self) -> list[str]:
        return sorted([*self._first.list(), *(f"{self._prefix}{file}" for file in self._second.list())])

    def size(self, file: str) -> int:
        reader, name = self._of(file)
        return reader.size(name)

    def identity(self, file: str) -> str:
        reader, name = self._of(file)
        return reader.identity(name)

    def read_vectored(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        reader, name = self._of(file)
        reader.read_vectored(name, start, buffers)

    def close(self) -> None:
        """Close both."""
        try:
            self._first.close()
        finally:
            self._second.close()

    def _of(self, file: str) -> tuple[StorageReader, str]:
        if file.startswith(self._prefix):
            return self._second, file.removeprefix(self._prefix)
        return self._first, file
