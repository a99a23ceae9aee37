"""The kinds of storages there are, as policies: how each likes to be read, and may be written to."""

from __future__ import annotations

from typing import Final

from shardwise.storage.contract import ReadPolicy, WritePolicy

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


MEMORY: Final = ReadPolicy(
    max_gap_bytes=0,
    request_bytes=1 << 30,
    concurrency=1,
    is_remote=False,
    bytes_per_s=1e10,
)
"""Bytes this process holds already: a request costs nothing, and a gap only its copy."""

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
