"""Files of a local, or locally mounted, folder."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from shardwise.errors import StorageError
from shardwise.storage.contract import ReadPolicy, StorageReader, ends_early
from shardwise.storage.machine import boot
from shardwise.storage.names import failed, shown, why_unsafe
from shardwise.storage.policies import LOCAL, NETWORK_FILE_SYSTEM, is_network, type_at
from shardwise.storage.vectored import advance, as_bytes, one_call


class _Descriptor:
    """A descriptor that is closed with the last reference to it, so that no thread loses it while it reads."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.descriptor)


class LocalReader(StorageReader):
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
            raise StorageError(f"{shown(self._root)}: no such directory. Check the path")
        self._policy = policy or (NETWORK_FILE_SYSTEM if is_network(type_at(self._root)) else LOCAL)
        self._max_open_files = max(1, max_open_files)
        self._open_files: OrderedDict[str, _Descriptor] = OrderedDict()
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

        def refuse(error: OSError) -> None:
            # A folder below that cannot be entered is not ours to complain about; the root is.
            if error.filename == self._root:
                raise failed(self._root, None, "listing it", error) from error

        names: list[str] = []
        for folder, subfolders, files in os.walk(self._root, onerror=refuse):
            subfolders[:] = [name for name in subfolders if not name.startswith(".")]
            paths = (Path(folder, name) for name in files)
            names += [path.relative_to(self._root).as_posix() for path in paths if path.is_file()]
        return sorted(names)

    def size(self, file: str) -> int:
        opened = self._opened(file)  # kept, or another thread may close it
        return os.fstat(opened.descriptor).st_size

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

    def read_vectored(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        pending, nbytes = as_bytes(buffers)
        position, stop = start, start + nbytes
        first = 0
        opened = self._opened(file)
        while first < len(pending):
            try:
                count = os.preadv(opened.descriptor, one_call(pending, first), position)
            except OSError as error:
                raise failed(self._root, file, f"reading at byte {position}", error) from error
            with self._lock:
                self.reads += 1
                self.bytes_read += count
            if count == 0:
                raise ends_early(self._root, file, (start, stop), position)
            position += count
            first = advance(pending, first, count)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._open_files.clear()

    def _state(self, status: os.stat_result) -> str:
        state = f"{status.st_size} bytes, changed at {status.st_mtime_ns} ns"
        # Clients of a network file system may number its files each in their own way.
        return state if self._policy.is_remote else f"{state}, inode {status.st_ino}"

    def _look(self, file: str) -> tuple[os.stat_result | None, os.stat_result]:
        """The state of the open file, if it is open, and of the file that has this name. Opens nothing."""
        path = self._path(file)
        held = self._open_files.get(file)
        opened = None if held is None else os.fstat(held.descriptor)
        try:
            named = os.stat(path)
        except (OSError, UnicodeError) as error:
            raise failed(self._root, file, "looking at it", error) from error
        if not stat.S_ISREG(named.st_mode):
            raise self._not_regular(file)
        return opened, named

    def _opened(self, file: str) -> _Descriptor:
        """The open file, which stays open for as long as the caller keeps it."""
        path = self._path(file)
        with self._lock:
            found = self._open_files.get(file)
            if found is not None:
                self._open_files.move_to_end(file)
                return found
        # Not under the lock: opening can take milliseconds on a network file system.
        fresh = self._open(file, path)
        with self._lock:
            if self._closed:
                raise self._is_closed(file)
            found = self._open_files.setdefault(file, fresh)
            self.files_opened += found is fresh
            while len(self._open_files) > self._max_open_files:
                self._open_files.popitem(last=False)
            return found

    def _open(self, file: str, path: str) -> _Descriptor:
        try:
            # O_NONBLOCK: opening a pipe must not wait for a writer. Regular files do not know it.
            opened = _Descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        except (OSError, UnicodeError) as error:
            raise failed(self._root, file, "opening it", error) from error
        if not stat.S_ISREG(os.fstat(opened.descriptor).st_mode):
            raise self._not_regular(file)
        return opened

    def _path(self, file: str) -> str:
        if self._closed:
            raise self._is_closed(file)
        fault = why_unsafe(file)
        if fault is not None:
            raise StorageError(
                f"{shown(file)}: refused as a file name below {self._root}, {fault}. "
                "Name files relative to the checkpoint's folder"
            )
        return os.path.join(self._root, file)

    def _not_regular(self, file: str) -> StorageError:
        return StorageError(f"{shown(file)} in {self._root}: not a regular file. Check the path")

    def _is_closed(self, file: str) -> StorageError:
        return StorageError(f"{shown(file)} in {self._root}: the reader is closed. Open another one")
