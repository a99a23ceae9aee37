"""What the arms took, out of the files of their ranks, and what a comparison has found. Needs no torch.

[Note: Growth] A rank's level is its first sample, after everything has been imported. What it grows by is memory
that is its own or shared (RssAnon, RssShmem) over that level; the machine's growth is the most of the sum over its
ranks at one moment. Pages of mapped files are the kernel's, which takes them back; they are told beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from shardwise.errors import FormatError
from shardwise.observing.bounded import extremes
from shardwise.observing.rank_record import RankRecord
from shardwise.observing.run_record import RunRecord
from shardwise.pictures.chart import Band, Chart, Floats, Look, Series
from shardwise.startup.kinds import KINDS, PHASES
from shardwise.startup.values import BroughtUp, compared, values_of

SLACK_BYTES = 32 << 20
"""What a rank of ours may take beside its shards and its budget."""

_KIB = 1024
_GIB_IN_KIB = 2.0**20
_POINTS = 150


@dataclass(frozen=True, slots=True)
class ArmFigures:
    """Of one run of an arm.

    Attributes:
        seconds: from the first rank's beginning to the last one's end of wrapping.
        phases: seconds of each phase, on the rank where it took longest.
        growth_bytes: of all ranks of the machine together, at the worst moment.
        fullest_bytes: of the rank that grew most.
        mapped_bytes: growth of mapped files, all ranks together, at the worst moment.
        device_bytes: the most in tensors of one accelerator.
    """

    seconds: float
    phases: Mapping[str, float]
    growth_bytes: int
    fullest_bytes: int
    mapped_bytes: int
    device_bytes: int


@dataclass(frozen=True)
class ArmRun:
    """A run that came to its end: its folder, what it took, what all ranks hold, and the values, by name."""

    arm: str
    folder: str
    figures: ArmFigures
    host_shards_bytes: int
    device_shards_bytes: int
    values: Mapping[str, str] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without the values."""
        return {name: value for name, value in asdict(self).items() if name != "values"}


@dataclass(frozen=True, slots=True)
class GrowthLimit:
    """What our arm may take of the machine: its shards, and for each rank the budget and some slack."""

    at_most_bytes: int
    growth_bytes: int

    @property
    def holds(self) -> bool:
        return self.growth_bytes <= self.at_most_bytes


def arm_run(arm: str, folder: str, figures: ArmFigures, ranks: Sequence[BroughtUp]) -> ArmRun:
    on_host, on_device = sum(rank.host_bytes for rank in ranks), sum(rank.device_bytes for rank in ranks)
    return ArmRun(arm, folder, figures, on_host, on_device, values_of(ranks))


def limit_of(run: ArmRun, ranks: int, budget_bytes: int) -> GrowthLimit:
    at_most = run.host_shards_bytes + ranks * (budget_bytes + SLACK_BYTES)
    return GrowthLimit(at_most, run.figures.growth_bytes)


def figures_of(record: RunRecord) -> ArmFigures:
    """What a run took.

    Raises:
        FormatError: a rank has left no samples, or not all phases.
    """
    for rank in record.ranks:
        found = {times.name for times in rank.phases() if len(times.path) == 1 and times.lane == 0}
        if not rank.count or not found.issuperset(PHASES):
            raise FormatError(f"{record.path}: rank {rank.rank} has not been observed to its end")
    begins = [rank.began + _span(rank, "load")[0] for rank in record.ranks]
    ends = [rank.began + _span(rank, "wrap")[1] for rank in record.ranks]
    phases = {name: max(b - a for a, b in (_span(rank, name) for rank in record.ranks)) for name in PHASES}
    time = _moments(record)
    own = [_growth(record, rank, time, "anonymous", "shared") for rank in record.ranks]
    mapped = sum((_growth(record, rank, time, "file") for rank in record.ranks), np.zeros(len(time)))
    return ArmFigures(
        seconds=max(ends) - min(begins),
        phases=phases,
        growth_bytes=_bytes(np.sum(own, axis=0)),
        fullest_bytes=_bytes(np.max(own, axis=0)),
        mapped_bytes=_bytes(mapped),
        device_bytes=max(_bytes(rank.samples()["allocated"]) for rank in record.ranks),
    )


def chart_of(arm: str, record: RunRecord, figures: ArmFigures) -> Chart:
    """Growth over time, ranks on top of each other; a phase lasts until the last rank leaves it."""
    time = _moments(record)
    layers = {
        f"rank {rank.rank}": np.maximum(_growth(record, rank, time, "anonymous", "shared"), 0.0) / _GIB_IN_KIB
        for rank in record.ranks
    }
    places = extremes(np.sum(list(layers.values()), axis=0), _POINTS)
    begin = min(rank.began + _span(rank, "load")[0] for rank in record.ranks) - record.began
    bands, start = [], 0.0
    for name in PHASES:
        stop = max(rank.began + _span(rank, name)[1] for rank in record.ranks) - record.began - begin
        bands.append(Band(name, start, stop))
        start = stop
    series = [Series(name, time[places] - begin, layer[places], Look.AREA) for name, layer in layers.items()]
    title = f"{arm}\n{figures.seconds:.1f} s, at most {figures.growth_bytes / 2**30:.2f} GiB"
    return Chart(f"startup-{arm}", title, "seconds", "GiB", series, bands)


def _span(rank: RankRecord, name: str) -> tuple[float, float]:
    """The outermost phase of this name, in the rank's own time."""
    [times] = [times for times in rank.phases() if times.path == (name,) and times.lane == 0]
    return times.starts[0], times.stops[0]


def _moments(record: RunRecord) -> Floats:
    """Of all samples of all ranks, in seconds since the run began."""
    return np.unique(np.concatenate([rank.samples()["t"] + rank.began - record.began for rank in record.ranks]))


def _growth(record: RunRecord, rank: RankRecord, time: Floats, *names: str) -> Floats:
    """Over the first sample, in KiB, at these moments; before and after its own the nearest counts."""
    samples = rank.samples()
    total = sum((samples[name] for name in names), np.zeros(len(samples["t"])))
    found: Floats = np.interp(time, samples["t"] + rank.began - record.began, total - total[0])
    return found


def _bytes(kib: Floats) -> int:
    return int(kib.max(initial=0.0)) * _KIB


@dataclass(frozen=True)
class StartupResult:
    """All runs of all arms, and why those that are not among them did not run."""

    model: str
    ranks: int
    dtype: str
    runs: Sequence[ArmRun]
    not_run: Mapping[str, str]
    limit: GrowthLimit | None
    """Of our run that grew most; None where ours is not among the arms."""
    files: Sequence[str] = ()

    def of(self, arm: str) -> list[ArmRun]:
        return [run for run in self.runs if run.arm == arm]

    def verdict(self, arm: str) -> str:
        """Whether it made the model that ours made, or the first arm that ran."""
        first = self.runs[0].values
        found = [compared(run.values, first) for run in self.of(arm)]
        return next((words for words in found if words != "same"), "same")

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        arms = {
            arm: {"does": KINDS[arm].does, "values": self.verdict(arm), "runs": [run.to_dict() for run in runs]}
            for arm in KINDS
            if (runs := self.of(arm))
        }
        limit = None if self.limit is None else {**asdict(self.limit), "holds": self.limit.holds}
        place = {"model": self.model, "ranks": self.ranks, "dtype": self.dtype}
        return {**place, "arms": arms, "not_run": dict(self.not_run), "limit": limit, "files": [*self.files]}
