"""What this process has of the host: memory by kind, and bytes it has read and written, as Linux counts them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from shardwise.errors import ConfigError

_STATUS = (b"RssAnon:", b"RssShmem:", b"RssFile:", b"VmHWM:")
_TRAFFIC = (b"rchar:", b"wchar:", b"read_bytes:", b"write_bytes:")
_SHARES = (b"Pss:", b"Pss_Anon:", b"Pss_Shmem:", b"Pss_File:")


@dataclass(frozen=True, slots=True)
class HostUse:
    """Memory in KiB. The peak is that of the whole process, by the kernel's own count."""

    anonymous_kib: int
    shared_kib: int
    """Of shared memory, counted whole by every rank that has touched it."""
    file_kib: int
    """Of files that are mapped; the kernel may take these back."""
    peak_kib: int


class OwnMemory:
    """Reads what the kernel counts of this process. Each reading takes some tens of microseconds.

    Raises:
        ConfigError: this system does not count memory by kind.
    """

    def __init__(self) -> None:
        try:
            self._status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"this process cannot be observed: {_NEEDED} ({error.strerror or error})") from error
        try:
            self._traffic: int | None = os.open("/proc/self/io", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # not shown to everybody
            self._traffic = None
        try:
            self.now()
        except (ValueError, OSError) as error:
            self.close()
            raise ConfigError(f"this process cannot be observed: {_NEEDED} ({error})") from error

    def now(self) -> HostUse:
        """Memory, this moment."""
        return HostUse(*_numbers(os.pread(self._status, 8192, 0), _STATUS))

    def traffic(self) -> Sequence[int]:
        """Bytes read and written by system calls, and those that came from, and went to, a disk."""
        if self._traffic is None:
            return (0, 0, 0, 0)
        return _numbers(os.pread(self._traffic, 1024, 0), _TRAFFIC)

    def shares(self) -> Mapping[str, int]:
        """Memory with each page divided by the processes that have it, in KiB, by kind; empty where nobody tells.

        The kernel walks all pages: milliseconds for gigabytes.
        """
        try:
            descriptor = os.open("/proc/self/smaps_rollup", os.O_RDONLY | os.O_CLOEXEC)
            try:
                text = os.read(descriptor, 8192)
            finally:
                os.close(descriptor)
            found = _numbers(text, _SHARES)
        except (OSError, ValueError):
            return {}
        return dict(zip(("all", "anonymous", "shared", "file"), found, strict=True))

    def close(self) -> None:
        os.close(self._status)
        if self._traffic is not None:
            os.close(self._traffic)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_NEEDED = "Linux's /proc/self/status with memory by kind (RssAnon, kernel 4.5 or newer) is needed"


def _numbers(text: bytes, names: Sequence[bytes]) -> list[int]:
    """The number behind each name.

    Raises:
        ValueError: one is not there.
    """
    text = b"\n" + text
    found = []
    for name in names:
        _, there, rest = text.partition(b"\n" + name)
        if not there:
            raise ValueError(f"no {name.decode()} in it")
        found.append(int(rest.split(None, 1)[0]))
    return found
