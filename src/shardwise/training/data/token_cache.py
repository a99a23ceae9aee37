"""Data sets as tokens, kept on disk from one training to the next.

[Note: Token cache] An entry is a folder with one safetensors file, called by a digest of all that decides what is
in it: the files (path, size, time of change, inode; or their content) and how each is read, the layout, the
tokenizer and its template, what is learned, the length, the versions of the libraries that tokenise, and of this
format. It is written and comes to count as everything that is saved does ([Note: Asked again] in
``execution/writing/committing.py``). Before it is used it is looked at as a stranger's: header, sizes, order, a
checksum of all its bytes. What is not sound is made again.

Whoever cannot write there, for a full disk or since another training is at the same entry, trains without.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import FormatError, ShardwiseError, StorageError
from shardwise.execution.writing.committing import let_count, remove_unnamed
from shardwise.execution.writing.saving_lock import new_token, take_lock
from shardwise.formats.safetensors_header import FileHeader, lay_out, read_header
from shardwise.planning.saves.commit import Commit, Rename, on_its_way
from shardwise.storage.contract import StorageWriter
from shardwise.storage.reading.local import LocalReader
from shardwise.storage.writing.opening import open_writer
from shardwise.tensors.dtypes import DType
from shardwise.training.data.examples import Examples, PlacesOfFile, TokenTable
from shardwise.training.data.row_files import ByStat, KnownBy, RowFile
from shardwise.training.texts.rows import RowFault

VERSION: Final = 1
"""Of the format of an entry; another one for any change of what it holds or means."""

BY_STAT: Final = ByStat()
_FILE = "tokens.safetensors"
_PREFIX = "tokens-"
_ARRAYS: Final[Mapping[str, tuple[DType, Any]]] = {
    "tokens": (DType.I32, np.int32),
    "supervised": (DType.BOOL, np.bool_),
    "ends": (DType.I64, np.int64),
    "lines": (DType.I64, np.int64),
    "hashes": (DType.U64, np.uint64),
    "cut": (DType.I64, np.int64),
    "skipped": (DType.I64, np.int64),
}
_LEFT_S = 24 * 3600.0
"""An entry without its file that is as old was left by whoever died while making it."""


@dataclass(frozen=True, slots=True)
class NoCache:
    """Rows are tokenised anew each time."""


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """Tokens are kept in a folder, where the ranks of a machine map them.

    Attributes:
        directory: of the entries; made when it is not there.
        known_by: what tells whether a file of rows is the one that was tokenised.
        most_bytes: of all entries; those that were not used for longest go first.
    """

    directory: Path
    known_by: KnownBy = BY_STAT
    most_bytes: int = 50 * 10**9


TokenCaching: TypeAlias = NoCache | CacheFolder


def key_of(files: Sequence[RowFile], known_by: KnownBy, decides: object) -> str | None:
    """What an entry is called; None where nothing tells the files from others.

    ``decides`` is what else decides about the tokens, as plain JSON values.

    Raises:
        ConfigError: a file cannot be read.
    """
    each = [file.facts(known_by) for file in files]
    if any(facts is None for facts in each):
        return None
    versions = {name: metadata.version(name) for name in ("tokenizers", "transformers")}
    ways = [file.way for file in files]
    whole = {"format": VERSION, "files": each, "ways": ways, "versions": versions, "decides": decides}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def find_table(cache: CacheFolder, key: str) -> TokenTable | None:
    """A kept table, its arrays mapped; None where there is none, or it is not sound, which is removed."""
    folder = _entry(cache, key)
    try:
        table = map_table(folder, key, CheckAll())
    except (StorageError, OSError):
        return None
    except FormatError:
        with contextlib.suppress(OSError):
            (folder / _FILE).unlink()
        return None
    with contextlib.suppress(OSError):
        os.utime(folder)  # it was used
    return table


@dataclass(frozen=True, slots=True)
class CheckAll:
    """Every byte is looked at."""


@dataclass(frozen=True, slots=True)
class CheckSizes:
    """Another rank of this machine has looked at every byte."""


def entry_of(cache: CacheFolder, key: str) -> str:
    """The folder of an entry, for :func:`map_table`."""
    return str(_entry(cache, key))


def map_table(folder: str | Path, key: str, check: CheckAll | CheckSizes) -> TokenTable:
    """The table of an entry, its arrays mapped: pages are read when they are used, and shared by ranks.

    Raises:
        StorageError: there is none.
        FormatError: it is not sound, or another key's.
    """
    with LocalReader(str(folder)) as reader:
        header = read_header(reader, _FILE)
    facts = _facts(header, key)
    arrays = _mapped(Path(folder, _FILE), header)
    examples = Examples(arrays["tokens"], arrays["supervised"], arrays["ends"], arrays["lines"])
    if isinstance(check, CheckAll):
        _require_sound(arrays, facts, examples)
    examples.digest = facts["digest"]
    try:
        return TokenTable(
            examples,
            arrays["hashes"],
            int(facts["rows"]),
            arrays["cut"],
            arrays["skipped"],
            tuple(RowFault(int(line), str(cause)) for line, cause in facts["faults"]),
            {name: int(count) for name, count in facts["layouts"].items()},
            tuple(PlacesOfFile(str(name), unit, int(first)) for name, unit, first in facts["files"]),
            int(facts["places"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{_FILE}: what it says of its rows makes no sense ({error})") from error


def _facts(header: FileHeader, key: str) -> dict[str, Any]:
    try:
        facts = json.loads(header.metadata.get("shardwise", ""))
        digest = facts["digest"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"{_FILE}: it does not say what its tokens are") from error
    if facts.get("version") != VERSION or facts.get("key") != key or type(digest) is not int:
        raise FormatError(f"{_FILE}: its tokens are others")
    return dict(facts)


def _mapped(path: Path, header: FileHeader) -> dict[str, Any]:
    found = {entry.key: entry for entry in header.entries}
    odd = found.keys() ^ _ARRAYS.keys()
    if odd or any(
        found[name].dtype is not dtype or len(found[name].shape) != 1 for name, (dtype, _) in _ARRAYS.items()
    ):
        raise FormatError(f"{_FILE}: it has other arrays than tokens are kept in")
    try:
        return {
            # Copied on write: torch makes tensors of nothing that cannot be written to.
            name: np.memmap(path, kind, "c", entry.start, entry.shape) if entry.numel else np.empty(0, kind)
            for name, (_, kind) in _ARRAYS.items()
            for entry in (found[name],)
        }
    except (OSError, ValueError) as error:  # replaced since its header was read
        raise FormatError(f"{path}: it cannot be mapped ({error}); start again") from error


def _require_sound(arrays: Mapping[str, Any], facts: Mapping[str, Any], examples: Examples) -> None:
    ends, count = arrays["ends"], len(arrays["ends"])
    is_ordered = not count or (
        ends[0] > 0 and bool((np.diff(ends) > 0).all()) and int(ends[-1]) == len(examples.tokens)
    )
    if not is_ordered or (not count and len(examples.tokens)):
        raise FormatError(f"{_FILE}: its rows do not end where they should")
    if {len(arrays["lines"]), len(arrays["hashes"])} != {count} or len(arrays["tokens"]) != len(
        arrays["supervised"]
    ):
        raise FormatError(f"{_FILE}: its arrays are not of one length")
    if len(examples.tokens) and (arrays["tokens"].min() < 0 or arrays["supervised"].view(np.uint8).max() > 1):
        raise FormatError(f"{_FILE}: some of its tokens are none")
    if _sum_of(arrays) != facts.get("sum") or examples.digest != facts["digest"]:
        raise FormatError(f"{_FILE}: its bytes are not those that were written")


def _sum_of(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Of what the digest of examples leaves out."""
    found = hashlib.blake2b(digest_size=16)
    for name in ("lines", "hashes", "cut", "skipped"):
        found.update(np.ascontiguousarray(arrays[name]).data)
    return found.hexdigest()


def keep_table(cache: CacheFolder, key: str, table: TokenTable) -> str | None:
    """Keep a table, and remove what is older where all is too much; None, or why it could not be kept.

    Memory: none beside the table's.
    """
    try:
        with open_writer(_entry(cache, key)) as writer:
            _write(writer, key, table)
    except (ShardwiseError, OSError) as error:
        return str(error)
    _clean(cache, spared=_entry(cache, key))
    return None


def _write(writer: StorageWriter, key: str, table: TokenTable) -> None:
    arrays: dict[str, NDArray[Any]] = {
        "tokens": table.examples.tokens,
        "supervised": table.examples.supervised,
        "ends": table.examples.ends,
        "lines": table.examples.lines,
        "hashes": table.hashes,
        "cut": table.cut,
        "skipped": table.skipped,
    }
    facts = {
        "version": VERSION,
        "key": key,
        "digest": table.examples.digest,
        "sum": _sum_of(arrays),
        "rows": table.rows,
        "faults": [[fault.line, fault.cause] for fault in table.faults],
        "layouts": dict(table.layouts),
        "places": table.places,
        "files": [[file.name, file.unit, file.first] for file in table.files],
    }
    tensors = [(name, dtype, (len(arrays[name]),)) for name, (dtype, _) in _ARRAYS.items()]
    token = new_token()
    file = lay_out(on_its_way(_FILE, token), tensors, {"shardwise": json.dumps(facts)})
    held = take_lock(writer, token)
    try:
        remove_unnamed(writer, writer.list())
        writer.create(file.name, file.nbytes)
        writer.write(file.name, 0, [memoryview(file.header)])
        for entry in file.entries:
            writer.write(
                file.name, entry.start, [memoryview(np.ascontiguousarray(arrays[entry.key]).view(np.uint8).data)]
            )
        writer.sync(file.name)
        steps = (Rename(file.name, _FILE),)
        commit = Commit({file.name: file.nbytes}, steps, {_FILE: file.nbytes}, without=frozenset({file.name}))
        let_count(writer, held, commit, {})
    except BaseException:
        with contextlib.suppress(StorageError):
            writer.remove(file.name)
        raise
    finally:
        with contextlib.suppress(StorageError):
            held.release()
            writer.sync_names()


def _entry(cache: CacheFolder, key: str) -> Path:
    return cache.directory.expanduser() / f"{_PREFIX}{key[:32]}"


def _clean(cache: CacheFolder, spared: Path) -> None:
    """Remove entries, those first that were not used for longest, until the rest is not too much.

    Whoever has one mapped keeps its pages.
    """
    with contextlib.suppress(OSError):
        entries = []
        for folder in cache.directory.expanduser().glob(f"{_PREFIX}*"):
            used = folder.stat().st_mtime
            file = folder / _FILE
            if file.is_file():
                entries.append((used, folder, file.stat().st_size))
            elif time.time() - used > _LEFT_S:
                shutil.rmtree(folder, ignore_errors=True)
        total = sum(nbytes for _, _, nbytes in entries)
        for _, folder, nbytes in sorted(entries):
            if total <= cache.most_bytes:
                break
            if folder != spared:
                shutil.rmtree(folder, ignore_errors=True)
                total -= nbytes
