"""Writes, commits and removes the checkpoints in an output folder of the Trainer's; see [Note: One commit].

The output folder is marked while a checkpoint is saved there, and while any are removed. What others have written
into a checkpoint (the Trainer's state, a tokenizer) is written once more, so that it lasts; what our saves have
written lasts already.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from shardwise.errors import StorageError
from shardwise.execution.ranks.world import World
from shardwise.execution.writing.committing import let_count, remove_unnamed
from shardwise.execution.writing.durable import write_again
from shardwise.execution.writing.marked_folder import Marked, Saving, marked_by_first, marked_here
from shardwise.execution.writing.saving_lock import Whose
from shardwise.integrations.trainer_runs import (
    BEGUN_FILE,
    FACTS_FILE,
    STATE_FOLDER,
    FolderKind,
    TrainerFacts,
    checkpoints_in,
    folder_of,
    kind_of,
)
from shardwise.planning.saves import fingerprints
from shardwise.planning.saves.commit import Commit, Publish, on_its_way
from shardwise.storage.writing.folders_writer import FoldersWriter, folders_in, remove_files


def marked_for(world: World, run: Path, step: int) -> AbstractContextManager[Saving]:
    """Mark an output folder while the checkpoint of this step is saved there; what was left there is removed.

    Collective: yes, at the beginning.

    Raises:
        StorageError: another save is going on there, or has been of this step; or somebody else's files are there.
    """
    return marked_by_first(world, run, partial(_begin, run, step), partial(_undo, run, step))


def _begin(run: Path, step: int, marked: Marked) -> None:
    _remove_left(run)  # before it is looked what counts; see [Note: Asked again]
    folder = folder_of(run, step)
    if folder.is_dir():
        raise StorageError(f"{folder}: is there already, {kind_of(folder).value}; nothing was overwritten")
    with FoldersWriter(folder) as writer:
        token = marked.token.encode()
        writer.create(BEGUN_FILE, len(token))
        writer.write(BEGUN_FILE, 0, [memoryview(token)])
        writer.sync(BEGUN_FILE)
        writer.sync_names()


def _undo(run: Path, step: int, marked: Marked) -> None:
    """Remove what was written for the step, unless it counts by now or the folder is another's."""
    folder = folder_of(run, step)
    if not folder.is_dir():
        return
    if marked.held.whose() is Whose.OURS:
        if (folder / BEGUN_FILE).is_file():
            _remove_unless_it_counts(folder)
        return
    with _emptying(folder) as writer:
        writer.remove(on_its_way(FACTS_FILE, marked.token))
        names = writer.list()
        is_begun = BEGUN_FILE in names or FACTS_FILE in names
        if not is_begun and (names or writer.folders):  # it was removed, and we made it again
            with contextlib.suppress(OSError):
                remove_files(writer, names)
                os.rmdir(folder)


def complete(marked: Marked, folder: Path, facts: TrainerFacts) -> None:
    """Have a checkpoint count, once all that is in it lasts.

    Raises:
        StorageError: the disk refuses; or the folder is not the one any more that was begun.
    """
    marked.held.require()
    with FoldersWriter(folder, folders_in(folder)) as writer:
        if writer.read(BEGUN_FILE) != marked.token.encode():
            raise StorageError(f"{folder}: another training has begun to save there; have an output_dir for each")
        kept = _lasting(writer)
        for name in writer.list():
            if name not in kept and not name.startswith(f"{STATE_FOLDER}/"):
                write_again(writer, name, marked.token)
        writer.sync_names()
        files = {name: nbytes for name, nbytes in writer.sizes().items() if name != FACTS_FILE}
        ready, content = on_its_way(FACTS_FILE, marked.token), facts.to_bytes()
        commit = Commit(
            files,
            steps=(Publish(ready, FACTS_FILE),),
            then=files,
            ready={ready: content},
            says={FACTS_FILE: content},
            without=frozenset({ready}),
        )
        let_count(writer, marked.held, commit, {})


def _lasting(writer: FoldersWriter) -> set[str]:
    """What saves of ours have written, as they recorded it, and what says that a checkpoint was begun."""
    found = {BEGUN_FILE}
    for name in writer.list():
        if not name.endswith(fingerprints.file_beside("")):
            continue
        folder, slash, _ = name.rpartition("/")
        for saved in fingerprints.from_bytes(writer.read(name)):
            found |= {f"{folder}{slash}{file}" for file in saved.files}
    return found


def remove_under(marked: Marked, run: Path, steps: Sequence[int]) -> None:
    """Remove checkpoints of an output folder that is marked; what makes one count goes first.

    Raises:
        StorageError: something cannot be removed.
    """
    for step in steps:
        if marked.held.whose() is not Whose.OURS:
            return  # whoever has the folder by now does it
        try:
            _remove(folder_of(run, step))
        except StorageError:
            if marked.held.whose() is Whose.OURS:
                raise  # else another one is removing the same


def remove_left(run: Path) -> None:
    """Remove what saves have left that never counted.

    Raises:
        StorageError: another save is going on there, or something cannot be removed.
    """
    with marked_here(run):
        _remove_left(run)


def remove_but(run: Path, best: int) -> None:
    """Remove all checkpoints of a run but that of one step.

    Raises:
        StorageError: another save is going on there, or something cannot be removed.
    """
    with marked_here(run) as marked:
        complete = [step for step, kind in checkpoints_in(run).items() if kind is FolderKind.COMPLETE]
        remove_under(marked, run, [step for step in complete if step != best])


def _remove_left(run: Path) -> None:
    for step, kind in checkpoints_in(run).items():
        if kind is FolderKind.LEFT:
            _remove_unless_it_counts(folder_of(run, step))


def _remove_unless_it_counts(folder: Path) -> None:
    """First goes what would make it count, if whoever left it went on after all; one that counts by then stays."""
    with _emptying(folder) as writer:
        remove_unnamed(writer, [name for name in writer.list() if name.startswith(f".{FACTS_FILE}.")])
        if FACTS_FILE not in writer.list():
            _empty(writer, folder)


def _remove(folder: Path) -> None:
    with _emptying(folder) as writer:
        if BEGUN_FILE not in writer.list():
            writer.replace(BEGUN_FILE, b"")  # what says that it is ours goes last
        writer.remove(FACTS_FILE)
        writer.sync_names()
        _empty(writer, folder)


@contextmanager
def _emptying(folder: Path) -> Iterator[FoldersWriter]:
    with FoldersWriter(folder, folders_in(folder)) as writer:
        yield writer


def _empty(writer: FoldersWriter, folder: Path) -> None:
    """All but what says that it was begun, then that."""
    remove_files(writer, [name for name in writer.list() if name != BEGUN_FILE])
    writer.sync_names()
    writer.remove(BEGUN_FILE)
    try:
        os.rmdir(folder)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be removed ({error.strerror or error})") from error
