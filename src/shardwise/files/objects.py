"""Access to object stores, HTTP servers and memory through obstore, and a writer of files as streams.

Credentials are removed from obstore's errors.
"""

from __future__ import annotations

import base64
import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final
from urllib.parse import unquote, urlsplit, urlunsplit

from shardwise.core.errors import ConfigError, StorageError
from shardwise.core.formatting import in_bytes
from shardwise.files.storage import OBJECT_STORE_WRITES, CannotListError, StorageWriter, WritePolicy, as_bytes
from shardwise.files.urls import get_scheme, redact, require_file_name, shown, without_secrets

_TIMEOUTS: Final = {"connect_timeout": "30s", "read_timeout": "30s", "timeout": "1h"}
"""Silence of half a minute is a failure; a request as a whole may take long, as others share the network."""

_ONE_CHUNK_BYTES: Final = 16 << 20


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
        return cls(meta["size"], f"ETag {meta['e_tag']}" if meta["e_tag"] else f"changed {meta['last_modified']}")

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
            CannotListError: the URL is on an HTTP server.
        """
        if self._is_http:
            raise CannotListError(f"{self.root}: an HTTP server does not list its files")
        with self.failures(None, "listing the files"):
            items = self.store.list(self._folder or None).collect()
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

    def fetch(self, file: str, start: int, stop: int, expected: FileState) -> Iterable[Any]:
        """Return the bytes ``start <= i < stop`` of a file in this state, in chunks.

        Call it within :meth:`failures`.
        """
        # A whole file is requested without a range, which some servers do not support.
        whole = (start, stop) == (0, expected.nbytes)
        answer = self.store.get(self.path(file), options=None if whole else {"range": (start, stop)})
        if (state := FileState.from_metadata(answer.meta)) != expected:
            raise StorageError(
                f"{self.label(file)}: the file changed while it was being read ({expected.identity} before, "
                f"{state.identity} now). Load again when no process writes to it"
            )
        # One chunk takes a quarter less of the processor than many, and as much memory as it is long.
        return [answer.bytes()] if stop - start <= _ONE_CHUNK_BYTES else answer.stream(min_chunk_size=1 << 20)

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
            text = redact(str(error).partition("\n\nDebug source")[0], *self._secrets)
            kind, cause, remedy = _find_cause(error, text)
            raise StorageError(f"{self.label(file)}: {doing} failed, {cause}. {remedy}") from kind(cause)


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


def fill(buffers: Iterable[memoryview], chunks: Iterable[Any]) -> bool:
    """Copy the chunks into the buffers, one after the other, and return whether the total sizes are equal."""
    targets: Iterator[memoryview] = iter(buffers)
    target = memoryview(b"")
    for chunk in chunks:
        data = memoryview(chunk)
        while data.nbytes:
            while not target.nbytes:
                following = next(targets, None)
                if following is None:
                    return False
                target = following
            count = min(target.nbytes, data.nbytes)
            target[:count] = data[:count]
            target, data = target[count:], data[count:]
    return not target.nbytes and next(targets, None) is None


_MIB = 1 << 20

_MAX_PARTS = 10_000
"""The maximum number of parts of a file on S3."""

_PARTS_AT_ONCE = 4


class ObjectWriter(StorageWriter):
    """A writer of files below a URL, each as one stream. See :class:`~shardwise.files.storage.StorageWriter`.

    A file becomes visible when it is synced, and only as a complete file. Until then a large file is a multipart
    upload, which stays invisible if it is not completed. The bucket's lifecycle rules remove its parts.

    Memory: about five parts for each file that is being written. A part has 16 MiB, or more for files above 156
    GiB.

    Args:
        url: a folder, as ``s3://bucket/folder``, ``gs://...``, ``az://...`` or ``memory://folder``.
        storage_options: the arguments of obstore's store, as for :class:`~shardwise.storage.RemoteReader`.
        policy: write policy of the storage.

    Raises:
        StorageError: the URL cannot be opened. No request is sent before the first call.
        ConfigError: the policy has capabilities that streams do not have.
    """

    def __init__(
        self,
        url: str,
        *,
        storage_options: Mapping[str, Any] | None = None,
        policy: WritePolicy = OBJECT_STORE_WRITES,
    ) -> None:
        if policy.has_random_writes or policy.can_rename:
            raise ConfigError(
                f"policy: {without_secrets(url)} is written as streams, neither in any order nor with renames. "
                "Pass a WritePolicy with has_random_writes=False, can_rename=False"
            )
        self._policy = policy
        self._files = Objects(url, storage_options or {}, doing="writing to")
        self._streams: dict[str, _Stream] = {}
        self._lock = threading.Lock()
        self._closed = False

    @property
    def root(self) -> str:
        return self._files.root

    @property
    def policy(self) -> WritePolicy:
        return self._policy

    def sizes(self) -> dict[str, int]:
        self._require_open(None)
        with self._files.failures(None, "listing it"):
            items = self._files.store.list_with_delimiter(self._files.path("") or None)["objects"]
        return dict(sorted((item["path"].rpartition("/")[2], item["size"]) for item in items))

    def read(self, file: str) -> bytes | None:
        path = self._path(file)
        with self._files.failures(file, "reading it"):
            try:
                return bytes(self._files.store.get(path).bytes())
            except FileNotFoundError:
                return None

    def create(self, file: str, nbytes: int) -> None:
        path = self._path(file)
        if nbytes < 0:
            raise StorageError(f"{self._files.label(file)}: cannot be created with {nbytes} bytes. Pass 0 or more")
        doing = f"creating it with {in_bytes(nbytes)}"
        with self._files.failures(file, doing):
            try:
                self._files.store.head(path)
                is_there = True
            except FileNotFoundError:
                is_there = False
            stream = _Stream(self._files, path, nbytes)
        with self._lock:
            if is_there or self._streams.setdefault(file, stream) is not stream:
                raise StorageError(f"{self._files.label(file)}: {doing} failed: it exists already. Remove it first")

    def write(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        self._path(file)
        with self._lock:
            stream = self._streams.get(file)
        if stream is None:
            raise StorageError(
                f"{self._files.label(file)}: no such file is being written by this writer. Create it first"
            )
        flat, nbytes = as_bytes(buffers)
        stop = start + nbytes
        with stream.lock, self._files.failures(file, f"writing at byte {start}"):
            self._require_complete(file, stream)
            if not 0 <= start <= stop <= stream.nbytes:
                raise StorageError(
                    f"{self._files.label(file)}: bytes {start}..{stop} are out of range, it was created with "
                    f"{stream.nbytes} bytes. Create it with its final size"
                )
            if start != stream.position:
                raise StorageError(
                    f"{self._files.label(file)}: bytes must be written in order, and byte {start} does not follow "
                    f"byte {stream.position}. Write from the first byte to the last"
                )
            # Broken until the write returns: after an error nobody knows how many bytes were sent.
            stream.is_broken = True
            # Obstore keeps what it is given until the part is sent, and the buffers may change before that.
            stream.upload.write(b"".join(flat))
            stream.position, stream.is_broken = stop, False

    def sync(self, file: str) -> None:
        self._path(file)
        with self._lock:
            stream = self._streams.get(file)
        if stream is None:
            return
        with stream.lock, self._files.failures(file, "completing it"):
            self._require_complete(file, stream)
            if stream.position < stream.nbytes:
                raise StorageError(
                    f"{self._files.label(file)}: only {stream.position} of {stream.nbytes} bytes were written. "
                    "Write all of them before syncing it"
                )
            stream.is_broken = True
            stream.upload.close()
        with self._lock:
            self._streams.pop(file, None)

    def rename(self, file: str, name: str) -> None:
        self._path(file)
        self._path(name)
        raise StorageError(
            f"{self._files.label(file)}: cannot be renamed to {shown(name)} in one step in such a storage. "
            "Write it under its name"
        )

    def publish(self, file: str, name: str) -> None:
        source, target = self._path(file), self._path(name)
        with self._files.failures(file, f"giving it the name {shown(name)}"):
            # The copy is the commit. If deleting fails, the source remains, which readers ignore.
            self._files.store.copy(source, target)
            self._files.store.delete(source)

    def replace(self, file: str, content: bytes) -> None:
        path = self._path(file)
        with self._files.failures(file, f"writing it with {in_bytes(len(content))}"):
            self._files.store.put(path, content, use_multipart=False)

    def remove(self, file: str) -> None:
        path = self._path(file)
        with self._lock:
            self._streams.pop(file, None)
        with self._files.failures(file, "removing it"), contextlib.suppress(FileNotFoundError):
            self._files.store.delete(path)

    def sync_names(self) -> None:
        self._require_open(None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._streams.clear()

    def _path(self, file: str) -> str:
        self._require_open(file)
        require_file_name(self.root, file, is_nested=False)
        return self._files.path(file)

    def _require_complete(self, file: str, stream: _Stream) -> None:
        if stream.is_broken:
            raise StorageError(
                f"{self._files.label(file)}: an earlier write to it failed, so it cannot be completed. "
                "Remove it and save again"
            )

    def _require_open(self, file: str | None) -> None:
        if self._closed:
            raise StorageError(f"{self._files.label(file)}: the writer is closed. Open another one")


class _Stream:
    """An upload of one file, which never becomes visible if it is dropped."""

    def __init__(self, files: Objects, path: str, nbytes: int) -> None:
        from obstore import open_writer

        self.upload = open_writer(
            files.store, path, buffer_size=_part_bytes(nbytes), max_concurrency=_PARTS_AT_ONCE
        )
        self.nbytes = nbytes
        self.position = 0
        self.is_broken = False
        self.lock = threading.Lock()


def _part_bytes(nbytes: int) -> int:
    """Return the size of an upload's parts: a multiple of 1 MiB, such that no file has too many parts."""
    return max(16, -(-nbytes // (_MAX_PARTS * _MIB))) * _MIB
