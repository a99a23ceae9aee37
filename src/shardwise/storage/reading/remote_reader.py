"""Files on other machines, read by range over the network: HTTP servers, object stores, the hub."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.errors import StorageError
from shardwise.storage.contract import ReadPolicy, StorageReader, ends_early
from shardwise.storage.names import scheme_of, shown, why_unsafe
from shardwise.storage.objects import FileState, Objects, fill
from shardwise.storage.policies import OBJECT_STORE
from shardwise.storage.reading.hub_files import HubFiles
from shardwise.storage.vectored import as_bytes


class RemoteReader(StorageReader):
    """Reads files below a URL by range; see :class:`~shardwise.storage.contract.StorageReader`.

    Nothing is written to disk, and no file is held in memory: each request in flight is held once (16 MiB at
    most), and copied into the caller's buffers. At most ``policy.concurrency`` requests are in flight, however many
    threads read. Failures that may pass are tried again by obstore. The version of every file is remembered when it
    is first looked at; bytes of another version are a StorageError.

    ``bytes_read``, ``reads`` (ranges asked for) and ``files_opened`` (files looked at) count what has been done.

    Args:
        url: a folder, as ``https://host/folder``, ``s3://bucket/folder``, ``gs://bucket/folder``, ``az://...``,
            ``hf://organisation/name@revision`` or ``memory://folder``. A query is sent with every file.
        storage_options: the arguments of obstore's store: ``client_options`` and ``retry_config``, for buckets
            also ``region``, ``endpoint``, ``skip_signature``, ...; for hf ``token``, ``endpoint``, ``revision``.
        concurrency: replaces ``policy.concurrency``.
        policy: how the storage is read.

    Raises:
        StorageError: for a URL that cannot be read. The network is not asked before the first read.
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
        options = storage_options or {}
        self._files = HubFiles(url, options) if scheme_of(url) == "hf" else Objects(url, options, doing="reading")
        self._in_flight = threading.BoundedSemaphore(self._policy.concurrency)
        self._states: dict[str, FileState] = {}
        self._lock = threading.Lock()
        self._closed = False
        self.bytes_read = 0
        self.reads = 0
        self.files_opened = 0

    @property
    def root(self) -> str:
        return self._files.root

    @property
    def policy(self) -> ReadPolicy:
        return self._policy

    def list(self) -> list[str]:
        """The names of all files below the URL, sorted.

        Raises:
            CannotListError: for an HTTP server, which gives files by name only.
        """
        self._require_open(None)
        return self._files.list()

    def size(self, file: str) -> int:
        return self._state(file).nbytes

    def identity(self, file: str) -> str:
        """The file's version (ETag or hash, else time of change) and size, asked of the server anew."""
        return self._look_at(file).identity

    def read_vectored(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        flat, nbytes = as_bytes(buffers)
        stop, state = start + nbytes, self._state(file)
        if not 0 <= start <= stop <= state.nbytes:
            raise ends_early(self.root, file, (start, stop), state.nbytes)
        if start == stop:
            return
        doing = f"reading bytes {start}..{stop}"
        with self._in_flight, self._files.failures(file, doing):
            self._require_open(file)
            is_whole = fill(flat, self._files.fetch(file, start, stop, state))
        if not is_whole:
            raise StorageError(
                f"{self._files.named(file)}: {doing} failed, the answer is of another size. Check the server"
            )
        with self._lock:
            self.reads += 1
            self.bytes_read += stop - start

    def close(self) -> None:
        self._closed = True

    def _state(self, file: str) -> FileState:
        """The file's state as it was when it was first looked at."""
        self._require_open(file)
        return self._states.get(file) or self._look_at(file, is_first=True)

    def _look_at(self, file: str, *, is_first: bool = False) -> FileState:
        self._require_open(file)
        fault = why_unsafe(file)
        if fault is not None:
            raise StorageError(
                f"{shown(file)}: refused as a file name below {self.root}, {fault}. "
                "Name files relative to the checkpoint's folder"
            )
        with self._in_flight:
            found = self._files.state(file)
        with self._lock:
            self.files_opened += file not in self._states
            first = self._states.setdefault(file, found)
        return first if is_first else found

    def _require_open(self, file: str | None) -> None:
        if self._closed:
            raise StorageError(f"{self._files.named(file)}: the reader is closed. Open another one")
