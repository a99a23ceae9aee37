"""Read access to object stores, HTTP servers and memory through obstore.

Credentials are removed from obstore's errors.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final
from urllib.parse import unquote, urlsplit, urlunsplit

from shardwise.core.errors import StorageError
from shardwise.files.storage import CannotListError
from shardwise.files.urls import get_scheme, redact, shown, without_secrets

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


class Objects:
    """The files below a URL.

    Args:
        url: ``s3://``, ``gs://``, ``az://``, ``http://``, ``https://`` or ``memory://`` (one for each process).
        options: the arguments of obstore's store (``client_options``, ``retry_config``, and those of its kind).
        doing: the operation for errors, such as "reading".

    Raises:
        StorageError: the URL cannot be opened. No request is sent yet.
    """

    def __init__(self, url: str, options: Mapping[str, Any], *, doing: str) -> None:
        self.root = without_secrets(url)
        # Kept to be removed from the texts of errors, and for nothing else.
        self._secrets = url, options
        self._folder = ""
        self._is_http = get_scheme(url) in ("http", "https")
        with self.failures(None, f"{doing} {get_scheme(url)}://"):
            if get_scheme(url) == "memory":
                self._folder = url.partition("://")[2].strip("/") + "/"
                self.store = _memory(**options)
            else:
                self.store = http_store(url, options) if self._is_http else _bucket(url, options)

    def path(self, file: str) -> str:
        """Return the path in the store of a file, or of the folder ("")."""
        return f"{self._folder}{file}"

    def list(self) -> list[str]:
        """Return the names of all files, sorted.

        Raises:
            CannotListError: the URL is on an HTTP server, or there is no permission to list.
        """
        if self._is_http:
            raise CannotListError(f"{self.root}: an HTTP server does not list its files")
        with self.failures(None, "listing the files"):
            try:
                items = self.store.list(self._folder or None).collect()
            except Exception as error:
                # Of a refused listing, obstore has only the text.
                if not is_denied(error) and " 403 Forbidden" not in str(error):
                    raise
                raise CannotListError(
                    f"{self.root}: listing the files is refused. Pass the URL of the file, or credentials by "
                    "storage_options"
                ) from PermissionError(self._text_of(error))
        return sorted(item["path"].removeprefix(self._folder) for item in items)

    def state(self, file: str) -> FileState:
        """Return the file's current state."""
        with self.failures(file, "reading its size"):
            try:
                return FileState.from_metadata(self.store.head(self.path(file)))
            except Exception as error:
                if not self._is_http or not is_denied(error):
                    raise
            # Links that are signed for GET refuse HEAD.
            return FileState.from_metadata(self.store.get(self.path(file), options={"range": (0, 1)}).meta)

    def fetch(self, file: str, start: int, stop: int, expected: FileState) -> memoryview:
        """Return the bytes ``start <= i < stop`` of a file in this state, buffered once.

        Call it within :meth:`failures`.
        """
        # A whole file is requested without a range, which some servers do not support.
        is_whole = (start, stop) == (0, expected.nbytes)
        options = None if is_whole else {"range": (start, stop)}
        answer = self.store.get(self.path(file), options=options)
        if (state := FileState.from_metadata(answer.meta)) != expected:
            raise StorageError(
                f"{self.label(file)}: the file changed while it was being read ({expected.identity} before, "
                f"{state.identity} now). Load again when no process writes to it"
            )
        return memoryview(answer.bytes())

    def label(self, file: str | None) -> str:
        """Format a file, or the folder, for errors."""
        return self.root if file is None else f"{shown(file)} in {self.root}"

    @contextmanager
    def failures(self, file: str | None, doing: str) -> Iterator[None]:
        """Raise errors of obstore as StorageErrors, caused by OSErrors of the same kind and without credentials."""
        try:
            yield
        except StorageError:
            raise
        except ImportError as error:
            raise StorageError(
                f"{self.root}: {doing} needs obstore. Run pip install 'shardwise[remote]'"
            ) from error
        except Exception as error:
            # The cause is an error of the same kind with the redacted text: a traceback shows no credentials.
            kind, cause, remedy = _find_cause(error, self._text_of(error))
            raise StorageError(f"{self.label(file)}: {doing} failed, {cause}. {remedy}") from kind(cause)

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
