"""Lists and removes nested folders, and makes temporary ones."""

import errno
import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwise.core.errors import StorageError
from shardwise.files.local_writer import LocalWriter


def folders_in(root: str | os.PathLike[str]) -> list[str]:
    """Return the relative paths of all folders below a root, without following links."""
    paths = [os.path.join(parent, name) for parent, names, _ in os.walk(root) for name in names]
    return sorted(os.path.relpath(path, root) for path in paths if not os.path.islink(path))


def remove_files(writer: LocalWriter, names: Collection[str]) -> None:
    """Remove files of a folder, unlisted links in its folders, and the registered folders.

    Files that no longer exist are no error, because another process may be removing them too.

    Raises:
        StorageError: a file or folder cannot be removed, or a folder contains other files.
    """
    try:
        # Files first, then links, then folders from the innermost one on.
        for name in names:
            writer.remove(name)
        # Links are not listed as files. Subfolders come before their parents, which must be empty to be removed.
        for inner in ("", *reversed(writer.folders)):
            with suppress(FileNotFoundError):
                for entry in os.scandir(os.path.join(writer.root, inner)):
                    if entry.is_symlink():
                        writer.remove(os.path.join(inner, entry.name))
        for inner in reversed(writer.folders):
            with suppress(FileNotFoundError):
                os.rmdir(os.path.join(writer.root, inner))
    except OSError as error:
        raise StorageError(f"{writer.root}: cannot be removed ({error.strerror or error})") from error


def remove_folder(root: str | os.PathLike[str]) -> None:
    """Remove a folder and its content, without an error if it does not exist.

    Raises:
        StorageError: a file or folder cannot be removed.
    """
    if not os.path.isdir(root):
        return
    with LocalWriter(root, folders=folders_in(root)) as writer:
        remove_files(writer, writer.list())
    try:
        with suppress(FileNotFoundError):
            os.rmdir(root)
    except OSError as error:
        raise StorageError(f"{os.fspath(root)}: cannot be removed ({error.strerror or error})") from error


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a folder for files that a library writes, until the end of the block.

    Raises:
        StorageError: it is full. Errors of the system do not tell which file that is of.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
            yield Path(folder)
    except (OSError, RuntimeError) as error:
        reason = "no space left"
        if isinstance(error, OSError):
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            reason = error.strerror or reason
        elif "inline_container" not in str(error):  # torch's writer of archives, which does not know the reason
            raise
        raise StorageError(
            f"{tempfile.gettempdir()}: temporary files cannot be written, {reason}. Free space there, or set TMPDIR"
        ) from error
