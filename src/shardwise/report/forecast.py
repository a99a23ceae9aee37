"""What a load will take, before it: on every rank, in memory and in bytes read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.report.forecast_parts import (
    BankForecast,
    ComputedForecast,
    GroupForecast,
    RankForecast,
    TrainingForecast,
)
from shardwise.report.names import collapse, in_bytes, trainable_in_words

_ROWS = 16
"""The most ranks of which each has a line of its own."""

_SHOWN = 6


@dataclass(frozen=True)
class Forecast:
    """What bringing up a model will take, for all ranks. Made without ranks, and before a tensor is read.

    ``device`` is "cpu" or the kind of accelerator that the shards go to. ``parameters`` counts elements, tied ones
    once. ``bytes_per_dtype`` are those of the whole model. ``whole`` are parameters that stay whole on every rank,
    with the reason; ``cast`` maps a name to ("stored dtype", "dtype in the model"). Of the tensors ``read_once``,
    ranks that need the same read it once in all. ``notes`` are sentences to be read before the load.
    """

    checkpoint: str
    model_class: str
    dtype: str
    device: str
    mesh: Mapping[str, int]
    nodes: int
    parameters: int
    checkpoint_bytes: int
    checkpoint_tensors: int
    checkpoint_files: int
    bytes_per_dtype: Mapping[str, int]
    groups: tuple[GroupForecast, ...]
    ranks: tuple[RankForecast, ...]
    whole: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cast: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    initialized: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    ignored_keys: tuple[str, ...] = ()
    read_once: tuple[str, ...] = ()
    computed: tuple[ComputedForecast, ...] = ()
    notes: tuple[str, ...] = ()
    trainable_parameters: int = 0
    training: tuple[TrainingForecast, ...] = ()
    """By rank, where a tuning was asked for."""
    bank: tuple[BankForecast, ...] = ()
    """By rank, where tenants were."""

    @property
    def largest_group(self) -> GroupForecast:
        """The group whose gathering takes the most memory."""
        return max(self.groups, key=lambda group: group.gathered_bytes)

    @property
    def read_bytes(self) -> int:
        """Bytes read by all ranks together."""
        return sum(rank.read_bytes for rank in self.ranks)

    @property
    def read_ratio(self) -> float:
        """Bytes read by all ranks together, over those of the checkpoint."""
        return self.read_bytes / max(self.checkpoint_bytes, 1)

    @property
    def held_imbalance(self) -> float:
        """The most bytes that a rank's shards have, over the mean."""
        return _imbalance([rank.shard_bytes for rank in self.ranks])

    @property
    def read_imbalance(self) -> float:
        """The most bytes that a rank reads, over the mean."""
        return _imbalance([rank.read_bytes for rank in self.ranks])

    @property
    def file_opens(self) -> int:
        """Over all ranks, the files that each opens for its tensors."""
        return sum(rank.files for rank in self.ranks)

    @property
    def node_host_bytes(self) -> int:
        """Host memory of the machine that needs the most; ranks are dealt to the machines in order."""
        per_node = len(self.ranks) // self.nodes
        starts = range(0, len(self.ranks), per_node)
        return max(sum(rank.host_bytes for rank in self.ranks[start : start + per_node]) for start in starts)

    def to_dict(self) -> dict[str, Any]:
        """The forecast as plain JSON values, with what follows from it under ``summary``."""
        largest = self.largest_group
        return {
            **dataclasses.asdict(self),
            "summary": {
                "read_bytes": self.read_bytes,
                "read_ratio": self.read_ratio,
                "held_imbalance": self.held_imbalance,
                "read_imbalance": self.read_imbalance,
                "file_opens": self.file_opens,
                "device_bytes": max(rank.device_bytes for rank in self.ranks),
                "host_bytes": max(rank.host_bytes for rank in self.ranks),
                "node_host_bytes": self.node_host_bytes,
                "largest_group": {"modules": list(largest.modules), "gathered_bytes": largest.gathered_bytes},
            },
        }

    def __str__(self) -> str:
        return self.told()

    def told(self, *, with_training: bool = True) -> str:
        """The forecast in words; with what training with AdamW takes, unless somebody knows that better."""
        is_trained = bool(self.training) and with_training
        stored = [
            in_bytes(self.checkpoint_bytes),
            _count(self.checkpoint_tensors, "tensor"),
            _count(self.checkpoint_files, "file"),
        ]
        largest = self.largest_group
        above = [
            ("model", f"{self.model_class}, {self.parameters:,} parameters in {self._dtypes()}"),
            *([("training", self._trainable())] if self.training else []),
            *([("tenants", self.bank[0].told_tenants)] if self.bank else []),
            ("checkpoint", ", ".join(stored)),
            ("mesh", f"{self._mesh()}, {self.device}, {_count(self.nodes, 'node')}"),
            *(("groups", line) for line in _groups(self.groups)),
            ("largest", f"{largest.name}: {in_bytes(largest.gathered_bytes)} gathered"),
            *_listing("whole", [f"{name}: {reason}" for name, reason in self.whole.items()]),
            *_listing("tied", [f"{name} = {source}" for name, source in self.tied.items()]),
            *_listing("cast", [f"{name}: {' to '.join(pair)}" for name, pair in self.cast.items()]),
            *_listing("initialized", self.initialized),
            *_listing("ignored", self.ignored_keys),
            *_listing("read once", self.read_once),
            *(("computed", _computed(item)) for item in self.computed[:_SHOWN]),
        ]
        below = [
            ("all ranks", self._together()),
            (
                "imbalance",
                f"{self.held_imbalance:.3f} held, {self.read_imbalance:.3f} read (most over mean)",
            ),
            *([("training", str(max(self.training, key=lambda rank: rank.total_bytes)))] if is_trained else []),
            *([("bank", str(max(self.bank, key=lambda rank: rank.total_bytes)))] if self.bank else []),
            *([("each node", f"{in_bytes(self.node_host_bytes)} of host memory")] if self.nodes > 1 else []),
            *(("note", note) for note in self.notes),
        ]
        title = f"plan for {self.checkpoint}"
        return "\n".join([title, *_facts(above), "", *_table(self.ranks), "", *_facts(below)])

    def _trainable(self) -> str:
        return trainable_in_words(self.trainable_parameters, self.parameters)

    def _dtypes(self) -> str:
        return ", ".join(f"{dtype} ({in_bytes(nbytes)})" for dtype, nbytes in self.bytes_per_dtype.items())

    def _mesh(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.mesh.items())

    def _together(self) -> str:
        return (
            f"read {in_bytes(self.read_bytes)}, {self.read_ratio:.2f} times the checkpoint, "
            f"in {sum(rank.reads for rank in self.ranks):,} requests; open a file {self.file_opens:,} times"
        )


def _imbalance(values: Sequence[int]) -> float:
    mean = sum(values) / len(values)
    return max(values) / mean if mean else 1.0


def _facts(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """One line for each, the words in a column of their own, and not repeated."""
    lines: list[str] = []
    last = ""
    for word, fact in pairs:
        lines.append(f"  {'' if word == last else word:<11} {fact}")
        last = word
    return lines


def _listing(word: str, names: Iterable[str]) -> list[tuple[str, str]]:
    groups = collapse(names)
    pairs = [(word, pattern + (f" x{count}" if count > 1 else "")) for pattern, count in groups[:_SHOWN]]
    if len(groups) > _SHOWN:
        pairs.append((word, f"... and {sum(count for _, count in groups[_SHOWN:])} more"))
    return pairs


def _groups(groups: Sequence[GroupForecast]) -> list[str]:
    """Groups that differ in the numbers of their names only are one line."""
    alike: dict[tuple[str, int, int], list[str]] = {}
    for group in groups:
        alike.setdefault((group.dtype, group.parameters, group.gathered_bytes), []).append(group.name)
    lines: list[str] = []
    for (dtype, parameters, nbytes), names in alike.items():
        for pattern, count in collapse(names):
            each = " each" if count > 1 else ""
            times = f" x{count}" if count > 1 else ""
            lines.append(f"{pattern}{times}: {parameters:,} {dtype} parameters, {in_bytes(nbytes)} gathered{each}")
    return [*lines[:_SHOWN], *([f"... and {len(lines) - _SHOWN} more kinds"] if len(lines) > _SHOWN else [])]


def _computed(item: ComputedForecast) -> str:
    names = ", ".join(pattern for pattern, _ in collapse(item.names))
    return (
        f"{names} by {item.conversion}: {in_bytes(item.input_bytes)} read whole, needs a budget of "
        f"{in_bytes(item.budget_bytes)}"
    )


_COLUMNS: tuple[tuple[str, Callable[[RankForecast], int]], ...] = (
    ("holds", lambda rank: rank.shard_bytes),
    ("device", lambda rank: rank.device_bytes),
    ("host", lambda rank: rank.host_bytes),
    ("reads", lambda rank: rank.read_bytes),
    ("requests", lambda rank: rank.reads),
    ("files", lambda rank: rank.files),
)
_COUNTS = ("requests", "files")


def _table(ranks: Sequence[RankForecast]) -> list[str]:
    """Each rank, or, of many ranks, the least, the mean and the most of every column."""
    if len(ranks) <= _ROWS:
        rows = [[str(rank.rank), *(_cell(name, value(rank)) for name, value in _COLUMNS)] for rank in ranks]
        last = [_experts(rank) for rank in ranks]
    else:
        columns = [(name, [value(rank) for rank in ranks]) for name, value in _COLUMNS]
        means = [(name, round(sum(values) / len(values))) for name, values in columns]
        rows = [
            ["least", *(_cell(name, min(values)) for name, values in columns)],
            ["mean", *(_cell(name, mean) for name, mean in means)],
            ["most", *(_cell(name, max(values)) for name, values in columns)],
            ["on rank", *(str(ranks[values.index(max(values))].rank) for _, values in columns)],
        ]
        last = [f"{_experts(ranks[0])} on rank 0" if ranks[0].experts else "", "", "", ""]
    header = ["rank", *(name for name, _ in _COLUMNS)]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    tails = ["experts" if any(last) else "", *last]
    lines = []
    for row, tail in zip([header, *rows], tails, strict=True):
        cells = [f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)]
        lines.append("  " + "  ".join([*cells, tail]).rstrip())
    return lines


def _experts(rank: RankForecast) -> str:
    """Stacks of which the rank holds the same experts are told in one."""
    held = {str(experts) for experts in rank.experts.values()}
    if len(held) <= 1:
        return "".join(held)
    return "; ".join(f"{pattern} {experts}" for pattern, experts in rank.experts.items())


def _cell(name: str, value: int) -> str:
    return f"{value:,}" if name in _COUNTS else in_bytes(value)


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" + ("" if number == 1 else "s")
