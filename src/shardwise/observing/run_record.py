"""What there is of a run in its folder: observed ranks, and what was told of each step."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shardwise.errors import FormatError, StorageError
from shardwise.observing.lines_read import MetricsLines, words_of
from shardwise.observing.rank_file import FOLDER
from shardwise.observing.rank_reader import RankReader
from shardwise.observing.rank_record import RankRecord
from shardwise.report.names import shown_ranks

METRICS = "metrics.jsonl"
_RANK_FILE = re.compile(r"rank-\d{5,9}\.jsonl")
_APART_S = 5.0
"""Ranks of a run begin to be observed together: where their clocks differ by more, it is the clocks."""

_MOST_TENANTS = 1024
_MOST_HOSTS = 4
_LINES_OF_ALL = 1 << 16
_LEAST_LINES = 1 << 11
"""Of a training, of its metrics."""

_MOST_CONFIG = 1 << 16
"""Bytes; ours are shorter."""


@dataclass(frozen=True)
class RunRecord:
    """A run, as far as it has left something.

    ``metrics`` are the lines of ``metrics.jsonl``, by tenant, under "" those of a training of one. ``ranks`` are
    those that were observed in the newest run into this folder. ``notes`` say what is not there.
    """

    path: Path
    model: str
    ranks: tuple[RankRecord, ...]
    metrics: Mapping[str, tuple[Mapping[str, Any], ...]]
    notes: tuple[str, ...] = ()

    @property
    def began(self) -> float:
        """Of the rank that began first, in seconds since 1970, by the clock of the first rank's host."""
        return min((record.began for record in self.ranks if self._is_in_time(record)), default=0.0)

    def shift_of(self, rank: RankRecord) -> float:
        """When a rank began, in seconds since the run did; 0 where the clock of its host is another."""
        return rank.began - self.began if self._is_in_time(rank) else 0.0

    def _is_in_time(self, rank: RankRecord) -> bool:
        return _have_one_clock(rank, self.ranks[0])

    @property
    def label(self) -> str:
        """The folder's name, with the model's."""
        name = words_of(self.path.resolve().name or str(self.path))
        return f"{name} ({self.model})" if self.model else name


class RunReader:
    """Reads a run, and on each further call what has been added to it.

    Raises:
        StorageError: there is no such folder, or it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise StorageError(f"{path}: there is no such folder; name the output folder of a run")
        self._readers: dict[str, RankReader] = {}
        self._metrics: dict[str, MetricsLines] = {}

    def read(self) -> RunRecord:
        """What there is now.

        Raises:
            FormatError: nothing that a run leaves.
            StorageError: something cannot be read.
        """
        try:
            self._read_ranks()
            self._read_metrics()
        except OSError as error:
            raise StorageError(f"{self.path}: it cannot be read ({error.strerror or error})") from error
        told = {name: tuple(metrics.lines) for name, metrics in self._metrics.items() if metrics.lines}
        ranks, notes = _newest(self._readers)
        if not ranks and not told:
            raise FormatError(
                f"{self.path}: there is neither {FOLDER}/ with files of observed ranks nor {METRICS} with steps; "
                "name the output folder of a run (shardwise train --observe, shardwise.observe)"
                + "".join(f"; {note}" for note in notes)
            )
        return RunRecord(self.path, _model_of(self.path, ranks), ranks, told, notes)

    def _read_ranks(self) -> None:
        folder = self.path / FOLDER
        names = [name for name in _names_in(folder) if _RANK_FILE.fullmatch(name)]
        self._readers = {name: self._readers.get(name) or RankReader(folder / name) for name in names}
        for reader in self._readers.values():
            reader.read_on()

    def _read_metrics(self) -> None:
        below = {words_of(name): self.path / name / METRICS for name in _names_in(self.path)}
        places = {"": self.path / METRICS, **below}
        found = [(name, place) for name, place in places.items() if _is_file(place)][: 1 + _MOST_TENANTS]
        most = max(_LINES_OF_ALL // max(len(found), 1), _LEAST_LINES)
        self._metrics = {name: self._metrics.get(name) or MetricsLines(place, most) for name, place in found}
        for metrics in self._metrics.values():
            metrics.read_on()


def _names_in(folder: Path) -> list[str]:
    """In order; none where there is no such folder, as where a run is removed meanwhile."""
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_file(path: Path) -> bool:
    """Whether there is one that we may see: a run may lie beside what is not ours."""
    try:
        return path.is_file()
    except OSError:
        return False


def _newest(readers: Mapping[str, RankReader]) -> tuple[tuple[RankRecord, ...], tuple[str, ...]]:
    """The ranks of the newest run, and what is to be said of the others, and of those that lack."""
    notes = []
    for name, reader in readers.items():
        if reader.record is None:
            notes.append(f"{FOLDER}/{name} is not of an observed rank, or empty")
        elif reader.odd_lines:
            notes.append(f"{FOLDER}/{name}: lines that cannot be understood were passed over: {reader.odd_lines}")
    lasts = [reader.record for reader in readers.values() if reader.record is not None]
    if not lasts:
        return (), tuple(notes)
    newest = _newest_of(lasts, {run for reader in readers.values() for run in reader.earlier})
    ranks = sorted((record for record in lasts if record.run == newest.run), key=lambda record: record.rank)
    lacking = sorted(set(range(newest.world_size)) - {record.rank for record in ranks})
    if lacking:
        notes.append(f"of {newest.world_size} ranks nothing is there of rank {shown_ranks(lacking)}")
    away = sorted({record.host for record in ranks if not _have_one_clock(record, ranks[0])})
    if away:
        notes.append(
            f"the clock of {_shown(away)} is not that of {ranks[0].host}; ranks there are shown as if all had "
            "begun at once"
        )
    earlier = (
        len({*(run for reader in readers.values() for run in reader.earlier), *(one.run for one in lasts)}) - 1
    )
    if earlier:
        notes.append(f"earlier runs into this folder, not shown: {earlier}")
    return tuple(ranks), tuple(notes)


def _newest_of(lasts: Sequence[RankRecord], followed: Container[str]) -> RankRecord:
    """A rank of the newest run; ``followed`` are runs that another one came after in some rank's file.

    Every run has a first rank; where its file lacks, clocks are all there is. It may be elsewhere by now, too: what
    is later by the same clock is newer than what it has left here.
    """
    left = [record for record in lasts if record.run not in followed] or lasts
    first = min(left, key=lambda record: (record.rank != 0, -record.began))
    return max((record for record in left if record.machine == first.machine), key=lambda record: record.began)


def _have_one_clock(rank: RankRecord, other: RankRecord) -> bool:
    """Whether times of the one are times of the other: they are of one machine, or agree."""
    return rank.machine == other.machine or abs(rank.began - other.began) <= _APART_S


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_HOSTS]) + (
        f" and {len(names) - _MOST_HOSTS} more" if len(names) > _MOST_HOSTS else ""
    )


def _model_of(path: Path, ranks: tuple[RankRecord, ...]) -> str:
    """What was trained or loaded, by the last part of its name; "" where nobody says."""
    name = _configured(path / "config.yaml")
    for record in ranks:
        for facts in record.facts:
            if not name and facts.get("tell") == "load" and isinstance(facts.get("checkpoint"), str):
                name = facts["checkpoint"]
    return words_of(name.rstrip("/").rpartition("/")[2])


def _configured(file: Path) -> str:
    """The model of a training's configuration; "" where there is none, or another's."""
    try:
        if not file.is_file() or file.stat().st_size > _MOST_CONFIG:
            return ""
        config = yaml.safe_load(file.read_text("utf-8"))
        model = config["model"]
        name = model["name"] if isinstance(model, dict) else model
        return name if isinstance(name, str) else ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError, RecursionError):
        return ""
