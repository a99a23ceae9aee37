"""A reader of object stores, HTTP servers and memory by range, through obstore.

Credentials are removed from obstore's errors.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final
from urllib.parse import unquote, urlsplit, urlunsplit

from shardwise.core.errors import StorageError
from shardwise.files.storage import OBJECT_STORE, CannotListError, ReadPolicy, StorageReader, as_bytes, ends_early
from shardwise.files.urls import get_scheme, redact, require_file_name, shown, without_secrets

_TIMEOUTS: Final = {"connect_timeout": "30s", "read_timeout": "30s", "timeout": "1h"}
"""Silence of half a minute is a failure; a request as a whole may take long, as others share the network."""


def is_denied(error: Exception) -> bool:
    """Check if obstore's error is a refusal of access by the server."""
    return type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError")


@dataclass(frozen=True, slots=True)
class FileState:
    """A file's size in bytes and its version as reported by the storage."""

    nbytes: int
    version: str

    @classmethod
    def from_metadata(cls, meta: Mapping[str, Any]) -> FileState:
        """Return the state in a response of obstore: from the ETag, or else the modification time."""
        version = f"ETag {meta['e_tag']}" if meta["e_tag"] else f"changed {meta['last_modified']}"
        return cls(meta["size"], version)

    @property
    def identity(self) -> str:
        return f"{self.version}, {self.nbytes} bytes"


class RemoteReader(StorageReader):
    """A reader of files below a URL by range. See :class:`~shardwise.files.storage.StorageReader`.

    Nothing is written to disk, and no complete file is held in memory: each request in flight is buffered once and
    copied into the caller's buffers. At most ``policy.concurrency`` requests are in flight, regardless of the
    number of threads. Obstore retries transient failures. The version of every file is recorded at the first
    access, and bytes of another version are a StorageError.

    ``reads`` (requested ranges) and ``files_opened`` (accessed files) are counters.

    Args:
        url: a folder, as ``https://host/folder``, ``s3://bucket/folder``, ``gs://bucket/folder``, ``az://...`` or
            ``memory://folder`` (one for each process). A query is sent with every file.
        storage_options: the arguments of obstore's store: ``client_options`` and ``retry_config``, for buckets also
            ``region``, ``endpoint``, ``skip_signature``, ...
        concurrency: a replacement for ``policy.concurrency``.
        policy: read policy of the storage.

    Raises:
        StorageError: the URL cannot be read. No request is sent before the first read.
    """

    def __init__(
        self,
        url: str,
        *,
        storage_options: Mapping[str, Any] | None = None,
        concurrency: int | None = None,
        policy: ReadPolicy = OBJECT_STORE,
    ) -> None:
        self._policy = policy if concurrency is None else replace(policy, concurrency=concurrency)
        options, scheme = storage_options or {}, get_scheme(url)
        self._root = without_secrets(url)
        if scheme == "hf":
            raise StorageError(
                f"{shown(self._root)}: the hub is not read in place. Pass the repository's name "
                "(organization/name, with revision and subfolder), whose files are downloaded"
            )
        # Kept to be removed from the texts of errors, and for nothing else.
        self._secrets = url, options
        self._folder = ""
        self._is_http = scheme in ("http", "https")
        with self._failures(None, f"reading {scheme}://"):
            if scheme == "memory":
                self._folder = url.partition("://")[2].strip("/") + "/"
                self._store = _memory(**options)
            else:
                self._store = http_store(url, options) if self._is_http else _bucket(url, options)
        self._in_flight = threading.BoundedSemaphore(self._policy.concurrency)
        self._states: dict[str, FileState] = {}
        self._lock = threading.Lock()
        self._closed = False
        self.reads = 0
        self.files_opened = 0

    @property
    def root(self) -> str:
        return self._root

    @property
    def policy(self) -> ReadPolicy:
        return self._policy

    def list(self) -> list[str]:
        """Return the names of all files below the URL, sorted.

        Raises:
            CannotListError: the URL is on an HTTP server, which only serves files by name, or there is no
                permission to list.
        """
        self._require_open(None)
        if self._is_http:
            raise CannotListError(f"{self._root}: an HTTP server does not list its files")
        with self._failures(None, "listing the files"):
            try:
                items = self._store.list(self._folder or None).collect()
            except Exception as error:
                # Of a refused listing, obstore has only the text.
                if not is_denied(error) and " 403 Forbidden" not in str(error):
                    raise
                raise CannotListError(
                    f"{self._root}: listing the files is refused. Pass the URL of the file, or credentials by "
                    "storage_options"
                ) from PermissionError(self._text_of(error))
        return sorted(item["path"].removeprefix(self._folder) for item in items)

    def size(self, file: str) -> int:
        return self._first_state(file).nbytes

    def identity(self, file: str) -> str:
        """Return the file's version (ETag or hash, or else modification time) and size, from a new request."""
        return self._request_state(file)[0].identity

    def read_vectored(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        flat, nbytes = as_bytes(buffers)
        stop, expected = start + nbytes, self._first_state(file)
        if not 0 <= start <= stop <= expected.nbytes:
            raise ends_early(self._root, file, (start, stop), expected.nbytes)
        if start == stop:
            return
        doing = f"reading bytes {start}..{stop}"
        # A whole file is requested without a range, which some servers do not support.
        is_whole = (start, stop) == (0, expected.nbytes)
        # The semaphore is held until the response is copied: it also bounds the memory of responses.
        with self._in_flight, self._failures(file, doing):
            self._require_open(file)
            answer = self._store.get(
                f"{self._folder}{file}", options=None if is_whole else {"range": (start, stop)}
            )
            if (state := FileState.from_metadata(answer.meta)) != expected:
                raise StorageError(
                    f"{self._label(file)}: the file changed while it was being read ({expected.identity} before, "
                    f"{state.identity} now). Load again when no process writes to it"
                )
            data = memoryview(answer.bytes())
            if data.nbytes != nbytes:
                raise StorageError(
                    f"{self._label(file)}: {doing} failed, the response has a wrong size. Check the server"
                )
            for buffer in flat:
                buffer[:], data = data[: buffer.nbytes], data[buffer.nbytes :]
        with self._lock:
            self.reads += 1

    def close(self) -> None:
        self._closed = True

    def _first_state(self, file: str) -> FileState:
        """Return the file's state as of its first access."""
        self._require_open(file)
        return self._states.get(file) or self._request_state(file)[1]

    def _request_state(self, file: str) -> tuple[FileState, FileState]:
        """Return the file's state now, and as of its first access."""
        self._require_open(file)
        require_file_name(self._root, file)
        path = f"{self._folder}{file}"
        with self._in_flight, self._failures(file, "reading its size"):
            try:
                state = FileState.from_metadata(self._store.head(path))
            except Exception as error:
                if not self._is_http or not is_denied(error):
                    raise
                # Links that are signed for GET refuse HEAD.
                state = FileState.from_metadata(self._store.get(path, options={"range": (0, 1)}).meta)
        with self._lock:
            self.files_opened += file not in self._states
            return state, self._states.setdefault(file, state)

    def _require_open(self, file: str | None) -> None:
        if self._closed:
            raise StorageError(f"{self._label(file)}: the reader is closed. Open another one")

    def _label(self, file: str | None) -> str:
        """Format a file, or the folder, for errors."""
        return self._root if file is None else f"{shown(file)} in {self._root}"

    @contextmanager
    def _failures(self, file: str | None, doing: str) -> Iterator[None]:
        """Raise errors of obstore as StorageErrors, caused by OSErrors of the same kind and without credentials."""
        try:
            yield
        except StorageError:
            raise
        except ImportError as error:
            raise StorageError(
                f"{self._root}: {doing} needs obstore. Run pip install 'shardwise[remote]'"
            ) from error
        except Exception as error:
            # The cause is an error of the same kind with the redacted text: a traceback shows no credentials.
            kind, cause, remedy = _find_cause(error, self._text_of(error))
            raise StorageError(f"{self._label(file)}: {doing} failed, {cause}. {remedy}") from kind(cause)

    def _text_of(self, error: Exception) -> str:
        return redact(str(error).partition("\n\nDebug source")[0], *self._secrets)


def _find_cause(error: Exception, text: str) -> tuple[type[OSError], str, str]:
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError, "no such file or bucket", "Check the URL"
    if is_denied(error):
        return PermissionError, f"access is refused ({text})", "Pass credentials by storage_options"
    return OSError, text, "Check the URL, the network, and storage_options"


@cache
def _memory() -> Any:
    from obstore.store import MemoryStore

    return MemoryStore()


def _bucket(url: str, options: Mapping[str, Any]) -> Any:
    from obstore.store import from_url

    return from_url(url.rstrip("/"), **_with_timeouts(options))


def http_store(url: str, options: Mapping[str, Any]) -> Any:
    """Open an HTTP server with obstore, passing a user and password in the URL as a header."""
    from obstore.store import HTTPStore

    components, options = urlsplit(url), _with_timeouts(options)
    # The query stays in the URL, as it is sent with every request. User and password must not.
    user, _, host = components.netloc.rpartition("@")
    if not host:
        raise ValueError("it names no server")
    client = {"allow_http": components.scheme.lower() == "http", **options.pop("client_options")}
    if user:
        words = base64.b64encode(unquote(user).encode()).decode()
        client["default_headers"] = {"Authorization": f"Basic {words}", **client.get("default_headers", {})}
    place = urlunsplit((components.scheme, host, components.path.rstrip("/"), components.query, ""))
    return HTTPStore.from_url(place, client_options=client, **options)


def _with_timeouts(options: Mapping[str, Any]) -> dict[str, Any]:
    return {**options, "client_options": {**_TIMEOUTS, **options.get("client_options", {})}}
