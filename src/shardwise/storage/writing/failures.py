"""Says why a local folder could not be written to, and what to do."""

from __future__ import annotations

import errno
import os
import shutil
from typing import Final

from shardwise.errors import StorageError
from shardwise.report.sizes import in_bytes
from shardwise.storage.names import shown

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
