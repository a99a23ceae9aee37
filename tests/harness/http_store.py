"""An object store on this machine: an HTTP server with ranges, as slow and as faulty as one wishes.

Longer than other files: it is one server, whose state stands under one lock.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from http import HTTPStatus
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeAlias
from urllib.parse import unquote

from shardwise.errors import ConfigError
from shardwise.storage.names import why_unsafe

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_SERVER = re.compile(r"^http://[^/]*/")
_SEND_BYTES = 1 << 20
_SLICE_S = 0.005
_CREDIT_S = 0.02
_LOGGED = 100_000


@dataclass(frozen=True, slots=True)
class Status:
    """Answer with this status, and ``Retry-After`` where it is given."""

    code: int
    retry_after_s: int | None = None


@dataclass(frozen=True, slots=True)
class Stall:
    """Send so many bytes of the body, then nothing for a while, then the rest."""

    seconds: float
    after_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Truncate:
    """Announce the whole body, send so many bytes of it, and close the connection."""

    after_bytes: int


@dataclass(frozen=True, slots=True)
class Reset:
    """Send so many bytes of the body, then reset the connection (RST); None: in place of any answer."""

    after_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class IgnoreRange:
    """Answer 200 with the whole file, whatever range is asked for."""


@dataclass(frozen=True, slots=True)
class Shift:
    """Answer with a range that begins so many bytes later than the one asked for."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Redirect:
    """Answer 302 with this place, to which the file's name is added."""

    folder_url: str


Disturbance: TypeAlias = Status | Stall | Truncate | Reset | IgnoreRange | Shift | Redirect


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """What was asked for, and the status of the answer (0: none was given). ``stop`` is exclusive."""

    method: str
    file: str
    start: int
    stop: int
    status: int
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Counters:
    """What a store has done so far. ``bytes_sent`` counts bodies; ``most_at_once`` requests being served."""

    requests: int
    bytes_sent: int
    connections: int
    most_at_once: int


@dataclass(slots=True)
class _Injection:
    fault: Disturbance
    pattern: str
    skip: int
    left: int | None


@dataclass(frozen=True, slots=True)
class _StoredBytes:
    descriptor: int
    nbytes: int
    etag: str


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    file: str
    headers: Mapping[str, str]


class _Bandwidth:
    """A token bucket: bytes leave one after the other, at a rate that all connections share."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    @property
    def slice_bytes(self) -> int:
        """How much may leave at once, for a flow that is even over some milliseconds."""
        return max(4096, min(_SEND_BYTES, int(self._bytes_per_s * _SLICE_S)))

    def take(self, nbytes: int) -> None:
        """Wait until so many bytes may leave."""
        now = time.monotonic()
        with self._lock:
            # Sleeping too long, by a fraction of a millisecond every time, is made good; an idle time is not.
            self._free_at = max(self._free_at, now - _CREDIT_S) + nbytes / self._bytes_per_s
            pause_s = self._free_at - now
        if pause_s > 0:
            time.sleep(pause_s)


class HttpStore:
    """Serves a folder or a mapping of names to contents over HTTP/1.1 on 127.0.0.1, with ranges and ETags.

    ::

        with HttpStore({"model.safetensors": content}, latency_s=0.02, bytes_per_s=1e9) as store:
            store.inject(Status(503), times=2)
            reader = RemoteReader(store.url)

    Connections are kept alive, one thread each; bodies go from the page cache to the socket (sendfile). For
    measurements, let it run in a process of its own: :class:`HttpStoreProcess`.

    Args:
        files: a folder, or contents by name.
        latency_s: time from a request to the first byte of its answer.
        bytes_per_s: what all connections together send, bodies only; None: no limit.
        max_concurrent: how many requests are served at once; the others wait. None: no limit.
    """

    def __init__(
        self,
        files: Mapping[str, bytes] | str | os.PathLike[str],
        *,
        latency_s: float = 0.0,
        bytes_per_s: float | None = None,
        max_concurrent: int | None = None,
    ) -> None:
        if latency_s < 0:
            raise ConfigError(f"latency_s={latency_s} is negative")
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise ConfigError(f"bytes_per_s={bytes_per_s} is not positive; None sets no limit")
        if max_concurrent is not None and max_concurrent < 1:
            raise ConfigError(f"max_concurrent={max_concurrent}: nothing would be served; None sets no limit")
        self._lock = threading.Lock()
        self._folder: str | None = None
        self._contents: dict[str, _StoredBytes] = {}
        self._replaced: list[int] = []
        if isinstance(files, Mapping):
            for name, content in files.items():
                self._contents[name] = _in_memory(content)
        else:
            self._folder = os.path.abspath(os.fspath(files))
        self._latency_s = latency_s
        self._bandwidth = None if bytes_per_s is None else _Bandwidth(bytes_per_s)
        self._gate = nullcontext() if max_concurrent is None else threading.BoundedSemaphore(max_concurrent)
        self._injections: list[_Injection] = []
        self._log: deque[ServedRequest] = deque(maxlen=_LOGGED)
        self._counts = dict.fromkeys(("requests", "bytes_sent", "connections", "most_at_once"), 0)
        self._at_once = 0
        self._closing = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._acceptor = threading.Thread(target=self._accept, name="http-store", daemon=True)
        self._acceptor.start()

    @property
    def counters(self) -> Counters:
        with self._lock:
            return Counters(**self._counts)

    @property
    def log(self) -> list[ServedRequest]:
        """The requests answered so far, the last hundred thousand of them."""
        with self._lock:
            return list(self._log)

    def inject(self, fault: Disturbance, *, file: str = "*", skip: int = 0, times: int | None = None) -> None:
        """From now on, after ``skip`` requests for files that match, meet ``times`` of them with a fault.

        ``times=None`` is always. Of several faults that fit, the one injected first counts.
        """
        with self._lock:
            self._injections.append(_Injection(fault, file, skip, times))

    def heal(self) -> None:
        """Forget all faults."""
        with self._lock:
            self._injections.clear()

    def replace(self, file: str, content: bytes | None) -> None:
        """Serve another content from now on, with another ETag; None: nothing. For stores made of a mapping."""
        with self._lock:
            before = self._contents.pop(file, None)
            if before is not None:
                self._replaced.append(before.descriptor)  # an answer may still be under way
            if content is not None:
                self._contents[file] = _in_memory(content)

    def hang_up(self) -> None:
        """End all connections there are, as servers do with idle ones; new ones are accepted."""
        with self._lock:
            connections, threads = list(self._sockets), list(self._threads)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()

    def close(self) -> None:
        """End all connections; closing twice is fine."""
        if self._closing.is_set():
            return
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        self.hang_up()
        for descriptor in (*self._replaced, *(content.descriptor for content in self._contents.values())):
            os.close(descriptor)
        self._replaced, self._contents = [], {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            with self._lock:
                self._sockets.add(connection)
                self._threads.add(thread)
                self._counts["connections"] += 1
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer the requests of one connection, one after the other."""
        try:
            with connection, connection.makefile("rb") as lines:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while not self._closing.is_set() and self._serve_one(connection, lines):
                    pass
        except OSError:
            pass  # the other end went away, or the store is closed
        finally:
            with self._lock:
                self._sockets.discard(connection)
                self._threads.discard(threading.current_thread())

    def _serve_one(self, connection: socket.socket, lines: BinaryIO) -> bool:
        """Whether the connection can go on."""
        request = _parse(lines)
        if request is None:
            return False
        with self._gate, self._counted():
            if self._latency_s:
                time.sleep(self._latency_s)
            fault = self._fault_for(request.file)
            with self._content(request.file) as content:
                return self._answer(connection, request, content, fault)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self._counts["requests"] += 1
            self._at_once += 1
            self._counts["most_at_once"] = max(self._counts["most_at_once"], self._at_once)
        try:
            yield
        finally:
            with self._lock:
                self._at_once -= 1

    def _fault_for(self, file: str) -> Disturbance | None:
        with self._lock:
            for injection in self._injections:
                if not fnmatchcase(file, injection.pattern) or injection.left == 0:
                    continue
                if injection.skip:
                    injection.skip -= 1
                    continue
                if injection.left is not None:
                    injection.left -= 1
                return injection.fault
        return None

    @contextmanager
    def _content(self, file: str) -> Iterator[_StoredBytes | None]:
        if self._folder is None:
            with self._lock:
                content = self._contents.get(file)
            yield content
            return
        try:
            if why_unsafe(file) is not None:
                raise FileNotFoundError(file)
            descriptor = os.open(os.path.join(self._folder, file), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            yield None
            return
        try:
            status = os.fstat(descriptor)
            yield _StoredBytes(descriptor, status.st_size, f'"{status.st_ino:x}-{status.st_mtime_ns:x}"')
        finally:
            os.close(descriptor)

    def _answer(
        self, connection: socket.socket, request: _Request, content: _StoredBytes | None, fault: Disturbance | None
    ) -> bool:
        match fault:
            case Status(code, retry_after_s):
                more = () if retry_after_s is None else (f"Retry-After: {retry_after_s}",)
                return self._refuse(connection, request, code, *more)
            case Redirect(folder_url):
                return self._refuse(connection, request, 302, f"Location: {folder_url}/{request.file}")
            case Reset(None):
                self._note(request, 0)
                _reset(connection)
                return False
        if request.method not in ("GET", "HEAD"):
            return self._refuse(connection, request, 405)
        if content is None:
            return self._refuse(connection, request, 404)
        about = [f"ETag: {content.etag}", "Accept-Ranges: bytes"]
        start, stop, status = 0, content.nbytes, 200
        if "range" in request.headers and not isinstance(fault, IgnoreRange):
            found = _range_of(request.headers["range"], content.nbytes)
            if found is None:
                return self._refuse(connection, request, 416, *about, f"Content-Range: bytes */{content.nbytes}")
            later = fault.nbytes if isinstance(fault, Shift) else 0
            start, stop, status = found[0] + later, found[1] + later, 206
            about.append(f"Content-Range: bytes {start}-{stop - 1}/{content.nbytes}")
        self._note(request, status, start, stop)
        connection.sendall(_head(status, stop - start, *about))
        return request.method == "HEAD" or self._send_body(connection, content, start, stop, fault)

    def _note(self, request: _Request, status: int, start: int = 0, stop: int = 0) -> None:
        with self._lock:
            self._log.append(ServedRequest(request.method, request.file, start, stop, status, request.headers))

    def _refuse(self, connection: socket.socket, request: _Request, status: int, *more: str) -> bool:
        self._note(request, status)
        connection.sendall(_head(status, 0, *more))
        return True

    def _send_body(
        self, connection: socket.socket, content: _StoredBytes, start: int, stop: int, fault: Disturbance | None
    ) -> bool:
        match fault:
            case Truncate(after_bytes):
                self._send(connection, content, start, min(stop, start + after_bytes))
                return False
            case Reset(int(after_bytes)):
                self._send(connection, content, start, min(stop, start + after_bytes))
                _reset(connection)
                return False
            case Stall(seconds, after_bytes):
                middle = min(stop, start + after_bytes)
                self._send(connection, content, start, middle)
                self._closing.wait(seconds)
                self._send(connection, content, middle, stop)
            case _:
                self._send(connection, content, start, stop)
        return True

    def _send(self, connection: socket.socket, content: _StoredBytes, start: int, stop: int) -> None:
        most = _SEND_BYTES if self._bandwidth is None else self._bandwidth.slice_bytes
        while start < stop:
            nbytes = min(most, stop - start)
            if self._bandwidth is not None:
                self._bandwidth.take(nbytes)
            with self._lock:
                self._counts["bytes_sent"] += nbytes  # first: whoever has the bytes finds them counted
            while nbytes:
                sent = os.sendfile(connection.fileno(), content.descriptor, start, nbytes)
                if sent == 0:
                    raise ConnectionError("the file became shorter")
                start += sent
                nbytes -= sent


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
        max_concurrent: int | None = None,
    ) -> None:
        options = {"latency_s": latency_s, "bytes_per_s": bytes_per_s, "max_concurrent": max_concurrent}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.http_store", os.fspath(folder), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        answer = self._read_line()
        self.url: str = answer["url"]

    @property
    def pid(self) -> int:
        return self._process.pid

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


def _in_memory(content: bytes) -> _StoredBytes:
    descriptor = os.memfd_create("http-store")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    return _StoredBytes(descriptor, len(content), f'"{zlib.crc32(content):08x}-{len(content):x}"')


def _parse(lines: BinaryIO) -> _Request | None:
    """The next request; None where the connection ends."""
    words = lines.readline().decode("latin-1").split()
    if len(words) != 3:
        return None
    headers: dict[str, str] = {}
    while True:
        name, colon, value = lines.readline().decode("latin-1").partition(":")
        if not colon:
            break
        headers[name.strip().lower()] = value.strip()
    # What a proxy is asked for begins with the server; a store serves its files for all of them.
    path = unquote(_SERVER.sub("/", words[1]).partition("?")[0])
    return _Request(words[0], path.removeprefix("/"), headers)


def _range_of(header: str, nbytes: int) -> tuple[int, int] | None:
    """The half-open range that a ``Range`` header asks for; None where the file has no byte of it."""
    match = _RANGE.fullmatch(header)
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        start, stop = max(0, nbytes - int(match[2])), nbytes
    else:
        start, stop = int(match[1]), min(int(match[2]) + 1, nbytes) if match[2] else nbytes
    return (start, stop) if start < stop else None


def _head(status: int, nbytes: int, *more: str) -> bytes:
    phrase = HTTPStatus(status).phrase
    lines = [f"HTTP/1.1 {status} {phrase}", "Server: shardwise", f"Content-Length: {nbytes}", *more]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _reset(connection: socket.socket) -> None:
    """Close with RST instead of FIN, as a server does that dies or a firewall that forgets."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


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
