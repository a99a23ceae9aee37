"""A reader of local or locally mounted folders, and a function that opens a reader for any path or URL."""

import contextlib
import os
import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import cast

from shardwise.core.errors import StorageError
from shardwise.core.machine import boot_id
from shardwise.files.storage import LOCAL, NETWORK_FILE_SYSTEM, ReadPolicy, StorageReader, as_bytes, ends_early
from shardwise.files.urls import (
    HubOptions,
    get_scheme,
    is_url,
    local_path,
    require_file_name,
    require_subfolder,
    shown,
    split_file,
    to_storage_error,
    without_secrets,
)


class _Descriptor:
    """A descriptor that is closed with the last reference to it, so that no thread loses it while it reads."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.descriptor)


class LocalReader(StorageReader):
    """A reader of files below ``root`` with ``preadv``. See :class:`~shardwise.files.storage.StorageReader`.

    The descriptors of the ``max_open_files`` most recently used files are kept open. Symbolic links are followed to
    any target because the cache of the Hugging Face hub consists of them.

    The policy is that of a network file system if ``root`` is on one according to the mount table, or else that of
    a local disk. ``policy`` replaces it.

    ``reads`` (system calls) and ``files_opened`` are counters.
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
        self._policy = policy or (NETWORK_FILE_SYSTEM if is_network(get_file_system_type(self._root)) else LOCAL)
        self._max_open_files = max(1, max_open_files)
        self._open_files: OrderedDict[str, _Descriptor] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = False
        self.reads = 0
        self.files_opened = 0

    @property
    def root(self) -> str:
        return self._root

    @property
    def policy(self) -> ReadPolicy:
        return self._policy

    def list(self) -> list[str]:
        """Return the names of all files below the root, sorted.

        Hidden folders (``.git``, ``.cache``), folders that are links, and broken links are left out.
        """

        def refuse(error: OSError) -> None:
            # Folders below the root that cannot be entered are left out.
            if error.filename == self._root:
                raise to_storage_error(self._root, None, "listing it", error) from error

        names: list[str] = []
        for folder, subfolders, files in os.walk(self._root, onerror=refuse):
            subfolders[:] = [name for name in subfolders if not name.startswith(".")]
            paths = (Path(folder, name) for name in files)
            # Not Path.is_file(), which raises for a file in a folder that may be listed but not entered.
            names += [path.relative_to(self._root).as_posix() for path in paths if os.path.isfile(path)]
        return sorted(names)

    def size(self, file: str) -> int:
        opened = self._get_open_file(file)  # a reference, or another thread may close the descriptor
        return os.fstat(opened.descriptor).st_size

    def identity(self, file: str) -> str:
        """Return size, modification time and, on a local disk, inode, also of a file that replaced the open one.

        A file that is rewritten in place with the same size within the resolution of the file system's clock (some
        milliseconds) is not detected.
        """
        # A file that was replaced by a rename has another inode than the descriptor, whose bytes are still the
        # old ones.
        opened, named = self._stat(file)
        if opened is None or os.path.samestat(opened, named):
            return self._state(named)
        return f"{self._state(opened)}, replaced by {self._state(named)}"

    def place(self, file: str) -> str:
        """Return the machine's boot ID, and device, inode, size and modification time of the open or named file."""
        opened, named = self._stat(file)
        status = opened or named
        return f"{boot_id()} {status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns}"

    def read_vectored(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        pending, nbytes = as_bytes(buffers)
        position, stop = start, start + nbytes
        first = 0
        opened = self._get_open_file(file)
        # A call may read less than was asked for, and takes a limited number of buffers.
        while first < len(pending):
            try:
                count = os.preadv(opened.descriptor, slice_for_one_call(pending, first), position)
            except OSError as error:
                raise to_storage_error(self._root, file, f"reading at byte {position}", error) from error
            with self._lock:
                self.reads += 1
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

    def _stat(self, file: str) -> tuple[os.stat_result | None, os.stat_result]:
        """Return the status of the open file, if any, and of the file that now has this name.

        No file is opened.
        """
        path = self._path(file)
        # Without the lock: one dict lookup is atomic, and the reference keeps the descriptor open.
        descriptor = self._open_files.get(file)
        opened = None if descriptor is None else os.fstat(descriptor.descriptor)
        try:
            named = os.stat(path)
        except (OSError, UnicodeError) as error:
            raise to_storage_error(self._root, file, "reading its size", error) from error
        if not stat.S_ISREG(named.st_mode):
            raise self._not_regular(file)
        return opened, named

    def _get_open_file(self, file: str) -> _Descriptor:
        """Return the open file, which stays open as long as the caller keeps a reference."""
        path = self._path(file)
        with self._lock:
            opened = self._open_files.get(file)
            if opened is not None:
                self._open_files.move_to_end(file)
                return opened
        # Not under the lock: opening can take milliseconds on a network file system.
        new = self._open(file, path)
        with self._lock:
            if self._closed:
                raise self._is_closed(file)
            # Another thread may have opened it meanwhile: its descriptor counts, and ``new`` is closed.
            opened = self._open_files.setdefault(file, new)
            self.files_opened += opened is new
            # Descriptors that are in use are only dropped here, and closed after the last read.
            while len(self._open_files) > self._max_open_files:
                self._open_files.popitem(last=False)
            return opened

    def _open(self, file: str, path: str) -> _Descriptor:
        try:
            # O_NONBLOCK: opening a pipe must not wait for a writer. It does not affect regular files.
            opened = _Descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        except (OSError, UnicodeError) as error:
            raise to_storage_error(self._root, file, "opening it", error) from error
        if not stat.S_ISREG(os.fstat(opened.descriptor).st_mode):
            raise self._not_regular(file)
        return opened

    def _path(self, file: str) -> str:
        if self._closed:
            raise self._is_closed(file)
        require_file_name(self._root, file)
        return os.path.join(self._root, file)

    def _not_regular(self, file: str) -> StorageError:
        return StorageError(f"{shown(file)} in {self._root}: not a regular file. Check the path")

    def _is_closed(self, file: str) -> StorageError:
        return StorageError(f"{shown(file)} in {self._root}: the reader is closed. Open another one")


CALL_BYTES = 0x7FFFF000
"""The most one call reads or writes on Linux (``MAX_RW_COUNT``, read(2))."""

CALL_BUFFERS = 1024
"""The most buffers one preadv or pwritev call takes on Linux (``IOV_MAX``)."""


def slice_for_one_call(buffers: Sequence[memoryview], first: int) -> Sequence[memoryview]:
    """Return the buffers from ``first`` on that fit in one system call, the last one possibly cut."""
    batch: list[memoryview] = []
    # Buffers are cut, not copied: the rest of the last one goes into the next call.
    remaining = CALL_BYTES
    for buffer in buffers[first : first + CALL_BUFFERS]:
        batch.append(buffer[:remaining])
        remaining -= batch[-1].nbytes
        if remaining == 0:
            break
    return batch


def advance(buffers: list[memoryview], first: int, count: int) -> int:
    """Return the index of the first unfinished buffer after ``count`` more bytes, and cut off its finished part."""
    while first < len(buffers) and count >= buffers[first].nbytes:
        count -= buffers[first].nbytes
        first += 1
    if count:
        buffers[first] = buffers[first][count:]
    return first


class CombinedReader(StorageReader):
    """A storage combined with a second one, whose file names have the prefix ``folder``.

    The policy is that of the first because it contains nearly all of the bytes.
    """

    def __init__(self, first: StorageReader, second: StorageReader, folder: str) -> None:
        self._first = first
        self._second = second
        self._prefix = f"{folder}/"

    @property
    def root(self) -> str:
        return self._first.root

    @property
    def policy(self) -> ReadPolicy:
        return self._first.policy

    @property
    def files_opened(self) -> int:
        """The number of opened files of both readers, as far as they count them."""
        return sum(getattr(reader, "files_opened", 0) for reader in (self._first, self._second))

    @property
    def reads(self) -> int:
        """The number of reads of both readers, as far as they count them."""
        return sum(getattr(reader, "reads", 0) for reader in (self._first, self._second))

    def list(self) -> list[str]:
        return sorted([*self._first.list(), *(f"{self._prefix}{file}" for file in self._second.list())])

    def size(self, file: str) -> int:
        reader, name = self._find_reader(file)
        return reader.size(name)

    def identity(self, file: str) -> str:
        reader, name = self._find_reader(file)
        return reader.identity(name)

    def read_vectored(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        reader, name = self._find_reader(file)
        reader.read_vectored(name, start, buffers)

    def close(self) -> None:
        """Close both readers."""
        try:
            self._first.close()
        finally:
            self._second.close()

    def _find_reader(self, file: str) -> tuple[StorageReader, str]:
        if file.startswith(self._prefix):
            return self._second, file.removeprefix(self._prefix)
        return self._first, file


@dataclass(frozen=True, slots=True)
class OpenStorage:
    """A reader of a checkpoint's folder, and the file in it that was named, if any."""

    reader: StorageReader
    file: str | None


def open_storage(
    path_or_url: str | os.PathLike[str],
    hub: HubOptions = HubOptions(),  # noqa: B008 - frozen
) -> OpenStorage:
    """Open a folder, a safetensors or index file, or a URL for reading in place. The caller closes the reader.

    Nothing is downloaded: a string is never the name of a repository. ``hub.subfolder`` applies to all of them.

    Raises:
        StorageError: the storage does not exist or cannot be opened.
    """
    if is_url(path_or_url):
        return _open_url(os.fspath(path_or_url), hub)
    place = cast(Path, local_path(Path(path_or_url), hub))  # a Path is never the name of a repository
    if place.is_file():
        return OpenStorage(LocalReader(place.parent), place.name)
    return OpenStorage(LocalReader(place), None)


def _open_url(url: str, hub: HubOptions) -> OpenStorage:
    where = shown(without_secrets(url))
    if get_scheme(url) == "file":
        raise StorageError(f"{where}: is on this machine. Pass the path without file://")
    if hub.local_files_only:
        raise StorageError(f"{where}: is read over the network, but local_files_only is set. Pass a local folder")
    # The subfolder goes before the query, which is sent with every file.
    folder, file = split_file(url)
    if file is not None and hub.subfolder:
        raise StorageError(f"{where}: is a file, which has no subfolder. Leave subfolder out")
    require_subfolder(where, hub)
    if hub.subfolder:
        before, mark, query = folder.partition("?")
        folder = f"{before.rstrip('/')}/{hub.subfolder}{mark}{query}"
    # Imported here: what is local needs no network code.
    from shardwise.files.objects import RemoteReader

    return OpenStorage(RemoteReader(folder), file)


_NETWORK = re.compile(
    "9p|afs|beegfs|ceph|cifs|glusterfs|gpfs|lustre|nfs4?|orangefs|panfs|pvfs2|smb3|smbfs|virtiofs|wekafs"
    r"|fuse(\.(?!(bindfs|fuse-overlayfs|lxcfs|mergerfs|ntfs-3g|snapfuse|squashfuse)$).*)?"
)
"""Types of file systems whose files come from another machine. Of FUSE all, but for those over local folders."""

_TABLE = "/proc/self/mountinfo"

_OCTAL = re.compile(r"\\([0-7]{3})")
"""Spaces and other characters, as the mount table escapes them."""


def get_file_system_type(path: str) -> str | None:
    """Return the type of the file system of a path, which need not exist, or None if it cannot be determined."""
    try:
        with open(_TABLE, encoding="utf-8", errors="surrogateescape") as table:
            return find_type_in_mountinfo(os.path.realpath(path), table.read())
    except OSError:  # not Linux, or no /proc
        return None


def find_type_in_mountinfo(path: str, mountinfo: str) -> str | None:
    """Return the type ("ext4", "nfs4", "fuse.gcsfuse") of the file system that contains ``path``, or None.

    ``path`` is absolute and free of links. ``mountinfo`` is the text of ``/proc/self/mountinfo`` (proc(5)).
    """
    # The mount point that is the longest prefix of the path counts.
    kind: str | None = None
    depth = -1
    place = PurePosixPath(path)
    for line in mountinfo.splitlines():
        # 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw: optional fields end with the dash.
        before, dash, after = line.partition(" - ")
        fields, kinds = before.split(" "), after.split(" ")
        if not dash or len(fields) < 5 or not kinds[0]:
            continue
        point = PurePosixPath(_OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4]))
        # Of two mounts on one folder the later one is on top.
        if place.is_relative_to(point) and len(point.parts) >= depth:
            kind, depth = kinds[0], len(point.parts)
    return kind


def is_network(kind: str | None) -> bool:
    """Check if files on this type of file system come from another machine, or from outside a virtual machine."""
    return _NETWORK.fullmatch(kind or "") is not None
