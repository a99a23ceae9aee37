"""Ranges of files on HTTP servers, received straight into their buffers."""

from __future__ import annotations

import base64
import http.client
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import quote, unquote, urljoin, urlsplit

from shardwise.errors import StorageError
from shardwise.storage.contract import CannotListError
from shardwise.storage.names import without_secrets
from shardwise.storage.reading.http_answers import (
    check_answer,
    check_status,
    content_range,
    unexpected_answer,
    version_in,
)
from shardwise.storage.reading.transport import (
    FileState,
    PermanentFault,
    Retries,
    TransientFault,
)

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS = 8
_STALE_LINK = frozenset({401, 403, 404, 410})
"""What a target of a redirect answers when the link, signed for some minutes, has expired."""

_KEPT = "/%:@!$&'()*+,;=~?[]"
"""What stands in a URL's path and query as it is; the rest is quoted where that was forgotten."""

_RECEIVE_BYTES = 1 << 20
_STAGE_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """Where a request goes."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def origin(self) -> tuple[str, str, int]:
        return self.scheme, self.host, self.port

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.target}"


class HttpTransport:
    """Asks an HTTP/1.1 server for ranges; see :class:`~shardwise.storage.reading.transport.Transport`.

    Connections are kept and used again. Redirects are followed, and their targets remembered until they expire;
    ``headers``, which may hold credentials, are sent to the URL's own server only. A file's version is its ETag,
    else its Last-Modified, and compared in every answer. ``proxy`` is the URL of an HTTP proxy that is asked in the
    server's place, for https by CONNECT.
    """

    def __init__(
        self,
        url: str,
        *,
        retries: Retries,
        headers: Mapping[str, str],
        context: ssl.SSLContext | None = None,
        proxy: str | None = None,
    ) -> None:
        self._shown = without_secrets(url)
        self._root, user_headers = _root_of(url, self._shown)
        self._headers = {name.title(): value for name, value in {**user_headers, **headers}.items()}
        self._retries = retries
        self._connections = _Connections(retries.timeout_s, context, None if proxy is None else _Proxy.at(proxy))
        self._targets: dict[str, _Endpoint] = {}

    def list(self) -> list[str]:
        raise CannotListError(f"{self._shown}: an HTTP server does not tell which files it has")

    def state(self, file: str) -> FileState:
        # One byte, rather than HEAD: links that are signed for GET refuse HEAD, and the answer shows whether the
        # server knows ranges.
        with self._answer(file, "bytes=0-0") as response:
            if response.status == 416:  # every other file has a first byte
                return FileState(0, version_in(response))
            if response.status == 206:
                _, _, total = content_range(response)
                response.read(1)
            elif response.status == 200:
                total = response.length
            else:
                raise unexpected_answer(response)
            if total is None:
                raise PermanentFault(
                    f"the server does not tell the file's size (status {response.status})",
                    "use a server that sends Content-Length and Content-Range, or download the file",
                )
            return FileState(total, version_in(response))

    def fetch(
        self,
        file: str,
        start: int,
        buffers: Sequence[memoryview],
        expected: FileState,
        is_abandoned: Callable[[], bool],
    ) -> None:
        nbytes = sum(buffer.nbytes for buffer in buffers)
        give_up_at = time.monotonic() + self._retries.longest_request_s(nbytes)
        with self._answer(file, f"bytes={start}-{start + nbytes - 1}") as response:
            check_answer(response, start, nbytes, expected)
            _Body(response, nbytes, give_up_at, is_abandoned).fill(buffers)

    def close(self) -> None:
        self._connections.close()

    @contextmanager
    def _answer(self, file: str, byte_range: str) -> Iterator[http.client.HTTPResponse]:
        """The answer to a request for a range, whose status is one the caller has to look at."""
        remembered = self._targets.get(file)
        if remembered is not None:
            with self._at(remembered, byte_range) as response:
                if response.status not in _STALE_LINK and response.status not in _REDIRECTS:
                    check_status(response)
                    yield response
                    return
            self._targets.pop(file, None)
        place = self._place_of(file)
        for _ in range(_MAX_REDIRECTS):
            with self._at(place, byte_range) as response:
                if response.status not in _REDIRECTS:
                    check_status(response)
                    if place.origin != self._root.origin:
                        self._targets[file] = place
                    yield response
                    return
                place = _redirected(place, response)
        raise PermanentFault(f"more than {_MAX_REDIRECTS} redirects", "check the URL")

    @contextmanager
    def _at(self, place: _Endpoint, byte_range: str) -> Iterator[http.client.HTTPResponse]:
        own = self._headers if place.origin == self._root.origin else {}
        headers = {"User-Agent": "shardwise", **own, "Range": byte_range}
        try:
            with self._connections.exchange(place, headers) as response:
                yield response
        except TimeoutError as error:
            raise TransientFault(f"nothing came for {self._retries.timeout_s:g} s") from error
        except ssl.SSLCertVerificationError as error:
            raise PermanentFault(
                f"the server's certificate is not trusted ({error.verify_message})",
                "check the URL, or pass an SSLContext that trusts it as storage_options={'ssl_context': ...}",
            ) from error
        except http.client.InvalidURL as error:
            raise PermanentFault("the URL cannot be sent to a server", "quote its special characters") from error
        except (ConnectionError, http.client.HTTPException) as error:
            raise TransientFault(f"the connection failed ({type(error).__name__}: {error})") from error
        except (TransientFault, PermanentFault, FileNotFoundError, PermissionError):
            raise
        except OSError as error:
            raise TransientFault(f"the server cannot be reached ({type(error).__name__}: {error})") from error

    def _place_of(self, file: str) -> _Endpoint:
        path, mark, query = self._root.target.partition("?")
        root = self._root
        return _Endpoint(root.scheme, root.host, root.port, f"{path}/{quote(file)}{mark}{query}")


@dataclass(frozen=True, slots=True)
class _Proxy:
    """What is asked in the servers' place, and who we are to it."""

    place: _Endpoint
    headers: Mapping[str, str]

    @classmethod
    def at(cls, url: str) -> _Proxy:
        place, user = _root_of(url, without_secrets(url))
        if place.scheme != "http":
            raise StorageError(f"{without_secrets(url)}: a proxy is spoken to in http; write http://host:port")
        return cls(place, {f"Proxy-{name}": value for name, value in user.items()})


class _Connections:
    """Connections to some servers, kept for the next request."""

    def __init__(self, timeout_s: float, context: ssl.SSLContext | None, proxy: _Proxy | None) -> None:
        self._timeout_s = timeout_s
        self._context = context
        self._proxy = proxy
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, str, int], list[http.client.HTTPConnection]] = defaultdict(list)
        self._closed = False

    @contextmanager
    def exchange(self, place: _Endpoint, headers: Mapping[str, str]) -> Iterator[http.client.HTTPResponse]:
        connection, response = self._send(place, headers)
        is_usable = False
        try:
            yield response
            # What was not read to its end cannot be used again: the rest would be taken for the next answer.
            is_usable = response.isclosed() and not response.will_close
        finally:
            if is_usable:
                self._keep(place, connection)
            else:
                # Both: a connection that the server will end belongs to its answer.
                response.close()
                connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections = [connection for kept in self._idle.values() for connection in kept]
            self._idle.clear()
        for connection in connections:
            connection.close()

    def _send(
        self, place: _Endpoint, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        while True:
            with self._lock:
                kept = self._idle[place.origin]
                connection = kept.pop() if kept else None
            is_fresh = connection is None
            if connection is None:
                connection = self._connect(place)
            try:
                target, more = self._addressed(place)
                connection.request("GET", target, headers={**headers, **more})
                return connection, connection.getresponse()
            except ConnectionError:
                connection.close()
                # A kept connection that the server has closed meanwhile is no failure.
                if is_fresh:
                    raise
            except BaseException:
                connection.close()
                raise

    def _connect(self, place: _Endpoint) -> http.client.HTTPConnection:
        proxy = self._proxy
        host, port = (place.host, place.port) if proxy is None else (proxy.place.host, proxy.place.port)
        if place.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        if self._context is None:
            self._context = ssl.create_default_context()
        connection = http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=self._context)
        if proxy is not None:
            connection.set_tunnel(place.host, place.port, dict(proxy.headers))
        return connection

    def _addressed(self, place: _Endpoint) -> tuple[str, Mapping[str, str]]:
        """What is asked for, as a server or a proxy wants it (RFC 9112, 3.2.2), and headers for the latter."""
        if self._proxy is None or place.scheme == "https":
            return place.target, {}
        return place.url, self._proxy.headers

    def _keep(self, place: _Endpoint, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if not self._closed:
                self._idle[place.origin].append(connection)
                return
        connection.close()


class _Body:
    """The body of an answer, received into buffers with at most one copy."""

    def __init__(
        self,
        response: http.client.HTTPResponse,
        nbytes: int,
        give_up_at: float,
        is_abandoned: Callable[[], bool],
    ) -> None:
        self._response = response
        self._nbytes = nbytes
        self._received = 0
        self._give_up_at = give_up_at
        self._is_abandoned = is_abandoned

    def fill(self, buffers: Sequence[memoryview]) -> None:
        stage: memoryview | None = None
        small: list[memoryview] = []
        waiting = 0
        for buffer in buffers:
            # A call per buffer of a few bytes would cost more than copying them.
            if buffer.nbytes < _STAGE_BYTES // 8:
                if waiting + buffer.nbytes > _STAGE_BYTES:
                    self._scatter(stage, small, waiting)
                    small, waiting = [], 0
                stage = stage or memoryview(bytearray(_STAGE_BYTES))
                small.append(buffer)
                waiting += buffer.nbytes
                continue
            self._scatter(stage, small, waiting)
            small, waiting = [], 0
            self._receive(buffer)
        self._scatter(stage, small, waiting)
        if not self._response.isclosed() and self._response.read(1):
            raise PermanentFault(f"the body is longer than the {self._nbytes} bytes asked for", "check the server")

    def _scatter(self, stage: memoryview | None, buffers: Sequence[memoryview], nbytes: int) -> None:
        if stage is None or not nbytes:
            return
        self._receive(stage[:nbytes])
        position = 0
        for buffer in buffers:
            buffer[:] = stage[position : position + buffer.nbytes]
            position += buffer.nbytes

    def _receive(self, buffer: memoryview) -> None:
        position = 0
        while position < buffer.nbytes:
            count = self._response.readinto(buffer[position : position + _RECEIVE_BYTES])
            if count == 0:
                raise TransientFault(f"the body ended after {self._received} of {self._nbytes} bytes")
            position += count
            self._received += count
            if self._is_abandoned():
                raise TransientFault("nobody waits for the bytes any more")
            if time.monotonic() > self._give_up_at:
                raise TransientFault(f"only {self._received} of {self._nbytes} bytes came in time")


def _root_of(url: str, shown_url: str) -> tuple[_Endpoint, dict[str, str]]:
    """The folder's place, its path without a slash at the end; and the user of the URL as a header."""
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme.lower() == "https" else 80)
    except ValueError:
        port = None
    if not parts.hostname or port is None:
        raise StorageError(f"{shown_url}: not the URL of a server; write it as https://host/folder")
    path = quote(parts.path.rstrip("/"), safe=_KEPT)
    query = f"?{parts.query}" if parts.query else ""
    headers = {}
    if parts.username is not None:
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
    return _Endpoint(parts.scheme.lower(), parts.hostname, port, path + query), headers


def _redirected(place: _Endpoint, response: http.client.HTTPResponse) -> _Endpoint:
    location = response.getheader("Location")
    response.read(_RECEIVE_BYTES)
    parts = urlsplit(urljoin(place.url, location or ""))
    scheme = parts.scheme.lower()
    if not location or scheme not in ("http", "https") or not parts.hostname:
        raise PermanentFault(f"status {response.status} leads nowhere", "check the URL")
    if place.scheme == "https" and scheme == "http":
        raise PermanentFault("https:// leads to http://, which anybody on the way can change", "check the URL")
    target = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe=_KEPT)
    return _Endpoint(scheme, parts.hostname, parts.port or (443 if scheme == "https" else 80), target)
