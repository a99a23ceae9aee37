"""The lines of a file that grows, or that another takes the place of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

MOST_LINE = 1 << 20
"""Bytes; ours are shorter."""

_CHUNK = 1 << 22
_TAIL = 512


class GrowingFile:
    """Reads on where it has come to.

    Whether the file is another one is told by the bytes before that place, which a file that was appended to has
    still: the number of an inode is given again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place = 0
        self._tail = b""
        self._rest = b""

    def read_on(self, begin_anew: Callable[[], None], take: Callable[[bytes], None]) -> None:
        """Hand over the whole lines that have come, without their ends; what is too long for a line is cut.

        Where another file is read now, ``begin_anew`` is called first. Where there is none, nothing is.

        Raises:
            OSError: it cannot be read.
        """
        if not self.path.is_file():  # a pipe would be waited for
            return
        try:
            file = self.path.open("rb", buffering=0)
        except FileNotFoundError:
            return
        with file:
            file.seek(self._place - len(self._tail))
            if file.read(len(self._tail)) != self._tail:
                self._place, self._tail, self._rest = 0, b"", b""
                file.seek(0)
                begin_anew()
            while chunk := file.read(_CHUNK):
                self._place += len(chunk)
                self._tail = (self._tail + chunk)[-_TAIL:]
                *whole, rest = (self._rest + chunk).split(b"\n")
                self._rest = rest[: MOST_LINE + 1]
                for line in whole:
                    take(line)
