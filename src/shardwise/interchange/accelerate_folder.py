"""States of accelerate's, all of a training in one folder: saved by all ranks, and counting together.

Models and optimizers are written where they belong by all ranks. What accelerate writes itself, and hooks of users'
do, goes into a folder of the save's own, and is copied from there by the first rank. All have names of the save's
own until a list of renames has them count ([Note: A list of renames]).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwise.errors import StorageError
from shardwise.execution.committing import (
    as_renamed,
    commit_written,
    copy_in,
    distributed_folders,
    remove_fresh,
    tidy,
    undo,
    work_folder,
)
from shardwise.execution.saving_lock import Marked, Saving, marked_by_first, marked_here
from shardwise.execution.world import World
from shardwise.formats.distributed import is_of_accelerate
from shardwise.interchange.accelerate_writing import PartOf
from shardwise.planning.save_plan import WrittenFiles, fresh
from shardwise.storage.writing import FoldersWriter, folders_in, remove_folder

_NUMBERED = re.compile(r"checkpoint_([0-9]+)")
_ALWAYS_THERE = "random_states_0.pkl"
"""Of every state that counts."""


class LinkedFolder(str):
    """The path of a folder of links that accelerate is told to load from, and the folder that it stands for."""

    folder: Path

    @classmethod
    def of(cls, place: Path, folder: Path) -> LinkedFolder:
        made = cls(place)
        made.folder = folder
        return made


class WorkFolder(str):
    """The path of a folder that accelerate is told to save into, and what models and optimizers are a part of."""

    part: PartOf
    folder: Path

    @classmethod
    def of(cls, saving: Saving) -> WorkFolder:
        """For a save that is under way."""
        made = cls(work_folder(saving.folder, saving.token))
        made.part, made.folder = PartOf(saving), Path(saving.folder)
        return made


@contextmanager
def state_saved(world: World, folder: Path, *, is_new: bool) -> Iterator[WorkFolder]:
    """Mark a folder for the time of the block, in which accelerate saves into the folder that is given.

    After the block all that was written counts, and takes the place of the older state; other files stay. With
    ``is_new`` nothing may be in the folder.

    Collective: yes, at the beginning and the end.
    Memory: a block of a file.

    Raises:
        StorageError: another save is writing there, or has since; a file could not be written; the folder is not
            new.
    """
    carried: set[str] = set()

    def begin(marked: Marked) -> None:
        tidy(marked)
        if is_new:
            _require_new(marked)
        os.mkdir(work_folder(folder, marked.token))

    def end(marked: Marked) -> None:
        undo(marked, carried)

    with marked_by_first(world, folder, begin, end) as saving:
        work = WorkFolder.of(saving)
        yield work
        seen = world.each(lambda: _names_in(work))
        names = sorted({name for told in seen for name in told})
        carried |= {name.rpartition("/")[0] for name in names} - {""}
        world.from_first(lambda: _commit(saving.marked, work, names))


def newest_in(place: Path) -> Path | None:
    """The folder ``checkpoint_N`` of the greatest number whose state counts; None where there is none.

    One that counts by a list of renames that a killed save has left is one; one that never counted is passed over.
    """
    for _, folder in sorted(_numbered(place), reverse=True):
        with as_renamed(folder) as seen:
            if (seen / _ALWAYS_THERE).is_file():
                return folder
    return None


def keep_newest(place: Path, newest: Path, limit: int | None) -> None:
    """Remove all but so many of the states ``checkpoint_N`` that count, the least numbers first; never the newest.

    Raises:
        StorageError: something cannot be removed, or is being saved.
    """
    found = [folder for _, folder in sorted(_numbered(place)) if (folder / _ALWAYS_THERE).is_file()]
    for folder in found[: max(0, len(found) - limit)] if limit is not None else ():
        if folder != newest and not folder.is_symlink():  # else it is somebody else's, or elsewhere
            with marked_here(folder) as marked, FoldersWriter(folder) as writer:
                tidy(marked)
                writer.remove(_ALWAYS_THERE)  # a half of a state does not count as one
                writer.sync_names()
            remove_folder(folder)


def _numbered(place: Path) -> list[tuple[int, Path]]:
    if not place.is_dir():
        return []
    return [(int(found[1]), path) for path in place.iterdir() if (found := _NUMBERED.fullmatch(path.name))]


def _require_new(marked: Marked) -> None:
    root = marked.writer.root
    others = [name for name in os.listdir(root) if name not in marked.files]
    if others:
        raise StorageError(
            f"{root}: is there already; set accelerator.project_configuration.iteration to the number that is to "
            "be saved next"
        )


def _names_in(work: str) -> list[str]:
    with FoldersWriter(work, folders_in(work)) as writer:
        return writer.list()


def _commit(marked: Marked, work: WorkFolder, names: list[str]) -> None:
    """Copy what accelerate has written, and let all count."""
    written = WrittenFiles()
    for part in work.part.parts:
        written = written.with_more(part)
    copies: dict[str, int] = {}
    folders = {name.rpartition("/")[0] for name in names} - {""}
    with FoldersWriter(marked.writer.root, folders) as writer:
        remove_fresh(writer, [name for name in writer.list() if name.rpartition("/")[0] in folders])
        for name in names:
            copies[name] = copy_in(writer, os.path.join(work, name), fresh(name, marked.token))
        writer.sync_names()
    written = written.with_more(WrittenFiles(copies))
    commit_written(marked, written, _older(marked.writer.root, written))


def _older(root: str, written: WrittenFiles) -> list[str]:
    """Files of an older state that nothing new takes the place of."""
    with FoldersWriter(root, distributed_folders(root)) as writer:
        new = {*written.named, *written.beside}
        return [name for name in writer.list() if is_of_accelerate(name) and name not in new]
