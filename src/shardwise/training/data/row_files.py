"""Files of rows by their kinds: how each is cut into blocks, and by what it is known again."""

from __future__ import annotations

import csv
import hashlib
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from shardwise.errors import ConfigError
from shardwise.training.data.row_blocks import (
    BOM,
    ArrowBlock,
    CsvBlock,
    ElementsBlock,
    LinesBlock,
    ParquetBlock,
    ReadBlock,
    RowBlock,
    arrow_errors,
    arrow_table,
    csv_records,
    parquet,
    unreadable,
)
from shardwise.training.texts.layouts import WANTED, RowWords

PlaceUnit: TypeAlias = Literal["line", "row"]

_ROW_BYTES = 1024
"""About how long a row is, where only rows can be counted."""

_PARTS_OF_GROUP = 8
"""A row group is decoded from its beginning for each part of it."""


@dataclass(frozen=True, slots=True)
class ByStat:
    """A file is the same where path, size, time of its last change and inode are."""


@dataclass(frozen=True, slots=True)
class ByContent:
    """A file is the same where its bytes are, wherever it is."""


KnownBy: TypeAlias = ByStat | ByContent


class RowFile(Protocol):
    """Rows in an order of their own."""

    @property
    def name(self) -> str:
        """What errors call it."""
        ...

    @property
    def unit(self) -> PlaceUnit:
        """What places in it are numbers of, from 1."""
        ...

    @property
    def way(self) -> str:
        """How its bytes are read: of the same bytes, read in another way, other rows are made."""
        ...

    def nbytes(self) -> int:
        """About how many bytes there are to read."""
        ...

    def blocks(self, nbytes: int, words: RowWords, /) -> Iterator[RowBlock]:
        """All of it in order, in blocks of about so many bytes.

        Raises:
            ConfigError: it cannot be read, or has no column that rows are made of.
        """
        ...

    def facts(self, known_by: KnownBy) -> object:
        """What tells it from others, and from itself at other times, as JSON values; None where nothing does."""
        ...


@dataclass(frozen=True, slots=True)
class _LocalFile:
    path: str

    @property
    def name(self) -> str:
        return self.path

    @property
    def way(self) -> str:
        return type(self).__name__

    def nbytes(self) -> int:
        try:
            return os.stat(self.path).st_size
        except OSError as error:
            raise unreadable(self.path, error) from error

    def facts(self, known_by: KnownBy) -> object:
        try:
            if isinstance(known_by, ByContent):
                with open(self.path, "rb") as file:
                    return hashlib.file_digest(file, "sha256").hexdigest()
            found = os.stat(self.path)
        except OSError as error:
            raise unreadable(self.path, error) from error
        return [os.path.realpath(self.path), found.st_size, found.st_mtime_ns, found.st_ino]


@dataclass(frozen=True, slots=True)
class JsonLines(_LocalFile):
    """A file with one JSON object on each line."""

    unit: PlaceUnit = "line"

    def blocks(self, nbytes: int, _words: RowWords) -> Iterator[RowBlock]:
        try:
            with open(self.path, "rb") as file:
                start, size = 0, os.fstat(file.fileno()).st_size
                while start < size:
                    file.seek(min(start + nbytes, size) - 1)
                    file.readline()
                    stop = min(file.tell(), size)
                    yield LinesBlock(self.path, start, stop)
                    start = stop
        except OSError as error:
            raise unreadable(self.path, error) from error


_OF_JSON = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}"]', re.DOTALL)


@dataclass(frozen=True, slots=True)
class JsonArray(_LocalFile):
    """A file that is one JSON array of objects. It is searched for where elements end, never whole in memory."""

    unit: PlaceUnit = "row"

    def blocks(self, nbytes: int, _words: RowWords) -> Iterator[RowBlock]:
        try:
            with open(self.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                yield from self._blocks(content, nbytes)
        except OSError as error:
            raise unreadable(self.path, error) from error

    def _blocks(self, content: mmap.mmap, nbytes: int) -> Iterator[RowBlock]:
        depth, start, stop = 0, 0, -1
        for found in _OF_JSON.finditer(content):
            match found.group(0):
                case b"[" | b"{":
                    if stop >= 0:
                        break
                    depth += 1
                    start = found.end() if depth == 1 else start
                case b"]" | b"}":
                    depth -= 1
                    if depth == 0:
                        stop = found.start()
                    elif depth == 1 and found.end() - start >= nbytes:
                        yield ElementsBlock(self.path, start, found.end())
                        start = found.end()
                case b'"':
                    raise ConfigError(
                        f"{self.path}: it is not valid JSON (a string from byte {found.start()} on has no end)"
                    )
                case _:
                    pass
        if stop < 0:
            raise ConfigError(f"{self.path}: it is not valid JSON (the array has no end; is the file whole?)")
        if content[stop + 1 :].strip():
            raise ConfigError(
                f"{self.path}: it is not valid JSON (there is more after the array, from byte {stop + 1} on)"
            )
        if content[start:stop].strip(b" \t\r\n,"):
            yield ElementsBlock(self.path, start, stop)


@dataclass(frozen=True, slots=True)
class Csv(_LocalFile):
    """A file of separated values (``.csv``, or ``.tsv`` by tabs) whose first record names the columns."""

    unit: PlaceUnit = "row"

    @property
    def way(self) -> str:
        return f"separated by {self._delimiter!r}"

    @property
    def _delimiter(self) -> str:
        return "\t" if self.path.lower().endswith(".tsv") else ","

    def blocks(self, nbytes: int, words: RowWords) -> Iterator[RowBlock]:
        delimiter = self._delimiter
        header: tuple[str, ...] = ()
        start = stop = 0
        opening = re.compile(rb'(?:^|[\r%b])"' % delimiter.encode())
        is_quoted = False
        try:
            with open(self.path, "rb") as file:
                for line in file:
                    is_quoted = _ends_quoted(line if stop else line.removeprefix(BOM), opening, is_quoted=is_quoted)
                    stop += len(line)
                    if is_quoted:
                        continue
                    if not header:
                        header = self._header(_beginning(self.path, stop), delimiter, words)
                        start = stop if header else start
                    elif stop - start >= nbytes:
                        yield CsvBlock(self.path, start, stop, header, delimiter)
                        start = stop
        except OSError as error:
            raise unreadable(self.path, error) from error
        if stop > start:
            if not header:
                raise ConfigError(f"{self.path}: row 1: its quotes are broken (the header has no end)")
            yield CsvBlock(self.path, start, stop, header, delimiter)

    def _header(self, content: bytes, delimiter: str, words: RowWords) -> tuple[str, ...]:
        try:
            records = list(csv_records(content.removeprefix(BOM).decode(), delimiter))
        except (csv.Error, UnicodeDecodeError) as error:
            raise unreadable(self.path, error) from error
        if not records:
            return ()
        if len(records) > 1:
            raise ConfigError(
                f"{self.path}: its header ends with a carriage return alone, as lines did on old Macs, and rows "
                "behind it would be lost; end lines with a line feed"
            )
        [names] = records
        wanted = require_columns(self.path, names, words)
        if len(set(wanted)) < len(wanted):
            raise ConfigError(f"{self.path}: two of its columns have one name: {', '.join(names)}")
        return tuple(names)


def _ends_quoted(line: bytes, opening: re.Pattern[bytes], *, is_quoted: bool) -> bool:
    """Whether a quoted text goes on behind a line. Only the quote that a field begins with opens one.

    Args:
        line: with its end, as far as it has one.
        opening: finds that quote, and what is before it.
        is_quoted: whether one goes on from the line before.
    """
    at = 0
    while (at := line.find(b'"', at)) >= 0:
        if is_quoted and line.startswith(b'""', at):
            at += 2
        elif is_quoted:
            is_quoted, at = False, at + 1
        elif (found := opening.search(line, max(at - 1, 0))) is not None:
            is_quoted, at = True, found.end()
        else:
            break
    return is_quoted


def _beginning(path: str, stop: int) -> bytes:
    """The first bytes of a file."""
    with open(path, "rb") as file:
        return file.read(stop)


@dataclass(frozen=True, slots=True)
class Parquet(_LocalFile):
    """A Parquet file, by row groups, of the columns that rows are made of."""

    unit: PlaceUnit = "row"

    def blocks(self, nbytes: int, words: RowWords) -> Iterator[RowBlock]:
        with arrow_errors(self.path), parquet().ParquetFile(self.path) as file:
            columns = require_columns(self.path, file.schema_arrow.names, words)
            groups = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
        of_row = self.nbytes() // max(sum(groups), 1)
        for group, count in enumerate(groups):
            rows = max(nbytes // _ROW_BYTES, -(-count // _PARTS_OF_GROUP), 1)
            for start in range(0, count, rows):
                stop = min(start + rows, count)
                yield ParquetBlock(self.path, group, start, stop, columns, of_row * (stop - start))


@dataclass(frozen=True, slots=True)
class ArrowTable(_LocalFile):
    """A file of Arrow's own format, for files or for streams."""

    unit: PlaceUnit = "row"

    def blocks(self, nbytes: int, words: RowWords) -> Iterator[RowBlock]:
        with arrow_errors(self.path):
            table = arrow_table(self.path)
            columns = require_columns(self.path, table.column_names, words)
        rows = max(nbytes // _ROW_BYTES, 1)
        for start in range(0, table.num_rows, rows):
            stop = min(start + rows, table.num_rows)
            yield ArrowBlock(self.path, start, stop, columns, self.nbytes() * (stop - start) // table.num_rows)


@dataclass(frozen=True, slots=True)
class DataSetRows:
    """A data set that the ``datasets`` library has opened; it is read where it was opened."""

    name: str
    opened: Any
    part: tuple[str, str | None] = ("train", None)
    """The split, which may be a slice of one, and the configuration: of other parts the files may be the same."""
    unit: PlaceUnit = "row"
    way: str = "a data set"

    def nbytes(self) -> int:
        return int(self.opened.data.nbytes)

    def facts(self, known_by: KnownBy) -> object:
        files = [entry["filename"] for entry in self.opened.cache_files]  # in the order of their rows
        # Of what is in memory alone nobody can say whether it is the same.
        return (
            [*self.part, len(self.opened), [_LocalFile(file).facts(known_by) for file in files]] if files else None
        )

    def blocks(self, nbytes: int, words: RowWords) -> Iterator[RowBlock]:
        columns = require_columns(self.name, self.opened.column_names, words)
        chosen = self.opened.select_columns(list(columns))
        rows = max(nbytes // _ROW_BYTES, 1)
        for start in range(0, len(chosen), rows):
            batch = chosen[start : start + rows]
            count = min(rows, len(chosen) - start)
            values = tuple({name: batch[name][index] for name in columns} for index in range(count))
            yield ReadBlock(values, self.nbytes() * count // len(chosen))


@dataclass(frozen=True, slots=True)
class StreamedDataSet:
    """A data set that the ``datasets`` library brings row by row, as it is read."""

    name: str
    opened: Any
    unit: PlaceUnit = "row"
    way: str = "a data set"

    def nbytes(self) -> int:
        return 0  # nobody knows

    def facts(self, _known_by: KnownBy) -> object:
        return None

    def blocks(self, nbytes: int, words: RowWords) -> Iterator[RowBlock]:
        there = self.opened.column_names
        if there is not None:
            require_columns(self.name, there, words)
        rows = max(nbytes // _ROW_BYTES, 1)
        for batch in self.opened.iter(rows):
            wanted = words.wanted(list(batch))
            count = len(next(iter(batch.values())))
            yield ReadBlock(tuple({name: batch[name][index] for name in wanted} for index in range(count)))


def require_columns(name: str, there: Sequence[str], words: RowWords) -> tuple[str, ...]:
    """The columns that rows are made of.

    Raises:
        ConfigError: there are none.
    """
    if missing := [theirs for theirs in words.columns.values() if theirs not in there]:
        raise ConfigError(
            f"{name}: data.columns names {missing[0]!r}, and it has the columns {', '.join(there) or 'none'}"
        )
    if not (found := words.wanted(there)):
        raise ConfigError(f"{name}: it has the columns {', '.join(there) or 'none'}; wanted are {WANTED}")
    return tuple(found)
