"""A folder of checkpoints: one folder inside for each step, and which of them are complete.

[Note: When a checkpoint counts] The files of step 120 are written into ``step-120``. The last one is ``.metadata``,
without which nothing that reads the format of ``torch.distributed.checkpoint`` finds anything there; it is put in
place in one step, when all else is durable. So a folder with a ``.metadata`` is complete, and one without is not
there for any reader: a checkpoint on its way, or one that was left. Removing a checkpoint goes the other way round:
first ``.metadata``, for good, then the rest.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path

from shardwise.checkpoints.facts import FACTS, MAX_FACTS_BYTES, Facts
from shardwise.errors import ConfigError, FormatError, StorageError
from shardwise.execution.committing import remove_unnamed
from shardwise.formats.joining import METADATA
from shardwise.storage.contract import INCOMPLETE, StorageWriter
from shardwise.storage.names import is_url
from shardwise.storage.writing import open_writer

_STEP = re.compile(r"step-(0|[1-9][0-9]{0,15})")
_DATA = re.compile(r"__[0-9]+_[0-9]+\.distcp")
_BESIDE = (METADATA, FACTS, "shardwise.fingerprints.json")  # the last is of earlier versions
_INTERIM = re.compile(rf"\.(?:{'|'.join(map(re.escape, _BESIDE))})(?:\.[0-9a-f]+)?{re.escape(INCOMPLETE)}")


def name_of(step: int) -> str:
    """The folder of a step."""
    return f"step-{step}"


def require_local(directory: str | os.PathLike[str]) -> Path:
    """The folder that checkpoints go to.

    Raises:
        ConfigError: it is a URL.
        StorageError: there is something that is no folder.
    """
    if is_url(directory):
        raise ConfigError(
            f"{os.fspath(directory)}: checkpoints are kept in a folder that all ranks see, not at a URL"
        )
    root = Path(os.path.abspath(directory))
    if os.path.lexists(root) and not root.is_dir():
        raise StorageError(f"{root}: is there and is no folder; pass a folder for checkpoints")
    return root


def steps_in(root: Path) -> list[int]:
    """The steps of which there is a complete checkpoint, in order. Links are no checkpoints."""
    return folders_of(root, StepKind.COMPLETE)


def newest_in(root: Path) -> int | None:
    """The newest step whose files are all there, as large as they were written; None where there is none.

    What has lost files, or has been cut, cannot be restored, and is no reason not to go on from the one before.
    """
    return next((step for step in reversed(steps_in(root)) if is_whole(root / name_of(step))), None)


def is_whole(place: Path) -> bool:
    """Whether the files that a checkpoint tells of are there, of the sizes it tells."""
    try:
        if (place / FACTS).stat().st_size > MAX_FACTS_BYTES:
            return False
        facts = Facts.from_bytes((place / FACTS).read_bytes(), FACTS)
        return all(
            _DATA.fullmatch(file) is not None and (place / file).stat().st_size == nbytes
            for file, nbytes in facts.files.items()
        )
    except (OSError, FormatError):
        return False


class StepKind(Enum):
    """The content of the folder of a step."""

    COMPLETE = "a complete checkpoint"
    LEFT = "one that was begun, or nothing"
    FOREIGN = "one in torch's format, without the facts of ours"


def folders_of(root: Path, kind: StepKind) -> list[int]:
    """Return the steps whose folders are of this kind, in order. Links are no checkpoints.

    Raises:
        StorageError: the folder cannot be listed.
    """
    found: list[int] = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                name = _STEP.fullmatch(entry.name)
                if name and entry.is_dir(follow_symlinks=False) and _kind_of(Path(entry.path)) is kind:
                    found.append(int(name[1]))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{root}: looking for checkpoints failed, {error.strerror}; check the folder") from error
    return sorted(found)


def _kind_of(place: Path) -> StepKind:
    if not _is_file(place / METADATA):
        return StepKind.LEFT
    return StepKind.COMPLETE if _is_file(place / FACTS) else StepKind.FOREIGN


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def remove(root: Path, steps: Sequence[int]) -> list[int]:
    """Remove the checkpoints of these steps, complete or not, and nothing else; the steps of those now gone.

    Raises:
        StorageError: a file cannot be removed.
    """
    return [step for step in steps if _removed(root / name_of(step), empty)]


def remove_left(root: Path) -> list[int]:
    """Remove what was left of checkpoints that were never completed; the steps of those now gone.

    First goes what would make one of them count, if whoever left it went on after all; one that counts by then
    stays.

    Raises:
        StorageError: a file cannot be removed.
    """
    return [step for step in folders_of(root, StepKind.LEFT) if _removed(root / name_of(step), _empty_left)]


def remove_own(root: Path, step: int) -> None:
    """Remove what a save has made for this step, unless it counts by now.

    Raises:
        StorageError: a file cannot be removed.
    """
    _removed(root / name_of(step), _empty_left)


def _removed(folder: Path, emptied: Callable[[StorageWriter], None]) -> bool:
    with open_writer(folder) as writer:
        emptied(writer)
    try:
        folder.rmdir()
    except OSError:  # files of somebody else's
        return False
    return True


def _empty_left(writer: StorageWriter) -> None:
    remove_unnamed(writer, [name for name in writer.list() if _INTERIM.fullmatch(name)])
    if METADATA not in writer.list():
        empty(writer)


def empty(writer: StorageWriter) -> None:
    """Remove what checkpoints put into a folder, whole or not; what counts goes first."""
    names = writer.list()
    if METADATA in names:
        writer.remove(METADATA)
        writer.sync_names()
    for name in names:
        if name in _BESIDE or _DATA.fullmatch(name) or _INTERIM.fullmatch(name):
            writer.remove(name)
    writer.sync_names()
