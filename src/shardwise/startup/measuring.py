"""Plans the arms for which there is room, has ranks carry them out in turns, and concludes. Needs no torch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from shardwise.errors import ConfigError, ShardwiseError, StorageError
from shardwise.execution.memory.free import host_pools
from shardwise.execution.processes.local_ranks import RanksLateError
from shardwise.formats.checkpoint_index import CheckpointIndex
from shardwise.formats.opening import open_checkpoint
from shardwise.observing.run_record import RunReader
from shardwise.pictures.chart import Chart
from shardwise.pictures.images import write_side_by_side
from shardwise.pictures.installed import require
from shardwise.pictures.page import draw_report, write_text
from shardwise.report.names import in_bytes
from shardwise.startup.figures import ArmRun, StartupResult, arm_run, chart_of, figures_of, limit_of
from shardwise.startup.kinds import KINDS, OURS, arms_named, lacking
from shardwise.startup.values import BroughtUp
from shardwise.storage.hub import resolve

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, of the dtypes that a model can be asked for in."""


def no_room(arm: str, index: CheckpointIndex, ranks: int, dtype: str) -> str:
    """Why an arm would not fit on this machine; "" where it does.

    Values that are wanted as they are stored stay in mapped files, which take no memory from anybody.
    """
    tensors = index.tensors()
    stored_bytes = sum(tensor.nbytes for tensor in tensors)
    wanted_bytes = sum(tensor.nbytes // max(tensor.dtype.itemsize, 1) for tensor in tensors) * SIZES.get(dtype, 0)
    if wanted_bytes in (0, stored_bytes):
        return ""
    needs = KINDS[arm].holder.at_once_bytes(wanted_bytes, ranks)
    room = min(host_pools().values(), default=needs)
    if needs <= room:
        return ""
    return (
        f"{KINDS[arm].holder.value} holds the whole model: {in_bytes(needs)} in all, and {in_bytes(room)} are free"
    )


PICTURE = "startup.png"
FIGURES = "startup.json"
_BLOCK = 8 << 20


@dataclass(frozen=True, slots=True)
class StartupOptions:
    """What is compared: a model, by its folder or its name on the hub, on so many ranks of this machine.

    Attributes:
        out: a new or empty folder, for the runs, the figures, the report and the picture.
        arms: names with commas between them; None for all.
        repeats: of all arms, in turns.
        dtype: the name of one, or "auto".
        limit: seconds that an arm may take, with the start of its ranks.
    """

    model: str
    ranks: int
    out: Path
    arms: str | None
    repeats: int
    dtype: str
    limit: float


class Starter(Protocol):
    """Starts fresh ranks for one call."""

    def __call__(
        self, size: int, function: Callable[..., BroughtUp], /, *args: object, timeout_s: float
    ) -> list[BroughtUp]:
        """Call the function on every rank; its values by rank. Raises ShardwiseError."""


@dataclass(frozen=True, slots=True)
class _ArmDone:
    """An arm that came to its end."""

    run: ArmRun
    chart: Chart
    budget_bytes: int


def measure_startup(options: StartupOptions, start: Starter, tell: Callable[[str], None]) -> StartupResult:
    """Run the arms in turns, and write runs, figures, report and picture; ``tell`` is given what happens, in lines.

    Raises:
        ShardwiseError: there is no such model or arm, the folder is in use, ours or all have failed.
    """
    names = arms_named(options.arms)
    place = resolve(options.model)
    index = open_checkpoint(place)
    _take(options.out)
    _warm(place)
    reasons = {name: lacking(name) or no_room(name, index, options.ranks, options.dtype) for name in names}
    not_run = {name: reason for name, reason in reasons.items() if reason}
    done: list[_ArmDone] = []
    for repeat in range(options.repeats):
        for name in names:
            if name in not_run:
                continue
            folder = options.out / (name if options.repeats == 1 else f"{name}-{repeat + 1}")
            tell(f"{folder.name}: {KINDS[name].does}")
            try:
                done.append(_run_arm(name, place, folder, options, start))
            except ShardwiseError as error:
                if name == OURS:
                    raise
                not_run[name] = str(error).strip().rpartition("\n")[2]
                tell(f"{folder.name}: {not_run[name]}")
    if not done:
        told = "; ".join(f"{name}: {reason}" for name, reason in not_run.items())
        raise ConfigError(f"no arm could run, so that nothing is measured ({told})")
    result = _concluded(options, done, not_run)
    write_text(options.out / FIGURES, json.dumps(result.to_dict(), indent=1) + "\n")
    return replace(result, files=_pictures(options.out, done, tell))


def _run_arm(name: str, place: Path, folder: Path, options: StartupOptions, start: Starter) -> _ArmDone:
    """One run of an arm, on fresh ranks.

    Raises:
        ShardwiseError: a rank failed, or they took too long.
    """
    job = (name, str(place), options.dtype, str(folder))
    try:
        held = start(options.ranks, bring_up, *job, timeout_s=options.limit)
    except RanksLateError as error:
        late = ", ".join(map(str, sorted(error.failures)))
        raise ConfigError(
            f"{name} was ended: after {options.limit:g} s rank {late} had not come to its end; --limit gives more"
        ) from error
    record = RunReader(folder).read()
    figures = figures_of(record)
    run = arm_run(name, str(folder), figures, held)
    return _ArmDone(run, chart_of(name, record, figures), max(rank.budget_bytes for rank in held))


def _concluded(options: StartupOptions, done: Sequence[_ArmDone], not_run: Mapping[str, str]) -> StartupResult:
    """All runs, with the limit of that of ours that grew most."""
    ours = [each for each in done if each.run.arm == OURS]
    worst = max(ours, key=lambda each: each.run.figures.growth_bytes, default=None)
    budget_bytes = max((each.budget_bytes for each in ours), default=0)
    limit = None if worst is None else limit_of(worst.run, options.ranks, budget_bytes)
    return StartupResult(
        options.model, options.ranks, options.dtype, [each.run for each in done], dict(not_run), limit
    )


def bring_up(arm: str, model: str, dtype: str, run: str) -> BroughtUp:
    """Carry an arm out, on a rank. Collective: yes."""
    from shardwise.startup.arms import StartupJob
    from shardwise.startup.rank import bring_up_observed

    return bring_up_observed(arm, StartupJob(model, dtype, run))


def _take(out: Path) -> None:
    """Make the folder of the runs, which holds nothing yet.

    Raises:
        StorageError: it has something in it, or cannot be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        used = next(out.iterdir(), None)
    except OSError as error:
        raise StorageError(f"--out={out}: it cannot be made ({error.strerror or error})") from error
    if used is not None:
        raise StorageError(f"--out={out}: there is {used.name} in it already; name a new or an empty folder")


def _warm(place: Path) -> None:
    """Read the files once, so that the first arm finds them where the others do; not those that cannot be read."""
    block = bytearray(_BLOCK)
    for path in [place] if place.is_file() else sorted(place.iterdir()):
        with contextlib.suppress(OSError):
            if path.is_file():
                with path.open("rb", buffering=0) as file:
                    while file.readinto(block):
                        pass


def _pictures(out: Path, done: Sequence[_ArmDone], tell: Callable[[str], None]) -> list[str]:
    """Draw all arms beside each other, each by its run of median length, and the report; the files.

    Nothing where what draws is not installed, or there is no room: what was measured is not lost by that.
    """
    charts = []
    for name in KINDS:
        if found := sorted((each for each in done if each.run.arm == name), key=_seconds_of):
            charts.append(found[(len(found) - 1) // 2].chart)
    try:
        require("plotly", "matplotlib")
        write_side_by_side(charts, out / PICTURE)
        draw_report([Path(each.run.folder) for each in done], out / "report")
    except ShardwiseError as error:
        tell(f"there is no picture, and no report: {error}")
        return []
    return [str(out / PICTURE), str(out / "report" / "report.html")]


def _seconds_of(done: _ArmDone) -> float:
    return done.run.figures.seconds
