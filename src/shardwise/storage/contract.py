"""Defines the interfaces of storages (readers and writers of a folder of files) and the policies for using them.

A *storage* is a folder of files, wherever it lies. A *reader* gives bytes of them by range, a *writer* takes them.
A *policy* has the preferences of a storage. Plans depend on the policy, not on the storage. A *request* is one
range of one file: for a reader one call of :meth:`StorageReader.read_vectored`, whose buffers are the targets of
the bytes (:class:`shardwise.planning.load_memory.ReadRequest`). For a writer it is one of
:meth:`StorageWriter.write`, whose buffers are their sources. A storage of your own is a subclass of one of them,
passed to a public function. ``tests/harness`` has their tests.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, Self, runtime_checkable

from shardwise.errors import ConfigError, StorageError
from shardwise.storage.names import shown


@dataclass(frozen=True, slots=True)
class ReadPolicy:
    """Preferred request sizes and concurrency of a storage, used to schedule reads.

    A policy affects how bytes are requested, never which bytes arrive. See [Note: Policies] in
    ``storage/contract.py``.

    Attributes:
        max_gap_bytes: ranges of one file are joined across unwanted gaps up to this.
        request_bytes: the maximum size of a request.
        concurrency: requests one rank keeps in flight.
        is_remote: every read crosses a network, and there is no page cache shared by ranks.
        bytes_per_s: expected read bandwidth of one machine, to compare reading twice with sending.

    Raises:
        ConfigError: for a number that is out of bounds.
    """

    max_gap_bytes: int
    request_bytes: int
    concurrency: int
    is_remote: bool
    bytes_per_s: float

    def __post_init__(self) -> None:
        if self.max_gap_bytes < 0:
            raise ConfigError(f"max_gap_bytes={self.max_gap_bytes} must be at least 0")
        for name in ("request_bytes", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if not (math.isfinite(self.bytes_per_s) and self.bytes_per_s > 0):
            raise ConfigError(f"bytes_per_s={self.bytes_per_s} must be a positive number of bytes per second")


class CannotListError(StorageError):
    """The storage returns files by name, but cannot list them."""


@runtime_checkable
class StorageReader(Protocol):
    """Interface of a folder of files that are read by byte ranges.

    Files are named relative to the root, "/"-separated. A name that could lead out of the root is rejected with a
    :class:`~shardwise.errors.StorageError` (see :func:`shardwise.storage.names.why_unsafe`). All sizes and
    positions count bytes. Every method may be called from several threads at once.

    A missing file is a StorageError whose ``__cause__`` is a :class:`FileNotFoundError`. Every other failure
    (permission, truncated file, I/O error, closed reader) has another cause or none.
    """

    @property
    def root(self) -> str:
        """Location of the files, for messages."""
        ...

    @property
    def policy(self) -> ReadPolicy:
        """Read policy of this storage, constant for the life of the reader."""
        ...

    def list(self) -> list[str]:
        """The names of all files below the root, sorted.

        Raises:
            CannotListError: the storage cannot list files. They can be read by name.
        """
        ...

    def size(self, file: str) -> int:
        """The file's size in bytes."""
        ...

    def identity(self, file: str) -> str:
        """Return a string that changes when the file's content is replaced. Not cached.

        Call it before the first and after the last read. If both are equal, all reads saw one state. Its
        reliability is that of the storage: an ETag or a version, otherwise modification time and size.

        Where ``policy.is_remote``, every rank is given the same text for the same state, so ranks may compare
        theirs. Elsewhere it means something on this machine only.
        """
        ...

    def read_vectored(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        """Scatter the one contiguous range that begins at ``start`` into ``buffers``, in their order.

        Buffers are writable and C-contiguous, of any format. A file that ends too early is a StorageError, and the
        content of the buffers is undefined.
        """
        ...

    def read_into(self, file: str, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` exactly with the bytes from ``start`` on, as :meth:`read_vectored` does."""
        self.read_vectored(file, start, (buffer,))

    def read(self, file: str, start: int, stop: int) -> bytes:
        """The bytes ``start <= i < stop``."""
        # A range that the file does not have is refused before it is allocated: the numbers may be hostile.
        nbytes = self.size(file)
        if not 0 <= start <= stop <= nbytes:
            raise ends_early(self.root, file, (start, stop), nbytes)
        buffer = bytearray(stop - start)
        self.read_vectored(file, start, (memoryview(buffer),))
        return bytes(buffer)

    def close(self) -> None:
        """Release open resources. Reading afterwards is a StorageError. Closing twice is allowed."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ends_early(root: str, file: str, wanted: tuple[int, int], nbytes: int) -> StorageError:
    """The error for a range of bytes, start and stop, that a file of ``nbytes`` does not have."""
    return StorageError(
        f"{shown(file)} in {root}: bytes {wanted[0]}..{wanted[1]} were asked for, but the file ends at byte "
        f"{nbytes}. It is truncated, or was replaced while being read: download or write it again"
    )


def as_bytes(buffers: Sequence[memoryview]) -> tuple[list[memoryview], int]:
    """The buffers that are not empty, as bytes, and how many bytes they have together."""
    flat = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
    return flat, sum(buffer.nbytes for buffer in flat)


@runtime_checkable
class FilePlaces(Protocol):
    """Additional method of readers of local files."""

    def place(self, file: str) -> str:
        """Return a string that is equal on two ranks only if they open the same file in the same state."""
        ...


@dataclass(frozen=True, slots=True)
class WritePolicy:
    """Capabilities of a storage for writing, used to plan saves.

    See [Note: Kinds of stores] in ``storage/contract.py``.

    Attributes:
        has_random_writes: several processes may write ranges of one file, in any order. Otherwise one process
            writes a file from its first byte to its last, and nobody sees it before :meth:`StorageWriter.sync`.
        can_rename: a file takes another's place in one step, in which either is seen whole.
        block_bytes: two processes on different machines must not write to the same aligned block of this size. 1 if
            there is no such limit.
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


INCOMPLETE: Final = ".incomplete"
"""How names of files end that are on their way to another name."""


@runtime_checkable
class StorageWriter(Protocol):
    """A folder whose files can be made, filled by range, and given a name.

    Files lie directly in the root. A name that leads anywhere else is rejected with a
    :class:`~shardwise.errors.StorageError` (see :func:`shardwise.storage.names.why_not_plain`). All sizes and
    positions count bytes. :meth:`write` and :meth:`sync` may be called from several threads at once, and, where
    ``policy.has_random_writes``, from several processes with a writer of their own for the same root.

    Every failure is a StorageError that names the file, the cause and the fix (a full disk, a folder that cannot be
    written to). Nothing is durable, nor sure to be in order, before it is synced: a machine that dies may keep any
    subset of the effects since. Partial files left by a process that dies, other than those it created, have names
    that end in :data:`INCOMPLETE`.
    """

    @property
    def root(self) -> str:
        """Location of the files, for messages."""
        ...

    @property
    def policy(self) -> WritePolicy:
        """Write policy of this storage, constant for the life of the writer."""
        ...

    def list(self) -> list[str]:
        """Return the names of all files in the root, sorted. Empty if the folder does not exist yet."""
        return sorted(self.sizes())

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every file that :meth:`list` names. For a link, that of its target."""
        ...

    def read(self, file: str) -> bytes | None:
        """Return the content of a small file, or None if it does not exist."""
        ...

    def create(self, file: str, nbytes: int) -> None:
        """Create a file of this size, with allocated space if the storage supports it. Its bytes are undefined.

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
        """Make the written content of a file durable.

        Without ``policy.has_random_writes`` the file becomes complete and visible to others with this call, not
        before. Missing bytes are an error. There is nothing to do for a file to which nothing was written since the
        last time. After a failure the file's content is unknown, and stays so: it must be created again.
        """
        ...

    def rename(self, file: str, name: str) -> None:
        """Rename a synced file in the root, replacing any file of that name. Durable when this returns.

        Where not ``policy.can_rename``, this is a StorageError.
        """
        ...

    def publish(self, file: str, name: str) -> None:
        """Rename a small synced file, replacing any file of that name. Durable when this returns.

        The file is gone then. The replacement is atomic on every storage (a store copies within itself). If the
        file has been removed meanwhile, this is a StorageError and changes nothing.
        """
        self.rename(file, name)

    def replace(self, file: str, content: bytes) -> None:
        """Write a small file, atomically replacing any file of its name. Durable when this returns."""
        ...

    def remove(self, file: str) -> None:
        """Remove a file, or drop one that is not visible yet. A missing file is not an error.

        Not durable before :meth:`sync_names`.
        """
        ...

    def sync_names(self) -> None:
        """Make created, renamed and removed names in the root durable."""
        ...

    def close(self) -> None:
        """Release open resources. Unsynced bytes may be lost, and files that are not visible yet are dropped.

        Writing afterwards is a StorageError. Closing twice is allowed.
        """
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_KIB = 1 << 10
_MIB = 1 << 20

# [Note: Policies]
#
# A gap is worth reading when its transfer takes less time than one more request: max_gap_bytes is about latency
# times the bandwidth of one stream. A request is big enough when latency is small beside its transfer, and
# small enough that several share the work and a repeated one costs little. Concurrency is what fills the
# bandwidth: one stream is bounded by the other end, not by us.

LOCAL: Final = ReadPolicy(
    max_gap_bytes=4 * _KIB,
    request_bytes=16 * _MIB,
    concurrency=4,
    is_remote=False,
    bytes_per_s=3e9,
)
"""A disk of this machine. A system call costs about a microsecond, in which a few KiB are copied, and the page
around a wanted byte is read anyway: gaps of up to a page are free. Calls of 1 to 16 MiB run at the speed of
memory; four streams keep an NVMe drive busy. Of what one rank reads, others on the machine are served from the
page cache."""


NETWORK_FILE_SYSTEM: Final = ReadPolicy(
    max_gap_bytes=1 * _MIB,
    request_bytes=16 * _MIB,
    concurrency=8,
    is_remote=True,
    bytes_per_s=2e9,
)
"""NFS, Lustre and their like. About half a millisecond per request at 2 GB/s per stream is 1 MiB: smaller gaps
are read through. One stream brings about 2 GB/s and many streams several times that, so eight are kept in
flight; explicit large reads step around the kernel's read-ahead, which is small by default. The page cache of
one machine holds what it has read, but every machine asks the server."""


OBJECT_STORE: Final = ReadPolicy(
    max_gap_bytes=1 * _MIB,
    request_bytes=8 * _MIB,
    concurrency=32,
    is_remote=True,
    bytes_per_s=1e9,
)
"""S3, GCS, the hub, any HTTP server. Ten to a hundred milliseconds to the first byte, then 50 to 100 MB/s per
stream: latency times bandwidth is 1 to 8 MiB, and 32 requests in flight are needed for a gigabyte per second.
Requests of 8 MiB wait about as long as they transfer; longer ones would leave the last of a range to one slow
stream."""


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
"""S3, GCS and whatever else is written to as a stream."""
