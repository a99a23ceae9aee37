"""Where rows come from: JSON lines, Parquet, folders and repositories of ``datasets``."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

from shardwise.errors import ConfigError
from shardwise.training.rows import Row, RowFault, json_lines, or_fault

_JSON = frozenset({".jsonl", ".ndjson", ".json"})
_PARQUET = frozenset({".parquet", ".pq"})
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w-]+")
_BATCH_ROWS = 1024


@dataclass(frozen=True, slots=True)
class DataName:
    """What a config says about data: a file, a folder or a repository, and which part of it."""

    path: str
    split: str = "train"
    subset: str | None = None
    """The configuration of a repository that has several."""


class RowSource(Protocol):
    """Rows in an order of their own, of which each rank takes its share."""

    @property
    def unit(self) -> Literal["line", "row"]:
        """What the places of its rows are numbers of, from 1."""
        ...

    def share(self, rank: int, size: int) -> Iterator[Row | RowFault]:
        """Every ``size``-th row, beginning with number ``rank``, as it is read."""
        ...


@dataclass(frozen=True, slots=True)
class JsonLines:
    """A file with one JSON object on each line."""

    path: Path
    unit: Literal["line", "row"] = "line"

    def share(self, rank: int, size: int) -> Iterator[Row | RowFault]:
        return json_lines(self.path, rank=rank, size=size)


@dataclass(frozen=True, slots=True)
class Parquet:
    """A Parquet file, by row groups, of the columns that rows have."""

    path: Path
    unit: Literal["line", "row"] = "row"

    def share(self, rank: int, size: int) -> Iterator[Row | RowFault]:
        parquet: Any = _library("pyarrow.parquet", f"{self.path}: Parquet files", "pyarrow")
        errors = importlib.import_module("pyarrow").lib.ArrowException
        try:
            with parquet.ParquetFile(self.path) as file:
                columns = [name for name in _COLUMNS if name in file.schema_arrow.names]
                if not columns:
                    raise _without_columns(self.path, file.schema_arrow.names)
                start = 0
                for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
                    for index in range((rank - start) % size, batch.num_rows, size):
                        row = batch.slice(index, 1).to_pylist()[0]
                        yield or_fault(start + index + 1, lambda row=row: without_nulls(row))  # type: ignore[misc]
                    start += batch.num_rows
        except (OSError, errors) as error:
            raise ConfigError(f"{self.path}: the data cannot be read ({error})") from error


@dataclass(frozen=True, slots=True)
class Arrow:
    """A data set of the ``datasets`` library: a folder it has saved or can read, or a repository of the hub."""

    name: DataName
    unit: Literal["line", "row"] = "row"

    def share(self, rank: int, size: int) -> Iterator[Row | RowFault]:
        found = self._open()
        columns = [name for name in _COLUMNS if name in found.column_names]
        if not columns:
            raise _without_columns(self.name.path, found.column_names)
        found = found.select_columns(columns)
        for index in range(rank, len(found), size):
            yield or_fault(index + 1, lambda index=index: without_nulls(found[index]))  # type: ignore[misc]

    def _open(self) -> Any:
        datasets: Any = _library("datasets", f"{self.name.path}: data sets of folders and repositories", "datasets")
        path, split = self.name.path, self.name.split
        try:
            if any(Path(path, mark).is_file() for mark in ("state.json", "dataset_dict.json")):
                found = datasets.load_from_disk(path)
                if isinstance(found, datasets.DatasetDict):
                    if split not in found:
                        raise ConfigError(f"{path}: it has no split {split!r}; it has {', '.join(map(str, found))}")
                    found = found[split]
                return found
            return datasets.load_dataset(path, self.name.subset, split=split)
        except ConfigError:
            raise
        except Exception as error:  # whatever the builders of that library raise
            raise ConfigError(
                f"{path}: the data set cannot be read ({type(error).__name__}: {error}); look at data.split and "
                "data.subset, and whether it is there"
            ) from error


_COLUMNS = ("messages", "text", "prompt", "completion")


def open_source(name: DataName) -> RowSource:
    """The source that a name means: by its suffix, then by what is there.

    Raises:
        ConfigError: there is nothing of that name.
    """
    path = Path(name.path)
    if path.suffix.lower() in _PARQUET and not path.is_dir():
        return Parquet(path)
    if path.is_dir():
        return Arrow(name)
    if path.suffix.lower() in _JSON or path.is_file():
        return JsonLines(path)
    if _HUB_ID.fullmatch(name.path) is not None:
        return Arrow(name)
    raise ConfigError(f"{name.path}: the data cannot be read (No such file or directory)")


def _without_columns(path: str | Path, columns: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"{path}: it has the columns {', '.join(columns) or 'none'}; wanted are messages, or text, or prompt and "
        "completion"
    )


def without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    """A row of columns as the object it was: Arrow fills what a row or a message lacks with null."""
    row = {key: found for key, found in value.items() if found is not None}
    messages = row.get("messages")
    if isinstance(messages, list):
        row["messages"] = [
            {key: found for key, found in message.items() if found is not None}
            if isinstance(message, Mapping)
            else message
            for message in messages
        ]
    return row


def _library(module: str, what: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{what} are read by {package}, which is not installed; pip install 'shardwise[train]'"
        ) from error


def name_of(data: str | os.PathLike[str] | DataName) -> DataName:
    """A path or an id as the name of all of it."""
    return data if isinstance(data, DataName) else DataName(os.fspath(data))
