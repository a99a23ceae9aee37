"""Compares several ways to load a model for training: memory, seconds, and the values of the model.

[Note: Growth] The baseline of a rank is its first sample, after all imports. Its growth is its anonymous
and shared memory (RssAnon, RssShmem) above it. The growth of the machine is the largest sum over its ranks
at one moment. Pages of mapped files belong to the kernel, which can reclaim them. They are reported separately.
"""

import contextlib
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from shardwise import pictures, run_records
from shardwise.errors import ConfigError, FormatError, ShardwiseError, StorageError
from shardwise.execution.memory import host_memory
from shardwise.execution.processes import RanksLateError
from shardwise.formats.contract import CheckpointIndex
from shardwise.formats.opening import open_checkpoint
from shardwise.report.names import in_bytes
from shardwise.startup_arms import ARMS, LOAD, OURS, PHASES, WRAP, ArmOnRank
from shardwise.storage.remote import resolve

Print: TypeAlias = Callable[[str], None]
"""Prints a line for the user."""

StartArm: TypeAlias = Callable[..., list[ArmOnRank]]
"""Runs an arm on fresh ranks."""

SLACK_BYTES = 32 << 20
"""Growth that our arm may have on each rank, beyond its shards and its budget."""

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_BLOCK_BYTES = 8 << 20


def _missing(arm: str) -> str:
    """Return the reason why an arm cannot run here, or ""."""
    if arm.startswith("accelerate") and importlib.util.find_spec("accelerate") is None:
        return "accelerate is not installed. Run pip install 'shardwise[accelerate]'"
    return ""


@dataclass(frozen=True, slots=True)
class StartupOptions:
    """The model (a folder, or a repository of the hub), the ranks, and the arms (with commas, "" for all).

    ``out`` is a new or empty folder. An arm may take ``limit`` seconds, including the start of its ranks.
    """

    model: str
    ranks: int
    out: Path
    arms: str = ""
    dtype: str = "float32"
    limit: float = 1800.0


@dataclass(frozen=True)
class ArmRun:
    """The run of an arm.

    Attributes:
        folder: of the run.
        seconds: from when the first rank begins to load until the last one has wrapped.
        phases: seconds of each phase, on the slowest rank.
        growth_bytes: of all ranks of the machine together, at the worst moment.
        fullest_bytes: of the rank that grew most.
        mapped_bytes: growth of mapped files, all ranks together, at the worst moment.
        device_bytes: the most that tensors take on one accelerator.
        limit_bytes: growth that our arm may have: shards, and for each rank the budget and some slack.
        values: fingerprints by name.
    """

    arm: str
    folder: str
    seconds: float
    phases: Mapping[str, float]
    growth_bytes: int
    fullest_bytes: int
    mapped_bytes: int
    device_bytes: int
    limit_bytes: int = 0
    values: Mapping[str, str] = field(default_factory=dict, repr=False)
    panel: pictures.Panel | None = field(default=None, repr=False)


@dataclass(frozen=True)
class StartupResult:
    """The runs by arm, the reasons of arms that did not run, and the files of the report."""

    model: str
    ranks: int
    dtype: str
    runs: Mapping[str, ArmRun]
    not_run: Mapping[str, str]
    files: Sequence[str] = ()

    @property
    def holds(self) -> bool:
        """True if our arm kept to its limit, or did not run."""
        ours = self.runs.get(OURS)
        return ours is None or ours.growth_bytes <= ours.limit_bytes

    def verdict(self, arm: str) -> str:
        """Return "same" if the model of an arm equals that of the first arm, otherwise what differs."""
        first, own = next(iter(self.runs.values())).values, self.runs[arm].values
        names = [*{**first, **own}]
        different = [name for name in names if own.get(name) != first.get(name) or not own[name]]
        return f"{len(different)} of {len(names)} differ, as {different[0]}" if different else "same"

    def table(self) -> pictures.Table:
        """Return the arms in rows: seconds and memory."""
        names = ["growth_bytes", "fullest_bytes", "mapped_bytes"]
        head = ["arm", "seconds", "growth", "fullest rank", "mapped files"]
        if any(run.device_bytes for run in self.runs.values()):
            names, head = [*names, "device_bytes"], [*head, "device"]
        rows = [
            (arm, f"{run.seconds:.2f}", *(in_bytes(getattr(run, name)) for name in names), self.verdict(arm))
            for arm, run in self.runs.items()
        ]
        return pictures.Table("Ways to load a model", (*head, "values"), rows)

    def notes(self) -> list[str]:
        """Return additions to the table: arms that did not run, and the limit."""
        found = [f"{arm} did not run: {reason}" for arm, reason in self.not_run.items()]
        if (ours := self.runs.get(OURS)) is not None:
            growth, limit = in_bytes(ours.growth_bytes), in_bytes(ours.limit_bytes)
            verdict = "holds" if self.holds else "DOES NOT HOLD"
            found.append(f"limit of {OURS}: {growth} of {limit} (shards, a budget and 32 MiB a rank), {verdict}")
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, without fingerprints."""
        arms = {
            arm: {**asdict(replace(run, values={}, panel=None)), "values": self.verdict(arm)}
            for arm, run in self.runs.items()
        }
        place = {"model": self.model, "ranks": self.ranks, "dtype": self.dtype}
        return {**place, "arms": arms, "not_run": dict(self.not_run), "holds": self.holds, "files": [*self.files]}


def compare_startup(options: StartupOptions, start: StartArm, tell: Print) -> StartupResult:
    """Run the arms, and write their records, the numbers, a picture and the report into the folder.

    ``start(size, arm, model, dtype, folder, timeout_s=...)`` loads a model by an arm on fresh ranks and returns
    their results. ``tell`` receives lines for the console.

    Raises:
        ShardwiseError: there is no such model or arm, the folder is in use, or our arm, or all, have failed.
    """
    names = _arms_named(options.arms)
    place = resolve(options.model)
    index = open_checkpoint(place)
    _create_empty(options.out)
    _read_once(place)
    reasons = {name: _missing(name) or _lack_of_room(name, index, options) for name in names}
    not_run = {name: reason for name, reason in reasons.items() if reason}
    runs: dict[str, ArmRun] = {}
    for name in [name for name in names if name not in not_run]:
        tell(f"{name}: {ARMS[name].does}")
        try:
            runs[name] = _run_arm(name, place, options, start)
        except ShardwiseError as error:
            if name == OURS:
                raise
            not_run[name] = str(error).strip().rpartition("\n")[2]
            tell(f"{name}: {not_run[name]}")
    if not runs:
        raise ConfigError(f"no arm could run ({'; '.join(f'{name}: {why}' for name, why in not_run.items())})")
    result = StartupResult(options.model, options.ranks, options.dtype, runs, not_run)
    try:
        (options.out / "startup.json").write_text(json.dumps(result.to_dict(), indent=1) + "\n")
    except OSError as error:
        raise StorageError(
            f"{options.out}: it cannot be written ({error.strerror or error}). Free some space"
        ) from error
    return replace(result, files=_draw(options.out, result, tell))


def _arms_named(text: str) -> list[str]:
    """Return the arms in a comma-separated list, in the order of ``ARMS``.

    Raises:
        ConfigError: one does not exist, or lacks a package.
    """
    names = [name.strip() for name in text.split(",")] if text else list(ARMS)
    if unknown := [name for name in names if name not in ARMS]:
        raise ConfigError(f"--arms={text!r}: there is no {unknown[0]!r}, but {', '.join(ARMS)}")
    for name in names:
        if text and (reason := _missing(name)):
            raise ConfigError(f"--arms={text!r}: {name} cannot run here: {reason}")
    return [name for name in ARMS if name in names]


def _lack_of_room(arm: str, index: CheckpointIndex, options: StartupOptions) -> str:
    """Return the reason why an arm does not fit on this machine, or "".

    Values in their stored dtype stay in mapped files, which the kernel can reclaim.
    """
    tensors = index.tensors()
    numbers = sum(tensor.nbytes // max(tensor.dtype.itemsize, 1) for tensor in tensors)
    wanted_bytes = numbers * _ITEM_BYTES.get(options.dtype, 0)
    if wanted_bytes in (0, sum(tensor.nbytes for tensor in tensors)):
        return ""
    holders = ARMS[arm].holders
    # Of all ranks at once: whole models, shards, and tensors that are sent whole.
    needed = {"": 1, "rank 0": 3, "every rank": options.ranks + 1}[holders] * wanted_bytes
    free = host_memory()
    if free is None or needed <= free:
        return ""
    what = f"{holders} holds the whole model" if holders else "the shards do not fit"
    return f"{what}: {in_bytes(needed)} in all, and {in_bytes(free)} are free"


def _create_empty(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        used = next(out.iterdir(), None)
    except OSError as error:
        raise StorageError(f"--out={out}: it cannot be created ({error.strerror or error})") from error
    if used is not None:
        raise StorageError(f"--out={out}: it has {used.name} in it. Name a new or an empty folder.")


def _read_once(place: Path) -> None:
    """Read the files, so that the first arm finds them in the page cache as the others do."""
    for path in [place] if place.is_file() else sorted(place.iterdir()):
        with contextlib.suppress(OSError):
            if path.is_file():
                with path.open("rb", buffering=0) as file:
                    while file.read(_BLOCK_BYTES):
                        pass


def _run_arm(name: str, place: Path, options: StartupOptions, start: StartArm) -> ArmRun:
    """Run an arm on fresh ranks.

    Raises:
        ShardwiseError: a rank failed, or they took too long.
    """
    folder = options.out / name
    try:
        ranks = start(options.ranks, name, str(place), options.dtype, str(folder), timeout_s=options.limit)
    except RanksLateError as error:
        raise ConfigError(f"{name} was ended: {error}; --limit gives more") from error
    limit_bytes = sum(rank.host_bytes + rank.budget_bytes + SLACK_BYTES for rank in ranks)
    return replace(
        arm_run(name, run_records.read_run(folder)), limit_bytes=limit_bytes, values=_agreed_values(ranks)
    )


def _agreed_values(ranks: Sequence[ArmOnRank]) -> dict[str, str]:
    """Return fingerprints by name, with "" for a tensor that differs between ranks."""
    found: dict[str, str] = {}
    for rank in ranks:
        for name, value in rank.values.items():
            found[name] = value if found.get(name, value) == value else ""
    return found


def _draw(out: Path, result: StartupResult, tell: Print) -> list[str]:
    """Draw all arms and the report. Return the files.

    An error in drawing is reported and not raised: the numbers have been written already.
    """
    table, runs = result.table(), result.runs.values()
    try:
        picture = pictures.draw_panels([run.panel for run in runs if run.panel is not None])
        figures = pictures.PageSection(table.title, {}, [replace(table, title="")], result.notes())
        panels = pictures.PageSection("Memory of all ranks", {"startup.png": picture})
        pictures.draw_report([Path(run.folder) for run in runs], out / "report", [figures, panels])
        (out / "startup.png").write_bytes(picture)
    except (ShardwiseError, OSError) as error:
        tell(f"no picture and no report: {error}")
        return []
    return [str(out / "startup.png"), str(out / "report" / "report.html")]


# Numbers of a run


def arm_run(arm: str, record: run_records.RunRecord) -> ArmRun:
    """Return time and memory of a run, from the records of its ranks.

    Raises:
        FormatError: a rank has left no samples, or not all phases.
    """
    spans = [_outer_phases(record, rank) for rank in record.ranks]
    begin, end = min(each[LOAD].start for each in spans), max(each[WRAP].stop for each in spans)
    time = np.unique(np.concatenate([rank.samples["t"] for rank in record.ranks]))
    own = [_growth(rank, time, rank.host_kib) for rank in record.ranks]
    mapped = [_growth(rank, time, rank.samples["file"]) for rank in record.ranks]
    growth_bytes, seconds = _most_bytes(sum(own)), end - begin
    stops = [max(each[name].stop for each in spans) - begin for name in PHASES]
    title = f"{arm}\n{seconds:.1f} s, at most {growth_bytes / 2**30:.2f} GiB"
    shown = {name: (start, stop) for name, start, stop in zip(PHASES, [0.0, *stops], stops, strict=False)}
    return ArmRun(
        arm,
        str(record.path),
        seconds,
        {name: max(each[name].stop - each[name].start for each in spans) for name in PHASES},
        growth_bytes,
        max(map(_most_bytes, own)),
        _most_bytes(sum(mapped)),
        int(max(rank.peak_kib("allocated") for rank in record.ranks)) << 10,
        panel=pictures.Panel(title, time - begin, [np.maximum(kib, 0) / 2**20 for kib in own], shown),
    )


def _outer_phases(record: run_records.RunRecord, rank: run_records.RankRecord) -> dict[str, run_records.PhaseSpan]:
    found = {span.path[0]: span for span in rank.phases if len(span.path) == 1 and span.thread == 0}
    if not found.keys() >= set(PHASES) or not rank.is_closed or not rank.samples["t"].size:
        raise FormatError(f"{record.path}: rank {rank.rank} was not observed to its end")
    return found


def _growth(rank: run_records.RankRecord, time: run_records.Floats, kib: run_records.Floats) -> run_records.Floats:
    """Return KiB above the first sample at these moments. Outside of its own samples the nearest one is used."""
    grown: run_records.Floats = np.interp(time, rank.samples["t"], kib - kib[0])
    return grown


def _most_bytes(kib: Any) -> int:
    return int(kib.max(initial=0.0)) << 10
