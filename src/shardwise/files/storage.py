"""The interfaces of storages (readers and writers of a folder of files) and the policies for using them.

A *storage* is a folder of files in any location. A *reader* reads byte ranges of them, a *writer* writes byte
ranges. A *policy* describes the access pattern that suits a storage. Plans size their requests by the policy and do
not depend on the kind of storage. A *request* is one range of one file. For a reader it is one call of
:meth:`StorageReader.read_vectored` with the destination buffers
(:class:`shardwise.transfer.file_requests.FileRequest`), and for a writer one call of :meth:`StorageWriter.write`
with the source buffers. A storage of one's own is a class that answers one of them. ``shardwise.load`` takes such a
reader. ``tests/support`` contains tests for both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, Self, runtime_checkable

from shardwise.core.errors import ConfigError, FormatError, StorageError
from shardwise.files.urls import shown


@dataclass(frozen=True, slots=True)
class ReadPolicy:
    """The access pattern for reads of a storage, from which reads are scheduled.

    A policy never changes the bytes that are read, only the requests for them. See [Note: Policies] in
    ``files/storage.py``.

    Attributes:
        max_gap_bytes: the maximum gap across which ranges of one file are joined.
        request_bytes: the maximum size of one request.
        concurrency: the number of requests that one rank keeps in flight.
        is_remote: whether every read crosses a network, and no page cache serves bytes that another rank has read.

    Raises:
        ConfigError: a number is out of bounds.
    """

    max_gap_bytes: int
    request_bytes: int
    concurrency: int
    is_remote: bool

    def __post_init__(self) -> None:
        if self.max_gap_bytes < 0:
            raise ConfigError(f"max_gap_bytes={self.max_gap_bytes} must be at least 0")
        for name in ("request_bytes", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")


class CannotListError(StorageError):
    """The error of a storage that can open files by name, but cannot list them."""


@runtime_checkable
class StorageReader(Protocol):
    """A folder of files that are read by byte range.

    File names are relative to the root and "/"-separated. A name that could lead out of the root is refused with a
    :class:`~shardwise.core.errors.StorageError` (see :func:`.urls.unsafe_name_reason`). All sizes and
    positions are in bytes. Every method may be called from several threads at once.

    A missing file is a StorageError whose ``__cause__`` is a :class:`FileNotFoundError`. Every other failure
    (permission, truncated file, I/O error, closed reader) is a StorageError with another cause or none.

    A reader can expect the following sequence of calls. None but the last changes its state, and any may be left
    out:

    1. :meth:`list`, or the names are known from an index.
    2. :meth:`size` and :meth:`read`, for headers and small files.
    3. :meth:`identity` of each file. Reads are planned for :attr:`policy`.
    4. :meth:`read_vectored` of ranges, from ``policy.concurrency`` threads at once.
    5. :meth:`identity` again.
    6. :meth:`close`.
    """

    @property
    def root(self) -> str:
        """The location of the files, for messages."""

    @property
    def policy(self) -> ReadPolicy:
        """The read policy of this storage, constant for the lifetime of the reader."""

    def list(self) -> list[str]:
        """Return the names of all files below the root, sorted.

        Raises:
            CannotListError: the storage cannot list its files. They can still be opened by name.
        """

    def size(self, file: str) -> int:
        """Return the file's size in bytes."""

    def identity(self, file: str) -> str:
        """Return a text that changes when the file's content is replaced, queried from the storage at every call.

        If the texts before the first read and after the last one are equal, all reads saw the same state. The text
        is as reliable as the storage's metadata: an ETag or a version, or else modification time and size.

        If ``policy.is_remote``, every rank receives the same text for the same state, so ranks may compare theirs.
        Otherwise it is only comparable on this machine.
        """

    def read_vectored(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        """Scatter the one contiguous range that begins at ``start`` into ``buffers``, in order.

        Buffers are writable and C-contiguous, of any format. A file that ends too early is a StorageError, and the
        content of the buffers is then undefined.
        """

    def read_into(self, file: str, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes that begin at ``start``, as :meth:`read_vectored` does."""
        self.read_vectored(file, start, (buffer,))

    def read(self, file: str, start: int, stop: int) -> bytes:
        """Return the bytes ``start <= i < stop``."""
        # A range that the file does not have is refused before it is allocated: the numbers may be hostile.
        nbytes = self.size(file)
        if not 0 <= start <= stop <= nbytes:
            raise ends_early(self.root, file, (start, stop), nbytes)
        buffer = bytearray(stop - start)
        self.read_vectored(file, start, (memoryview(buffer),))
        return bytes(buffer)

    def close(self) -> None:
        """Release all resources. Reading afterwards is a StorageError, but closing twice is not."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_limited(reader: StorageReader, file: str, max_nbytes: int) -> bytes:
    """Return the content of a file of at most ``max_nbytes`` bytes.

    Raises:
        FormatError: it is larger.
        StorageError: it cannot be read.
    """
    # The size first, so that a damaged file does not fill the memory.
    nbytes = reader.size(file)
    if nbytes > max_nbytes:
        what = f"{shown(file)} in {reader.root}"
        raise FormatError(f"{what}: has {nbytes} bytes, {max_nbytes} is the limit. Download or write it again")
    return reader.read(file, 0, nbytes)


def ends_early(root: str, file: str, wanted: tuple[int, int], nbytes: int) -> StorageError:
    """Return the error for a range of bytes (start, stop) beyond the end of a file of ``nbytes``."""
    return StorageError(
        f"{shown(file)} in {root}: bytes {wanted[0]}..{wanted[1]} were asked for, but the file ends at byte "
        f"{nbytes}. It is truncated, or was replaced while being read: download or write it again"
    )


def as_bytes(buffers: Sequence[memoryview]) -> tuple[list[memoryview], int]:
    """Return the non-empty buffers, cast to bytes, and their total size in bytes."""
    # As bytes, so that a buffer can be cut anywhere. Empty ones would only count for the limit of a call.
    flat = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
    return flat, sum(buffer.nbytes for buffer in flat)


@runtime_checkable
class FilePlaces(Protocol):
    """An additional interface of readers of local files."""

    def place(self, file: str) -> str:
        """Return a text that is equal on two ranks only if they open the same file in the same state."""


@dataclass(frozen=True, slots=True)
class WritePolicy:
    """The access pattern for writes to a storage, from which a save is planned.

    See [Note: Kinds of stores] in ``files/storage.py``.

    Attributes:
        block_bytes: two processes on different machines must not write to the same aligned block of this size. It
            is 1 if there is no such restriction.
        request_bytes: the maximum size of one write.
        concurrency: the number of writes that one rank keeps in flight.
        is_direct: large writes bypass the page cache, so that a write waits for the disk, and a sync hardly does.

    Raises:
        ConfigError: a number is out of bounds.
    """

    block_bytes: int
    request_bytes: int
    concurrency: int
    is_direct: bool = False

    def __post_init__(self) -> None:
        for name in ("block_bytes", "request_bytes", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")


INCOMPLETE: Final = ".incomplete"
"""Suffix of temporary names of files."""


@runtime_checkable
class StorageWriter(Protocol):
    """A folder in which files are created, written by range, and renamed.

    Files are directly in the root. A name that leads anywhere else is refused with a
    :class:`~shardwise.core.errors.StorageError` (see :func:`shardwise.files.urls.require_file_name`). All sizes and
    positions are in bytes. :meth:`write` and :meth:`sync` may be called from several threads at once, and from
    several processes that each have a writer for the same root.

    Every failure is a StorageError that contains the file, the cause and the remedy (a full disk, a folder without
    write permission). Nothing is durable or ordered before it is synced: if the machine dies, any subset of the
    later effects may survive. A process that dies may leave, in addition to the files it created, incomplete files
    with the suffix :data:`INCOMPLETE`.

    A writer can expect the following sequence of calls in a save:

    1. :meth:`create`, :meth:`write` and :meth:`sync` of the small file that locks the folder.
    2. :meth:`list` and :meth:`read`, to find what is there. What an interrupted save has left is removed.
    3. :meth:`create` of each file, by one process.
    4. :meth:`write` of ranges, by any process, each byte once.
    5. :meth:`sync` of each file, by every process that has written to it and by the one that has created it. Then
       :meth:`sync_names`, for files that keep these names.
    6. :meth:`sizes`, and then :meth:`replace` and :meth:`rename`. One rename commits the save.
    7. :meth:`remove` of the files of the older save, and of the lock, and :meth:`sync_names`.
    8. :meth:`close`.

    After a failure, the files of this save are removed, and then the lock.
    """

    @property
    def root(self) -> str:
        """The location of the files, for messages."""

    @property
    def policy(self) -> WritePolicy:
        """The write policy of this storage, constant for the lifetime of the writer."""

    def list(self) -> list[str]:
        """Return the names of all files in the root, sorted, or none if the folder does not exist yet."""
        return sorted(self.sizes())

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every file in :meth:`list`, for links the size of the target."""

    def read(self, file: str) -> bytes | None:
        """Return the content of a small file, or None if it does not exist."""

    def create(self, file: str, nbytes: int) -> None:
        """Create a new file of this size, with undefined content and, if the storage can do so, preallocated space.

        The root is created if it does not exist. One process does this before any writes, and must sync the file
        later even if it writes nothing to it, because only then is the size durable. It is an error if the file
        exists.
        """

    def write(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        """Write the buffers, one after the other, from byte ``start`` of a created file. Its size cannot grow."""

    def sync(self, file: str) -> None:
        """Make all bytes durable that this writer has written to the file.

        The call does nothing for a file without writes since the last sync. After a failure the file's content is
        unknown for good, and the file must be created again.
        """

    def rename(self, file: str, name: str) -> None:
        """Rename a synced file in the root, atomically replace any file of that name, and make the change durable.

        If the file has been removed in the meantime, this is a StorageError and nothing changes.
        """

    def replace(self, file: str, content: bytes) -> None:
        """Write a small file, atomically replace any file of its name, and make the change durable."""

    def remove(self, file: str) -> None:
        """Remove a file, without an error if it does not exist.

        The removal is not durable before :meth:`sync_names`.
        """

    def sync_names(self) -> None:
        """Make all creations and removals in the root durable."""

    def close(self) -> None:
        """Release all resources. Unsynced writes may be lost.

        Writing afterwards is a StorageError, but closing twice is not.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_KIB = 1 << 10
_MIB = 1 << 20

# [Note: Policies]
#
# A gap is worth reading if its transfer takes less time than another request: max_gap_bytes is about latency times
# the bandwidth of one stream. A request is large enough if its latency is small compared with its transfer, and
# small enough if several share the work and a retry costs little. Concurrency fills the bandwidth, because the
# other end limits one stream.

LOCAL: Final = ReadPolicy(
    max_gap_bytes=4 * _KIB,
    request_bytes=16 * _MIB,
    concurrency=4,
    is_remote=False,
)
"""A disk of this machine. A system call costs about a microsecond, in which a few KiB are copied, and the kernel
reads whole pages anyway: gaps of up to a page are free. Calls of 1 to 16 MiB run at the speed of memory; four
streams saturate an NVMe drive. Other ranks of the machine read the same bytes from the page cache."""


NETWORK_FILE_SYSTEM: Final = ReadPolicy(
    max_gap_bytes=1 * _MIB,
    request_bytes=16 * _MIB,
    concurrency=8,
    is_remote=True,
)
"""NFS, Lustre and similar. About half a millisecond per request at 2 GB/s per stream is 1 MiB: smaller gaps are
read. One stream has about 2 GB/s and many streams several times that, so eight are in flight; large reads do not
depend on the kernel's read-ahead, which is small by default. Each machine has its own page cache, so every machine
reads from the server."""


OBJECT_STORE: Final = ReadPolicy(
    max_gap_bytes=1 * _MIB,
    request_bytes=8 * _MIB,
    concurrency=32,
    is_remote=True,
)
"""S3, GCS, the hub, any HTTP server. Ten to a hundred milliseconds to the first byte, then 50 to 100 MB/s per
stream: latency times bandwidth is 1 to 8 MiB, and 32 requests in flight are needed for a gigabyte per second. The
latency of a request of 8 MiB is about its transfer time; with larger ones, one slow stream would delay the end."""


# [Note: Kinds of stores]
#
# Several processes can write ranges of one file to a local disk. To a network file system as well, but its clients
# cache whole pages: two machines that write to one page may overwrite each other's bytes, so only one of them
# writes to a block. Object stores are not written to: they take a complete file from one writer, have no atomic
# rename, and no file that only one process can create, so neither the lock nor the commit of a save works there.

LOCAL_WRITES: Final = WritePolicy(block_bytes=1, request_bytes=16 * _MIB, concurrency=1)
"""A file system of this machine."""


DISK_WRITES: Final = WritePolicy(block_bytes=1, request_bytes=16 * _MIB, concurrency=2, is_direct=True)
"""A disk of this machine with direct writes: while one write waits for the disk, the next one is assembled."""


NETWORK_FILE_SYSTEM_WRITES: Final = WritePolicy(block_bytes=_MIB, request_bytes=16 * _MIB, concurrency=4)
"""NFS, Lustre and similar. A block of 1 MiB is a whole number of pages, and Lustre's smallest stripe."""
