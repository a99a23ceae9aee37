"""A writer into local or locally mounted folders."""

import contextlib
import ctypes
import errno
import os
import secrets
import stat
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

from shardwise.core.errors import StorageError
from shardwise.core.formatting import in_bytes
from shardwise.files import storage
from shardwise.files.direct_io import (
    BLOCK_BYTES,
    FILE_SYSTEMS,
    MAX_DEFERRED_BYTES,
    MIN_DIRECT_BYTES,
    assemble,
    new_buffer,
    open_direct,
)
from shardwise.files.local_reader import advance, get_file_system_type, is_network, slice_for_one_call
from shardwise.files.urls import get_scheme, is_url, require_file_name, shown, to_storage_error, without_secrets

_MODE = 0o666
"""Permissions of created files, minus the umask."""

_UNSUPPORTED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})
"""Errors of file systems that do not support an operation, or do not need it."""

# [Note: A descriptor lives from the first write to the sync]
#
# Linux reports a failed write-back once: to the descriptors that were open when it failed, at their next fsync. A
# descriptor that is closed and opened again in between may never get the error. After the report the pages count as
# clean, so that another fsync succeeds though the bytes are lost. Hence a file that has been written to is not
# closed before it is synced, and cannot be written to any more once a sync has failed.


class _OpenFile:
    """A file open for writing, closed with the last reference to it.

    ``direct`` is a descriptor that writes around the page cache, opened at the first write that can use it.
    ``deferred`` contains offsets and bytes that wait for the sync. ``users`` counts writes in progress, ``writes``
    all writes so far. All of them change only under the writer's lock.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.descriptor = descriptor
        self.nbytes = nbytes
        self.direct: int | None = None
        self.deferred: list[tuple[int, bytes]] = []
        self.users = 0
        self.writes = 0

    def __del__(self) -> None:
        for descriptor in (self.descriptor, self.direct):
            if descriptor is not None:
                with contextlib.suppress(OSError):  # it was synced, or is dropped
                    os.close(descriptor)


class LocalWriter(storage.StorageWriter):
    """A writer of files into ``root`` with ``pwritev``. See :class:`~shardwise.files.storage.StorageWriter`.

    Space is allocated when a file is created (``fallocate``), so that a full disk is an error before anything is
    written. File systems without ``fallocate`` report a full disk later. Permissions are rw-rw-rw- minus the umask.
    Symbolic links in the root are never written through: :meth:`write` refuses a link, and renaming, replacing or
    removing applies to the link, not to its target. The root itself may be a link.

    The mount table determines the policy for ``root``: that of a disk (ext4, xfs), of a network file system, or of
    another local one. ``policy`` replaces it. If the policy ``is_direct``, large writes bypass the page cache (see
    [Note: Around the page cache]) if the file system supports it, and small ones may wait for the sync. A file
    keeps its descriptors open until it is synced.

    With ``folders`` (paths relative to the root), file names may contain folders. Files in these folders are listed
    in addition to the root's, and folders of written files are added. The root may be a link, but folders in it may
    not, so that nothing outside of the root is written or removed. With None, names with folders are refused.

    Raises:
        StorageError: the root or a folder exists but is not a folder, or a folder is a link.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        folders: Collection[str] | None = None,
        policy: storage.WritePolicy | None = None,
    ) -> None:
        # Nothing is created here: the root is made with the first file.
        self._root = os.path.abspath(os.fspath(root))
        if os.path.lexists(self._root) and not os.path.isdir(self._root):
            raise StorageError(f"{shown(self._root)}: is a file. Pass a folder to write to")
        self._policy = policy or _get_policy(get_file_system_type(self._root))
        self._is_direct = self._policy.is_direct
        self._is_nested = folders is not None
        self._folders = {""}
        self._made: set[str] = set()
        self._buffers: list[memoryview] = []
        self._files: dict[str, _OpenFile] = {}
        self._failed: set[str] = set()
        self._lock = threading.Lock()
        self._closed = False
        for folder in sorted(folders or ()):
            self.add_parent(f"{folder}/")

    @property
    def root(self) -> str:
        return self._root

    @property
    def folders(self) -> Sequence[str]:
        """The registered folders in the root, each before its subfolders."""
        return sorted(self._folders - {""})

    def add_parent(self, file: str) -> None:
        """Register the folder in a file's name."""
        folder = file.rpartition("/")[0]
        if folder in self._folders:
            return
        path = os.path.join(self._root, folder)
        if is_through_link(self._root, folder):
            raise StorageError(
                f"{shown(folder)} in {self._root}: leads out by a link, and nothing is written or removed outside. "
                "Remove the link, or save to another folder"
            )
        if os.path.lexists(path) and not os.path.isdir(path):
            raise StorageError(f"{shown(path)}: is a file. Pass a folder to write to")
        self._folders.add(folder)

    @property
    def policy(self) -> storage.WritePolicy:
        return self._policy

    def sizes(self) -> dict[str, int]:
        self._require_open(None)
        sizes: dict[str, int] = {}
        for folder in sorted(self._folders):
            with self._failures(None, "listing it"), contextlib.suppress(FileNotFoundError):
                for entry in os.scandir(os.path.join(self._root, folder)):
                    if not entry.is_dir():
                        sizes[os.path.join(folder, entry.name)] = _get_size(entry)
        return sizes

    def read(self, file: str) -> bytes | None:
        path = self._path(file)
        with self._failures(file, "reading it"):
            try:
                # O_NONBLOCK: opening a pipe must not wait for a writer. It does not affect regular files.
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except FileNotFoundError:
                return None
            with os.fdopen(descriptor, "rb") as opened:
                self._require_regular(file, descriptor)
                return opened.read()

    def create(self, file: str, nbytes: int) -> None:
        path = self._path(file)
        if nbytes < 0:
            raise StorageError(f"{shown(file)} in {self._root}: cannot be created with {nbytes} bytes")
        with self._failures(file, f"creating it with {in_bytes(nbytes)}"):
            self._make(os.path.dirname(path))
            # If no space can be allocated, no file is left.
            opened = _OpenFile(_create(path), nbytes)
            try:
                _allocate(opened.descriptor, nbytes)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(path)
                raise
        with self._lock:
            self._failed.discard(file)
            opened.writes = 1  # the size must be synced
            self._files[file] = opened

    def write(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        # Three ways: through the page cache, deferred until the sync, or around the page cache.
        pending, nbytes = storage.as_bytes(buffers)
        stop = start + nbytes
        with self._using(file) as opened:
            if not 0 <= start <= stop <= opened.nbytes:
                raise StorageError(
                    f"{shown(file)} in {self._root}: bytes {start}..{stop} are out of range, it was created "
                    f"with {opened.nbytes} bytes. Create it with its final size"
                )
            if not self._is_direct:
                self._write_all(file, opened, pending, start)
            elif nbytes < MIN_DIRECT_BYTES:
                self._defer(file, opened, [(start, b"".join(pending))])
            else:
                self._write_direct(file, opened, pending, start)

    def sync(self, file: str) -> None:
        self._path(file)
        with self._lock:
            self._require_writable(file)
            opened = self._files.get(file)
            if opened is None:
                return
            # Writes that begin from here on are not part of this sync: they change ``writes``.
            writes, deferred, opened.deferred = opened.writes, opened.deferred, []
            is_idle = not opened.users  # otherwise a write may end after the sync, and needs another one
        try:
            # Deferred bytes first, since fdatasync covers only what has been written before.
            self._write_deferred(file, opened, deferred)
            with self._failures(file, "syncing it"):
                os.fdatasync(opened.descriptor)
        except StorageError:
            # The kernel reports this once. See [Note: A descriptor lives from the first write to the sync].
            with self._lock:
                self._failed.add(file)
                self._files.pop(file, None)
            raise
        with self._lock:
            if self._files.get(file) is opened and is_idle and opened.writes == writes:
                del self._files[file]

    def rename(self, file: str, name: str) -> None:
        # A name that counts must not refer to bytes that are not durable.
        source, target = self._path(file), self._path(name)
        with self._lock:
            self._require_writable(file)
            if file in self._files:
                raise StorageError(
                    f"{shown(file)} in {self._root}: must be synced before it is renamed to {shown(name)}"
                )
        with self._failures(file, f"renaming it to {shown(name)}"):
            os.rename(source, target)
            # The rename is durable with its folders, of which there may be two.
            for folder in {os.path.dirname(source), os.path.dirname(target)}:
                _sync_folder(folder)

    def replace(self, file: str, content: bytes) -> None:
        # Readers see the old content or the new one, never a part: write under another name, sync, rename.
        folder, name = os.path.split(self._path(file))
        fresh = os.path.join(folder, f".{name}.{secrets.token_hex(4)}{storage.INCOMPLETE}")
        with self._failures(file, f"writing it with {in_bytes(len(content))}"):
            self._make(folder)
            try:
                with os.fdopen(_create(fresh), "wb") as opened:
                    opened.write(content)
                    opened.flush()
                    os.fsync(opened.fileno())  # before the rename, or a crash may leave an empty file of this name
                os.rename(fresh, os.path.join(folder, name))
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(fresh)
                raise
            _sync_folder(folder)

    def remove(self, file: str) -> None:
        path = self._path(file)
        with self._lock:
            self._failed.discard(file)
            self._files.pop(file, None)
        with self._failures(file, "removing it"), contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def sync_names(self) -> None:
        self._require_open(None)
        with self._failures(None, "syncing its names"):
            for folder in sorted(self._folders):
                if os.path.isdir(os.path.join(self._root, folder)):
                    _sync_folder(os.path.join(self._root, folder))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._files.clear()
            self._buffers.clear()

    @contextmanager
    def _using(self, file: str) -> Iterator[_OpenFile]:
        """Yield the file, open for writing at least until the block ends."""
        path = self._path(file)
        with self._lock:
            self._require_writable(file)
            opened = self._files.get(file) or self._open(file, path)
            self._files[file] = opened
            # Counted under the lock, so that a sync knows whether all writes have ended before it.
            opened.users += 1
            opened.writes += 1
        try:
            yield opened
        finally:
            with self._lock:
                opened.users -= 1

    def _open(self, file: str, path: str) -> _OpenFile:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        except FileNotFoundError as error:
            raise StorageError(f"{shown(file)} in {self._root}: no such file. Create it first") from error
        except (OSError, UnicodeError) as error:
            raise to_storage_error(self._root, file, "opening it for writing", error) from error
        opened = _OpenFile(descriptor, 0)
        opened.nbytes = self._require_regular(file, descriptor).st_size
        return opened

    def _write_direct(self, file: str, opened: _OpenFile, buffers: Sequence[memoryview], start: int) -> None:
        """Write full blocks around the page cache, if the file system supports it, and keep the ends back."""
        with self._lock, self._failures(file, "opening it for writing"):
            if opened.direct is None:
                opened.direct = open_direct(opened.descriptor)
                self._is_direct = opened.direct is not None
            buffer = self._buffers.pop() if self._buffers else new_buffer()
        for position, chunk in assemble(buffers, start, buffer):
            # A first chunk ends at a block boundary, and is smaller than a block if it does not begin at one.
            whole = 0 if position % BLOCK_BYTES else chunk.nbytes // BLOCK_BYTES * BLOCK_BYTES
            if whole:
                count = self._write_blocks(file, opened, chunk[:whole], position)
                # The rest of a short write, or all if the file system does not support it.
                self._write_all(file, opened, [chunk[count:whole]], position + count)
            if whole < chunk.nbytes:
                self._defer(file, opened, [(position + whole, bytes(chunk[whole:]))])
        # list.append is atomic. After an error the buffer is dropped, not reused.
        self._buffers.append(buffer)

    def _write_blocks(self, file: str, opened: _OpenFile, blocks: memoryview, position: int) -> int:
        """Write blocks around the page cache, and return the number of bytes written."""
        if opened.direct is None or not self._is_direct:
            return 0
        try:
            return os.pwritev(opened.direct, [blocks], position)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise to_storage_error(self._root, file, f"writing at byte {position}", error) from error
            self._is_direct = False
            return 0

    def _defer(self, file: str, opened: _OpenFile, small: Sequence[tuple[int, bytes]]) -> None:
        """Keep small writes back until the sync, or write them now if there are too many bytes."""
        many: list[tuple[int, bytes]] = []
        with self._lock:
            opened.deferred.extend(small)
            if sum(len(content) for _, content in opened.deferred) > MAX_DEFERRED_BYTES:
                many, opened.deferred = opened.deferred, []
        self._write_deferred(file, opened, many)

    def _write_deferred(self, file: str, opened: _OpenFile, deferred: Sequence[tuple[int, bytes]]) -> None:
        for position, content in deferred:
            self._write_all(file, opened, [memoryview(content)], position)

    def _write_all(self, file: str, opened: _OpenFile, buffers: Sequence[memoryview], position: int) -> None:
        pending = [buffer for buffer in buffers if buffer.nbytes]
        first = 0
        while first < len(pending):
            with self._failures(file, f"writing at byte {position}"):
                count = os.pwritev(opened.descriptor, slice_for_one_call(pending, first), position)
                if count == 0:
                    raise OSError(errno.EIO, "the file system writes nothing")
            position += count
            first = advance(pending, first, count)

    def _make(self, folder: str) -> None:
        if folder not in self._made or not os.path.isdir(folder):
            make_folder(folder)
            self._made.add(folder)

    def _path(self, file: str) -> str:
        self._require_open(file)
        require_file_name(self._root, file, is_nested=self._is_nested)
        self.add_parent(file)
        return os.path.join(self._root, file)

    def _require_open(self, file: str | None) -> None:
        if self._closed:
            raise StorageError(f"{shown(file or self._root)} in {self._root}: the writer is closed")

    def _require_writable(self, file: str) -> None:
        """Raise if the writer is closed or a sync of the file has failed. The caller holds the lock."""
        self._require_open(file)
        if file in self._failed:
            raise StorageError(
                f"{shown(file)} in {self._root}: could not be synced before, so its content is unknown. "
                "Remove it and save again"
            )

    def _require_regular(self, file: str, descriptor: int) -> os.stat_result:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise StorageError(f"{shown(file)} in {self._root}: not a regular file. Use another folder")
        return status

    @contextmanager
    def _failures(self, file: str | None, doing: str) -> Iterator[None]:
        """Raise errors of the system as StorageErrors."""
        try:
            yield
        except (OSError, UnicodeError) as error:
            raise to_storage_error(self._root, file, doing, error) from error


def _get_policy(file_system: str | None) -> storage.WritePolicy:
    if is_network(file_system):
        return storage.NETWORK_FILE_SYSTEM_WRITES
    return storage.DISK_WRITES if file_system in FILE_SYSTEMS else storage.LOCAL_WRITES


def _get_size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except FileNotFoundError:
        return 0  # a broken link


def _create(path: str) -> int:
    """Create a file that must not exist yet, and return a descriptor for writing."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)


def _allocate(descriptor: int, nbytes: int) -> None:
    """Set the size of an empty file, and allocate its space on the disk if the file system can do so."""
    # Not os.posix_fallocate: where the file system cannot, the C library writes to every block, over a network too.
    # Repeated after a signal (EINTR). Without fallocate, the size is set, and the disk may turn out full later.
    library = ctypes.CDLL(None, use_errno=True)
    while nbytes and hasattr(library, "fallocate"):
        if library.fallocate(descriptor, 0, ctypes.c_long(0), ctypes.c_long(nbytes)) == 0:
            return
        code = ctypes.get_errno()
        if code in _UNSUPPORTED:
            break
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    os.ftruncate(descriptor, nbytes)


def make_folder(path: str) -> None:
    """Create a folder durably, even if a process that created it died before it synced the parent."""
    # The parent is synced after the new name is in it, on each level, or a crash may lose the folder.
    parent = os.path.dirname(path)
    if not os.path.isdir(path):
        if parent != path:
            make_folder(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        _sync_folder(parent)
        return
    with contextlib.suppress(OSError):  # a parent that cannot be opened was not created by a save
        _sync_folder(parent)


def is_through_link(root: str | os.PathLike[str], folder: str) -> bool:
    """Check if a folder below a root is a link, or is reached through one."""
    prefixes = accumulate(folder.split("/"), "{}/{}".format) if folder else ()
    return any(os.path.islink(os.path.join(root, prefix)) for prefix in prefixes)


def _sync_folder(folder: str) -> None:
    """Make the names in a folder durable, if the file system supports it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


def open_writer(target: str | os.PathLike[str]) -> storage.StorageWriter:
    """Open a folder, which need not exist, for writing. The caller closes the writer.

    Nothing is created before the first file.

    Raises:
        StorageError: the target is a URL, or a path of a file.
    """
    if not is_url(target):
        return LocalWriter(os.path.expanduser(target))
    url = os.fspath(target)
    where = shown(without_secrets(url))
    if get_scheme(url) == "file":
        raise StorageError(f"{where}: is on this machine. Pass the path without file://")
    if get_scheme(url) == "hf":
        raise StorageError(
            f"{where}: the hub is not written to. Save to a folder and upload it "
            "(hf upload organization/name folder)"
        )
    raise StorageError(f"{where}: a URL cannot be written to. Save to a folder and upload it, or mount the bucket")
