"""Writing to a local, or locally mounted, folder."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from shardwise.errors import StorageError
from shardwise.report.sizes import in_bytes
from shardwise.storage.around_cache import (
    BLOCK_BYTES,
    FILE_SYSTEMS,
    LEAST_BYTES,
    MOST_KEPT_BYTES,
    Blocks,
    open_around,
    put_together,
    whole_blocks,
)
from shardwise.storage.mounts import is_network, type_at
from shardwise.storage.names import shown, why_not_plain
from shardwise.storage.vectored import advance, one_call
from shardwise.storage.writer import (
    DISK_WRITES,
    INCOMPLETE,
    LOCAL_WRITES,
    NETWORK_FILE_SYSTEM_WRITES,
    WritePolicy,
)

_MODE = 0o666
"""Permissions of what is created, less the umask."""

_CANNOT_SET_ASIDE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})

_CANNOT_SYNC_FOLDERS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})
"""What CIFS and some FUSE file systems answer, where names need no sync or cannot be synced."""


# [Note: A descriptor lives from the first write to the sync]
#
# Linux reports a failed write-back once: to the descriptors that were open when it failed, at their next fsync. A
# descriptor that is closed and opened again in between may never hear of it. After the report the pages count as
# clean, so that asking again succeeds though the bytes are gone. Hence what has been written to is not closed
# before it is synced, and a file whose sync failed is given up for good.


@dataclass(slots=True, eq=False)
class _OpenFile:
    """A descriptor, how many calls are using it right now, and how much happened through it.

    ``around`` is one that writes around the page cache, from the first write on that could use it; ``kept`` are the
    places and bytes of what waits for the sync meanwhile.
    """

    descriptor: int
    nbytes: int
    users: int = 0
    writes: int = 0
    around: int | None = None
    kept: list[tuple[int, bytes]] = field(default_factory=list)

    def take_way_around(self, descriptor: int) -> None:
        """Write around the page cache by this descriptor from now on, unless there is one. The lock is held."""
        if self.around is None:
            self.around = descriptor
        else:
            os.close(descriptor)

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


class LocalWriter:
    """Writes files into ``root`` with ``pwritev``; see :class:`~shardwise.storage.writer.StorageWriter`.

    Space is set aside when a file is created (``fallocate``), so that a full disk is an error before anything is
    written; file systems that cannot do so tell it later. Permissions are what the umask leaves of rw-rw-rw-.
    Symbolic links in the root are never written through: a link is refused by :meth:`write`, and it is the link
    that is renamed, replaced or removed, not the file it leads to. The root itself may be one.

    The policy is that of a disk (ext4, xfs), of a network file system, or of another local one, as the mount table
    says of ``root``; ``policy`` replaces it. By a policy that ``is_direct``, large writes go around the page cache
    (see [Note: Around the page cache]), where that can be done, and small ones may wait for the sync. A file keeps
    its descriptors open until it is synced.

    ``bytes_written`` and ``writes`` (system calls) count what has been done so far.

    Raises:
        StorageError: for a root that is there and is no folder.
    """

    def __init__(self, root: str | os.PathLike[str], *, policy: WritePolicy | None = None) -> None:
        self._root = os.path.abspath(os.fspath(root))
        if os.path.lexists(self._root) and not os.path.isdir(self._root):
            raise StorageError(f"{shown(self._root)}: is there and is no folder; pass a folder to write to")
        self._policy = policy or _policy_of(type_at(self._root))
        self._goes_around = self._policy.is_direct
        self._blocks = Blocks()
        self._open_files: dict[str, _OpenFile] = {}
        self._given_up: set[str] = set()
        self._lock = threading.Lock()
        self._closed = False
        self.bytes_written = 0
        self.writes = 0

    @property
    def root(self) -> str:
        return self._root

    @property
    def policy(self) -> WritePolicy:
        return self._policy

    def list(self) -> list[str]:
        """The names of all files and links in the root, sorted; links to files that are gone, too."""
        self._require_open(None)
        try:
            with os.scandir(self._root) as entries:
                return sorted(entry.name for entry in entries if not entry.is_dir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._failed(None, "listing it", error) from error

    def read(self, file: str) -> bytes | None:
        path = self._path(file)
        try:
            # O_NONBLOCK: opening a pipe must not wait for a writer. Regular files do not know it.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except (OSError, UnicodeError) as error:
            raise self._failed(file, "reading it", error) from error
        with os.fdopen(descriptor, "rb") as opened:
            self._require_regular(file, descriptor)
            try:
                return opened.read()
            except OSError as error:
                raise self._failed(file, "reading it", error) from error

    def create(self, file: str, nbytes: int) -> None:
        path = self._path(file)
        if nbytes < 0:
            raise StorageError(
                f"{shown(file)} in {self._root}: cannot be created with {nbytes} bytes; pass 0 or more"
            )
        doing = f"creating it with {in_bytes(nbytes)}"
        try:
            self._make_root()
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
        except (OSError, UnicodeError) as error:
            raise self._failed(file, doing, error) from error
        try:
            _set_aside(descriptor, nbytes)
        except OSError as error:
            failure = self._failed(file, doing, error)
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise failure from error
        with self._lock:
            self._given_up.discard(file)
            # The size is something to sync.
            self._open_files[file] = _OpenFile(descriptor, nbytes, writes=1)

    def write(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        pending = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        stop = start + sum(buffer.nbytes for buffer in pending)
        with self._using(file) as opened:
            if not 0 <= start <= stop <= opened.nbytes:
                raise StorageError(
                    f"{shown(file)} in {self._root}: bytes {start}..{stop} are to be written, but it was created "
                    f"with {opened.nbytes} bytes; create it with the size it will have"
                )
            first, last = whole_blocks(start, stop)
            if not self._goes_around:
                self._write_all(file, opened.descriptor, pending, start)
            elif last - first < LEAST_BYTES:
                self._keep(file, opened, [(start, pending)])
            elif self._has_way_around(file, opened):
                head, middle, tail = _cut(pending, [first - start, last - start])
                self._write_around(file, opened, middle, first)
                self._keep(file, opened, [(start, head), (last, tail)])
            else:
                self._write_all(file, opened.descriptor, pending, start)

    def sync(self, file: str) -> None:
        self._path(file)
        with self._lock:
            self._require_hope(file)
            opened = self._open_files.get(file)
            if opened is None:
                return
            opened.users += 1
            writes = opened.writes
            kept, opened.kept = opened.kept, []
        try:
            self._write_kept(file, opened, kept)
            os.fdatasync(opened.descriptor)
        except StorageError:
            with self._lock:
                self._given_up.add(file)
            raise
        except OSError as error:
            with self._lock:
                self._given_up.add(file)
            raise self._failed(file, "syncing it", error) from error
        finally:
            is_last = self._leave(file, opened, synced_writes=writes)
        if is_last:
            try:
                opened.close()
            except OSError as error:  # a server may refuse what it is sent at last
                with self._lock:
                    self._given_up.add(file)
                raise self._failed(file, "closing it", error) from error

    def rename(self, file: str, name: str) -> None:
        source, target = self._path(file), self._path(name)
        with self._lock:
            self._require_hope(file)
            if file in self._open_files:
                raise StorageError(
                    f"{shown(file)} in {self._root}: is to become {shown(name)}, but was not synced; sync it first"
                )
        doing = f"renaming it to {shown(name)}"
        try:
            os.rename(source, target)
        except (OSError, UnicodeError) as error:
            raise self._failed(file, doing, error) from error
        self._sync_folder(self._root, file, doing)

    def replace(self, file: str, content: bytes) -> None:
        target = self._path(file)
        fresh = os.path.join(self._root, f".{file}.{secrets.token_hex(4)}{INCOMPLETE}")
        doing = f"writing it with {in_bytes(len(content))}"
        try:
            self._make_root()
            self._write_whole(fresh, content)
            os.rename(fresh, target)
        except (OSError, UnicodeError) as error:
            failure = self._failed(file, doing, error)
            with contextlib.suppress(OSError, UnicodeError):
                os.unlink(fresh)
            raise failure from error
        self._sync_folder(self._root, file, doing)

    def remove(self, file: str) -> None:
        path = self._path(file)
        with self._lock:
            self._given_up.discard(file)
            opened = self._open_files.pop(file, None)
            is_idle = opened is not None and not opened.users
        if opened is not None and is_idle:
            with contextlib.suppress(OSError):  # what could not be written is not wanted any more
                opened.close()
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        except (OSError, UnicodeError) as error:
            raise self._failed(file, "removing it", error) from error

    def sync_names(self) -> None:
        self._require_open(None)
        if os.path.isdir(self._root):
            self._sync_folder(self._root, None, "syncing its names")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle = {file: opened for file, opened in self._open_files.items() if not opened.users}
            for file in idle:
                del self._open_files[file]
        for opened in idle.values():
            with contextlib.suppress(OSError):
                opened.close()
        self._blocks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _has_way_around(self, file: str, opened: _OpenFile) -> bool:
        """Whether the file can be written to around the page cache, with a descriptor for it if so."""
        if opened.around is not None:
            return True
        try:
            around = open_around(self._path(file))
        except OSError as error:
            raise self._failed(file, "opening it for writing", error) from error
        with self._lock:
            if around is None:
                self._goes_around = False
                return False
            opened.take_way_around(around)
        return True

    def _write_around(self, file: str, opened: _OpenFile, buffers: Sequence[memoryview], position: int) -> None:
        """Whole blocks, around the page cache as far as the file system takes them so."""
        assert opened.around is not None
        with self._blocks.lent() as block:
            for whole in put_together(buffers, block):
                done = 0
                while self._goes_around and done < whole.nbytes and done % BLOCK_BYTES == 0:
                    try:
                        done += self._write_some(file, opened.around, [whole[done:]], position + done)
                    except StorageError as error:
                        if not _is_refused(error.__cause__):
                            raise
                        self._goes_around = False
                self._write_all(file, opened.descriptor, [whole[done:]], position + done)
                position += whole.nbytes

    def _keep(self, file: str, opened: _OpenFile, small: Sequence[tuple[int, Sequence[memoryview]]]) -> None:
        """Put aside what does not go around the page cache until the sync, unless that is much."""
        many: list[tuple[int, bytes]] = []
        with self._lock:
            opened.kept.extend((position, b"".join(buffers)) for position, buffers in small if buffers)
            if sum(len(content) for _, content in opened.kept) > MOST_KEPT_BYTES:
                many, opened.kept = opened.kept, []
        self._write_kept(file, opened, many)

    def _write_kept(self, file: str, opened: _OpenFile, kept: Sequence[tuple[int, bytes]]) -> None:
        for position, content in kept:
            self._write_all(file, opened.descriptor, [memoryview(content)], position)

    def _write_all(self, file: str, descriptor: int, buffers: Sequence[memoryview], position: int) -> None:
        pending = [buffer for buffer in buffers if buffer.nbytes]
        first = 0
        while first < len(pending):
            count = self._write_some(file, descriptor, one_call(pending, first), position)
            position += count
            first = advance(pending, first, count)

    def _write_some(self, file: str, descriptor: int, buffers: Sequence[memoryview], position: int) -> int:
        """One system call; the number of bytes it took, at least 1."""
        while True:
            try:
                count = os.pwritev(descriptor, buffers, position)
            except InterruptedError:
                continue
            except OSError as error:
                raise self._failed(file, f"writing at byte {position}", error) from error
            if count == 0:
                raise StorageError(
                    f"{shown(file)} in {self._root}: writing at byte {position} failed, the file system takes "
                    "nothing and does not say why; check it and save again"
                )
            with self._lock:
                self.writes += 1
                self.bytes_written += count
            return count

    @contextmanager
    def _using(self, file: str) -> Iterator[_OpenFile]:
        """The file, open for writing, which stays open at least until the block is left."""
        path = self._path(file)
        opened = self._reuse(file) or self._open(file, path)
        try:
            yield opened
        finally:
            if self._leave(file, opened):
                with contextlib.suppress(OSError):
                    opened.close()

    def _reuse(self, file: str) -> _OpenFile | None:
        with self._lock:
            self._require_hope(file)
            opened = self._open_files.get(file)
            if opened is not None:
                opened.users += 1
                opened.writes += 1
            return opened

    def _open(self, file: str, path: str) -> _OpenFile:
        # Not under the lock: opening can take milliseconds on a network file system.
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        except (OSError, UnicodeError) as error:
            raise self._failed(file, "opening it for writing", error) from error
        try:
            nbytes = self._require_regular(file, descriptor).st_size
        except StorageError:
            os.close(descriptor)
            raise
        with self._lock:
            kept = self._open_files.get(file)
            if kept is not None or self._closed:
                os.close(descriptor)
            if self._closed:
                raise self._is_closed(file)
            if kept is None:
                kept = self._open_files[file] = _OpenFile(descriptor, nbytes)
            kept.users += 1
            kept.writes += 1
            return kept

    def _leave(self, file: str, opened: _OpenFile, *, synced_writes: int | None = None) -> bool:
        """A call is done with the file; whether it was the last one, and has to close the descriptor."""
        with self._lock:
            opened.users -= 1
            if opened.users:
                return False
            is_kept = self._open_files.get(file) is opened
            if is_kept and not self._closed and (opened.writes != synced_writes or opened.kept):
                return False
            if is_kept:
                del self._open_files[file]
            return True

    def _make_root(self) -> None:
        """Make the root where it is not there, so that it lasts."""
        if os.path.isdir(self._root):
            return
        missing = []
        folder = self._root
        while not os.path.lexists(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        os.makedirs(self._root, exist_ok=True)
        for made in missing:
            _sync_folder(os.path.dirname(made))

    def _sync_folder(self, folder: str, file: str | None, doing: str) -> None:
        try:
            _sync_folder(folder)
        except OSError as error:
            raise self._failed(file, doing, error) from error

    def _write_whole(self, path: str, content: bytes) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
        try:
            with os.fdopen(descriptor, "wb", closefd=False) as opened:
                opened.write(content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _path(self, file: str) -> str:
        self._require_open(file)
        fault = why_not_plain(file)
        if fault is not None:
            raise StorageError(
                f"{shown(file)}: refused as the name of a file in {self._root}, {fault}; name a file of that folder"
            )
        return os.path.join(self._root, file)

    def _require_regular(self, file: str, descriptor: int) -> os.stat_result:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise StorageError(
                f"{shown(file)} in {self._root}: not a regular file; remove it or take another folder"
            )
        return status

    def _require_hope(self, file: str) -> None:
        """The file's sync has not failed, and the writer is open. The lock is held."""
        if self._closed:
            raise self._is_closed(file)
        if file in self._given_up:
            raise StorageError(
                f"{shown(file)} in {self._root}: could not be synced before, so what it holds is unknown; "
                "remove it and save again"
            )

    def _require_open(self, file: str | None) -> None:
        if self._closed:
            raise self._is_closed(file)

    def _is_closed(self, file: str | None) -> StorageError:
        return StorageError(f"{self._named(file)}: the writer is closed; open another one")

    def _named(self, file: str | None) -> str:
        return shown(self._root) if file is None else f"{shown(file)} in {self._root}"

    def _failed(self, file: str | None, doing: str, error: OSError | UnicodeError) -> StorageError:
        if isinstance(error, UnicodeError):
            cause, remedy = "the name cannot be encoded", "rename it"
        elif error.errno == errno.ENOSPC:
            cause, remedy = f"the disk is full{self._free()}", "make room, or save elsewhere"
        else:
            unknown = f"{error.strerror} (errno {error.errno})", "check the file system and try again"
            cause, remedy = _CAUSES.get(error.errno or 0, unknown)
        return StorageError(f"{self._named(file)}: {doing} failed, {cause}; {remedy}")

    def _free(self) -> str:
        """How much there is room for, as far as that can be found out."""
        folder = self._root
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        try:
            return f", {in_bytes(shutil.disk_usage(folder).free)} are free"
        except OSError:
            return ""


_CAUSES: Final = {
    errno.EACCES: ("permission denied", f"make the folder writable for user id {os.getuid()}, or save elsewhere"),
    errno.EPERM: ("permission denied", f"make the folder writable for user id {os.getuid()}, or save elsewhere"),
    errno.EROFS: ("the file system is read-only", "mount it for writing, or save elsewhere"),
    errno.EDQUOT: ("the quota is used up", "make room, ask for more, or save elsewhere"),
    errno.EFBIG: ("files may not be that large", "raise the limit (ulimit -f), or save in smaller files"),
    errno.EEXIST: ("it is there already", "remove it first, or take another name"),
    errno.ENOENT: ("no such file", "create it first, and do not remove the folder meanwhile"),
    errno.ENOTDIR: ("a file is where a folder should be", "check the path"),
    errno.EISDIR: ("a folder is there already", "remove it, or save elsewhere"),
    errno.ELOOP: ("it is a symbolic link, which is not written through", "remove the link, or save elsewhere"),
    errno.ENAMETOOLONG: ("the name is too long", "take a shorter one"),
}


def _policy_of(file_system: str | None) -> WritePolicy:
    if is_network(file_system):
        return NETWORK_FILE_SYSTEM_WRITES
    return DISK_WRITES if file_system in FILE_SYSTEMS else LOCAL_WRITES


def _is_refused(error: BaseException | None) -> bool:
    """Whether a file system says that it takes nothing around the page cache after all."""
    return isinstance(error, OSError) and error.errno in (errno.EINVAL, errno.EOPNOTSUPP)


def _cut(buffers: Sequence[memoryview], places: Sequence[int]) -> list[list[memoryview]]:
    """Buffers that follow each other, cut at these places, counted in bytes from their beginning, in order."""
    parts: list[list[memoryview]] = [[]]
    ahead = list(places)
    position = 0
    for buffer in buffers:
        while ahead and ahead[0] <= position + buffer.nbytes:
            cut = ahead.pop(0) - position
            parts[-1].append(buffer[:cut])
            parts.append([])
            buffer, position = buffer[cut:], position + cut
        parts[-1].append(buffer)
        position += buffer.nbytes
    return parts


def _set_aside(descriptor: int, nbytes: int) -> None:
    """Give an empty file its size, and space on the disk where the file system can."""
    # Not os.posix_fallocate: where the file system cannot, the C library writes to every block, over a network too.
    library = ctypes.CDLL(None, use_errno=True)
    while nbytes and hasattr(library, "fallocate"):
        if library.fallocate(descriptor, 0, ctypes.c_long(0), ctypes.c_long(nbytes)) == 0:
            return
        code = ctypes.get_errno()
        if code in _CANNOT_SET_ASIDE:
            break
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    os.ftruncate(descriptor, nbytes)


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC_FOLDERS:
            raise
    finally:
        os.close(descriptor)
