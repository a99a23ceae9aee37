"""Charts and tables of the observed ranks of one run, by time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardwise.observing.bounded import PhaseSpan, PhaseTimes, extremes, merged
from shardwise.observing.lines_read import number_in
from shardwise.observing.rank_record import RankRecord, ToldFacts
from shardwise.observing.run_record import RunRecord
from shardwise.pictures.chart import Band, Bars, Chart, Floats, Look, Series, Table
from shardwise.pictures.training_charts import TrainingForeseen
from shardwise.report.names import in_bytes

_POINTS = 60_000
"""Of all series of a chart."""

_MOST_BANDS = 60
_MOST_RANKS = 64
"""Of which lines are drawn."""

_MOST_RANKS_OF_BARS = 8
_MOST_ROWS = 40
_GIB = 2.0**20
"""In KiB."""

_MOST_MACHINES = 16

_TIME = "seconds"


class RankCharts:
    """What there is to be seen of the ranks of a run."""

    def __init__(self, run: RunRecord) -> None:
        self.run = run
        self.ranks = _with_fullest(_shown(run.ranks, _MOST_RANKS), run.ranks)
        self.samples = [rank.samples() for rank in self.ranks]
        self.shifts = [run.shift_of(rank) for rank in self.ranks]
        self.seconds = max((run.shift_of(rank) + rank.last for rank in run.ranks), default=0.0)
        self.training = TrainingForeseen(self.ranks, self.shifts)
        self.bands = self._bands()
        self.parts = max(40, min(1000, _POINTS // (2 * max(len(self.ranks), 1))))

    def notes(self) -> list[str]:
        """What is not drawn, for there is too much of it."""
        found = []
        if len(self.ranks) < len(self.run.ranks):
            found.append(
                f"of {len(self.run.ranks)} ranks {len(self.ranks)} have lines and rows, among them the fullest, "
                f"rank {_fullest(self.run.ranks).rank}; all of them are in what is stacked by machine"
            )
        if thinned := [rank for rank in self.run.ranks if rank.count < rank.taken]:
            most = max(thinned, key=lambda rank: rank.taken)
            found.append(
                f"of {most.taken} samples of rank {most.rank} {most.count} are kept, the least and the most of "
                "each part; bytes a second are means from each of these to the next"
            )
        if len(machines := self._machines()) > _MOST_MACHINES:
            found.append(f"of {len(machines)} machines {_MOST_MACHINES} are drawn")
        return found

    def charts(self) -> list[Chart]:
        """All that have something in them."""
        charts = [self.memory(), *self.by_machine(), self.accelerator(), self.phases(), *self.traffic()]
        return [chart for chart in charts if not chart.is_empty]

    def memory(self) -> Chart:
        """Of the host, by rank; the pages of mapped files are the kernel's."""
        series = [
            self._line(f"rank {rank.rank}", time, (samples["anonymous"] + samples["shared"]) / _GIB)
            for rank, time, samples in self._each()
        ]
        series += self._foreseen()
        if self.training.is_on_host:
            series += self.training.lines()
        for rank, shift in zip(self.ranks, self.shifts, strict=True):
            shares = rank.divided()
            if len(shares["t"]):
                own = (shares["anonymous"] + shares["shared"]) / _GIB
                series.append(self._line(f"rank {rank.rank}, PSS", shares["t"] + shift, own, Look.POINTS))
        return Chart(
            "memory", "Host memory by rank, anonymous and shared; points: PSS", _TIME, "GiB", series, self.bands
        )

    def by_machine(self) -> list[Chart]:
        """The same, all ranks of a machine on top of each other; what they share counts once."""
        machines = self._machines()
        charts = []
        for number, members in enumerate([*machines.values()][:_MOST_MACHINES]):
            title = f"Host memory of {members[0].host}, its ranks stacked"
            if len({ranks[0].host for ranks in machines.values()}) < len(machines):
                title += f" (machine {number})"  # by names they are not told apart
            key = f"machine{number}" if len(machines) > 1 else "machine"
            charts.append(Chart(key, title, _TIME, "GiB", self._stacked(members), self.bands))
        return charts

    def _machines(self) -> dict[str, list[RankRecord]]:
        machines: dict[str, list[RankRecord]] = {}
        for rank in self.run.ranks:
            machines.setdefault(rank.machine, []).append(rank)
        return machines

    def accelerator(self) -> Chart:
        """Memory of accelerators, by rank; nothing where there is none."""
        series = []
        for rank, time, samples in self._each():
            if samples["used"].any():
                series.append(self._line(f"rank {rank.rank}, in tensors", time, samples["allocated"] / _GIB))
                series.append(self._line(f"rank {rank.rank}, kept", time, samples["reserved"] / _GIB, Look.DASHED))
        if series and not self.training.is_on_host:
            series += self.training.lines()
        return Chart("accelerator", "Accelerator memory by rank", _TIME, "GiB", series, self.bands)

    def phases(self) -> Chart:
        """When each rank was in which phase; short ones that follow each other are one."""
        shown = _shown(self.ranks, _MOST_RANKS_OF_BARS)
        phases = {rank.rank: rank.phases() for rank in shown}
        rows = [*dict.fromkeys(_row(times) for found in phases.values() for times in found)][:_MOST_ROWS]
        bars = []
        for rank in shown:
            shift = self.run.shift_of(rank)
            names: list[str] = []
            starts, stops = [np.zeros(0)], [np.zeros(0)]
            for times in phases[rank.rank]:
                if (row := _row(times)) in rows:
                    start, ends = merged(*times.spans(), self.seconds / 600)
                    names += [row] * len(start)
                    starts.append(start + shift)
                    stops.append(ends + shift)
            start = np.concatenate(starts)
            bars.append(Bars(f"rank {rank.rank}", names, start, np.concatenate(stops) - start))
        some = f" of {len(shown)} of {len(self.run.ranks)} ranks" if len(shown) < len(self.run.ranks) else ""
        return Chart("phases", f"Phases{some}", _TIME, "", bars=bars, rows=rows)

    def traffic(self) -> list[Chart]:
        """Bytes a second, by rank, where there is anything worth seeing."""
        charts = []
        for key, name, title in (
            ("read", "read", "Read, by system calls"),
            ("from_disk", "from_disk", "Read, from disks"),
            ("written", "written", "Written, by system calls"),
        ):
            series = []
            for rank, time, samples in self._each():
                middle, rate = _rates(time, samples[name], 0.5 / rank.samples_per_second)
                series.append(self._line(f"rank {rank.rank}", middle, rate * 1024 / 1e9))
            if any(item.y.max(initial=0.0) > 0.001 for item in series):
                charts.append(Chart(key, title, _TIME, "GB/s", series, self.bands))
        return charts

    def fullest(self, name: str) -> Series:
        """Host memory of the fullest rank, at each moment."""
        grid = self._grid()
        if not len(grid):
            return Series(name, grid, grid)
        most = np.zeros(len(grid))
        for rank in self.run.ranks:
            most = np.maximum(most, self._on(grid, rank, "anonymous", "shared"))
        return self._line(name, grid, most)

    def tables(self) -> list[Table]:
        """What was foreseen beside what happened, and seconds by phase."""
        return [table for table in (self._loads(), self.training.table(), self._seconds()) if table.rows]

    def _each(self) -> list[tuple[RankRecord, Floats, Mapping[str, Floats]]]:
        return [
            (rank, samples["t"] + shift, samples)
            for rank, samples, shift in zip(self.ranks, self.samples, self.shifts, strict=True)
            if len(samples["t"])
        ]

    def _line(self, name: str, x: Floats, y: Floats, look: Look = Look.LINE) -> Series:
        places = extremes(y, self.parts)
        return Series(name, x[places], y[places], look)

    def _grid(self) -> Floats:
        """Moments, as far apart as samples are, but not more than some ten thousands."""
        if not any(len(samples["t"]) for samples in self.samples):
            return np.zeros(0)
        rate = max(rank.samples_per_second for rank in self.ranks)
        return np.linspace(0.0, self.seconds, int(np.clip(self.seconds * rate, 2, 50_000)))

    def _on(self, grid: Floats, rank: RankRecord, *names: str) -> Floats:
        """Memory of a rank at these moments, in GiB; nothing before its first sample and after its last."""
        samples = rank.samples()
        if not len(samples["t"]):
            return np.zeros(len(grid))
        total = sum((samples[name] for name in names), np.zeros(len(samples["t"])))
        return np.interp(grid, samples["t"] + self.run.shift_of(rank), total, left=0.0, right=0.0) / _GIB

    def _stacked(self, members: Sequence[RankRecord]) -> list[Series]:
        grid = self._grid()
        if not len(grid):
            return []
        shared = np.zeros(len(grid))
        own: dict[str, Floats] = {}
        for rank in members:
            shared = np.maximum(shared, self._on(grid, rank, "shared"))
            own[f"rank {rank.rank}"] = self._on(grid, rank, "anonymous")
        layers = {"shared": shared, **own}
        places = extremes(np.sum(list(layers.values()), axis=0), min(self.parts, _POINTS // (2 * len(layers))))
        return [Series(name, grid[places], layer[places], Look.AREA) for name, layer in layers.items()]

    def _foreseen(self) -> list[Series]:
        """The peak that was foreseen for a load, on top of what there was before, of the rank that needs most."""
        found = []
        for rank, _, _ in self._each():
            for load in _loads_of(rank):
                around = _around(load)
                if around.before_kib < 0:
                    continue
                before = around.before_kib / _GIB
                stop = rank.last if around.stop is None else around.stop
                place = np.array([around.start, stop]) + self.run.shift_of(rank)
                height = before + _forecast(load.facts, "host_bytes") / 2**30
                found.append(Series(f"foreseen for rank {rank.rank}", place, np.full(2, height), Look.DASHED))
        return [max(found, key=lambda item: float(item.y[0]))] if found else []

    def _loads(self) -> Table:
        head = ("rank", "read, foreseen", "read", "held, foreseen", "held", "host peak, foreseen", "host, grown by")
        rows = []
        for rank, _, _ in self._each():
            for load in _loads_of(rank):
                around = _around(load)
                grown = max(around.most_kib - around.before_kib, 0.0) * 1024 if around.before_kib >= 0 else 0.0
                facts = load.facts
                held = ("read_bytes", _number(facts, "read_bytes")), ("shard_bytes", _number(facts, "placed_bytes"))
                pairs = [in_bytes(int(value)) for name, was in held for value in (_forecast(facts, name), was)]
                rows.append(
                    (str(rank.rank), *pairs, in_bytes(int(_forecast(facts, "host_bytes"))), in_bytes(int(grown)))
                )
        return Table("Loading: foreseen, and done", head, rows[:_MOST_RANKS])

    def _seconds(self) -> Table:
        taken: dict[tuple[str, ...], dict[int, list[PhaseTimes]]] = {}
        for rank in self.ranks:
            for times in rank.phases():
                taken.setdefault(times.path, {}).setdefault(rank.rank, []).append(times)
        rows = []
        for path, by_rank in list(taken.items())[:_MOST_ROWS]:
            sums = {rank: sum(times.seconds for times in each) for rank, each in by_rank.items()}
            slowest = max(sums, key=lambda rank: sums[rank])
            most_times = max(sum(times.times for times in each) for each in by_rank.values())
            mean = sum(sums.values()) / len(sums)
            most = f"{sums[slowest]:.2f} s on rank {slowest}"
            rows.append((": ".join(path), str(most_times), f"{mean:.2f} s", most))
        return Table("Phases: seconds", ("phase", "times", "mean of ranks", "most"), rows)

    def _bands(self) -> list[Band]:
        """The outer phases of the first rank."""
        if not self.ranks:
            return []
        first, shift = self.ranks[0], self.shifts[0]
        bands = []
        for times in first.phases():
            if len(times.path) > 1 or times.lane:
                continue
            name = times.name
            starts, stops = merged(*times.spans(), self.seconds / 100)
            bands += [Band(name, float(a) + shift, float(b) + shift) for a, b in zip(starts, stops, strict=True)]
        longest = sorted(bands, key=lambda band: band.start - band.stop)[:_MOST_BANDS]
        return sorted(longest, key=lambda band: band.start)


def _shown(ranks: Sequence[RankRecord], most: int) -> list[RankRecord]:
    """So many of the ranks, from the first to the last."""
    places = np.unique(np.linspace(0, len(ranks) - 1, min(len(ranks), most)).astype(int))
    return [ranks[int(place)] for place in places]


def _fullest(ranks: Sequence[RankRecord]) -> RankRecord:
    return max(ranks, key=lambda rank: rank.peak_kib)


def _with_fullest(shown: list[RankRecord], ranks: Sequence[RankRecord]) -> list[RankRecord]:
    """These, with the one that needed most: a peak is what somebody looks for."""
    if len(shown) == len(ranks):
        return shown
    by_rank = {rank.rank: rank for rank in (*shown, _fullest(ranks))}
    return [by_rank[number] for number in sorted(by_rank)]


def _row(times: PhaseTimes) -> str:
    return ": ".join(times.path) + (f" (thread {times.lane})" if times.lane > 0 else "")


def _rates(time: Floats, counted: Floats, least_s: float) -> tuple[Floats, Floats]:
    """What was added a second, between samples; a count that went back has begun anew."""
    if len(time) < 2:
        return np.zeros(0), np.zeros(0)
    passed = np.maximum(np.diff(time), least_s)
    return (time[1:] + time[:-1]) / 2, np.maximum(np.diff(counted), 0.0) / passed


def _loads_of(rank: RankRecord) -> list[ToldFacts]:
    return [told for told in rank.told if told.facts.get("tell") == "load"]


def _around(load: ToldFacts) -> PhaseSpan:
    """The outermost phase that a load was told in, or that moment."""
    t = float(load.facts["t"])
    return load.around or PhaseSpan((), 0, t, t)


def _number(facts: Mapping[str, Any], name: str) -> float:
    return number_in(facts, name) or 0.0


def _forecast(load: Mapping[str, Any], name: str) -> float:
    forecast = load.get("forecast")
    return _number(forecast, name) if isinstance(forecast, dict) else 0.0
