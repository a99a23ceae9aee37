"""Rows as tokens: read and tokenised once on each machine, and had by all its ranks."""

from __future__ import annotations

import bisect
import datetime
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from transformers import PreTrainedTokenizerBase

from shardwise.errors import ConfigError
from shardwise.execution.ranks.progress import ProgressBar
from shardwise.execution.ranks.world import World
from shardwise.observing.phases import phase
from shardwise.storage.machine import file_space
from shardwise.training.data.encoding import Encoding
from shardwise.training.data.examples import Examples, TokenTable, gathered
from shardwise.training.data.row_files import RowFile
from shardwise.training.data.sources import DataName, each_shown, names_of, open_source
from shardwise.training.data.token_cache import (
    CacheFolder,
    CheckSizes,
    NoCache,
    TokenCaching,
    entry_of,
    find_table,
    keep_table,
    key_of,
    map_table,
)
from shardwise.training.data.tokenising import Effort, encoded_blocks
from shardwise.training.data.train_data import FoundData, TrainData, held_out_rows, put_together
from shardwise.training.texts.chat_script import ChatOptions
from shardwise.training.texts.masking import Encoder
from shardwise.training.texts.rows import RowFault, refuse

__all__ = ["Examples", "Malformed", "RefuseRows", "SkipRows", "TrainData", "read_data"]


@dataclass(frozen=True, slots=True)
class RefuseRows:
    """A row that cannot be used is an error, which names all of them."""


@dataclass(frozen=True, slots=True)
class SkipRows:
    """Rows that cannot be used are left out, and told."""


Malformed: TypeAlias = RefuseRows | SkipRows

_NO_CACHE, _EFFORT, _CHATS, _REFUSE = NoCache(), Effort(), ChatOptions(), RefuseRows()


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How rows become tokens, beside what they mean.

    Attributes:
        caching: where tokens are kept.
        effort: by how many processes.
        progress: whether a bar is shown.
    """

    caching: TokenCaching = _NO_CACHE
    effort: Effort = _EFFORT
    progress: bool = False


_OPTIONS = ReadOptions()


@dataclass(frozen=True, slots=True)
class RowsAsked:
    """What is to become of rows.

    Attributes:
        tokenizer: makes tokens of them.
        max_length: tokens of a row; what is beyond is cut off.
        malformed: what becomes of rows that cannot be used.
        chats: how chats are read.
        options: where tokens are kept, and by how many processes they are made.
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    malformed: Malformed = _REFUSE
    chats: ChatOptions = _CHATS
    options: ReadOptions = _OPTIONS


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A part of the rows is not learned; which of them follows from what is in them, and a seed.

    Rows that are alike, and all examples of one row, are on one side.

    Raises:
        ConfigError: the fraction is not between 0 and 1.
    """

    fraction: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise ConfigError(
                f"data.validation_fraction={self.fraction:g}: it must be greater than 0 and less than 1"
            )


def read_data(
    data: str | os.PathLike[str] | DataName | Sequence[str | os.PathLike[str] | DataName],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    malformed: Malformed = _REFUSE,
    chats: ChatOptions = _CHATS,
    options: ReadOptions = _OPTIONS,
) -> TrainData:
    """Read and tokenise rows: of files, folders, or data sets of the hub; of several, in their order.

    One rank of each machine does so, with the processes that ``options.effort`` allows. With a cache it keeps the
    tokens there, and all ranks of the machine map them; else every rank has them in memory.

    Collective: yes, over the default process group.
    Memory: 5 bytes for a token and 32 for a row; with a cache once for each machine, as pages of a file.

    Raises:
        ConfigError: the data cannot be read, the tokenizer has no chat template, or rows are malformed; all of
            them by line or row (up to 20), and the same error on every rank.
    """
    names = World.current().together(lambda: names_of(data))
    return read_names(names, RowsAsked(tokenizer, max_length, malformed, chats, options))


def read_names(names: Sequence[DataName], asked: RowsAsked) -> TrainData:
    """The same as :func:`read_data`, of data sets by their names. Collective: yes."""
    world = World.current()
    found = _all_on_all_ranks(world, names, asked)
    return world.together(lambda: put_together(found, asked.tokenizer, None))


def read_and_hold_out(names: Sequence[DataName], asked: RowsAsked, held: HeldOut) -> tuple[TrainData, TrainData]:
    """What is learned, and what of the same data sets is only looked at. Collective: yes.

    Raises:
        ConfigError: as of :func:`read_data`; there are not two rows that differ.
    """
    world = World.current()
    found = _all_on_all_ranks(world, names, asked)

    def split() -> tuple[TrainData, TrainData]:
        hashes = [table.hashes for table in found.tables]
        apart = held_out_rows(hashes, held.fraction, held.seed)
        if apart is None:
            raise ConfigError(
                f"{each_shown(names)}: data.validation_fraction={held.fraction:g} cannot be held out, since there "
                "are not two rows that differ"
            )
        kept = [np.flatnonzero(~mask) for mask in apart]
        held_rows = [np.flatnonzero(mask) for mask in apart]
        return (
            put_together(found, asked.tokenizer, kept),
            put_together(found.looked_at(), asked.tokenizer, held_rows),
        )

    return world.together(split)


# One data set


@dataclass(frozen=True, slots=True)
class Leading:
    """This rank reads for all ranks of its machine."""


@dataclass(frozen=True, slots=True)
class Led:
    """Another rank of this machine does."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the leading rank of a machine has: the place of a kept table, or why there is none."""

    place: str
    folder: str | None
    key: str | None
    note: str = ""
    names: tuple[str, ...] = ()
    """Of the files, as they are called now."""


def _all_on_all_ranks(world: World, names: Sequence[DataName], asked: RowsAsked) -> FoundData:
    """All data sets as tokens. Collective: yes."""
    leading = Leading() if world.is_first_of(file_space()) else Led()
    chats = asked.chats
    if chats.day is None:  # midnight may come between ranks
        chats = replace(chats, day=world.from_first(datetime.date.today))
    encoder = world.together(lambda: Encoder(asked.tokenizer, chats))
    tables: list[TokenTable] = []
    notes: list[str] = []
    for name in names:
        encoding = Encoding(encoder, name.words, asked.max_length)
        table, note = _on_all_ranks(world, leading, name, encoding, asked.malformed, asked.options)
        tables.append(table)
        notes += [note] if note else []
    return FoundData(tuple(names), tuple(tables), tuple(notes))


def _on_all_ranks(
    world: World,
    leading: Leading | Led,
    name: DataName,
    encoding: Encoding,
    malformed: Malformed,
    options: ReadOptions,
) -> tuple[TokenTable, str]:
    """A data set as tokens, on every rank, and what is worth knowing of it. Collective: yes."""
    made: list[TokenTable] = []

    def lead() -> _Kept | None:
        if isinstance(leading, Led):
            return None
        table, led = _led(world, name, encoding, malformed, options)
        made.append(table)
        return led

    leaders = {led.place: led for led in world.each(lead) if led is not None}
    led = leaders[file_space()]
    if any(each.folder is None for each in leaders.values()) and world.size > 1:
        whole = world.from_first(lambda: made[0])
        made = made or [whole]
    elif not made:
        made = world.together(lambda: _mapped(led))
    else:
        world.together(lambda: None)
    [table] = made
    world.require_equal(table.examples.digest, f"what is in {name.path}")
    return table, led.note


def _mapped(led: _Kept) -> list[TokenTable]:
    assert led.folder is not None
    assert led.key is not None
    return [map_table(led.folder, led.key, CheckSizes()).called(led.names)]


def _led(
    world: World, name: DataName, encoding: Encoding, malformed: Malformed, options: ReadOptions
) -> tuple[TokenTable, _Kept]:
    """Have a data set as tokens, for all ranks of this machine."""
    files, caching = open_source(name), options.caching
    if not isinstance(caching, CacheFolder):
        table = _tokenised(world, files, encoding, options)
        _require_usable(name, table, malformed, encoding.max_length)
        return table, _Kept(file_space(), None, None)
    key = _key(files, caching, encoding)
    names = tuple(file.name for file in files)
    kept = find_table(caching, key) if key is not None else None
    if kept is not None and key is not None:
        kept, note = kept.called(names), f"{name.path}: its tokens were kept"
        _require_usable(name, kept, malformed, encoding.max_length)
        return kept, _Kept(file_space(), entry_of(caching, key), key, note, names)
    table = _tokenised(world, files, encoding, options)
    _require_usable(name, table, malformed, encoding.max_length)
    if (cause := _keep(files, caching, key, table, encoding)) is not None:
        return table, _Kept(file_space(), None, None, f"{name.path}: its tokens are not kept ({cause})")
    assert key is not None
    folder = entry_of(caching, key)
    return map_table(folder, key, CheckSizes()), _Kept(file_space(), folder, key, names=names)


def _keep(
    files: Sequence[RowFile], caching: CacheFolder, key: str | None, table: TokenTable, encoding: Encoding
) -> str | None:
    """Keep a table; None, or why it could not be."""
    if key is None:
        return "nothing tells whether the data are the same"
    if key != _key(files, caching, encoding):
        return "a file was changed while it was read"
    return keep_table(caching, key, table)


def _key(files: Sequence[RowFile], caching: CacheFolder, encoding: Encoding) -> str | None:
    decides = [encoding.encoder.facts(), encoding.words.facts(), encoding.max_length]
    return key_of(files, caching.known_by, decides)


def _tokenised(world: World, files: Sequence[RowFile], encoding: Encoding, options: ReadOptions) -> TokenTable:
    with ProgressBar(
        "tokenising", world, sum(file.nbytes() for file in files), enabled=options.progress and world.rank == 0
    ) as bar:
        advance = bar.advance if world.rank == 0 else lambda nbytes: None
        blocks = encoded_blocks(files, encoding, options.effort, check=world.check, advance=advance)
        with closing(blocks), phase("tokenise"):  # and with them the processes
            return gathered(files, blocks)


_SHOWN_FILES = 5


def _refuse_each(table: TokenTable) -> None:
    """Refuse rows that cannot be used, file by file.

    Raises:
        ConfigError: naming them, of the first files that have any.
    """
    of_file: dict[int, list[RowFault]] = {}
    firsts = [file.first for file in table.files]
    for fault in table.faults:
        number = bisect.bisect_left(firsts, fault.line) - 1
        of_file.setdefault(number, []).append(RowFault(fault.line - firsts[number], fault.cause))
    told: list[str] = []
    for number, faults in list(of_file.items())[:_SHOWN_FILES]:
        try:
            refuse(table.files[number].name, faults, unit=table.files[number].unit)
        except ConfigError as error:
            told.append(str(error))
    if len(of_file) > _SHOWN_FILES:
        told.append(f"and rows of {len(of_file) - _SHOWN_FILES} more files")
    if told:
        raise ConfigError("\n".join(told))


def _require_usable(name: DataName, table: TokenTable, malformed: Malformed, max_length: int) -> None:
    """Refuse what cannot be learned from.

    Raises:
        ConfigError: rows that cannot be used, or none that can.
    """
    if not isinstance(malformed, SkipRows):
        _refuse_each(table)
    if not table.rows:
        raise ConfigError(f"{name.path}: there are no rows; give it one JSON object on each line")
    if not len(table.examples):
        raise ConfigError(
            f"{name.path}: in none of its {table.rows} rows is there a token to learn within "
            f"max_length={max_length}; raise it, or look at what the chat template makes of the rows"
        )
