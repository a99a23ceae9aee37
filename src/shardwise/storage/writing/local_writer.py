"""Writing to a local, or locally mounted, folder."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from shardwise.errors import StorageError
from shardwise.report.names import in_bytes
from shardwise.storage.contract import INCOMPLETE, WritePolicy
from shardwise.storage.names import shown, why_not_plain
from shardwise.storage.policies import DISK_WRITES, LOCAL_WRITES, NETWORK_FILE_SYSTEM_WRITES, is_network, type_at
from shardwise.storage.vectored import advance, one_call
from shardwise.storage.writing.around_cache import (
    BLOCK_BYTES,
    FILE_SYSTEMS,
    LEAST_BYTES,
    Blocks,
    cut,
    is_refused,
    open_around,
    put_together,
    whole_blocks,
)
from shardwise.storage.writing.disk import create_file, failed, make_folder, set_aside, sync_folder, write_whole
from shardwise.storage.writing.open_files import OpenFile, OpenFiles


class LocalWriter:
    """Writes files into ``root`` with ``pwritev``; see :class:`~shardwise.storage.contract.StorageWriter`.

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
        self._open_files = OpenFiles(self._root)
        self._counting = threading.Lock()
        self._is_made = False
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
        self._open_files.require_open(None)
        try:
            with os.scandir(self._root) as entries:
                return sorted(entry.name for entry in entries if not entry.is_dir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._failed(None, "listing it", error) from error

    def sizes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for file in self.list():
            try:
                found[file] = os.stat(os.path.join(self._root, file)).st_size
            except FileNotFoundError:
                if os.path.lexists(os.path.join(self._root, file)):
                    found[file] = 0  # a link that leads nowhere
            except OSError as error:
                raise self._failed(file, "looking at it", error) from error
        return found

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
            descriptor = create_file(path)
        except (OSError, UnicodeError) as error:
            raise self._failed(file, doing, error) from error
        try:
            set_aside(descriptor, nbytes)
        except OSError as error:
            failure = self._failed(file, doing, error)
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise failure from error
        self._open_files.add_created(file, descriptor, nbytes)

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
                head, middle, tail = cut(pending, [first - start, last - start])
                self._write_around(file, opened, middle, first)
                self._keep(file, opened, [(start, head), (last, tail)])
            else:
                self._write_all(file, opened.descriptor, pending, start)

    def sync(self, file: str) -> None:
        self._path(file)
        syncing = self._open_files.begin_sync(file)
        if syncing is None:
            return
        opened = syncing.opened
        try:
            self._write_kept(file, opened, syncing.kept)
            os.fdatasync(opened.descriptor)
        except StorageError:
            self._open_files.give_up(file)
            raise
        except OSError as error:
            self._open_files.give_up(file)
            raise self._failed(file, "syncing it", error) from error
        finally:
            is_last = self._open_files.leave(file, opened, synced_writes=syncing.writes)
        if is_last:
            try:
                opened.close()
            except OSError as error:  # a server may refuse what it is sent at last
                self._open_files.give_up(file)
                raise self._failed(file, "closing it", error) from error

    def rename(self, file: str, name: str) -> None:
        source, target = self._path(file), self._path(name)
        if self._open_files.is_unsynced(file):
            raise StorageError(
                f"{shown(file)} in {self._root}: is to become {shown(name)}, but was not synced; sync it first"
            )
        doing = f"renaming it to {shown(name)}"
        try:
            os.rename(source, target)
        except (OSError, UnicodeError) as error:
            raise self._failed(file, doing, error) from error
        self._sync_names(file, doing)

    def publish(self, file: str, name: str) -> None:
        self.rename(file, name)

    def replace(self, file: str, content: bytes) -> None:
        target = self._path(file)
        fresh = os.path.join(self._root, f".{file}.{secrets.token_hex(4)}{INCOMPLETE}")
        doing = f"writing it with {in_bytes(len(content))}"
        try:
            self._make_root()
            write_whole(fresh, content)
            os.rename(fresh, target)
        except (OSError, UnicodeError) as error:
            failure = self._failed(file, doing, error)
            with contextlib.suppress(OSError, UnicodeError):
                os.unlink(fresh)
            raise failure from error
        self._sync_names(file, doing)

    def remove(self, file: str) -> None:
        path = self._path(file)
        self._open_files.forget(file)
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        except (OSError, UnicodeError) as error:
            raise self._failed(file, "removing it", error) from error

    def sync_names(self) -> None:
        self._open_files.require_open(None)
        if os.path.isdir(self._root):
            self._sync_names(None, "syncing its names")

    def close(self) -> None:
        self._open_files.close()
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

    def _has_way_around(self, file: str, opened: OpenFile) -> bool:
        """Whether the file can be written to around the page cache, with a descriptor for it if so."""
        if opened.around is not None:
            return True
        try:
            around = open_around(self._path(file))
        except OSError as error:
            raise self._failed(file, "opening it for writing", error) from error
        if around is None:
            self._goes_around = False
            return False
        self._open_files.take_way_around(opened, around)
        return True

    def _write_around(self, file: str, opened: OpenFile, buffers: Sequence[memoryview], position: int) -> None:
        """Whole blocks, around the page cache as far as the file system takes them so."""
        assert opened.around is not None
        with self._blocks.lent() as block:
            for whole in put_together(buffers, block):
                done = 0
                while self._goes_around and done < whole.nbytes and done % BLOCK_BYTES == 0:
                    try:
                        done += self._write_some(file, opened.around, [whole[done:]], position + done)
                    except StorageError as error:
                        if not is_refused(error.__cause__):
                            raise
                        self._goes_around = False
                self._write_all(file, opened.descriptor, [whole[done:]], position + done)
                position += whole.nbytes

    def _keep(self, file: str, opened: OpenFile, small: Sequence[tuple[int, Sequence[memoryview]]]) -> None:
        """Put aside what does not go around the page cache until the sync, unless that is much."""
        self._write_kept(file, opened, self._open_files.keep(opened, small))

    def _write_kept(self, file: str, opened: OpenFile, kept: Sequence[tuple[int, bytes]]) -> None:
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
            with self._counting:
                self.writes += 1
                self.bytes_written += count
            return count

    @contextmanager
    def _using(self, file: str) -> Iterator[OpenFile]:
        """The file, open for writing, which stays open at least until the block is left."""
        path = self._path(file)
        opened = self._open_files.use(file) or self._open(file, path)
        try:
            yield opened
        finally:
            if self._open_files.leave(file, opened):
                with contextlib.suppress(OSError):
                    opened.close()

    def _open(self, file: str, path: str) -> OpenFile:
        # Not under a lock: opening can take milliseconds on a network file system.
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        except (OSError, UnicodeError) as error:
            raise self._failed(file, "opening it for writing", error) from error
        try:
            nbytes = self._require_regular(file, descriptor).st_size
        except StorageError:
            os.close(descriptor)
            raise
        return self._open_files.use_opened(file, descriptor, nbytes)

    def _make_root(self) -> None:
        if not (self._is_made and os.path.isdir(self._root)):
            make_folder(self._root)
            self._is_made = True

    def _sync_names(self, file: str | None, doing: str) -> None:
        try:
            sync_folder(self._root)
        except OSError as error:
            raise self._failed(file, doing, error) from error

    def _path(self, file: str) -> str:
        self._open_files.require_open(file)
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

    def _failed(self, file: str | None, doing: str, error: OSError | UnicodeError) -> StorageError:
        return failed(self._root, file, doing, error)


def _policy_of(file_system: str | None) -> WritePolicy:
    if is_network(file_system):
        return NETWORK_FILE_SYSTEM_WRITES
    return DISK_WRITES if file_system in FILE_SYSTEMS else LOCAL_WRITES
