"""Folders that are locked for a save, by the first rank or by this process."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from os import PathLike, fspath

from shardwise.core.errors import StorageError
from shardwise.files.local_writer import open_writer
from shardwise.files.storage import StorageWriter
from shardwise.ranks.world import World
from shardwise.saving import saving_lock
from shardwise.saving.saving_lock import new_save_id

_log = logging.getLogger(__name__)


class LockedFolder:
    """A folder that this process has locked for a save. The lock is renewed until it is released.

    Args:
        writer: the writer of the folder.
        save_id: the id of the save, 8 hex digits.

    Raises:
        StorageError: as of :func:`~shardwise.saving.saving_lock.take_lock`.
    """

    def __init__(self, writer: StorageWriter, save_id: str) -> None:
        # The thread starts once the lock is taken, so that it never renews another save's.
        saving_lock.take_lock(writer, save_id)
        self.writer = writer
        self.save_id = save_id
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="shardwise-lock", daemon=True)
        self._thread.start()

    def is_held(self) -> bool:
        """Return False if another save has taken the lock over, or it was removed."""
        return saving_lock.holds_lock(self.writer, self.save_id)

    def require(self) -> None:
        """Raise StorageError if the lock is not held any more."""
        saving_lock.require_lock(self.writer, self.save_id)

    def release(self) -> None:
        """Remove the lock for good, if it exists. May be called again.

        A failure is a warning: the save is over all the same, whether it counts or not, and the lock is stale.
        """
        # The thread ends first: a renewal after the removal might touch the lock of the next save.
        self._ended.set()
        try:
            self._thread.join()
        finally:  # after Ctrl-C, too: the lock would be this process's until it ends
            try:
                saving_lock.release_lock(self.writer, self.save_id)
                self.writer.sync_names()
            except StorageError as error:
                root, name = self.writer.root, saving_lock.LOCK_FILE
                _log.warning("%s: %s may be left. Remove it if later saves are refused. %s", root, name, error)

    def _renew(self) -> None:
        while not self._ended.wait(saving_lock.RENEWAL_S):
            with contextlib.suppress(OSError, StorageError):  # the commit will find out
                if self.is_held():
                    os.utime(os.path.join(self.writer.root, saving_lock.LOCK_FILE))


@dataclass(slots=True)
class Saving:
    """A save of all ranks: its id, the folder, and, on the first rank alone, its lock."""

    save_id: str
    folder: str
    _locked: LockedFolder | None

    @property
    def is_locked_here(self) -> bool:
        """True on the first rank."""
        return self._locked is not None

    @property
    def locked(self) -> LockedFolder:
        """On the first rank."""
        assert self._locked is not None, "only the first rank holds the lock"
        return self._locked

    def require(self) -> None:
        """Require on any rank that the lock is still this save's.

        Raises:
            StorageError: it is not.
        """
        with open_writer(self.folder) as writer:
            saving_lock.require_lock(writer, self.save_id)

    def find_cause(self, failure: Exception) -> Exception:
        """Return the cause of a failure on this rank: the loss of the lock, or else the failure itself."""
        try:
            self.require()
        except StorageError as lost:
            lost.__cause__ = failure
            return lost
        return failure


@contextmanager
def lock_on_first_rank(world: World, folder: str | PathLike[str]) -> Iterator[Saving]:
    """Lock a folder on the first rank. The block releases the lock when its save counts.

    If the block raises, this function releases it.

    Collective: yes, at the beginning.

    Raises:
        StorageError: another save holds the lock, or the folder is not writable.
    """
    # All ranks have a Saving. The first one's has the lock, the others learn its id.
    saving = Saving("", fspath(folder), None)
    with ExitStack() as stack:
        try:
            with world.broadcast("lock the folder") as exchange:
                if world.rank == 0:
                    # Its writer is closed with the stack. The others learn the id at the end of the phase.
                    writer = stack.enter_context(open_writer(saving.folder))
                    saving._locked = LockedFolder(writer, new_save_id())
                    exchange.local = saving._locked.save_id
            saving.save_id = exchange.result
            yield saving
        except BaseException:
            if saving.is_locked_here:
                saving.locked.release()
            raise


@contextmanager
def lock_here(folder: str | PathLike[str]) -> Iterator[Saving]:
    """Lock a folder for the time of the block, by one rank. Collective: no.

    Raises:
        StorageError: another save is writing there, or the folder cannot be written to.
    """
    with lock_on_first_rank(World(0, 1), folder) as saving:
        yield saving
        saving.locked.release()
