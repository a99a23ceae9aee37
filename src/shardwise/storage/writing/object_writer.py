"""Writes to object stores, each file as one stream."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.errors import ConfigError, StorageError
from shardwise.report.names import in_bytes
from shardwise.storage.contract import StorageWriter, WritePolicy
from shardwise.storage.names import shown, why_not_plain, without_secrets
from shardwise.storage.objects import Objects
from shardwise.storage.policies import OBJECT_STORE_WRITES
from shardwise.storage.vectored import as_bytes

_MIB = 1 << 20

_MOST_PARTS = 10_000
"""The most parts of which S3 puts a file together."""

_PARTS_AT_ONCE = 4


class ObjectWriter(StorageWriter):
    """Writes files below a URL, each as one stream; see :class:`~shardwise.storage.contract.StorageWriter`.

    A file is seen when it is synced, whole. Until then a large one is a multipart upload, of which nothing is seen
    where it is not completed. What it leaves in the store then is removed by the bucket's lifecycle rules.

    Memory: about five parts for each file that is being written. A part has 16 MiB, more for files above 156 GiB.

    Args:
        url: a folder, as ``s3://bucket/folder``, ``gs://...``, ``az://...`` or ``memory://folder``.
        storage_options: the arguments of obstore's store, as for :class:`~shardwise.storage.RemoteReader`.
        policy: how the storage is written to.

    Raises:
        StorageError: for a URL that cannot be opened. The network is not asked before the first call.
        ConfigError: for a policy that promises more than streams can keep.
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
            found = self._files.store.list_with_delimiter(self._files.path("") or None)["objects"]
        return dict(sorted((item["path"].rpartition("/")[2], item["size"]) for item in found))

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
            raise StorageError(f"{self._files.named(file)}: cannot be created with {nbytes} bytes. Pass 0 or more")
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
                raise StorageError(
                    f"{self._files.named(file)}: {doing} failed, it is there already. Remove it first"
                )

    def write(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        self._path(file)
        with self._lock:
            stream = self._streams.get(file)
        if stream is None:
            raise StorageError(
                f"{self._files.named(file)}: no such file is being written by this writer; create it first"
            )
        flat, nbytes = as_bytes(buffers)
        stop = start + nbytes
        with stream.lock, self._files.failures(file, f"writing at byte {start}"):
            self._require_whole(file, stream)
            if not 0 <= start <= stop <= stream.nbytes:
                raise StorageError(
                    f"{self._files.named(file)}: bytes {start}..{stop} are to be written, but it was created with "
                    f"{stream.nbytes} bytes. Create it with the size it will have"
                )
            if start != stream.position:
                raise StorageError(
                    f"{self._files.named(file)}: is written from its first byte to its last, and byte {start} does "
                    f"not follow on byte {stream.position}. Write in order"
                )
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
            self._require_whole(file, stream)
            if stream.position < stream.nbytes:
                raise StorageError(
                    f"{self._files.named(file)}: only {stream.position} of {stream.nbytes} bytes were written. "
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
            f"{self._files.named(file)}: cannot be renamed to {shown(name)} in one step in such a storage. "
            "Write it under its name"
        )

    def publish(self, file: str, name: str) -> None:
        source, target = self._path(file), self._path(name)
        with self._files.failures(file, f"giving it the name {shown(name)}"):
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
        fault = why_not_plain(file)
        if fault is not None:
            raise StorageError(
                f"{shown(file)}: refused as the name of a file in {self.root}, {fault}. Name a file of that folder"
            )
        return self._files.path(file)

    def _require_whole(self, file: str, stream: _Stream) -> None:
        if stream.is_broken:
            raise StorageError(
                f"{self._files.named(file)}: an earlier write to it failed, so it cannot be completed. "
                "Remove it and save again"
            )

    def _require_open(self, file: str | None) -> None:
        if self._closed:
            raise StorageError(f"{self._files.named(file)}: the writer is closed. Open another one")


class _Stream:
    """One file on its way; one that is dropped is never seen."""

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
    """How much of a file is sent at once: a whole number of MiB, so that no file has too many parts."""
    return max(16, -(-nbytes // (_MOST_PARTS * _MIB))) * _MIB
