"""Writing to whatever fsspec knows, file by file as streams: S3, Google Cloud Storage, and many more."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self

from shardwise.errors import ConfigError, StorageError
from shardwise.report.names import in_bytes
from shardwise.storage.contract import INCOMPLETE, WritePolicy
from shardwise.storage.names import Redactor, scheme_of, shown, why_not_plain, without_secrets
from shardwise.storage.policies import OBJECT_STORE_WRITES
from shardwise.storage.reading.fsspec_transport import fault_of, open_file_system, tuned
from shardwise.storage.reading.transport import DEFAULT_RETRIES, PermanentFault, Retries

_MIB = 1 << 20

_SHOWN_WHEN_CLOSED: Final = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})
"""Storages that show a file once its stream is closed. Others show what is on the way, under a name for that."""

_MOST_PARTS = 10_000
"""The most parts of which S3 puts a file together."""


class FsspecWriter:
    """Writes files below a URL, each as one stream; see :class:`~shardwise.storage.contract.StorageWriter`.

    A file is seen when it is synced, whole. On object stores it is a multipart upload until then, dropped where the
    file is not completed. Storages that show what is being written (``memory://``, ``sftp://``) have it under a
    name of its own, ending in ``.incomplete``, and move it. What fsspec cannot sync is durable as far as the
    storage says so itself. Failures that pass are tried again by fsspec's file systems, as they see fit.

    ``bytes_written`` counts what has been written so far.

    Memory: about two parts for each file that is being written. A part has 16 MiB, more for files above 156 GiB.

    Args:
        url: a folder, as ``s3://bucket/folder``, or of any kind that fsspec writes to.
        storage_options: what the fsspec file system takes (``key``, ``secret``, ``anon``, ...).
        policy: how the storage is written to.
        retries: its ``timeout_s`` is the time S3 may take to answer.

    Raises:
        StorageError: for a URL of an unknown kind, or one whose package is not installed. The network is not asked
            before the first call.
        ConfigError: for a policy that promises more than streams can keep.
    """

    def __init__(
        self,
        url: str,
        *,
        storage_options: Mapping[str, Any] | None = None,
        policy: WritePolicy = OBJECT_STORE_WRITES,
        retries: Retries = DEFAULT_RETRIES,
    ) -> None:
        if policy.has_random_writes or policy.can_rename:
            raise ConfigError(
                f"policy: {without_secrets(url)} is written as streams, neither in any order nor with renames; "
                "pass a WritePolicy with has_random_writes=False, can_rename=False"
            )
        options = dict(storage_options or {})
        scheme = scheme_of(url)
        self._root = without_secrets(url)
        self._policy = policy
        self._retries = retries
        self._redacted = Redactor(url, options)
        made_of = tuned(scheme, options, retries, policy.concurrency)
        self._files, path = open_file_system(url, made_of, doing="writing to")
        self._folder = path.rstrip("/")
        self._is_shown_when_closed = scheme in _SHOWN_WHEN_CLOSED
        self._streams: dict[str, _FsspecStream] = {}
        self._lock = threading.Lock()
        self._closed = False
        self.bytes_written = 0

    @property
    def root(self) -> str:
        return self._root

    @property
    def policy(self) -> WritePolicy:
        return self._policy

    def list(self) -> list[str]:
        return list(self.sizes())

    def sizes(self) -> dict[str, int]:
        self._require_open(None)
        self._files.invalidate_cache()
        with self._failures(None, "listing it"):
            try:
                found = self._files.ls(self._folder, detail=True)
            except FileNotFoundError:
                return {}
        sizes = {
            entry["name"].rstrip("/").rpartition("/")[2]: int(entry.get("size") or 0)
            for entry in found
            if entry["type"] == "file"
        }
        return {name: sizes[name] for name in sorted(sizes) if name}

    def read(self, file: str) -> bytes | None:
        path = self._path(file)
        self._files.invalidate_cache()
        with self._failures(file, "reading it"):
            try:
                return bytes(self._files.cat_file(path))
            except FileNotFoundError:
                return None

    def create(self, file: str, nbytes: int) -> None:
        path = self._path(file)
        if nbytes < 0:
            raise StorageError(f"{self._named(file)}: cannot be created with {nbytes} bytes; pass 0 or more")
        doing = f"creating it with {in_bytes(nbytes)}"
        self._files.invalidate_cache()
        with self._failures(file, doing):
            is_there = self._files.exists(path)
        fresh = _FsspecStream(self._files, path, self._interim(path), nbytes)
        with self._lock:
            if is_there or self._streams.setdefault(file, fresh) is not fresh:
                raise StorageError(f"{self._named(file)}: {doing} failed, it is there already; remove it first")
        try:
            with self._failures(file, doing):
                self._in_folder(fresh.open)
        except BaseException:
            with self._lock:
                self._streams.pop(file, None)
            raise

    def write(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        self._path(file)
        with self._lock:
            stream = self._streams.get(file)
        if stream is None:
            raise StorageError(
                f"{self._named(file)}: no such file is being written by this writer; create it first"
            )
        flat = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        stop = start + sum(buffer.nbytes for buffer in flat)
        with stream.lock:
            self._require_whole(file, stream)
            if not 0 <= start <= stop <= stream.nbytes:
                raise StorageError(
                    f"{self._named(file)}: bytes {start}..{stop} are to be written, but it was created with "
                    f"{stream.nbytes} bytes; create it with the size it will have"
                )
            if start != stream.position:
                raise StorageError(
                    f"{self._named(file)}: is written from its first byte to its last, and byte {start} does not "
                    f"follow on byte {stream.position}; write in order"
                )
            with self._failures(file, f"writing at byte {start}"):
                stream.write(flat)
        with self._lock:
            self.bytes_written += stop - start

    def sync(self, file: str) -> None:
        self._path(file)
        with self._lock:
            stream = self._streams.get(file)
        if stream is None:
            return
        with stream.lock:
            self._require_whole(file, stream)
            if stream.position < stream.nbytes:
                raise StorageError(
                    f"{self._named(file)}: only {stream.position} of {stream.nbytes} bytes were written; "
                    "write all of them before syncing it"
                )
            with self._failures(file, "completing it"):
                stream.complete()
        with self._lock:
            self._streams.pop(file, None)

    def rename(self, file: str, name: str) -> None:
        self._path(file)
        self._path(name)
        raise StorageError(
            f"{self._named(file)}: cannot be renamed to {shown(name)} in one step in such a storage; "
            "write it under its name"
        )

    def publish(self, file: str, name: str) -> None:
        source, target = self._path(file), self._path(name)
        self._files.invalidate_cache()
        with self._failures(file, f"giving it the name {shown(name)}"):
            _move(self._files, source, target)

    def replace(self, file: str, content: bytes) -> None:
        path = self._path(file)
        interim = self._interim(path)
        with self._failures(file, f"writing it with {in_bytes(len(content))}"):
            self._in_folder(lambda: self._files.pipe_file(interim, content))
            if interim != path:
                _move(self._files, interim, path)

    def remove(self, file: str) -> None:
        path = self._path(file)
        with self._lock:
            stream = self._streams.pop(file, None)
        if stream is not None:
            stream.drop()
        with self._failures(file, "removing it"), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(path)

    def sync_names(self) -> None:
        self._require_open(None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            dropped = list(self._streams.values())
            self._streams.clear()
        for stream in dropped:
            stream.drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _path(self, file: str) -> str:
        self._require_open(file)
        fault = why_not_plain(file)
        if fault is not None:
            raise StorageError(
                f"{shown(file)}: refused as the name of a file in {self._root}, {fault}; name a file of that folder"
            )
        return f"{self._folder}/{file}" if self._folder else file

    def _interim(self, path: str) -> str:
        """Where a file is while it is written."""
        if self._is_shown_when_closed:
            return path
        folder, slash, file = path.rpartition("/")
        return f"{folder}{slash}.{file}.{secrets.token_hex(4)}{INCOMPLETE}"

    def _in_folder(self, act: Any) -> None:
        """Do what needs the folder, which is made only where it is missed: object stores have none to make."""
        try:
            act()
        except FileNotFoundError:
            if self._is_shown_when_closed:
                raise
            self._files.makedirs(self._folder, exist_ok=True)
            act()

    def _require_whole(self, file: str, stream: _FsspecStream) -> None:
        if stream.is_broken:
            raise StorageError(
                f"{self._named(file)}: an earlier write to it failed, so it cannot be completed; "
                "remove it and save again"
            )

    def _require_open(self, file: str | None) -> None:
        if self._closed:
            raise StorageError(f"{self._named(file)}: the writer is closed; open another one")

    def _named(self, file: str | None) -> str:
        return self._root if file is None else f"{shown(file)} in {self._root}"

    @contextmanager
    def _failures(self, file: str | None, doing: str) -> Iterator[None]:
        """What file systems raise, as StorageErrors without credentials."""
        try:
            yield
        except Exception as error:
            fault = fault_of(error, self._retries.timeout_s)
            assert isinstance(fault, OSError)
            cause, remedy = _explained(fault)
            message = f"{self._named(file)}: {doing} failed, {self._redacted(cause)}; {remedy}"
            raise StorageError(message) from self._redacted.made_anew(fault)


class _FsspecStream:
    """One file on its way: written at ``interim``, and seen at ``path`` once it is complete."""

    def __init__(self, files: Any, path: str, interim: str, nbytes: int) -> None:
        self._files = files
        self._path = path
        self._interim = interim
        self._opened: Any = None
        self.nbytes = nbytes
        self.position = 0
        self.is_broken = False
        self.lock = threading.Lock()

    def open(self) -> None:
        self._opened = self._files.open(self._interim, "wb", block_size=_part_bytes(self.nbytes))
        self._seal()

    def write(self, buffers: Sequence[memoryview]) -> None:
        self._unseal()
        self.is_broken = True
        try:
            for buffer in buffers:
                self._opened.write(buffer)
                self.position += buffer.nbytes
        finally:
            self._seal()
        self.is_broken = False

    def complete(self) -> None:
        self._unseal()
        self.is_broken = True
        self._opened.close()
        if self._interim != self._path:
            _move(self._files, self._interim, self._path)

    def drop(self) -> None:
        """Leave nothing behind, as far as the storage lets itself be asked."""
        with self.lock, contextlib.suppress(Exception):
            if self._opened is not None and self._interim == self._path:
                self._opened.discard()
            elif self._opened is not None:
                self._opened.close()
                self._files.rm_file(self._interim)

    def _seal(self) -> None:
        """See to it that the file does not become complete by being forgotten.

        What fsspec buffers closes itself when it is collected, which completes the upload of what there is so far.
        """
        if self._is_buffered():
            self._opened.closed = True

    def _unseal(self) -> None:
        if self._is_buffered():
            self._opened.closed = False

    def _is_buffered(self) -> bool:
        from fsspec.spec import AbstractBufferedFile

        return isinstance(self._opened, AbstractBufferedFile) and self._interim == self._path


def _part_bytes(nbytes: int) -> int:
    """How much of a file is sent at once: a whole number of MiB, so that no file has too many parts."""
    return max(16, -(-nbytes // (_MOST_PARTS * _MIB))) * _MIB


def _move(files: Any, source: str, target: str) -> None:
    from fsspec.spec import AbstractFileSystem

    if type(files).mv is AbstractFileSystem.mv:
        # Which copies and removes, too, but takes brackets and stars in names for patterns.
        files.cp_file(source, target)
        files.rm_file(source)
    else:
        files.mv(source, target)


def _explained(fault: OSError) -> tuple[str, str]:
    """The cause of a failure, and what to do."""
    if isinstance(fault, FileNotFoundError):
        return "there is no such bucket or folder", "check the URL"
    if isinstance(fault, PermissionError):
        return str(fault), "check the URL, and pass credentials that may write there (storage_options)"
    if isinstance(fault, PermanentFault):
        return str(fault), fault.remedy
    return str(fault), "check the network and the storage, and save again"
