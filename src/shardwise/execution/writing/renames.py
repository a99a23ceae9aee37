"""Carries out lists of renames, and removes what saves by such lists have left; see [Note: A list of renames]."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from shardwise.errors import FormatError, StorageError
from shardwise.execution.reading.renamed_folder import read_list
from shardwise.execution.writing.committing import let_count, remove_unnamed
from shardwise.execution.writing.distributed_folder import left_in
from shardwise.execution.writing.marked_folder import Marked
from shardwise.execution.writing.saving_lock import HeldMark, Whose
from shardwise.formats.accelerate_names import is_distributed_folder
from shardwise.planning.saves.commit import Renames, WrittenFiles, fresh, lists_among, on_its_way, token_of_fresh
from shardwise.storage.names import shown
from shardwise.storage.writing.folders_writer import FoldersWriter, is_through_link, remove_folder

_WORK = (".shardwise.", ".work")
"""The beginning and the end of the name of a folder in which others write for a save, with its token between."""


def work_folder(folder: str | os.PathLike[str], token: str) -> Path:
    """Where the code of others writes what is then saved."""
    return Path(folder, token.join(_WORK))


def tidy(marked: Marked) -> None:
    """Carry out what is left to be renamed, and remove what saves of accelerate's files have left besides.

    Raises:
        FormatError: a list of renames makes no sense.
        StorageError: a file cannot be renamed or removed.
    """
    root = marked.writer.root
    folders = distributed_folders(root)
    with FoldersWriter(root, folders) as writer:
        remove_unnamed(writer, writer.list())  # by what was about to be named nothing can begin to count
        _finish_all(root, marked.held)
        remove_fresh(writer, writer.list())
        for folder in folders:
            for name in left_in(Path(root, folder)):
                writer.remove(f"{folder}/{name}")
    for entry in _entries(root):
        if entry.name.startswith(_WORK[0]) and entry.name.endswith(_WORK[1]):
            remove_folder(entry.path)


def undo(marked: Marked, also: Collection[str] = ()) -> None:
    """Remove what this save has made, unless it counts by now. ``also`` are further folders that it wrote into."""
    root = marked.writer.root
    folders = distributed_folders(root)
    also = [folder for folder in also if not is_through_link(root, folder)]
    with FoldersWriter(root, {*folders, *also}) as writer:
        names = writer.list()
        listed = Renames(marked.token, ()).file
        writer.remove(on_its_way(listed, marked.token))
        if listed not in names:
            remove_fresh(writer, [name for name in names if token_of_fresh(name) == marked.token])
            for folder in folders:
                for name in left_in(Path(root, folder), of=marked.token):
                    writer.remove(f"{folder}/{name}")
    _remove_empty(root, {*folders, *also})
    remove_folder(work_folder(root, marked.token))


def commit_written(marked: Marked, written: WrittenFiles, older: Sequence[str]) -> None:
    """Let the files of a save count, give them their names, and remove the older ones; then release the mark.

    Raises:
        StorageError: as of :func:`~shardwise.execution.writing.committing.let_count`.
    """
    root = marked.writer.root
    renames = Renames(marked.token, tuple(written.named), tuple(older))
    folders = {name.rpartition("/")[0] for name in (*written.named, *written.beside, *older)} - {""}
    with FoldersWriter(root, folders) as writer:
        let_count(writer, marked.held, renames.commit(written), {})
    if marked.held.whose() is not Whose.ANOTHERS:  # who has the folder by now has found the list, and finishes it
        _finish(root, renames.file, marked.held)
    _remove_empty(root, folders)
    remove_folder(work_folder(root, marked.token))
    marked.release()


def _entries(root: str) -> list[os.DirEntry[str]]:
    with os.scandir(root) as entries:
        return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]


def distributed_folders(root: str) -> list[str]:
    """The folders of models and optimizers that are there. Links are not followed."""
    return sorted(entry.name for entry in _entries(root) if is_distributed_folder(entry.name))


def remove_fresh(writer: FoldersWriter, names: Collection[str]) -> None:
    """Remove those of these files that saves have written and not named."""
    for name in names:
        if token_of_fresh(name) is not None:
            writer.remove(name)


def _remove_empty(root: str, folders: Collection[str]) -> None:
    for folder in sorted(folders, reverse=True):
        with contextlib.suppress(OSError):
            os.rmdir(os.path.join(root, folder))


def _finish_all(root: str, held: HeldMark) -> None:
    with FoldersWriter(root) as writer:
        lists = lists_among(writer.list())
    for file in lists:
        _finish(root, file, held)


def _finish(root: str, file: str, held: HeldMark) -> None:
    """Give the files that are listed their names, and remove those that are older; when marked.

    Whoever has taken the folder over does the same meanwhile, and may be done first. Then new files are not there
    to be renamed any more; before a name is removed that others may have given, it is asked whose the mark is.
    """
    renames = read_list(Path(root), file)
    if renames is None:
        return  # somebody else has finished it
    with FoldersWriter(root) as writer:
        for name in (*renames.names, *renames.older):
            writer.add_folder_of(name)
        there = set(writer.list())
        for name in renames.names:
            if fresh(name, renames.token) in there:
                _rename(writer, fresh(name, renames.token), name)
            elif name not in there and file in writer.list():
                raise FormatError(
                    f"{file} in {root}: lists {shown(name)}, which is gone; remove that list, and save again"
                )
        if file not in writer.list():
            return  # what is there by now may be of a newer save
        for name in renames.older:
            if name in there and name not in renames.names:
                if held.whose() is not Whose.OURS:
                    return  # the list stays until all that is older is gone; whoever has the folder goes on by it
                writer.remove(name)
        writer.sync_names()
        writer.remove(file)
        writer.sync_names()


def _rename(writer: FoldersWriter, file: str, name: str) -> None:
    try:
        writer.rename(file, name)
    except StorageError:
        if file in writer.list():
            raise
