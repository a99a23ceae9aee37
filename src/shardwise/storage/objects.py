"""Opens object stores, HTTP servers and memory by obstore, and tells its errors without credentials."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final
from urllib.parse import unquote, urlsplit, urlunsplit

from shardwise.errors import StorageError
from shardwise.storage.contract import CannotListError
from shardwise.storage.names import redacted, scheme_of, shown, without_secrets

_TIMEOUTS: Final = {"connect_timeout": "30s", "read_timeout": "30s", "timeout": "1h"}
"""Silence of half a minute is a failure; a request as a whole may take long, as others share the network."""

_ONE_CHUNK_BYTES: Final = 16 << 20


def is_denied(error: Exception) -> bool:
    """Whether obstore says that a server refuses access."""
    return type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError")


@dataclass(frozen=True, slots=True)
class FileState:
    """A file's size in bytes, and its version as the storage calls it."""

    nbytes: int
    version: str

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> FileState:
        """The state in an answer of obstore's: by the ETag, else the time of change."""
        return cls(meta["size"], f"ETag {meta['e_tag']}" if meta["e_tag"] else f"changed {meta['last_modified']}")

    @property
    def identity(self) -> str:
        return f"{self.version}, {self.nbytes} bytes"


class Objects:
    """The files below a URL.

    Args:
        url: ``s3://``, ``gs://``, ``az://``, ``http://``, ``https://`` or ``memory://`` (one for each process).
        options: the arguments of obstore's store (``client_options``, ``retry_config``, and those of its kind).
        doing: as in "reading", for errors.

    Raises:
        StorageError: for a URL that cannot be opened. The network is not asked.
    """

    def __init__(self, url: str, options: Mapping[str, Any], *, doing: str) -> None:
        self.root = without_secrets(url)
        self._secrets = url, options
        self._folder = ""
        self._is_http = scheme_of(url) in ("http", "https", "hf")
        with self.failures(None, f"{doing} {scheme_of(url)}://"):
            self.store = self._opened(url, options)

    def _opened(self, url: str, options: Mapping[str, Any]) -> Any:
        if scheme_of(url) != "memory":
            return http_store(url, options) if self._is_http else _bucket(url, options)
        self._folder = url.partition("://")[2].strip("/") + "/"
        return _memory(**options)

    def path(self, file: str) -> str:
        """The name of a file, or with "" of the folder, in the store."""
        return f"{self._folder}{file}"

    def list(self) -> list[str]:
        """The names of all files, sorted.

        Raises:
            CannotListError: for an HTTP server.
        """
        if self._is_http:
            raise CannotListError(f"{self.root}: an HTTP server does not tell which files it has")
        with self.failures(None, "listing the files"):
            found = self.store.list(self._folder or None).collect()
        return sorted(item["path"].removeprefix(self._folder) for item in found)

    def state(self, file: str) -> FileState:
        """The file's state as it is now."""
        with self.failures(file, "looking at it"):
            try:
                return FileState.of(self.store.head(self.path(file)))
            except Exception as error:
                if not self._is_http or not is_denied(error):
                    raise
            # Links that are signed for GET refuse HEAD.
            return FileState.of(self._get(file, {"range": (0, 1)}).meta)

    def fetch(self, file: str, start: int, stop: int, expected: FileState) -> Iterable[Any]:
        """The bytes ``start <= i < stop`` of a file in this state, in chunks. Within :meth:`failures`."""
        # A whole file is asked for without a range, which not every server knows.
        whole = (start, stop) == (0, expected.nbytes)
        answer = self._get(file, None if whole else {"range": (start, stop)})
        self.require_same(file, expected, FileState.of(answer.meta))
        # One chunk takes a quarter less of the processor than many, and as much memory as it is long.
        return [answer.bytes()] if stop - start <= _ONE_CHUNK_BYTES else answer.stream(min_chunk_size=1 << 20)

    def _get(self, file: str, options: Any) -> Any:
        return self.store.get(self.path(file), options=options)

    def require_same(self, file: str, expected: FileState, found: FileState) -> None:
        """Raises StorageError for a file whose content was replaced since it was first looked at."""
        if found != expected:
            raise StorageError(
                f"{self.named(file)}: the file changed while it was being read ({expected.identity} before, "
                f"{found.identity} now). Load again, from files that nobody writes to"
            )

    def named(self, file: str | None) -> str:
        """A file, or the folder, as errors name it."""
        return self.root if file is None else f"{shown(file)} in {self.root}"

    @contextmanager
    def failures(self, file: str | None, doing: str) -> Iterator[None]:
        """Raise errors of obstore as StorageErrors that OSErrors of their kind cause, all without credentials."""
        try:
            yield
        except StorageError:
            raise
        except ImportError as error:
            raise StorageError(
                f"{self.root}: {doing} needs obstore. Run pip install 'shardwise[remote]'"
            ) from error
        except Exception as error:
            told = redacted(str(error).partition("\n\nDebug source")[0], *self._secrets)
            kind, cause, remedy = _explained(error, told)
            raise StorageError(f"{self.named(file)}: {doing} failed, {cause}. {remedy}") from kind(cause)


def _explained(error: Exception, told: str) -> tuple[type[OSError], str, str]:
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError, "no such file or bucket", "Check the URL"
    if is_denied(error):
        return PermissionError, f"access is refused ({told})", "Pass credentials by storage_options"
    return OSError, told, "Check the URL, the network, and storage_options"


@cache
def _memory() -> Any:
    from obstore.store import MemoryStore

    return MemoryStore()


def _bucket(url: str, options: Mapping[str, Any]) -> Any:
    from obstore.store import from_url

    return from_url(url.rstrip("/"), **_patient(options))


def http_store(url: str, options: Mapping[str, Any]) -> Any:
    """An HTTP server as obstore opens it; a user and password in the URL become a header."""
    from obstore.store import HTTPStore

    parts, options = urlsplit(url), _patient(options)
    user, _, host = parts.netloc.rpartition("@")
    if not host:
        raise ValueError("it names no server")
    client = {"allow_http": parts.scheme.lower() == "http", **options.pop("client_options")}
    if user:
        words = base64.b64encode(unquote(user).encode()).decode()
        client["default_headers"] = {"Authorization": f"Basic {words}", **client.get("default_headers", {})}
    place = urlunsplit((parts.scheme, host, parts.path.rstrip("/"), parts.query, ""))
    return HTTPStore.from_url(place, client_options=client, **options)


def _patient(options: Mapping[str, Any]) -> dict[str, Any]:
    return {**options, "client_options": {**_TIMEOUTS, **options.get("client_options", {})}}


def fill(buffers: Iterable[memoryview], chunks: Iterable[Any]) -> bool:
    """Copy the chunks into the buffers, one after the other; whether they are of the same size together."""
    waiting: Iterator[memoryview] = iter(buffers)
    room = memoryview(b"")
    for chunk in chunks:
        data = memoryview(chunk)
        while data.nbytes:
            while not room.nbytes:
                following = next(waiting, None)
                if following is None:
                    return False
                room = following
            count = min(room.nbytes, data.nbytes)
            room[:count] = data[:count]
            room, data = room[count:], data[count:]
    return not room.nbytes and next(waiting, None) is None
