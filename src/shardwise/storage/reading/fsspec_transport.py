"""Ranges of files on whatever fsspec knows: S3, Google Cloud Storage, and many more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwise.errors import StorageError
from shardwise.storage.names import scheme_of, without_secrets
from shardwise.storage.reading.transport import (
    PASSING_STATUSES,
    FileState,
    PermanentFault,
    Retries,
    TransientFault,
    changed,
)

_PACKAGES = {
    "s3": ("s3fs", "pip install 'shardwise[s3]'"),
    "s3a": ("s3fs", "pip install 'shardwise[s3]'"),
    "gs": ("gcsfs", "pip install 'shardwise[gs]'"),
    "gcs": ("gcsfs", "pip install 'shardwise[gs]'"),
    "abfs": ("adlfs", "pip install adlfs"),
    "abfss": ("adlfs", "pip install adlfs"),
    "az": ("adlfs", "pip install adlfs"),
}

_VERSIONS = ("ETag", "etag", "xet_hash", "generation", "md5Hash", "content_md5", "checksum")
"""What file systems call the version of a content, the best first."""

_TIMES = ("LastModified", "last_modified", "updated", "mtime", "modified", "uploaded_at", "created")

_RECHECK_S = 5.0
"""fsspec's reads do not tell which version they read; so often the file is looked at again while it is read."""

_WRONG_USE = (ValueError, TypeError, AttributeError, NotImplementedError, ImportError)


class FsspecTransport:
    """Asks an fsspec file system for ranges; see :class:`~shardwise.storage.reading.transport.Transport`.

    The file system is an instance of its own, without a cache of listings or blocks, made from ``options``.
    """

    def __init__(self, url: str, *, retries: Retries, concurrency: int, options: Mapping[str, Any]) -> None:
        self._shown = without_secrets(url)
        self._retries = retries
        self._files, root = open_file_system(
            url, tuned(scheme_of(url), options, retries, concurrency), doing="reading"
        )
        self._root = root.rstrip("/")
        self._lock = threading.Lock()
        self._seen_at: dict[str, float] = {}

    def list(self) -> list[str]:
        prefix = f"{self._root}/" if self._root else ""
        found = self._call("find", self._root)
        return [path.removeprefix(prefix) for path in found if path.startswith(prefix)]

    def state(self, file: str) -> FileState:
        path = self._path(file)
        with self._lock:
            self._files.invalidate_cache()
        info = self._call("info", path)
        if info.get("type") == "directory":
            raise FileNotFoundError("it is a folder")
        size = info.get("size")
        if not isinstance(size, int):
            raise PermanentFault(f"{scheme_of(self._shown)}:// does not tell the file's size", "download the file")
        with self._lock:
            self._seen_at[file] = time.monotonic()
        return FileState(size, _version(info))

    def fetch(
        self,
        file: str,
        start: int,
        buffers: Sequence[memoryview],
        expected: FileState,
        is_abandoned: Callable[[], bool],  # noqa: ARG002 - fsspec's reads cannot be stopped
    ) -> None:
        nbytes = sum(buffer.nbytes for buffer in buffers)
        data = memoryview(self._call("cat_file", self._path(file), nbytes=nbytes, start=start, end=start + nbytes))
        if data.nbytes > nbytes:
            raise PermanentFault(
                f"{data.nbytes} bytes came where {nbytes} were asked for: the server ignores ranges",
                "use a server that serves byte ranges, or download the checkpoint",
            )
        if data.nbytes < nbytes:
            self._require(file, expected)
            raise TransientFault(f"the body ended after {data.nbytes} of {nbytes} bytes")
        position = 0
        for buffer in buffers:
            buffer[:] = data[position : position + buffer.nbytes]
            position += buffer.nbytes
        if time.monotonic() - self._seen_at.get(file, 0.0) > _RECHECK_S:
            self._require(file, expected)

    def close(self) -> None:
        with self._lock:
            self._files.invalidate_cache()

    def _require(self, file: str, expected: FileState) -> None:
        now = self.state(file)
        expected.require_version(now.version)
        if now.nbytes != expected.nbytes:
            raise changed(f"{expected.nbytes} bytes before, {now.nbytes} now")

    def _path(self, file: str) -> str:
        return f"{self._root}/{file}" if self._root else file

    def _call(self, method: str, path: str, *, nbytes: int = 0, **arguments: Any) -> Any:
        """One call of the file system, bounded in time where the file system lets itself be interrupted."""
        from fsspec.asyn import AsyncFileSystem, sync

        try:
            if not isinstance(self._files, AsyncFileSystem):
                return getattr(self._files, method)(path, **arguments)
            return sync(
                self._files.loop,
                getattr(self._files, f"_{method}"),
                path,
                **arguments,
                timeout=self._retries.longest_request_s(nbytes),
            )
        except Exception as error:
            raise fault_of(error, self._retries.longest_request_s(nbytes)) from error


def tuned(scheme: str, options: Mapping[str, Any], retries: Retries, concurrency: int) -> dict[str, Any]:
    """The options of a file system of its own, which keeps no listings, waits and connects as it should."""
    found = {"use_listings_cache": False, "skip_instance_cache": True, **options}
    if scheme in ("s3", "s3a"):
        ours = {
            # botocore keeps 10 connections, which would bound the requests in flight.
            "max_pool_connections": concurrency,
            "connect_timeout": retries.timeout_s,
            "read_timeout": retries.timeout_s,
        }
        found["config_kwargs"] = {**ours, **found.get("config_kwargs", {})}
    return found


def open_file_system(url: str, options: Mapping[str, Any], *, doing: str) -> tuple[Any, str]:
    """A file system for the URL, and its path there; ``doing`` ("reading") says in errors what it is wanted for."""
    shown_url = without_secrets(url)
    scheme = scheme_of(url)
    try:
        from fsspec.core import url_to_fs
        from fsspec.registry import get_filesystem_class
    except ImportError as error:
        raise StorageError(f"{shown_url}: {doing} {scheme}:// needs fsspec: pip install fsspec") from error
    try:
        get_filesystem_class(scheme)
    except ImportError as error:
        package, command = _PACKAGES.get(scheme, (error.name or "a package", "install what is named above"))
        raise StorageError(
            f"{shown_url}: {doing} {scheme}:// needs {package}, which cannot be imported ({error}); {command}"
        ) from error
    except ValueError as error:
        raise StorageError(
            f"{shown_url}: {scheme}:// is no kind of storage that is known here (fsspec: {error}); check the URL"
        ) from error
    files, root = url_to_fs(url, **options)
    return files, root


def _version(info: Mapping[str, Any]) -> str | None:
    for name in (*_VERSIONS, *_TIMES):
        value = info.get(name)
        if value is not None:
            return f"{name} {value}"
    return None


def fault_of(error: Exception, timeout_s: float) -> Exception:
    """What a file system raised, as one of the faults of a transport."""
    status = _status(error)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return FileNotFoundError("no such file")
    if isinstance(error, PermissionError) or status in (401, 403):
        return PermissionError(f"access is refused ({type(error).__name__}: {error})")
    # fsspec's own timeout, which is no TimeoutError before Python 3.11's asyncio has it so.
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return TransientFault(f"nothing came in time ({timeout_s:.3g} s at most)")
    told = f"{type(error).__name__}: {error}"
    if isinstance(error, _WRONG_USE):
        return PermanentFault(f"the file system refuses ({told})", "check the URL and storage_options")
    if status is not None and 400 <= status < 500 and status not in PASSING_STATUSES:
        return PermanentFault(f"the server answered {status} ({told})", "check the URL and storage_options")
    return TransientFault(f"the file system failed ({told})")


def _status(error: BaseException) -> int | None:
    """The HTTP status inside an error, which every library keeps at another place."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status", "status_code", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, int) and 100 <= value < 600:
                return value
            if isinstance(value, str) and value.isdecimal():
                return int(value)
    return None
