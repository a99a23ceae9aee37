"""Files that are open for writing, from the first write to the sync."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwise.errors import StorageError
from shardwise.storage.names import shown
from shardwise.storage.writing.around_cache import MOST_KEPT_BYTES
from shardwise.storage.writing.disk import closed

# [Note: A descriptor lives from the first write to the sync]
#
# Linux reports a failed write-back once: to the descriptors that were open when it failed, at their next fsync. A
# descriptor that is closed and opened again in between may never hear of it. After the report the pages count as
# clean, so that asking again succeeds though the bytes are gone. Hence what has been written to is not closed
# before it is synced, and a file whose sync failed is given up for good.


@dataclass(slots=True, eq=False)
class OpenFile:
    """A descriptor, how many calls are using it right now, and how much happened through it.

    ``around`` is one that writes around the page cache, from the first write on that could use it; ``kept`` are the
    places and bytes of what waits for the sync meanwhile. All of this changes under the lock of :class:`OpenFiles`.
    """

    descriptor: int
    nbytes: int
    users: int = 0
    writes: int = 0
    around: int | None = None
    kept: list[tuple[int, bytes]] = field(default_factory=list)

    def close(self) -> None:
        """Close what is open.

        Raises:
            OSError: what the system had still to tell.
        """
        if self.around is not None:
            with contextlib.suppress(OSError):  # whatever it wrote is in the file, or was an error
                os.close(self.around)
            self.around = None
        os.close(self.descriptor)


@dataclass(frozen=True, slots=True)
class Syncing:
    """A file that is being synced, with what was written and kept until the sync began."""

    opened: OpenFile
    writes: int
    kept: list[tuple[int, bytes]]


class OpenFiles:
    """Which files of the folder ``root`` are open for writing, by how many calls, and which are given up.

    Threads may call at the same time. A call that uses a file says so (:meth:`use`, :meth:`use_opened`,
    :meth:`begin_sync`), and that it is done (:meth:`leave`); the last one may have to close the descriptor.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._by_name: dict[str, OpenFile] = {}
        self._given_up: set[str] = set()
        self._lock = threading.Lock()
        self._closed = False

    def require_open(self, file: str | None) -> None:
        """Raises StorageError when all has been closed."""
        if self._closed:
            raise closed(self._root, file)

    def add_created(self, file: str, descriptor: int, nbytes: int) -> None:
        """A file that has just been created; nobody uses it yet."""
        with self._lock:
            self._given_up.discard(file)
            # The size is something to sync.
            self._by_name[file] = OpenFile(descriptor, nbytes, writes=1)

    def use(self, file: str) -> OpenFile | None:
        """The file for one more write, if it is open.

        Raises:
            StorageError: the file is given up, or all has been closed.
        """
        with self._lock:
            self._require_hope(file)
            opened = self._by_name.get(file)
            if opened is not None:
                opened.users += 1
                opened.writes += 1
            return opened

    def use_opened(self, file: str, descriptor: int, nbytes: int) -> OpenFile:
        """The file for one more write, by this descriptor unless another call has opened it meanwhile.

        Raises:
            StorageError: all has been closed.
        """
        with self._lock:
            opened = self._by_name.get(file)
            if opened is not None or self._closed:
                os.close(descriptor)
            if self._closed:
                raise closed(self._root, file)
            if opened is None:
                opened = self._by_name[file] = OpenFile(descriptor, nbytes)
            opened.users += 1
            opened.writes += 1
            return opened

    def take_way_around(self, opened: OpenFile, descriptor: int) -> None:
        """Write around the page cache by this descriptor from now on, unless there is one."""
        with self._lock:
            if opened.around is None:
                opened.around = descriptor
            else:
                os.close(descriptor)

    def keep(self, opened: OpenFile, small: Sequence[tuple[int, Sequence[memoryview]]]) -> list[tuple[int, bytes]]:
        """Put bytes aside until the sync; when that has become much, all of it is handed out to be written."""
        many: list[tuple[int, bytes]] = []
        with self._lock:
            opened.kept.extend((position, b"".join(buffers)) for position, buffers in small if buffers)
            if sum(len(content) for _, content in opened.kept) > MOST_KEPT_BYTES:
                many, opened.kept = opened.kept, []
        return many

    def begin_sync(self, file: str) -> Syncing | None:
        """The file, to be synced and then left; None if there is nothing to sync.

        Raises:
            StorageError: the file is given up, or all has been closed.
        """
        with self._lock:
            self._require_hope(file)
            opened = self._by_name.get(file)
            if opened is None:
                return None
            opened.users += 1
            kept, opened.kept = opened.kept, []
            return Syncing(opened, opened.writes, kept)

    def leave(self, file: str, opened: OpenFile, *, synced_writes: int | None = None) -> bool:
        """A call is done with the file; whether it was the last one, and has to close the descriptor."""
        with self._lock:
            opened.users -= 1
            if opened.users:
                return False
            is_kept = self._by_name.get(file) is opened
            if is_kept and not self._closed and (opened.writes != synced_writes or opened.kept):
                return False
            if is_kept:
                del self._by_name[file]
            return True

    def give_up(self, file: str) -> None:
        """What the file holds is unknown from now on, until it is removed or created again."""
        with self._lock:
            self._given_up.add(file)

    def is_unsynced(self, file: str) -> bool:
        """Whether the file is open, so that something of it may not be synced.

        Raises:
            StorageError: the file is given up, or all has been closed.
        """
        with self._lock:
            self._require_hope(file)
            return file in self._by_name

    def forget(self, file: str) -> None:
        """The file is to be removed. Who is using it closes the descriptor."""
        with self._lock:
            self._given_up.discard(file)
            opened = self._by_name.pop(file, None)
            is_idle = opened is not None and not opened.users
        if opened is not None and is_idle:
            with contextlib.suppress(OSError):  # what could not be written is not wanted any more
                opened.close()

    def close(self) -> None:
        """Close what nobody uses; who is using a file closes it."""
        with self._lock:
            self._closed = True
            idle = {file: opened for file, opened in self._by_name.items() if not opened.users}
            for file in idle:
                del self._by_name[file]
        for opened in idle.values():
            with contextlib.suppress(OSError):
                opened.close()

    def _require_hope(self, file: str) -> None:
        """The file's sync has not failed, and the writer is open. The lock is held."""
        if self._closed:
            raise closed(self._root, file)
        if file in self._given_up:
            raise StorageError(
                f"{shown(file)} in {self._root}: could not be synced before, so what it holds is unknown; "
                "remove it and save again"
            )
