"""Where rows come from: which files a name means, local ones, folders of them, and repositories of the hub."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from huggingface_hub import constants

from shardwise.errors import ConfigError, StorageError
from shardwise.storage.hub import commit_of
from shardwise.storage.names import HubOptions
from shardwise.training.data.row_blocks import BOM, library, unreadable
from shardwise.training.data.row_files import (
    ArrowTable,
    Csv,
    DataSetRows,
    JsonArray,
    JsonLines,
    Parquet,
    RowFile,
    StreamedDataSet,
)
from shardwise.training.texts.layouts import RowWords

_LINES = frozenset({".jsonl", ".ndjson"})
_KINDS: dict[str, type[Parquet | ArrowTable | Csv]] = {
    ".parquet": Parquet,
    ".pq": Parquet,
    ".arrow": ArrowTable,
    ".csv": Csv,
    ".tsv": Csv,
}
_SUFFIXES = frozenset({*_LINES, ".json", *_KINDS})
_NO_ROWS = frozenset({"config.json", "dataset_info.json", "dataset_infos.json"})
"""Files that say something about rows, as ``datasets`` has them."""
_COMPRESSED = frozenset({".gz", ".bz2", ".xz", ".zst", ".zip"})
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w-]+")
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""What files of a split are called."""


@dataclass(frozen=True, slots=True)
class DataName:
    """What a config says about a data set: where it is, which part of it, and how its rows are to be read.

    ``path`` is a file, a pattern of such (``chats/*.jsonl``), a folder, or a repository of the hub.
    """

    path: str
    split: str = "train"
    subset: str | None = None
    """The configuration of a repository that has several."""
    words: RowWords = field(default_factory=RowWords)
    weight: float | None = None
    """Its share of the rows of an epoch, against those of the others; None where each row comes once."""


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A repository of the hub is downloaded before it is read."""


@dataclass(frozen=True, slots=True)
class AsItComes:
    """A repository of the hub is read as it comes."""


RepositoryReading: TypeAlias = Downloaded | AsItComes
_DOWNLOADED = Downloaded()


def open_source(name: DataName, fetching: RepositoryReading = _DOWNLOADED) -> list[RowFile]:
    """The files that a name means, in their order: by suffix, then by what is there.

    Raises:
        ConfigError: there is nothing of that name.
    """
    path = Path(name.path)
    if path.is_dir():
        return _folder(name, fetching)
    suffix = path.suffix.lower()
    if path.is_file() or (suffix in _SUFFIXES and not glob.has_magic(name.path)):
        return [_file(path)]
    if glob.has_magic(name.path):
        found = sorted(Path(match) for match in glob.glob(name.path, recursive=True) if os.path.isfile(match))
        if not found:
            raise ConfigError(f"{name.path}: no file is called so")
        return [_file(path) for path in found]
    if _HUB_ID.fullmatch(name.path) is not None:
        return [_data_set(name, fetching)]
    raise unreadable(name.path, FileNotFoundError(2, "No such file or directory"))


def _file(path: Path) -> RowFile:
    suffix = path.suffix.lower()
    if suffix in _COMPRESSED:
        raise ConfigError(f"{path}: compressed files are not read; decompress it")
    if suffix in _KINDS:
        return _KINDS[suffix](str(path))
    if suffix == ".json":
        return JsonArray(str(path)) if _is_array(path) else JsonLines(str(path))
    return JsonLines(str(path))


def _is_array(path: Path) -> bool:
    """Whether a file begins as a JSON array.

    Raises:
        ConfigError: it cannot be read, or is one object over several lines.
    """
    try:
        with path.open("rb") as file:
            first = next((line for line in file if line.removeprefix(BOM).strip()), b"").removeprefix(BOM).strip()
    except OSError as error:
        raise unreadable(str(path), error) from error
    if first == b"{":
        raise ConfigError(
            f"{path}: it is one JSON object over several lines; wanted is an array of rows, or a row on each line"
        )
    return first.startswith(b"[")


def _folder(name: DataName, fetching: RepositoryReading) -> list[RowFile]:
    """A folder that ``datasets`` has saved, or whose card says what is in it; else the files in it, by name."""
    path = Path(name.path)
    is_saved = any((path / mark).is_file() for mark in ("state.json", "dataset_dict.json"))
    if is_saved or name.subset is not None or _has_configs(path / "README.md"):
        return [_data_set(name, Downloaded() if is_saved else fetching)]
    files = [found for found in sorted(path.rglob("*")) if _is_of_rows(found, path)]
    if not files:
        raise ConfigError(f"{path}: there is no file of rows in it; they end in {', '.join(sorted(_SUFFIXES))}")
    told = {file: _split_of(file.relative_to(path)) for file in files}
    # What says nothing is learned, unless others say that they are.
    of_split = {file: split or "train" for file, split in told.items() if split or "train" not in told.values()}
    asked = _alias(name.split) or name.split
    if asked not in of_split.values():
        there = ", ".join(sorted(set(of_split.values())))
        raise ConfigError(f"{path}: it has no split {name.split!r}; it has {there}")
    return [_file(file) for file, split in of_split.items() if split == asked]


def _is_of_rows(file: Path, root: Path) -> bool:
    hidden = any(part.startswith((".", "_")) for part in file.relative_to(root).parts)
    is_named_so = file.suffix.lower() in _SUFFIXES and file.name not in _NO_ROWS
    return is_named_so and not hidden and file.is_file()


def _split_of(file: Path) -> str | None:
    """The split that a file's name, or that of a folder it is in, tells."""
    for part in reversed([*file.parts[:-1], file.stem]):
        for word in re.split(r"[^a-z]+", part.lower()):
            if (split := _alias(word)) is not None:
                return split
    return None


def _alias(word: str) -> str | None:
    return next((split for split, words in _SPLITS.items() if word in words), None)


def _has_configs(card: Path) -> bool:
    try:
        head = card.read_text("utf-8", errors="replace")[:65536]
    except OSError:
        return False
    parts = head.split("---")
    return head.startswith("---") and len(parts) > 2 and re.search(r"^configs:", parts[1], re.MULTILINE) is not None


def _data_set(name: DataName, fetching: RepositoryReading) -> DataSetRows | StreamedDataSet:
    """A data set of the ``datasets`` library: a folder it has saved or can read, or a repository of the hub."""
    opened = _opened(name, fetching)
    if isinstance(fetching, Downloaded):
        return DataSetRows(name.path, opened, (name.split, name.subset))
    return StreamedDataSet(name.path, opened)


def _opened(name: DataName, fetching: RepositoryReading) -> Any:
    datasets: Any = library("datasets", f"{name.path}: data sets of folders and repositories", "datasets")
    path, split = name.path, name.split
    if not (os.path.exists(path) or constants.HF_HUB_OFFLINE):
        _require_known(path, Path(datasets.config.HF_DATASETS_CACHE))
    try:
        if any(Path(path, mark).is_file() for mark in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(path)
            if isinstance(found, datasets.DatasetDict):
                if split not in found:
                    raise ConfigError(f"{path}: it has no split {split!r}; it has {', '.join(map(str, found))}")
                found = found[split]
            return found
        return datasets.load_dataset(path, name.subset, split=split, streaming=isinstance(fetching, AsItComes))
    except ConfigError:
        raise
    except Exception as error:  # whatever the builders of that library raise
        if constants.HF_HUB_OFFLINE and not os.path.exists(path):
            raise ConfigError(
                f"{path}: there is no such file or folder, nor such a data set in the cache, and downloading is "
                "off (HF_HUB_OFFLINE is set)"
            ) from error
        raise ConfigError(
            f"{path}: the data set cannot be read ({type(error).__name__}: {error}); look at data.split and "
            "data.subset, and whether it is there"
        ) from error


def _require_known(path: str, prepared: Path) -> None:
    """Ask the hub once for a repository that is in no cache, before its library asks again and again.

    Raises:
        ConfigError: it is not there, or the hub cannot be reached.
    """
    if (prepared / path.replace("/", "___")).is_dir():  # as that library has made it ready, which it may go on with
        return
    try:
        commit_of(path, HubOptions(), kind="dataset")
    except StorageError as error:
        raise ConfigError(
            f"{path}: there is no such file or folder, and as a data set of the hub: {error}"
        ) from error


def names_of(
    data: str | os.PathLike[str] | DataName | Sequence[str | os.PathLike[str] | DataName],
) -> list[DataName]:
    """Paths and ids as names of all that they have.

    Raises:
        ConfigError: there are none, or some have a weight and others none.
    """
    given = [data] if isinstance(data, str | os.PathLike | DataName) else list(data)
    names = [each if isinstance(each, DataName) else DataName(os.fspath(each)) for each in given]
    if not names:
        raise ConfigError("data.train: there is no data set in the list")
    if wrong := [name for name in names if name.weight is not None and not 0 < name.weight < float("inf")]:
        raise ConfigError(
            f"{wrong[0].path}: its weight is {wrong[0].weight:g}; it must be greater than 0, and finite"
        )
    without = [name for name in names if name.weight is None]
    if without and len(without) < len(names):
        raise ConfigError(
            f"{without[0].path}: it has no weight, and other data sets have; give each a weight, or none"
        )
    return names


def each_shown(names: Sequence[DataName]) -> str:
    """Their paths, for messages."""
    shown = ", ".join(name.path for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
