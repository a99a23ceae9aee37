"""Files on other machines, read by range over the network: HTTP servers, object stores, the hub."""

from __future__ import annotations

import random
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

from shardwise.errors import ConfigError, StorageError
from shardwise.storage.contract import ReadPolicy
from shardwise.storage.names import Redactor, scheme_of, shown, why_unsafe, without_secrets
from shardwise.storage.policies import OBJECT_STORE
from shardwise.storage.reading.fsspec_transport import FsspecTransport
from shardwise.storage.reading.http_transport import HttpTransport
from shardwise.storage.reading.hub_transport import HubTransport
from shardwise.storage.reading.transport import (
    DEFAULT_RETRIES,
    FileState,
    PermanentFault,
    Retries,
    TransientFault,
    Transport,
)

T = TypeVar("T")

_Piece = tuple[int, list[memoryview]]
"""Where a request begins, and what it fills."""


class _OneCall:
    """The requests of one call of a reader: the first failure among them, and whether anybody waits for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._abandoned = threading.Event()
        self.failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self.failure = self.failure or error
        self._abandoned.set()

    def abandon(self) -> None:
        self._abandoned.set()

    def is_abandoned(self) -> bool:
        return self._abandoned.is_set()

    def pause(self, seconds: float) -> None:
        """Wait, but no longer than somebody waits for the outcome."""
        self._abandoned.wait(seconds)


class RemoteReader:
    """Reads files below a URL by range; see :class:`~shardwise.storage.contract.StorageReader`.

    Nothing is written to disk, and no file is held in memory: bytes go from the socket into the caller's buffers
    (``http``, ``https``, ``hf``), or through one copy of a request's size (everything else, which fsspec reads).

    A range longer than ``policy.request_bytes`` is asked for in several requests. At most ``policy.concurrency``
    requests are in flight, however many threads read. Failures that may pass are tried again (:class:`Retries`).
    The version of every file is remembered when it is first looked at; bytes of another version are a StorageError.

    ``bytes_read``, ``reads`` (requests, those that failed too), ``retried`` (requests made again) and
    ``files_opened`` (files looked at) count what has been done so far.

    Args:
        url: a folder, as ``https://host/folder``, ``s3://bucket/folder``, ``gs://bucket/folder``,
            ``hf://organisation/name@revision``, or of any kind that fsspec knows. A query is sent with every file.
        storage_options: for http and https ``headers``, ``ssl_context`` and ``proxy`` (the environment's is not
            used); for hf ``token``, ``endpoint``, ``revision`` and ``proxy``; else what the fsspec file system
            takes (``key``, ``secret``, ``anon``, ...).
        concurrency: replaces ``policy.concurrency``.
        policy: how the storage is read.
        retries: attempts, waits and timeouts.

    Raises:
        StorageError: for a URL that cannot be read: of an unknown kind, or whose package is not installed. The
            network is not asked before the first read.
    """

    def __init__(
        self,
        url: str,
        *,
        storage_options: Mapping[str, Any] | None = None,
        concurrency: int | None = None,
        policy: ReadPolicy = OBJECT_STORE,
        retries: Retries = DEFAULT_RETRIES,
    ) -> None:
        options = dict(storage_options or {})
        self._policy = policy if concurrency is None else replace(policy, concurrency=concurrency)
        self._retries = retries
        self._root = without_secrets(url)
        self._redacted = Redactor(url, options)
        self._transport = _transport(url, options, self._policy, retries)
        self._states: dict[str, FileState] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._calls: set[_OneCall] = set()
        # One pool bounds the requests in flight and is where they wait their turn.
        self._pool = ThreadPoolExecutor(self._policy.concurrency, thread_name_prefix="shardwise-remote")
        self.bytes_read = 0
        self.reads = 0
        self.retried = 0
        self.files_opened = 0

    @property
    def root(self) -> str:
        return self._root

    @property
    def policy(self) -> ReadPolicy:
        return self._policy

    def list(self) -> list[str]:
        """The names of all files below the URL, sorted.

        Raises:
            CannotListError: for an HTTP server, which gives files by name only.
        """
        self._require_open(None)
        return sorted(self._ask(None, "listing the files", self._transport.list))

    def size(self, file: str) -> int:
        return self._state(file).nbytes

    def identity(self, file: str) -> str:
        """The file's version (ETag, hash, generation, else time of change) and size, asked of the server anew."""
        state = self._look_at(file)
        with self._lock:
            self._remember(file, state)
        return state.identity

    def read_into(self, file: str, start: int, buffer: memoryview) -> None:
        self.read_vectored(file, start, (buffer,))

    def read_vectored(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        flat = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        nbytes = sum(buffer.nbytes for buffer in flat)
        state = self._require_range(file, start, start + nbytes)
        if not nbytes:
            return
        pieces = _pieces(start, flat, self._policy.request_bytes)
        requests: list[Future[None]] = []
        with self._call() as call:
            try:
                for piece in pieces:
                    requests.append(self._submit(file, self._fetch_piece, file, piece, state, call))
            finally:
                # Nobody writes to the caller's buffers once this call is over, whatever ends it.
                try:
                    wait(requests)
                finally:
                    call.abandon()
                    wait(requests)
        if call.failure is not None:
            raise call.failure

    def read(self, file: str, start: int, stop: int) -> bytes:
        # A range that the file does not have is refused before it is allocated: the numbers may be hostile.
        self._require_range(file, start, stop)
        buffer = bytearray(stop - start)
        self.read_into(file, start, memoryview(buffer))
        return bytes(buffer)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for call in self._calls:
                call.abandon()
        # What waits in the pool for its turn is not cancelled: it finds the reader closed, and says so.
        self._pool.shutdown(wait=False)
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _state(self, file: str) -> FileState:
        """The file's state as it was when it was first looked at."""
        self._require_open(file)
        with self._lock:
            state = self._states.get(file)
        if state is None:
            found = self._look_at(file)
            with self._lock:
                state = self._remember(file, found)
        return state

    def _look_at(self, file: str) -> FileState:
        self._require_open(file)
        fault = why_unsafe(file)
        if fault is not None:
            raise StorageError(
                f"{shown(file)}: refused as a file name below {self._root}, {fault}; "
                "name files relative to the checkpoint's folder"
            )
        return self._ask(file, "looking at it", lambda: self._transport.state(file))

    def _remember(self, file: str, state: FileState) -> FileState:
        """The state that counts: the first one. The lock is held."""
        if file not in self._states:
            self.files_opened += 1
        return self._states.setdefault(file, state)

    def _require_range(self, file: str, start: int, stop: int) -> FileState:
        state = self._state(file)
        if not 0 <= start <= stop <= state.nbytes:
            raise StorageError(
                f"{shown(file)} in {self._root}: bytes {start}..{stop} were asked for, but the file ends at byte "
                f"{state.nbytes}; it is truncated: upload it again"
            )
        return state

    def _require_open(self, file: str | None) -> None:
        if self._closed:
            raise self._is_closed(file)

    def _is_closed(self, file: str | None) -> StorageError:
        return StorageError(f"{self._named(file)}: the reader is closed; open another one")

    def _named(self, file: str | None) -> str:
        return self._root if file is None else f"{shown(file)} in {self._root}"

    @contextmanager
    def _call(self) -> Iterator[_OneCall]:
        call = _OneCall()
        with self._lock:
            self._calls.add(call)
        try:
            yield call
        finally:
            with self._lock:
                self._calls.discard(call)

    def _submit(self, file: str | None, function: Callable[..., T], *arguments: Any) -> Future[T]:
        try:
            return self._pool.submit(function, *arguments)
        except RuntimeError as error:  # the pool is shut down
            raise self._is_closed(file) from error

    def _ask(self, file: str | None, doing: str, request: Callable[[], T]) -> T:
        with self._call() as call:
            answer: Future[T] = self._submit(file, self._persist, file, doing, request, call)
            return answer.result()

    def _fetch_piece(self, file: str, piece: _Piece, state: FileState, call: _OneCall) -> None:
        start, buffers = piece
        nbytes = sum(buffer.nbytes for buffer in buffers)

        def fetch() -> None:
            self._transport.fetch(file, start, buffers, state, call.is_abandoned)

        try:
            self._persist(file, f"bytes {start}..{start + nbytes}", fetch, call)
        except BaseException as error:
            call.fail(error)
            return
        with self._lock:
            self.bytes_read += nbytes

    def _persist(self, file: str | None, doing: str, request: Callable[[], T], call: _OneCall) -> T:
        """Make the request until it succeeds, or fails for good, or nobody waits for it any more."""
        begun = time.monotonic()
        failures = 0
        while True:
            self._require_open(file)
            if call.is_abandoned():
                raise StorageError(f"{self._named(file)}: {doing} was given up, as another request failed")
            with self._lock:
                self.reads += 1
                self.retried += failures > 0
            try:
                return request()
            except TransientFault as error:
                failures += 1
                fault: OSError = error
                pause_s = self._retries.wait_s(failures, random.random(), error.retry_after_s)
            except (PermanentFault, FileNotFoundError, PermissionError) as error:
                fault = error
                break
            if failures >= self._retries.attempts:
                break
            call.pause(pause_s)
        message = self._explain(file, doing, fault, failures, time.monotonic() - begun)
        raise StorageError(message) from self._redacted.made_anew(fault)

    def _explain(self, file: str | None, doing: str, fault: OSError, failures: int, seconds: float) -> str:
        cause = self._redacted(str(fault))
        where = f"{self._named(file)}: {doing} failed"
        if isinstance(fault, FileNotFoundError):
            return f"{where}, {cause or 'no such file'}; check the URL"
        if isinstance(fault, PermissionError):
            return f"{where}, {cause}; check the URL, and pass credentials that may read it (storage_options)"
        if isinstance(fault, PermanentFault):
            return f"{where}, {cause}; {fault.remedy}"
        times = "1 attempt" if failures == 1 else f"{failures} attempts"
        return (
            f"{where} in {times} over {seconds:.1f} s, at last because {cause}; "
            "check the network and the server, or allow more with Retries(attempts=..., timeout_s=...)"
        )


def open_remote(url: str, storage_options: Mapping[str, Any]) -> RemoteReader:
    """A reader of what lies below a URL, as :class:`RemoteReader` is by default."""
    return RemoteReader(url, storage_options=storage_options)


def _transport(url: str, options: Mapping[str, Any], policy: ReadPolicy, retries: Retries) -> Transport:
    scheme = scheme_of(url)
    if scheme in ("http", "https"):
        unknown = sorted(set(options) - {"headers", "ssl_context", "proxy"})
        if unknown:
            raise ConfigError(
                f"storage_options {unknown} mean nothing to {scheme}://; it takes headers, ssl_context and proxy"
            )
        context = options.get("ssl_context")
        if context is not None and not isinstance(context, ssl.SSLContext):
            raise ConfigError(f"storage_options: ssl_context is a {type(context).__name__}, not an ssl.SSLContext")
        return HttpTransport(
            url,
            retries=retries,
            headers=options.get("headers", {}),
            context=context,
            proxy=options.get("proxy"),
        )
    if scheme == "hf" and not url.startswith("hf://buckets/"):
        return HubTransport(url, retries=retries, options=options)
    return FsspecTransport(url, retries=retries, concurrency=policy.concurrency, options=options)


def _pieces(start: int, buffers: Sequence[memoryview], request_bytes: int) -> list[_Piece]:
    """The range cut into requests of about equal size, none longer than ``request_bytes``."""
    nbytes = sum(buffer.nbytes for buffer in buffers)
    count = -(-nbytes // request_bytes)
    size = -(-nbytes // count)
    pieces: list[_Piece] = []
    room = 0
    position = start
    for buffer in buffers:
        taken = 0
        while taken < buffer.nbytes:
            if room == 0:
                pieces.append((position, []))
                room = size
            part = buffer[taken : taken + room]
            pieces[-1][1].append(part)
            taken += part.nbytes
            position += part.nbytes
            room -= part.nbytes
    return pieces
