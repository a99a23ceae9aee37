"""The file of one observed rank: lines of JSON, each written in one go, appended and never changed.

[Note: A rank's file] ``observed/rank-00003.jsonl`` below the folder of a run. Each time a rank is observed it
appends a header, an object with ``observed`` (the version of this layout) and ``run`` (a name that all ranks have
agreed on, so that no clock is asked which ranks belong together), and then:

- samples: ``[0, t, anonymous, shared, file, peak, allocated, reserved, used, read, written, from_disk, to_disk]``,
  in KiB: memory of the host by kind, the most of it so far, memory of the accelerator (0 without), and what has
  been read and written since the process began;
- shares: ``[1, t, all, anonymous, shared, file]``, memory of the host, each page divided by those who have it;
- phases: ``[2, t, lane, name]`` begins one, ``[3, t, lane]`` ends the innermost; a lane is a thread;
- facts: ``{"t": ..., "tell": "load", ...}``;
- an end: ``{"t": ..., "end": true, "peak_kib": ...}``, the kernel's count of the most host memory.

``t`` is in seconds since the header's ``began``, which is in seconds since 1970. Whatever ends a process, all lines
but the last are whole, and who reads passes over what is not.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.errors import StorageError

FOLDER = "observed"
VERSION = 1
SAMPLE, SHARES, BEGIN, END = 0, 1, 2, 3

SAMPLED = (
    "t",
    "anonymous",
    "shared",
    "file",
    "peak",
    "allocated",
    "reserved",
    "used",
    "read",
    "written",
    "from_disk",
    "to_disk",
)
"""What a sample has, in order."""

SHARED = ("t", "all", "anonymous", "shared", "file")


def name_of(rank: int) -> str:
    return f"rank-{rank:05d}.jsonl"


class RankFile:
    """Appends lines for one rank, which no other process does meanwhile.

    Raises:
        StorageError: it cannot be written, or another process writes it.
    """

    def __init__(self, run: Path, rank: int) -> None:
        self.path = run / FOLDER / name_of(rank)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StorageError(f"{self.path}: it cannot be written ({error.strerror or error})") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._file)
            raise StorageError(
                f"{self.path}: another process is observed into this file; name another folder, and begin to "
                "observe once the process group is there (torch.distributed.init_process_group), which tells "
                "ranks apart"
            ) from error
        except OSError:  # a file system without locks
            pass
        try:
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":  # a rank was killed, or the disk was full
                os.write(self._file, b"\n")
        except OSError as error:
            os.close(self._file)
            raise StorageError(f"{self.path}: it cannot be written ({error.strerror or error})") from error

    def write(self, line: Sequence[Any] | Mapping[str, Any]) -> None:
        """Append a line; raises OSError."""
        text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        while text := text[os.write(self._file, text) :]:  # a disk that is almost full takes a part
            pass

    def close(self) -> None:
        os.close(self._file)
