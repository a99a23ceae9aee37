"""The whole contract of a storage that is read: give me these bytes."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from shardwise.errors import StorageError
from shardwise.storage.reading.policy import ReadPolicy


class CannotListError(StorageError):
    """A storage gives files by name, but does not tell which there are."""


@runtime_checkable
class StorageReader(Protocol):
    """A folder of files whose bytes can be asked for by range.

    Files are named relative to the root, "/"-separated; a name that could lead out of the root is refused
    with a :class:`~shardwise.errors.StorageError` (see :func:`shardwise.storage.names.why_unsafe`). All sizes
    and positions count bytes. Every method may be called from several threads at once.

    A file that is not there is a StorageError whose ``__cause__`` is a :class:`FileNotFoundError`; every
    other failure (permission, truncated file, I/O error, reader closed) is one with another cause or none.
    """

    @property
    def root(self) -> str:
        """Where the files are, for messages."""
        ...

    @property
    def policy(self) -> ReadPolicy:
        """How this storage likes to be read; the same for as long as the reader lives."""
        ...

    def list(self) -> list[str]:
        """The names of all files below the root, sorted.

        Raises:
            CannotListError: for a storage that does not tell; its files can be asked for by name.
        """
        ...

    def size(self, file: str) -> int:
        """The file's size in bytes."""
        ...

    def identity(self, file: str) -> str:
        """A text that changes when the file's content is replaced; asked of the storage anew at every call.

        Ask before the first and after the last read, and compare: equal means that all reads saw one state. It
        is as good as what the storage tells: an ETag or a version, else time of change and size.

        Where ``policy.is_remote``, every rank is given the same text for the same state, so ranks may compare
        theirs. Elsewhere it means something on this machine only.
        """
        ...

    def read_into(self, file: str, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` exactly with the bytes from ``start`` on.

        ``buffer`` is writable and C-contiguous, of any format. A file that ends too early is a StorageError;
        what the buffer holds then is undefined.
        """
        ...

    def read_vectored(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        """Scatter the one contiguous range that begins at ``start`` into ``buffers``, in their order."""
        ...

    def read(self, file: str, start: int, stop: int) -> bytes:
        """The bytes ``start <= i < stop``."""
        ...

    def close(self) -> None:
        """Release what is held open. Reading afterwards is a StorageError; closing twice is not."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


@runtime_checkable
class PageCache(Protocol):
    """What a reader can do besides when the system keeps in memory what it has read."""

    def cached(self, file: str, start: int, stop: int) -> memoryview | None:
        """The bytes ``start <= i < stop`` as a view of the system's page cache; None where it lacks some of them.

        Whether it has them is found out by samples. The view must not be written to. Should the file be cut short
        while the view is in use, the process is ended by the system (SIGBUS), as with every memory-mapped file.
        """
        ...


@runtime_checkable
class FilePlaces(Protocol):
    """What a reader of files of this machine can do besides."""

    def place(self, file: str) -> str:
        """A text that two ranks have in common only where they open one file, and its state is the same."""
        ...
