"""Sets space aside on a local file system, and makes files and names last."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os

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
