"""Writing to a folder and to folders in it, as one."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from itertools import accumulate
from types import TracebackType
from typing import Self

from shardwise.errors import StorageError
from shardwise.storage.contract import StorageWriter, WritePolicy
from shardwise.storage.names import shown, why_unsafe
from shardwise.storage.writing.local_writer import LocalWriter


class FoldersWriter:
    """A :class:`~shardwise.storage.contract.StorageWriter` whose names may have a folder in front.

    Each folder has a writer of its own. A file gets another name in its own folder only. ``folders`` are those that
    :meth:`list` tells of beside the root, by their way from it; one that a name of a file leads to is added. The
    root may be a link, folders in it may not, so that nothing outside of the root is written or removed.

    Raises:
        StorageError: for a root, or a folder, that is none; for a folder that is a link.
    """

    def __init__(self, root: str | os.PathLike[str], folders: Collection[str] = ()) -> None:
        self._closing = ExitStack()
        self._writers: dict[str, StorageWriter] = {}
        self._root = os.path.abspath(os.fspath(root))
        try:
            for folder in ("", *sorted(folders)):
                self._of(folder)
        except BaseException:
            self.close()
            raise

    @property
    def root(self) -> str:
        return self._root

    @property
    def policy(self) -> WritePolicy:
        return self._writers[""].policy

    @property
    def folders(self) -> list[str]:
        """Those in the root that this writer knows of, each before what lies in it."""
        return sorted(folder for folder in self._writers if folder)

    def add_folder_of(self, file: str) -> None:
        """Know of the folder that a file has in front."""
        self._place(file)

    def list(self) -> list[str]:
        return sorted(_joined(folder, name) for folder, writer in self._known() for name in writer.list())

    def sizes(self) -> dict[str, int]:
        return {
            _joined(folder, name): nbytes
            for folder, writer in self._known()
            for name, nbytes in writer.sizes().items()
        }

    def read(self, file: str) -> bytes | None:
        writer, name = self._place(file)
        return writer.read(name)

    def create(self, file: str, nbytes: int) -> None:
        writer, name = self._place(file)
        writer.create(name, nbytes)

    def write(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        writer, name = self._place(file)
        writer.write(name, start, buffers)

    def sync(self, file: str) -> None:
        writer, name = self._place(file)
        writer.sync(name)

    def rename(self, file: str, name: str) -> None:
        writer, source, target = self._both(file, name)
        writer.rename(source, target)

    def publish(self, file: str, name: str) -> None:
        writer, source, target = self._both(file, name)
        writer.publish(source, target)

    def replace(self, file: str, content: bytes) -> None:
        writer, name = self._place(file)
        writer.replace(name, content)

    def remove(self, file: str) -> None:
        writer, name = self._place(file)
        writer.remove(name)

    def sync_names(self) -> None:
        for _, writer in self._known():
            writer.sync_names()

    def close(self) -> None:
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _known(self) -> Sequence[tuple[str, StorageWriter]]:
        return sorted(self._writers.items())

    def _of(self, folder: str) -> StorageWriter:
        if folder not in self._writers:
            if is_through_link(self._root, folder):
                raise StorageError(
                    f"{shown(folder)} in {self._root}: leads out by a link, and nothing is written or removed "
                    "outside; remove the link, or save to another folder"
                )
            self._writers[folder] = self._closing.enter_context(LocalWriter(os.path.join(self._root, folder)))
        return self._writers[folder]

    def _place(self, file: str) -> tuple[StorageWriter, str]:
        fault = why_unsafe(file)
        if fault is not None:
            raise StorageError(f"{shown(file)}: refused as the name of a file below {self._root}, {fault}")
        folder, _, name = file.rpartition("/")
        return self._of(folder), name

    def _both(self, file: str, name: str) -> tuple[StorageWriter, str, str]:
        (source, before), (target, after) = self._place(file), self._place(name)
        if source is not target:
            raise StorageError(
                f"{shown(file)} in {self._root}: cannot become {shown(name)}, which has another folder"
            )
        return source, before, after


def is_through_link(root: str | os.PathLike[str], folder: str) -> bool:
    """Whether a folder below a root is a link, or lies behind one."""
    ways = accumulate(folder.split("/"), "{}/{}".format) if folder else ()
    return any(os.path.islink(os.path.join(root, way)) for way in ways)


def folders_in(root: str | os.PathLike[str]) -> list[str]:
    """All folders below a root, by their way from it. Links are not followed."""
    found: list[str] = []
    for around, names, _ in os.walk(root):
        way = os.path.relpath(around, root)
        found += [
            _joined("" if way == "." else way, name)
            for name in names
            if not os.path.islink(os.path.join(around, name))
        ]
    return sorted(found)


def remove_files(writer: FoldersWriter, names: Collection[str]) -> None:
    """Remove files of a folder, links to folders, which a writer does not list, and the folders that it knows of.

    What is gone already is no error: another process may be removing the same.

    Raises:
        StorageError: something cannot be removed; a folder has other files in it.
    """
    try:
        for name in names:
            writer.remove(name)
        for inner in ("", *reversed(writer.folders)):
            with suppress(FileNotFoundError):
                for entry in os.scandir(os.path.join(writer.root, inner)):
                    if entry.is_symlink():
                        writer.remove(_joined(inner, entry.name))
        for inner in reversed(writer.folders):
            with suppress(FileNotFoundError):
                os.rmdir(os.path.join(writer.root, inner))
    except OSError as error:
        raise StorageError(f"{writer.root}: cannot be removed ({error.strerror or error})") from error


def remove_folder(root: str | os.PathLike[str]) -> None:
    """Remove a folder and all that is in it; that it is not there is no error.

    Raises:
        StorageError: something cannot be removed.
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


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
