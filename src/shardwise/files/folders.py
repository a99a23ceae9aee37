"""A writer into nested folders, and removal of folders."""

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import accumulate

from shardwise.core.errors import StorageError
from shardwise.files.local_writer import LocalWriter
from shardwise.files.urls import require_file_name, shown


class FoldersWriter(LocalWriter):
    """A :class:`~shardwise.files.storage.StorageWriter` whose file names may contain folders.

    ``folders`` are paths relative to the root. Their files are listed in addition to the root's, and folders of
    written files are added. The root may be a link, but folders in it may not, so that nothing outside of the root
    is written or removed.

    Raises:
        StorageError: the root or a folder exists but is not a folder, or a folder is a link.
    """

    def __init__(self, root: str | os.PathLike[str], folders: Collection[str] = ()) -> None:
        super().__init__(root)
        for folder in sorted(folders):
            self.add_parent(f"{folder}/")

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

    def _path(self, file: str) -> str:
        self._require_open(file)
        require_file_name(self._root, file)
        self.add_parent(file)
        return os.path.join(self._root, file)


def is_through_link(root: str | os.PathLike[str], folder: str) -> bool:
    """Check if a folder below a root is a link, or is reached through one."""
    prefixes = accumulate(folder.split("/"), "{}/{}".format) if folder else ()
    return any(os.path.islink(os.path.join(root, prefix)) for prefix in prefixes)


def folders_in(root: str | os.PathLike[str]) -> list[str]:
    """Return the relative paths of all folders below a root, without following links."""
    paths = [os.path.join(parent, name) for parent, names, _ in os.walk(root) for name in names]
    return sorted(os.path.relpath(path, root) for path in paths if not os.path.islink(path))


def remove_files(writer: FoldersWriter, names: Collection[str]) -> None:
    """Remove files of a folder, unlisted links in its folders, and the registered folders.

    Files that no longer exist are no error, because another process may be removing them too.

    Raises:
        StorageError: a file or folder cannot be removed, or a folder contains other files.
    """
    try:
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
    with FoldersWriter(root, folders_in(root)) as writer:
        remove_files(writer, writer.list())
    try:
        with suppress(FileNotFoundError):
            os.rmdir(root)
    except OSError as error:
        raise StorageError(f"{os.fspath(root)}: cannot be removed ({error.strerror or error})") from error
