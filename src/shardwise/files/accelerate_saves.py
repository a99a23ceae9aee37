"""Names of the files and folders in which accelerate saves models and optimizers.

Models and optimizers in one folder are numbered. Each has one of three forms: one file of whole tensors, a
folder of ``torch.distributed.checkpoint``, or one file per rank. Source of the names: accelerate's
``utils/fsdp_utils.py`` and ``utils/constants.py``.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from shardwise.core.errors import ConfigError, FormatError, StorageError
from shardwise.files.checkpoint_index import listed
from shardwise.files.join_entries import METADATA
from shardwise.files.urls import shown


@dataclass(frozen=True, slots=True)
class SavedKind:
    """Kind of state: a model or an optimizer. ``stem`` is the prefix of its file names."""

    what: str
    stem: str

    def file(self, number: int) -> str:
        """Return the name of a file of whole tensors. The first has no number."""
        return f"{self.stem}_{number}.bin" if number else f"{self.stem}.bin"

    def folder(self, number: int) -> str:
        """Return the name of a folder of ``torch.distributed.checkpoint``."""
        return f"{self.stem}_{number}"

    def rank_file(self, number: int, rank: int) -> str:
        """Return the name of one rank's file."""
        return f"{self.stem}_{number}_rank{rank}.bin"

    def parse_rank(self, name: str, number: int) -> int | None:
        """Return the rank whose file has this name, or None for other files. FSDP1 omits the number 0."""
        middle = f"(?:_{number})?" if number == 0 else f"_{number}"
        match = re.fullmatch(rf"{re.escape(self.stem)}{middle}_rank(\d{{1,9}})\.bin", name)
        return int(match[1]) if match else None


MODEL = SavedKind("model", "pytorch_model_fsdp")


OPTIMIZER = SavedKind("optimizer", "optimizer")


_FILE = re.compile(
    r"(pytorch_model_fsdp|optimizer)(_[0-9]+)?(_rank[0-9]+)?\.bin"
    r"|(scheduler|sampler|dl_state_dict)(_[0-9]+)?\.bin"
    r"|(random_states|custom_checkpoint)_[0-9]+\.pkl|scaler\.pt"
)


_FOLDER = re.compile(r"(pytorch_model_fsdp|optimizer)_[0-9]+")


_IN_FOLDER = re.compile(rf"{re.escape(METADATA)}|__[0-9]+_[0-9]+\.distcp")


def is_accelerate_file(name: object) -> bool:
    """Return whether this relative path is that of a file that accelerate saves under FSDP.

    Files of a model in the hub's layout do not count, although accelerate without FSDP writes them, too.
    """
    if not isinstance(name, str):
        return False
    folder, _, file = name.rpartition("/")
    if folder:
        return is_distributed_folder(folder) and _IN_FOLDER.fullmatch(file) is not None
    return _FILE.fullmatch(name) is not None


def is_distributed_folder(name: str) -> bool:
    """Return whether accelerate gives this name to the folder of a model or an optimizer."""
    return _FOLDER.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class WholeFile:
    """Whole tensors in one file of ``torch.save``."""

    folder: str
    file: str


@dataclass(frozen=True, slots=True)
class Distributed:
    """A folder of ``torch.distributed.checkpoint``."""

    folder: str


@dataclass(frozen=True, slots=True)
class FilePerRank:
    """One file per rank, in the order of ranks."""

    folder: str
    files: tuple[str, ...]


AccelerateSave: TypeAlias = WholeFile | Distributed | FilePerRank


def find_saved(path: str | os.PathLike[str], kind: SavedKind, number: int) -> AccelerateSave:
    """Find a saved model or optimizer: ``path`` itself, or the one with this number in the folder ``path``.

    Raises:
        ConfigError: it exists in several forms.
        FormatError: it does not exist, or was not completed.
        StorageError: the folder does not exist, or cannot be listed.
    """
    place = Path(path)
    if place.is_file():
        numbered = re.fullmatch(rf"{re.escape(kind.stem)}(?:_(0|[1-9]\d{{0,8}}))?_rank\d{{1,9}}\.bin", place.name)
        if numbered:
            return _find_rank_files(place.parent, kind, int(numbered[1] or 0))
        return WholeFile(str(place.parent), place.name)
    # A folder: of a distributed checkpoint itself, or one that contains models and optimizers in any of the
    # three forms.
    names = _names_in(place)
    if METADATA in names:
        return Distributed(str(place))
    saves: list[AccelerateSave] = []
    if kind.file(number) in names:
        saves.append(WholeFile(str(place), kind.file(number)))
    folder = place / kind.folder(number)
    if (folder / METADATA).is_file():
        saves.append(Distributed(str(folder)))
    if any(kind.parse_rank(name, number) is not None for name in names):
        saves.append(_find_rank_files(place, kind, number))
    if not saves:
        raise _not_found_error(place, names, kind, number)
    if len(saves) > 1:
        raise ConfigError(
            f"{place}: {kind.what} {number} exists in several forms: {', '.join(map(_describe, saves))}. Pass the "
            "path of one of them"
        )
    return saves[0]


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError as error:
        raise StorageError(f"{folder}: no such file or folder. Check the path") from error
    except OSError as error:
        raise StorageError(f"{folder}: listing it failed, {error.strerror}") from error


def _find_rank_files(folder: Path, kind: SavedKind, number: int) -> FilePerRank:
    """Return the files of all ranks, or raise FormatError if one is missing."""
    by_rank: dict[int, str] = {}
    for name in _names_in(folder):
        rank = kind.parse_rank(name, number)
        if rank is None:
            continue
        if rank in by_rank:
            raise FormatError(f"{folder}: {by_rank[rank]} and {name} are both of rank {rank}. Leave one of them")
        by_rank[rank] = name
    # Ranks in names are untrusted: with files of ranks 0 and 999999999, the first few absent ones are enough.
    absent = [rank for rank in range(min(max(by_rank) + 1, len(by_rank) + 8)) if rank not in by_rank]
    if absent:
        raise FormatError(
            f"{folder}: {kind.what} {number} has files of {len(by_rank)} ranks, and none of rank "
            f"{listed(map(str, absent))}. Every machine wrote its own: copy them all into one folder"
        )
    return FilePerRank(str(folder), tuple(by_rank[rank] for rank in sorted(by_rank)))


def _describe(save: AccelerateSave) -> str:
    match save:
        case WholeFile(_, file):
            return file
        case Distributed(folder):
            return f"{Path(folder).name}/"
        case FilePerRank(_, files):
            return f"{files[0]} (of {len(files)} ranks)"


def _not_found_error(place: Path, names: list[str], kind: SavedKind, number: int) -> FormatError:
    if kind.folder(number) in names or any(name.endswith(".distcp") for name in names):
        inner = kind.folder(number) if kind.folder(number) in names else "."
        return FormatError(
            f"{place / inner}: has no {METADATA}, which is written last. Use a save that was completed"
        )
    looked_for = f"{kind.file(number)}, {kind.folder(number)}/, {kind.rank_file(number, 0)}"
    return FormatError(
        f"{place}: no {kind.what} {number} saved by accelerate\n  looked for: {looked_for}\n"
        f"  files there: {listed(map(shown, names)) or 'nothing'}\nCheck the path, and the number"
    )
