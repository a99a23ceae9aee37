"""An object store of a folder as a process, so that a measurement shares no interpreter with it."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from tests.support.http_store import Counters, HttpStore


class HttpStoreProcess:
    """An :class:`HttpStore` of a folder in a process of its own, so that it shares no interpreter with the reader.

    It ends with the ``with`` block, and with the process that started it.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        latency_s: float = 0.0,
        bytes_per_s: float | None = None,
    ) -> None:
        options = {"latency_s": latency_s, "bytes_per_s": bytes_per_s}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.http_process", os.fspath(folder), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        answer = self._read_line()
        self.url: str = answer["url"]

    @property
    def counters(self) -> Counters:
        assert self._process.stdin is not None
        self._process.stdin.write("counters\n")
        self._process.stdin.flush()
        return Counters(**self._read_line())

    def close(self) -> None:
        """End the server; closing twice is fine."""
        # It ends when there is nothing more to read.
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read_line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.communicate()
            raise RuntimeError(f"the server's process ended with exit code {self._process.returncode}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _main(folder: str, options: str) -> None:
    with HttpStore(folder, **json.loads(options)) as store:
        _tell({"url": store.url})
        for _ in sys.stdin:
            _tell(asdict(store.counters))


def _tell(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _main(*sys.argv[1:])
