"""How a storage likes to be read: what a schedule of reads is made by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from shardwise.errors import ConfigError

_KIB = 1 << 10
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ReadPolicy:
    """How a storage likes to be read; what a schedule of reads is made by.

    A policy never changes which bytes arrive, only how they are asked for. See [Note: Policies].

    Attributes:
        max_gap_bytes: ranges of one file are joined across unwanted gaps up to this.
        request_bytes: the most one request asks for.
        concurrency: requests one rank keeps in flight.
        is_remote: every read crosses a network, and no page cache serves what another rank has read.
        bytes_per_s: what one machine can expect to read, to weigh reading twice against sending.

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
            raise ConfigError(f"max_gap_bytes={self.max_gap_bytes} is negative; 0 joins only what touches")
        if self.request_bytes < 1:
            raise ConfigError(f"request_bytes={self.request_bytes}: a request asks for at least one byte")
        if self.concurrency < 1:
            raise ConfigError(f"concurrency={self.concurrency}: at least one request must be in flight")
        if not (math.isfinite(self.bytes_per_s) and self.bytes_per_s > 0):
            raise ConfigError(f"bytes_per_s={self.bytes_per_s} is not a positive number of bytes per second")


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
