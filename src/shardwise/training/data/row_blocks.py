"""Files of rows, read in blocks: each can be read alone, by any process, and in order they are the whole file."""

from __future__ import annotations

import csv
import importlib
import io
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, TypeAlias

from shardwise.errors import ConfigError
from shardwise.training.texts.layouts import without_filled_nulls
from shardwise.training.texts.row_values import RowError, json_of, object_of
from shardwise.training.texts.rows import json_value

BOM = b"\xef\xbb\xbf"
_BATCH_ROWS = 1024

RowValue: TypeAlias = "object | RowError"
"""What a place of a file says, or why nothing can be made of it."""


@dataclass(frozen=True, slots=True)
class Broken:
    """From this place of a block on, counted from 1, nothing of the file can be told any more."""

    place: int
    cause: str


@dataclass(frozen=True, slots=True)
class BlockRows:
    """What a block holds: its rows with their places, counted from 1, and how many places it has."""

    rows: Sequence[tuple[int, RowValue]]
    places: int
    broken: Broken | None = None


class RowBlock(Protocol):
    """A part of a file; can be pickled."""

    @property
    def nbytes(self) -> int:
        """About how much of the file it is."""
        ...

    def read(self) -> BlockRows:
        """Its rows.

        Raises:
            ConfigError: the file cannot be read.
        """
        ...


@dataclass(frozen=True, slots=True)
class LinesBlock:
    """Whole lines of a file with one JSON object on each."""

    path: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def read(self) -> BlockRows:
        lines = _bytes_of(self.path, self.start, self.stop).split(b"\n")
        if not lines[-1]:
            lines.pop()
        rows = [(number, _json(line)) for number, line in enumerate(lines, start=1) if line.strip()]
        return BlockRows(rows, len(lines))


def _json(line: bytes) -> RowValue:
    try:
        return json_value(line)
    except RowError as error:
        return error


@dataclass(frozen=True, slots=True)
class ElementsBlock:
    """Whole elements of a JSON array, with what stands between them."""

    path: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def read(self) -> BlockRows:
        content = _bytes_of(self.path, self.start, self.stop).strip(b" \t\r\n,")
        try:
            values = json_of(b"[" + content + b"]")
        except (ValueError, RecursionError):
            return self._one_by_one(content)
        assert isinstance(values, list)
        return BlockRows(list(enumerate(values, start=1)), len(values))

    def _one_by_one(self, content: bytes) -> BlockRows:
        decoder, again, at = json.JSONDecoder(object_pairs_hook=object_of), json.JSONDecoder(), 0
        rows: list[tuple[int, RowValue]] = []
        try:
            text = content.decode()
            while at < len(text):
                value: RowValue
                try:
                    value, stop = decoder.raw_decode(text, at)
                except RowError as error:
                    value, stop = error, again.raw_decode(text, at)[1]
                rows.append((len(rows) + 1, value))
                at = stop
                between = len(text[at:]) - len(text[at:].lstrip(" \t\r\n"))
                if at + between < len(text) and text[at + between] != ",":
                    raise ValueError("Expecting ',' between elements")
                at += between + 1
                at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n"))
        except (ValueError, RecursionError) as error:
            return BlockRows(rows, len(rows), Broken(len(rows) + 1, f"it is not valid JSON ({error})"))
        return BlockRows(rows, len(rows))


@dataclass(frozen=True, slots=True)
class CsvBlock:
    """Whole records of a file of separated values; cells without a text say nothing."""

    path: str
    start: int
    stop: int
    header: tuple[str, ...]
    delimiter: str

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def read(self) -> BlockRows:
        rows: list[tuple[int, RowValue]] = []
        try:
            text = _bytes_of(self.path, self.start, self.stop).decode()
            for fields in csv_records(text, self.delimiter):
                rows.append((len(rows) + 1, self._row(fields)))
        except UnicodeDecodeError as error:
            return BlockRows(rows, len(rows), Broken(len(rows) + 1, f"invalid UTF-8 ({error.reason})"))
        except csv.Error as error:
            return BlockRows(rows, len(rows), Broken(len(rows) + 1, f"its quotes are broken ({error})"))
        return BlockRows(rows, len(rows))

    def _row(self, fields: Sequence[str]) -> RowValue:
        if len(fields) != len(self.header):
            return RowError(f"it has {len(fields)} fields, and the header {len(self.header)}")
        return {name: text for name, text in zip(self.header, fields, strict=True) if text}


def csv_records(text: str, delimiter: str) -> Iterator[list[str]]:
    """Records that are not empty.

    Raises:
        csv.Error: quotes do not match.
    """
    before = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        for fields in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True):
            if fields:
                yield fields
    finally:
        csv.field_size_limit(before)


@dataclass(frozen=True, slots=True)
class ParquetBlock:
    """Rows ``start <= i < stop`` of a row group."""

    path: str
    group: int
    start: int
    stop: int
    columns: tuple[str, ...]
    nbytes: int = 0

    def read(self) -> BlockRows:
        rows: list[object] = []
        first = 0
        with arrow_errors(self.path), parquet().ParquetFile(self.path) as file:
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=[self.group], columns=list(self.columns)):
                wanted = batch.slice(max(0, self.start - first), max(0, self.stop - max(self.start, first)))
                rows += wanted.to_pylist()
                first += batch.num_rows
                if first >= self.stop:
                    break
        return _of_columns(rows)


@dataclass(frozen=True, slots=True)
class ArrowBlock:
    """Rows ``start <= i < stop`` of an Arrow file."""

    path: str
    start: int
    stop: int
    columns: tuple[str, ...]
    nbytes: int = 0

    def read(self) -> BlockRows:
        with arrow_errors(self.path):
            table = arrow_table(self.path).select(list(self.columns))
            return _of_columns(table.slice(self.start, self.stop - self.start).to_pylist())


@dataclass(frozen=True, slots=True)
class ReadBlock:
    """Rows that have been read already."""

    values: tuple[object, ...]
    nbytes: int = 0

    def read(self) -> BlockRows:
        return _of_columns(self.values)


def _of_columns(values: Sequence[object]) -> BlockRows:
    return BlockRows([(number, without_filled_nulls(value)) for number, value in enumerate(values, 1)], len(values))


def parquet() -> Any:
    """pyarrow's module for Parquet."""
    return library("pyarrow.parquet", "Parquet files", "pyarrow")


def arrow_table(path: str) -> Any:
    """The table of an Arrow file, in the page cache; of either kind, for files or for streams."""
    arrow: Any = library("pyarrow", "Arrow files", "pyarrow")
    source = arrow.memory_map(path)
    is_file = bytes(source.read(6)) == b"ARROW1"
    source.seek(0)
    opened = arrow.ipc.open_file(source) if is_file else arrow.ipc.open_stream(source)
    return opened.read_all()


@contextmanager
def arrow_errors(path: str) -> Iterator[None]:
    """What pyarrow raises of a file, as a ConfigError that names it."""
    arrow: Any = library("pyarrow", "Parquet and Arrow files", "pyarrow")
    try:
        yield
    except (OSError, arrow.lib.ArrowException) as error:
        raise unreadable(path, error) from error


def library(module: str, what: str, package: str) -> ModuleType:
    """A module that comes with an extra of ours.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{what} are read by {package}, which is not installed; pip install 'shardwise[train]'"
        ) from error


def unreadable(path: str, error: BaseException) -> ConfigError:
    """The error for data that cannot be read."""
    cause = getattr(error, "strerror", None) or error
    return ConfigError(f"{path}: the data cannot be read ({cause})")


def _bytes_of(path: str, start: int, stop: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(start)
            content = file.read(stop - start)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(content) < stop - start:
        raise ConfigError(f"{path}: the data cannot be read (it has become shorter while it was read)")
    return content.removeprefix(BOM) if start == 0 else content
