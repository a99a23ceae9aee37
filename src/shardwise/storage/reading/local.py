"""Files of a local, or locally mounted, folder."""

from __future__ import annotations

import mmap
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from shardwise.errors import StorageError
from shardwise.storage.contract import ReadPolicy
from shardwise.storage.machine import boot
from shardwise.storage.names import shown, why_unsafe
from shardwise.storage.policies import LOCAL, NETWORK_FILE_SYSTEM, is_on_network
from shardwise.storage.vectored import advance, one_call

_CACHE_SAMPLES = 5
"""Bytes of a range by which it is judged whether the page cache has it."""


@dataclass(slots=True)
class _SharedDescriptor:
    """A descriptor and how many reads are using it right now."""

    descriptor: int
    users: int = 0
    map: mmap.mmap | None = None


class LocalReader:
    """Reads files below ``root`` with ``preadv``; see :class:`~shardwise.storage.contract.StorageReader`.

    Descriptors are kept open, the ``max_open_files`` last used ones. Symbolic links are followed wherever
    they lead: the cache of the Hugging Face hub is made of them.

    The policy is that of a local disk, or of a network file system where the mount table says that ``root``
    lies on one; ``policy`` replaces it.

    ``bytes_read``, ``reads`` (system calls) and ``files_opened`` count what has been done so far.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        policy: ReadPolicy | None = None,
        max_open_files: int = 64,
    ) -> None:
        self._root = os.path.abspath(os.fspath(root))
        if not os.path.isdir(self._root):
            raise StorageError(f"{shown(self._root)}: no such directory; check the path")
        self._policy = policy or (NETWORK_FILE_SYSTEM if is_on_network(self._root) else LOCAL)
        self._max_open_files = max(1, max_open_files)
        self._open_files: OrderedDict[str, _SharedDescriptor] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = False
        self.bytes_read = 0
        self.reads = 0
        self.files_opened = 0

    @property
    def root(self) -> str:
        return self._root

    @property
    def policy(self) -> ReadPolicy:
        return self._policy

    def list(self) -> list[str]:
        """The names of all files below the root, sorted.

        Hidden folders (``.git``, ``.cache``) and linked folders are not entered; links to files that are gone
        are left out.
        """
        names: list[str] = []
        for folder, subfolders, files in os.walk(self._root, onerror=self._refuse_listing):
            subfolders[:] = [name for name in subfolders if not name.startswith(".")]
            for name in files:
                path = Path(folder, name)
                if path.is_file():
                    names.append(path.relative_to(self._root).as_posix())
        return sorted(names)

    def size(self, file: str) -> int:
        with self._descriptor(file) as descriptor:
            return os.fstat(descriptor).st_size

    def identity(self, file: str) -> str:
        """Size, time of change and, on a local disk, inode; and whether the name leads to another file by now.

        A file rewritten in place, to the same size, within the resolution of the file system's clock (some
        milliseconds) is not noticed.
        """
        opened, named = self._look(file)
        if opened is None or os.path.samestat(opened, named):
            return self._state(named)
        return f"{self._state(opened)}, replaced by {self._state(named)}"

    def place(self, file: str) -> str:
        """The machine's boot, device, inode, size and time of change of the file that is, or would be, opened."""
        opened, named = self._look(file)
        status = opened or named
        return f"{boot()} {status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns}"

    def read_into(self, file: str, start: int, buffer: memoryview) -> None:
        self.read_vectored(file, start, (buffer,))

    def read(self, file: str, start: int, stop: int) -> bytes:
        # A range that the file does not have is refused before it is allocated: the numbers may be hostile.
        file_nbytes = self.size(file)
        if not 0 <= start <= stop <= file_nbytes:
            raise self._ends_early(file, start, stop, file_nbytes)
        buffer = bytearray(stop - start)
        self.read_into(file, start, memoryview(buffer))
        return bytes(buffer)

    def read_vectored(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        pending = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        position, stop = start, start + sum(buffer.nbytes for buffer in pending)
        first = 0
        with self._descriptor(file) as descriptor:
            while first < len(pending):
                count = self._read_some(file, descriptor, one_call(pending, first), position)
                if count == 0:
                    raise self._ends_early(file, start, stop, position)
                position += count
                first = advance(pending, first, count)

    def cached(self, file: str, start: int, stop: int) -> memoryview | None:
        if not self._is_cached(file, start, stop):
            return None
        with self._descriptor(file) as descriptor, self._lock:
            opened = self._open_files[file]
            if opened.map is None:
                # Copy-on-write: numpy and torch warn of views of a map that is read-only, or refuse them.
                opened.map = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
            if stop > len(opened.map):
                raise self._ends_early(file, start, stop, len(opened.map))
            self.bytes_read += stop - start
            return memoryview(opened.map)[start:stop]

    def _is_cached(self, file: str, start: int, stop: int) -> bool:
        sample = bytearray(1)
        with self._descriptor(file) as descriptor:
            try:
                for part in range(_CACHE_SAMPLES):
                    place = start + (stop - 1 - start) * part // (_CACHE_SAMPLES - 1)
                    if os.preadv(descriptor, [sample], place, os.RWF_NOWAIT) == 0:
                        return False
            except OSError:  # not there without waiting for the disk, or a file system that cannot tell
                return False
        return stop > start

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for file in [file for file, opened in self._open_files.items() if not opened.users]:
                os.close(self._open_files.pop(file).descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _state(self, status: os.stat_result) -> str:
        state = f"{status.st_size} bytes, changed at {status.st_mtime_ns} ns"
        # Clients of a network file system may number its files each in their own way.
        return state if self._policy.is_remote else f"{state}, inode {status.st_ino}"

    def _look(self, file: str) -> tuple[os.stat_result | None, os.stat_result]:
        """What is known of the open file, if it is open, and of the file that has this name. Opens nothing."""
        held = self._reuse(file)
        try:
            opened = None if held is None else os.fstat(held.descriptor)
        finally:
            if held is not None:
                with self._lock:
                    held.users -= 1
                    self._close_surplus()
        self._require_safe(file)
        try:
            named = os.stat(os.path.join(self._root, file))
        except (OSError, UnicodeError) as error:
            raise self._failed(file, "looking at", error) from error
        if not stat.S_ISREG(named.st_mode):
            raise self._not_regular(file)
        return opened, named

    def _read_some(self, file: str, descriptor: int, buffers: Sequence[memoryview], position: int) -> int:
        """One system call; the number of bytes it brought, 0 at the end of the file."""
        while True:
            try:
                count = os.preadv(descriptor, buffers, position)
            except InterruptedError:
                continue
            except OSError as error:
                raise self._failed(file, f"reading at byte {position}", error) from error
            with self._lock:
                self.reads += 1
                self.bytes_read += count
            return count

    @contextmanager
    def _descriptor(self, file: str) -> Iterator[int]:
        """The file's descriptor, which stays open at least until the block is left."""
        opened = self._acquire(file)
        try:
            yield opened.descriptor
        finally:
            with self._lock:
                opened.users -= 1
                self._close_surplus()

    def _acquire(self, file: str) -> _SharedDescriptor:
        opened = self._reuse(file)
        if opened is not None:
            return opened
        # Not under the lock: opening can take milliseconds on a network file system.
        descriptor = self._open(file)
        with self._lock:
            kept = self._open_files.get(file)
            if kept is not None or self._closed:
                os.close(descriptor)
            if self._closed:
                raise self._is_closed(file)
            if kept is None:
                kept = self._open_files[file] = _SharedDescriptor(descriptor)
                self.files_opened += 1
            kept.users += 1
            self._close_surplus()
            return kept

    def _reuse(self, file: str) -> _SharedDescriptor | None:
        with self._lock:
            if self._closed:
                raise self._is_closed(file)
            opened = self._open_files.get(file)
            if opened is not None:
                opened.users += 1
                self._open_files.move_to_end(file)
            return opened

    def _close_surplus(self) -> None:
        """Close idle descriptors, the longest unused first, down to the limit. The lock is held."""
        surplus = len(self._open_files) - (0 if self._closed else self._max_open_files)
        if surplus <= 0:
            return
        idle = [file for file, opened in self._open_files.items() if not opened.users]
        for file in idle[:surplus]:
            os.close(self._open_files.pop(file).descriptor)

    def _require_safe(self, file: str) -> None:
        fault = why_unsafe(file)
        if fault is not None:
            raise StorageError(
                f"{shown(file)}: refused as a file name below {self._root}, {fault}; "
                "name files relative to the checkpoint's folder"
            )

    def _not_regular(self, file: str) -> StorageError:
        return StorageError(f"{shown(file)} in {self._root}: not a regular file; check the path")

    def _open(self, file: str) -> int:
        self._require_safe(file)
        try:
            # O_NONBLOCK: opening a pipe must not wait for a writer. Regular files do not know it.
            descriptor = os.open(os.path.join(self._root, file), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, UnicodeError) as error:
            raise self._failed(file, "opening", error) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise self._not_regular(file)
        return descriptor

    def _failed(self, file: str, doing: str, error: OSError | UnicodeError) -> StorageError:
        path = os.path.join(self._root, file)
        if isinstance(error, UnicodeError):
            cause, remedy = "the name cannot be encoded", "rename it"
        elif isinstance(error, FileNotFoundError) and os.path.islink(path):
            cause = f"it is a link to {shown(os.readlink(path))}, which is not there"
            remedy = "the download was interrupted or the cache was pruned: download it again"
        elif isinstance(error, FileNotFoundError):
            cause, remedy = "no such file", "check the path, or download it again"
        elif isinstance(error, PermissionError):
            cause, remedy = "permission denied", f"make it readable for user id {os.getuid()}"
        else:
            cause, remedy = f"{error.strerror} (errno {error.errno})", "check the file system and try again"
        return StorageError(f"{shown(file)} in {self._root}: {doing} it failed, {cause}; {remedy}")

    def _ends_early(self, file: str, start: int, stop: int, end: int) -> StorageError:
        return StorageError(
            f"{shown(file)} in {self._root}: bytes {start}..{stop} were asked for, but the file ends at byte "
            f"{end}; it is truncated or was replaced while being read: download or write it again"
        )

    def _is_closed(self, file: str) -> StorageError:
        return StorageError(f"{shown(file)} in {self._root}: the reader is closed; open another one")

    def _refuse_listing(self, error: OSError) -> None:
        # A folder below that cannot be entered is not ours to complain about; the root is.
        if error.filename == self._root:
            raise StorageError(
                f"{self._root}: listing it failed, {error.strerror}; check its permissions"
            ) from error
