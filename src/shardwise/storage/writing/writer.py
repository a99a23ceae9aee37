"""The whole contract of a storage that is written to: put these bytes here, then let others see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self, runtime_checkable

from shardwise.errors import ConfigError

_KIB = 1 << 10
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class WritePolicy:
    """How a storage may be written to; what a save is planned by. See [Note: Kinds of stores].

    Attributes:
        has_random_writes: several processes may write ranges of one file, in any order. Otherwise one process
            writes a file from its first byte to its last, and nobody sees it before :meth:`StorageWriter.sync`.
        can_rename: a file takes another's place in one step, in which either is seen whole.
        block_bytes: two processes on different machines must not write to the same block of this size, aligned to
            itself; 1 where nothing is lost.
        request_bytes: the most one write brings.
        concurrency: writes one rank keeps in flight.
        is_direct: large writes go around the system's page cache, so that a write waits for the disk, and a sync
            hardly does.

    Raises:
        ConfigError: for a number that is out of bounds.
    """

    has_random_writes: bool
    can_rename: bool
    block_bytes: int
    request_bytes: int
    concurrency: int
    is_direct: bool = False

    def __post_init__(self) -> None:
        for name in ("block_bytes", "request_bytes", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")


# [Note: Kinds of stores]
#
# A local disk takes ranges from anybody. A network file system does so too, but its clients keep whole pages: two
# machines that write to one page may undo each other's bytes, so a block belongs to one of them. An object store
# takes a file as a whole, from one writer, and shows it once it is complete; it knows no rename that is one step.

LOCAL_WRITES: Final = WritePolicy(
    has_random_writes=True, can_rename=True, block_bytes=1, request_bytes=16 * _MIB, concurrency=1
)
"""A file system of this machine."""

DISK_WRITES: Final = WritePolicy(
    has_random_writes=True,
    can_rename=True,
    block_bytes=1,
    request_bytes=16 * _MIB,
    concurrency=2,
    is_direct=True,
)
"""A disk of this machine that can be written to around the page cache: while one write waits for it, the next is
put together."""

NETWORK_FILE_SYSTEM_WRITES: Final = WritePolicy(
    has_random_writes=True, can_rename=True, block_bytes=_MIB, request_bytes=16 * _MIB, concurrency=4
)
"""NFS, Lustre and their like. A block of 1 MiB is a whole number of pages, and Lustre's smallest stripe."""

OBJECT_STORE_WRITES: Final = WritePolicy(
    has_random_writes=False, can_rename=False, block_bytes=1, request_bytes=16 * _MIB, concurrency=1
)
"""S3, GCS and whatever else fsspec writes to as a stream."""


INCOMPLETE: Final = ".incomplete"
"""How names of files end that are on their way to another name."""


@runtime_checkable
class StorageWriter(Protocol):
    """A folder whose files can be made, filled by range, and given a name.

    Files lie directly in the root; a name that leads anywhere else is refused with a
    :class:`~shardwise.errors.StorageError` (see :func:`shardwise.storage.names.why_not_plain`). All sizes and
    positions count bytes. :meth:`write` and :meth:`sync` may be called from several threads at once, and, where
    ``policy.has_random_writes``, from several processes with a writer of their own for the same root.

    Every failure is a StorageError that names the file, the cause and the fix (a full disk, a folder that cannot be
    written to). Nothing is durable, nor sure to be in order, before it is synced: a machine that dies may keep any
    subset of the effects since. What a process that dies leaves half made, beside the files it created, has a name
    that ends in :data:`INCOMPLETE`.
    """

    @property
    def root(self) -> str:
        """Where the files are, for messages."""
        ...

    @property
    def policy(self) -> WritePolicy:
        """How this storage may be written to; the same for as long as the writer lives."""
        ...

    def list(self) -> list[str]:
        """The names of all files in the root, sorted; none where there is no such folder yet."""
        ...

    def sizes(self) -> dict[str, int]:
        """The size in bytes of every file that :meth:`list` names; of a link, of what it leads to."""
        ...

    def read(self, file: str) -> bytes | None:
        """The content of a small file; None where there is none."""
        ...

    def create(self, file: str, nbytes: int) -> None:
        """Make a new file of this size, with space set aside for it where the storage can; its bytes are undefined.

        The root is made if it is not there. One process does this, before any writes, and syncs the file later,
        whether it wrote to it or not: only then is the size durable. That the file exists is an error.
        """
        ...

    def write(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        """Put the buffers, one after the other, at byte ``start`` of a created file. They never go beyond its size.

        Without ``policy.has_random_writes`` the writer is the one that created the file, and each call must begin
        where the last one ended.
        """
        ...

    def sync(self, file: str) -> None:
        """What this writer has written to the file is durable when this returns.

        Without ``policy.has_random_writes`` the file is complete then, and seen by others: not earlier; that bytes
        are missing is an error. There is nothing to do for a file to which nothing was written since the last time.
        After a failure the file's content is unknown, and stays so: it must be created again.
        """
        ...

    def rename(self, file: str, name: str) -> None:
        """Give a synced file another name in the root, in place of whatever had it; durable when this returns.

        Where not ``policy.can_rename``, this is a StorageError.
        """
        ...

    def publish(self, file: str, name: str) -> None:
        """Give a small file that is synced another name, in place of whatever had it; durable when this returns.

        The file is gone then. The other name changes in one step, on every storage (a store copies within itself);
        that the file has been removed meanwhile is a StorageError, and changes nothing.
        """
        ...

    def replace(self, file: str, content: bytes) -> None:
        """Put a small file in place of whatever has its name, in one step; durable when this returns."""
        ...

    def remove(self, file: str) -> None:
        """Remove a file, or drop one that is not seen yet; that there is none is no error.

        Not durable before :meth:`sync_names`.
        """
        ...

    def sync_names(self) -> None:
        """What has been created and removed in the root is durable when this returns."""
        ...

    def close(self) -> None:
        """Release what is held open; what was not synced may be lost, and what is not seen yet is dropped.

        Writing afterwards is a StorageError; closing twice is not.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
