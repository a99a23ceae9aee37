"""Space, files and names on a local file system that last; and why a folder could not be written to."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from typing import Final

from shardwise.errors import StorageError
from shardwise.report.names import in_bytes
from shardwise.storage.names import shown

_MODE = 0o666
"""Permissions of what is created, less the umask."""

_CANNOT_SET_ASIDE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})

_CANNOT_SYNC_FOLDERS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})
"""What CIFS and some FUSE file systems answer, where names need no sync or cannot be synced."""


def create_file(path: str) -> int:
    """A descriptor that writes to a file which was not there before.

    Raises:
        OSError: the file is there, or cannot be made.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)


def set_aside(descriptor: int, nbytes: int) -> None:
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


def write_whole(path: str, content: bytes) -> None:
    """Write a file that was not there before, and sync it; its name is not synced."""
    descriptor = create_file(path)
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as opened:
            opened.write(content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: str) -> None:
    """Make the folder where it is not there, so that it lasts; also where whoever made it died before it did."""
    parent = os.path.dirname(path)
    if not os.path.isdir(path):
        if parent != path:
            make_folder(parent)
        try:
            os.mkdir(path)
        except FileExistsError as error:
            if not os.path.isdir(path):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from error
        sync_folder(parent)
        return
    with contextlib.suppress(OSError):  # not ours to look into, then not made by a save of ours
        sync_folder(parent)


def sync_folder(folder: str) -> None:
    """Make the names in a folder last, where the file system can or has to be asked for it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC_FOLDERS:
            raise
    finally:
        os.close(descriptor)


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


def failed(root: str, file: str | None, doing: str, error: OSError | UnicodeError) -> StorageError:
    """What could not be done to a file of the folder ``root`` (None: to the folder), why, and what helps."""
    if isinstance(error, UnicodeError):
        cause, remedy = "the name cannot be encoded", "rename it"
    elif error.errno == errno.ENOSPC:
        cause, remedy = f"the disk is full{_free(root)}", "make room, or save elsewhere"
    else:
        unknown = f"{error.strerror} (errno {error.errno})", "check the file system and try again"
        cause, remedy = _CAUSES.get(error.errno or 0, unknown)
    return StorageError(f"{_named(root, file)}: {doing} failed, {cause}; {remedy}")


def closed(root: str, file: str | None) -> StorageError:
    """The writer of the folder ``root`` was asked for something after it was closed."""
    return StorageError(f"{_named(root, file)}: the writer is closed; open another one")


def _named(root: str, file: str | None) -> str:
    return shown(root) if file is None else f"{shown(file)} in {root}"


def _free(root: str) -> str:
    """How much there is room for, as far as that can be found out."""
    folder = root
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    try:
        return f", {in_bytes(shutil.disk_usage(folder).free)} are free"
    except OSError:
        return ""
