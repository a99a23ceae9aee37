"""An object store on this machine: an HTTP server with ranges, as slow and as faulty as one wishes."""

import mmap
import os
import re
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias
from urllib.parse import unquote

from tests.support.closing import Closing

from shardwise.core.errors import ConfigError
from shardwise.files.urls import unsafe_name_reason

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_SERVER = re.compile(r"^http://[^/]*/")
_SEND_BYTES = 1 << 20
_SLICE_S = 0.005
_CREDIT_S = 0.02


@dataclass(frozen=True, slots=True)
class Status:
    """Answer with this status."""

    code: int


@dataclass(frozen=True, slots=True)
class Stall:
    """Send so many bytes of the body, then nothing for a while, or until ``go_on`` of the store, then the rest."""

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


@dataclass(slots=True)
class Counters:
    """What a store has done so far: requests, and the most that waited for their answers to begin at once."""

    requests: int = 0
    most_at_once: int = 0


@dataclass(slots=True)
class _Injection:
    fault: Disturbance
    pattern: str
    skip: int
    left: int | None


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


class HttpStore(Closing):
    """Serves a folder or a mapping of names to contents over HTTP/1.1 on 127.0.0.1, with ranges and ETags.

    ::

        with HttpStore({"model.safetensors": content}, latency_s=0.02, bytes_per_s=1e9) as store:
            store.inject(Status(503), times=2)
            reader = RemoteReader(store.url)

    Connections are kept alive, one thread each. For measurements, let it run in a process of its own, as
    ``benchmarks/load.py`` does.

    Args:
        files: a folder, or contents by name.
        latency_s: time from a request to the first byte of its answer.
        bytes_per_s: what all connections together send, bodies only; None: no limit.
    """

    def __init__(
        self,
        files: Mapping[str, bytes] | str | os.PathLike[str],
        *,
        latency_s: float = 0.0,
        bytes_per_s: float | None = None,
    ) -> None:
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise ConfigError(f"bytes_per_s={bytes_per_s} is not positive; None sets no limit")
        self.latency_s = latency_s
        self.bandwidth = None if bytes_per_s is None else _Bandwidth(bytes_per_s)
        self.log: list[ServedRequest] = []
        """The requests answered so far."""
        self.counters = Counters()
        self.closing, self.go_on = threading.Event(), threading.Event()
        self._files = dict(files) if isinstance(files, Mapping) else os.path.abspath(os.fspath(files))
        self._lock = threading.Lock()
        self._injections: list[_Injection] = []
        self._at_once = 0
        self._server = _Server(self)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def inject(self, fault: Disturbance, *, file: str = "*", skip: int = 0, times: int | None = None) -> None:
        """From now on, after ``skip`` requests for files that match, meet ``times`` of them with a fault.

        ``times=None`` is always. Of several faults that fit, the one injected first counts.
        """
        with self._lock:
            self._injections.append(_Injection(fault, file, skip, times))

    def replace(self, file: str, content: bytes | None) -> None:
        """Serve another content from now on, with another ETag; None: nothing. For stores made of a mapping."""
        assert isinstance(self._files, dict)
        with self._lock:
            self._files.pop(file, None)
            if content is not None:
                self._files[file] = content

    def hang_up(self) -> None:
        """End all connections there are, as servers do with idle ones; new ones are accepted."""
        self._server.hang_up()

    def close(self) -> None:
        """End all connections; closing twice is fine."""
        if not self.closing.is_set():
            self.closing.set()
            self.go_on.set()
            self._server.shutdown()
            self._thread.join()
            self.hang_up()
            self._server.server_close()

    @contextmanager
    def counted(self) -> Iterator[None]:
        with self._lock:
            self.counters.requests += 1
            self._at_once += 1
            self.counters.most_at_once = max(self.counters.most_at_once, self._at_once)
        try:
            yield
        finally:
            with self._lock:
                self._at_once -= 1

    def fault_for(self, file: str) -> Disturbance | None:
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

    def content(self, file: str) -> tuple[bytes | mmap.mmap, str] | None:
        """Return the bytes of a file, and its ETag; None if there is none."""
        if isinstance(self._files, dict):
            with self._lock:
                found = self._files.get(file)
            return None if found is None else (found, f'"{zlib.crc32(found):08x}-{len(found):x}"')
        try:
            if unsafe_name_reason(file) is not None:
                return None
            with open(os.path.join(self._files, file), "rb") as opened:
                status = os.fstat(opened.fileno())
                data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) if status.st_size else b""
        except OSError:
            return None
        return data, f'"{status.st_ino:x}-{status.st_mtime_ns:x}"'


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # they are joined when it is closed
    request_queue_size = 512

    def __init__(self, store: HttpStore) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.store = store
        self._sockets: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._sockets.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._sockets.discard(request)
        request.close()  # at once, so that a reset is one

    def hang_up(self) -> None:
        for connection in list(self._sockets):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The other end went away, or the store is closed."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        store = self.server.store
        # What a proxy is asked for begins with the server; a store serves its files for all of them.
        file = unquote(_SERVER.sub("/", self.path).partition("?")[0]).removeprefix("/")
        with store.counted():
            time.sleep(store.latency_s)
        self._answer(file, store.fault_for(file))

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing is printed."""

    def _answer(self, file: str, fault: Disturbance | None) -> None:
        match fault:
            case Status(code):
                return self._refuse(file, code)
            case Redirect(folder_url):
                return self._refuse(file, 302, {"Location": f"{folder_url}/{file}"})
            case Reset(None):
                self._note(file, 0)
                return self._reset()
        found = self.server.store.content(file)
        if self.command not in ("GET", "HEAD"):
            return self._refuse(file, 405)
        if found is None:
            return self._refuse(file, 404)
        data, etag = found
        headers = {"ETag": etag, "Accept-Ranges": "bytes"}
        start, stop, status = 0, len(data), 200
        if (asked := self.headers["Range"]) and not isinstance(fault, IgnoreRange):
            wanted = _range_of(asked, len(data))
            if wanted is None:
                return self._refuse(file, 416, {**headers, "Content-Range": f"bytes */{len(data)}"})
            later = fault.nbytes if isinstance(fault, Shift) else 0
            start, stop, status = wanted[0] + later, wanted[1] + later, 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        self._note(file, status, start, stop)
        self._head(status, stop - start, headers)
        if self.command == "GET":
            self._send_body(memoryview(data)[start:stop], fault)
        return None

    def _note(self, file: str, status: int, start: int = 0, stop: int = 0) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.store.log.append(ServedRequest(self.command, file, start, stop, status, headers))

    def _refuse(self, file: str, status: int, headers: Mapping[str, str] = {}) -> None:
        self._note(file, status)
        self._head(status, 0, headers)

    def _head(self, status: int, nbytes: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(nbytes), **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def _reset(self) -> None:
        """Close with RST instead of FIN, as a server does that dies or a firewall that forgets."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def _send_body(self, body: memoryview, fault: Disturbance | None) -> None:
        match fault:
            case Truncate(after_bytes):
                self._send(body[:after_bytes])
                self.close_connection = True
            case Reset(int(after_bytes)):
                self._send(body[:after_bytes])
                self._reset()
            case Stall(seconds, after_bytes):
                self._send(body[:after_bytes])
                self.server.store.go_on.wait(seconds)
                self._send(body[after_bytes:])
            case _:
                self._send(body)

    def _send(self, body: memoryview) -> None:
        bandwidth = self.server.store.bandwidth
        size = _SEND_BYTES if bandwidth is None else bandwidth.slice_bytes
        for start in range(0, len(body), size):
            part = body[start : start + size]
            if bandwidth is not None:
                bandwidth.take(len(part))
            self.wfile.write(part)


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
