"""What there is of a run in its folder: observed ranks, and what was told of each step."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shardwise.errors import FormatError, StorageError
from shardwise.observing.plain import words_of
from shardwise.observing.rank_file import FOLDER
from shardwise.observing.rank_record import RankReader, RankRecord
from shardwise.report.names import shown_ranks

METRICS = "metrics.jsonl"
_RANK_FILE = re.compile(r"rank-\d{5,9}\.jsonl")
_APART_S = 5.0
"""Ranks of a run begin to be observed together: where their clocks differ by more, it is the clocks."""

_MOST_TENANTS = 1024
_MOST_HOSTS = 4
_MOST_STEP = 1 << 50
_MOST_LINE = 1 << 20
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
        """Whether its clock agrees with that of the first."""
        return abs(rank.began - self.ranks[0].began) <= _APART_S

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
        names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
        for name in filter(_RANK_FILE.fullmatch, names):
            self._readers.setdefault(name, RankReader(folder / name)).read_on()

    def _read_metrics(self) -> None:
        below = [entry for entry in sorted(self.path.iterdir()) if _is_file(entry / METRICS)]
        places = {
            "": self.path / METRICS,
            **{words_of(entry.name): entry / METRICS for entry in below[:_MOST_TENANTS]},
        }
        for name, place in places.items():
            if place.is_file():
                self._metrics.setdefault(name, MetricsLines(place)).read_on()


def _is_file(path: Path) -> bool:
    """Whether there is one that we may see: a run may lie beside what is not ours."""
    try:
        return path.is_file()
    except OSError:
        return False


class MetricsLines:
    """The lines of a file of metrics, which grows, or is replaced where a training goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[Mapping[str, Any]] = []
        self._place = 0
        self._file = (0, 0)

    def read_on(self) -> None:
        """Take in what is there now; raises OSError."""
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            if (status.st_dev, status.st_ino) != self._file or status.st_size < self._place:
                self._file, self._place, self.lines = (status.st_dev, status.st_ino), 0, []
            file.seek(self._place)
            text = file.read()
        whole, newline, _ = text.rpartition(b"\n")
        self._place += len(whole) + len(newline)
        for line in whole.splitlines():
            try:
                found = json.loads(line) if len(line) <= _MOST_LINE else None
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict) and isinstance(found.get("kind"), str) and _is_step(found.get("step")):
                self.lines.append(found)


def _is_step(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST_STEP


def _newest(readers: Mapping[str, RankReader]) -> tuple[tuple[RankRecord, ...], tuple[str, ...]]:
    """The ranks of the newest run, and what is to be said of the others, and of those that lack."""
    notes = []
    for name, reader in readers.items():
        if not reader.records:
            notes.append(f"{FOLDER}/{name} is not of an observed rank, or empty")
        elif reader.odd_lines:
            notes.append(f"{FOLDER}/{name}: lines that cannot be understood were passed over: {reader.odd_lines}")
    lasts = [reader.records[-1] for reader in readers.values() if reader.records]
    if not lasts:
        return (), tuple(notes)
    # Every run has a first rank; where its file lacks, clocks are all there is.
    newest = min(lasts, key=lambda record: (record.rank != 0, -record.began))
    ranks = sorted((record for record in lasts if record.run == newest.run), key=lambda record: record.rank)
    lacking = sorted(set(range(newest.world_size)) - {record.rank for record in ranks})
    if lacking:
        notes.append(f"of {newest.world_size} ranks nothing is there of rank {shown_ranks(lacking)}")
    away = sorted({record.host for record in ranks if abs(record.began - ranks[0].began) > _APART_S})
    if away:
        notes.append(
            f"the clock of {_shown(away)} is not that of {ranks[0].host}; ranks there are shown as if all had "
            "begun at once"
        )
    earlier = len({record.run for reader in readers.values() for record in reader.records}) - 1
    if earlier:
        notes.append(f"earlier runs into this folder, not shown: {earlier}")
    return tuple(ranks), tuple(notes)


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
