"""A folder that counts as a whole: written beside, and put in its place in one step.

[Note: A folder counts] ``save_state`` writes many files, some of which are accelerate's own. They are written into
a folder of another name. When all is durable, the older folder is set aside, the new one takes its name, and the
older one goes. Whoever is killed in between leaves the older folder, or the new one, or both under names from which
:meth:`SavedFolder.recover` tells which it is: the older one is set aside only once the new one is whole. What lies
in the older folder and is no file of a saved state (a log, a config) stays, and is moved over.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import StorageError

_OF_A_STATE = re.compile(
    r"(pytorch_model|model)(_[0-9]+)?(-[0-9]+-of-[0-9]+)?\.(bin|safetensors)(\.index\.json)?"
    r"|(pytorch_model_fsdp|optimizer)(_[0-9]+)?(_rank[0-9]+)?(\.bin)?"
    r"|(scheduler|sampler|dl_state_dict)(_[0-9]+)?\.bin"
    r"|(random_states|custom_checkpoint)_[0-9]+\.pkl|scaler\.pt"
)
"""Names of files and folders that accelerate gives, and nobody else."""

_NUMBER = re.compile(r"checkpoint_([0-9]+)")


@dataclass(frozen=True)
class SavedFolder:
    """Where a state is saved.

    Attributes:
        path: the folder that counts.
        beside: where it lies until then; None for the folder around it.
    """

    path: Path
    beside: Path | None = None

    @property
    def work(self) -> Path:
        """Where it is written."""
        return self._beside("saving")

    @property
    def older(self) -> Path:
        """Where what it takes the place of is set aside."""
        return self._beside("older")

    def _beside(self, what: str) -> Path:
        return (self.beside or self.path.absolute().parent) / f".{self.path.name}.{what}"

    def require_new(self) -> None:
        """Raise where there is one already.

        Raises:
            StorageError: it is there.
        """
        if self.path.exists():
            raise StorageError(
                f"{self.path}: is there already; set accelerator.project_configuration.iteration to the number "
                "that is to be saved next"
            )

    def begin(self) -> None:
        """Make room to write in. On one rank.

        Raises:
            StorageError: it cannot be written to.
        """
        try:
            if os.path.ismount(self.path):
                raise StorageError(
                    f"{self.path}: is a mount point, which takes no other name; save to a folder in it"
                )
            self.recover()
            if self.work.exists():
                shutil.rmtree(self.work)
            self.path.absolute().parent.mkdir(parents=True, exist_ok=True)
            self.work.mkdir(parents=True)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be saved to ({error.strerror or error})") from error

    def commit(self) -> None:
        """Let what has been written count. On one rank.

        Raises:
            StorageError: it cannot; the older one counts.
        """
        try:
            _sync(self.work)
            if self.path.exists():
                os.rename(self.path, self.older)
                _sync_names(self.older.parent)
            os.rename(self.work, self.path)
            _sync_names(self.path.absolute().parent)
            self._tidy()
        except OSError as error:
            raise StorageError(f"{self.path}: could not be put in place ({error.strerror or error})") from error

    def recover(self) -> None:
        """Finish what somebody was killed at, if there is something. On one rank."""
        try:
            if self.older.exists() and not self.path.exists():
                newer = self.work if self.work.exists() else self.older
                os.rename(newer, self.path)
                _sync_names(self.path.absolute().parent)
            self._tidy()
        except OSError as error:
            raise StorageError(f"{self.path}: could not be put in order ({error.strerror or error})") from error

    def keep_newest(self, limit: int | None) -> None:
        """Remove all but so many of the folders ``checkpoint_N`` beside this one, the least numbers first."""
        found = {
            int(match[1]): path for path in self.path.parent.iterdir() if (match := _NUMBER.fullmatch(path.name))
        }
        for number in sorted(found)[: len(found) - limit] if limit is not None else ():
            if found[number] != self.path:
                shutil.rmtree(found[number])

    def _tidy(self) -> None:
        """Remove the older one, but for what is no file of a state."""
        if not self.older.exists():
            return
        for entry in self.older.iterdir():
            target = self.path / entry.name
            if not target.exists() and not _OF_A_STATE.fullmatch(entry.name):
                os.rename(entry, target)
        shutil.rmtree(self.older)


def _sync(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            _sync_names(Path(root, name))
        _sync_names(Path(root))


def _sync_names(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
