"""Folders that are locked for a save, by the first rank or by this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from os import PathLike, fspath
from typing import TypeAlias

from shardwise.errors import StorageError
from shardwise.execution.saving_lock import LOCK_FILE, HeldLock, new_save_id, require_lock, take_lock
from shardwise.execution.world import World
from shardwise.storage.contract import StorageWriter
from shardwise.storage.writing import open_writer


@dataclass(frozen=True, slots=True)
class LockedFolder:
    """A marked folder, as the first rank has it.

    Attributes:
        writer: of the folder.
        held: its mark.
        save_id: that of this save, 8 hex digits.
    """

    writer: StorageWriter
    held: HeldLock
    save_id: str

    @property
    def files(self) -> frozenset[str]:
        """Files that exist for the lease only."""
        return frozenset({LOCK_FILE})

    def release(self) -> None:
        """Take the mark away, for good."""
        self.held.release()
        self.writer.sync_names()


OnFirst: TypeAlias = Callable[[LockedFolder], None]
"""What the first rank does in a marked folder."""


@dataclass(slots=True)
class Saving:
    """A save that all ranks take part in: its id, the folder, and, on the first rank alone, its mark."""

    save_id: str
    folder: str
    _marked: LockedFolder | None

    @property
    def marked(self) -> LockedFolder:
        """On the first rank."""
        assert self._marked is not None, "only the first rank holds the mark"
        return self._marked

    def require(self) -> None:
        """Look whether the mark is this save's still, on any rank.

        Raises:
            StorageError: it is not.
        """
        with open_writer(self.folder) as writer:
            require_lock(writer, self.save_id)

    def cause_of(self, failure: Exception) -> Exception:
        """Why this rank could not save: that somebody else has taken the folder over, if that is it."""
        try:
            self.require()
        except StorageError as lost:
            lost.__cause__ = failure
            return lost
        return failure


@contextmanager
def locked_by_first_rank(
    world: World, folder: str | PathLike[str], tidy: OnFirst | None = None, undo: OnFirst | None = None
) -> Iterator[Saving]:
    """Mark a folder on the first rank for the time of the block.

    ``tidy`` reads the folder and removes remains, once the lock is held. If ``tidy`` or the block fails, ``undo``
    removes this save's files, and the lock is released. Otherwise the block has released it.

    Collective: yes, at the beginning.

    Raises:
        StorageError: another save holds the lock, the folder is not writable, or ``tidy`` failed.
    """
    found: list[LockedFolder] = []
    with ExitStack() as closing:

        def begin() -> str:
            save_id = new_save_id()
            writer = closing.enter_context(open_writer(folder))
            found.append(LockedFolder(writer, take_lock(writer, save_id), save_id))
            if tidy is not None:
                tidy(found[0])
            return save_id

        try:
            save_id = world.broadcast(begin)
            yield Saving(save_id, fspath(folder), found[0] if found else None)
        except BaseException:
            for marked in found:
                with contextlib.suppress(StorageError):
                    if undo is not None:
                        undo(marked)
                with contextlib.suppress(StorageError):
                    marked.release()
            raise


@contextmanager
def locked_here(folder: str | PathLike[str]) -> Iterator[LockedFolder]:
    """Mark a folder for the time of the block, by one rank. Collective: no.

    Raises:
        StorageError: another save is writing there, or the folder cannot be written to.
    """
    with locked_by_first_rank(World(0, 1), folder) as saving:
        yield saving.marked
        saving.marked.release()
