"""Output to a console that may be gone: a closed terminal, or a pipe whose reader has ended."""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class _DroppingStream:
    """A text stream that drops its output once it cannot be written, instead of raising OSError."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.written = (0.0, False)
        """When it was last written to, by the monotonic clock, and whether that line is not ended."""

    def write(self, text: str) -> int:
        if text:
            self.written = (time.monotonic(), not text.endswith(("\n", "\r")))
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        """Send what is buffered, and all later output of this process, nowhere. Python flushes it again at exit."""
        if isinstance(error, BlockingIOError):  # the console is slow, not gone
            return
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def last_output() -> tuple[float, bool]:
    """Return when this process last wrote to stdout or stderr, and whether that line is not ended.

    Of output within :func:`surviving_console`. 0 seconds if there is none.
    """
    return max(getattr(stream, "written", (0.0, False)) for stream in (sys.stdout, sys.stderr))


@contextmanager
def surviving_console() -> Iterator[None]:
    """Have writes to stdout and stderr raise nothing within the block, whatever becomes of the console."""
    before = sys.stdout, sys.stderr
    streams = [stream and _DroppingStream(stream) for stream in before]  # None if it was closed from the start
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        for stream in filter(None, streams):
            stream.flush()
        sys.stdout, sys.stderr = before
