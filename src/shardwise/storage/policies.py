"""The kinds of storages there are, as policies, and which kind of file system a path lies on."""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath
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


_NETWORK = re.compile(
    "9p|afs|beegfs|ceph|cifs|glusterfs|gpfs|lustre|nfs4?|orangefs|panfs|pvfs2|smb3|smbfs|virtiofs|wekafs"
    r"|fuse\.(?!(bindfs|fuse-overlayfs|lxcfs|mergerfs|ntfs-3g|snapfuse|squashfuse)$).*"
)

_TABLE = "/proc/self/mountinfo"

_OCTAL = re.compile(r"\\([0-7]{3})")


def type_at(path: str) -> str | None:
    """The type of the file system that a path, which need not exist, lies on; None where nobody tells."""
    try:
        with open(_TABLE, encoding="utf-8", errors="surrogateescape") as table:
            return file_system_type(os.path.realpath(path), table.read())
    except OSError:  # not Linux, or no /proc
        return None


def file_system_type(path: str, mountinfo: str) -> str | None:
    """The type ("ext4", "nfs4", "fuse.gcsfuse") of the file system that holds ``path``; None where it is not told.

    ``path`` is absolute and free of links; ``mountinfo`` is the text of ``/proc/self/mountinfo`` (proc(5)).
    """
    found: str | None = None
    depth = -1
    place = PurePosixPath(path)
    for line in mountinfo.splitlines():
        # 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw: optional fields end with the dash.
        before, dash, after = line.partition(" - ")
        fields, kinds = before.split(" "), after.split(" ")
        if not dash or len(fields) < 5 or not kinds[0]:
            continue
        point = PurePosixPath(_OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4]))
        # Of two mounts on one folder the later one is on top.
        if place.is_relative_to(point) and len(point.parts) >= depth:
            found, depth = kinds[0], len(point.parts)
    return found


def is_network(kind: str | None) -> bool:
    """Whether files of this type of file system are fetched from another machine, or from outside a virtual one."""
    return _NETWORK.fullmatch(kind or "") is not None
