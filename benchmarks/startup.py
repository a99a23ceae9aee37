"""Ways to load a model for training, compared: memory, seconds, and the values of the model.

``python -m benchmarks.startup``. Four ranks load Qwen3-1.7B's shape by every arm of ``benchmarks/startup_arms.py``,
each arm in new processes, which are observed while they load, wrap and create an optimizer. An arm that fails is
left out. The folder of ``--out`` has a run for each arm, ``startup.png`` and ``report/``.

The baseline of a rank is its first sample, after all imports. Its growth is its anonymous and shared memory
(RssAnon, RssShmem) above it. The growth of the machine is the largest sum over its ranks at one moment. Pages of
mapped files belong to the kernel, which can reclaim them. They are reported separately.
"""

import argparse
import io
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.checkpoints import SHAPES, write
from benchmarks.place import RANKS, SLACK_BYTES, add_device, commit, machine, say
from benchmarks.startup_arms import ARMS, LOAD, OURS, PHASES, WRAP, ArmOnRank, load_by_arm
from tests.support.local_ranks import LocalRanks, RankError

from shardwise.pictures import draw_report
from shardwise.run_records import Floats, PhaseSpan, RankRecord, RunRecord, read_run

PICTURE = Path("docs", "images", "startup.png")
_MIB = 1 << 20
_BLOCK_BYTES = 8 << 20
_SHADES = ("#3b82f6", "#60a5fa")
_BANDS = {"load": "#f59e0b", "wrap": "#10b981", "optimizer": "#a855f7"}
_INK = "#7d8590"  # readable on white and on black


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
        curves: seconds, and the growth of each rank in GiB.
        spans: the first start and the last stop of each phase.
    """

    folder: str
    seconds: float
    phases: Mapping[str, float]
    growth_bytes: int
    fullest_bytes: int
    mapped_bytes: int
    device_bytes: int
    limit_bytes: int = 0
    values: Mapping[str, str] = field(default_factory=dict, repr=False)
    curves: tuple[Floats, Sequence[Floats]] | None = field(default=None, repr=False)
    spans: Mapping[str, tuple[float, float]] = field(default_factory=dict, repr=False)


def run_of(record: RunRecord) -> ArmRun:
    """Return time and memory of a run, from the records of its ranks.

    Raises:
        RuntimeError: a rank has left no samples, or not all phases.
    """
    spans = [_outer_phases(record, rank) for rank in record.ranks]
    begin, end = min(each[LOAD].start for each in spans), max(each[WRAP].stop for each in spans)
    time = np.unique(np.concatenate([rank.samples["t"] for rank in record.ranks]))
    own = [_growth(rank, time, rank.host_kib) for rank in record.ranks]
    mapped = [_growth(rank, time, rank.samples["file"]) for rank in record.ranks]
    stops = [max(each[name].stop for each in spans) - begin for name in PHASES]
    return ArmRun(
        str(record.path),
        end - begin,
        {name: max(each[name].stop - each[name].start for each in spans) for name in PHASES},
        _most_bytes(sum(own)),
        max(map(_most_bytes, own)),
        _most_bytes(sum(mapped)),
        int(max(rank.peak_kib("allocated") for rank in record.ranks)) << 10,
        curves=(time - begin, [np.maximum(kib, 0) / 2**20 for kib in own]),
        spans=dict(zip(PHASES, itertools.pairwise([0.0, *stops]), strict=True)),
    )


def _outer_phases(record: RunRecord, rank: RankRecord) -> dict[str, PhaseSpan]:
    found = {span.path[0]: span for span in rank.phases if len(span.path) == 1 and span.thread == 0}
    if not found.keys() >= set(PHASES) or not rank.is_closed:
        raise RuntimeError(f"{record.path}: rank {rank.rank} was not observed to its end")
    return found


def _growth(rank: RankRecord, time: Floats, kib: Floats) -> Floats:
    """Return KiB above the first sample at these moments. Outside of its own samples the nearest one is used."""
    grown: Floats = np.interp(time, rank.samples["t"], kib - kib[0])
    return grown


def _most_bytes(kib: Any) -> int:
    return int(kib.max(initial=0.0)) << 10


def compare(
    model_dir: Path,
    out: Path,
    *,
    ranks: int,
    dtype: str,
    arms: Sequence[str],
    timeout_s: float,
    device: str = "cpu",
) -> tuple[dict[str, ArmRun], dict[str, str]]:
    """Run the arms. Return the runs by arm, and the errors of peers that failed.

    Raises:
        RankError: our arm failed.
    """
    _read_once(model_dir)
    runs: dict[str, ArmRun] = {}
    failed: dict[str, str] = {}
    for name in arms:
        say(f"{name}: {ARMS[name].does}")
        try:
            is_forked = device == "cpu"  # from a process that has the imports
            with LocalRanks(ranks, timeout_s=timeout_s, device=device, is_forked=is_forked) as started:
                ended: list[ArmOnRank] = started.run(load_by_arm, name, str(model_dir), dtype, str(out / name))
        except RankError as error:
            if name == OURS:
                raise
            failed[name] = str(error).strip().rpartition("\n")[2]
            continue
        limit_bytes = sum(rank.host_bytes + rank.budget_bytes + SLACK_BYTES for rank in ended)
        runs[name] = replace(run_of(read_run(out / name)), limit_bytes=limit_bytes, values=_agreed_values(ended))
    return runs, failed


def _read_once(folder: Path) -> None:
    """Read the files, so that the first arm finds them in the page cache as the others do."""
    for path in sorted(folder.iterdir()):
        with path.open("rb", buffering=0) as file:
            while file.read(_BLOCK_BYTES):
                pass


def _agreed_values(ranks: Sequence[ArmOnRank]) -> dict[str, str]:
    """Return fingerprints by name, with "" for a tensor that differs between ranks."""
    found: dict[str, str] = {}
    for rank in ranks:
        for name, value in rank.values.items():
            found[name] = value if found.get(name, value) == value else ""
    return found


def verdict(runs: Mapping[str, ArmRun], arm: str) -> str:
    """Return "same" if the model of an arm equals that of the first arm, otherwise what differs."""
    first, own = next(iter(runs.values())).values, runs[arm].values
    names = [*{**first, **own}]
    different = [name for name in names if own.get(name) != first.get(name) or not own[name]]
    return f"{len(different)} of {len(names)} differ, as {different[0]}" if different else "same"


def page(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the results as Markdown."""
    place = results["machine"]
    yield f"# A model coming up: {results['model']}, {results['ranks']} ranks, as {results['dtype']}"
    yield ""
    yield (
        f"{results['date']}, commit {results['commit']}, `{results['command']}`; {place['cpus']} cores "
        f"({place['processor']}), {place['memory_bytes'] / 2**30:.0f} GiB, Linux {place['kernel']}, "
        + ", ".join(f"{name} {version}" for name, version in place["versions"].items())
        + ". Files in the page cache; fresh processes for each arm."
    )
    yield ""
    yield "| arm | seconds to wrapped | growth, MiB | fullest rank | mapped files | device | values |"
    yield "|---|--:|--:|--:|--:|--:|---|"
    columns = ("growth_bytes", "fullest_bytes", "mapped_bytes", "device_bytes")
    for name, arm in results["arms"].items():
        most = [f"{arm[key] / _MIB:,.0f}" for key in columns]
        yield f"| {name} | {arm['seconds']:.2f} | {' | '.join(most)} | {arm['verdict']} |"
    yield ""
    for name, reason in results["not_run"].items():
        yield f"{name} did not run: {reason}."
        yield ""
    if ours := results["arms"].get(OURS):
        held = "holds" if holds(ours) else "DOES NOT HOLD"
        grown, most_bytes = ours["growth_bytes"] / _MIB, ours["limit_bytes"] / _MIB
        yield f"Limit of our arm: {grown:,.0f} MiB of at most {most_bytes:,.0f} MiB, {held}."


def holds(ours: Mapping[str, Any]) -> bool:
    """Return whether our arm grew by no more than its shards, its budget and some slack."""
    return bool(ours["growth_bytes"] <= ours["limit_bytes"])


def draw(runs: Mapping[str, ArmRun]) -> bytes:
    """Return a PNG with memory over time, one panel for each arm, on one scale."""
    import matplotlib
    from matplotlib.figure import Figure

    colors = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK)
    across = min(3, len(runs))
    down = -(-len(runs) // across)
    buffer = io.BytesIO()
    with matplotlib.rc_context({**colors, "font.size": 9, "savefig.transparent": True}):  # type: ignore[arg-type]
        figure = Figure(figsize=(3.2 * across + 0.4, 2.5 * down + 0.5), dpi=110, layout="constrained")
        every = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flatten()
        for number, (axes, (name, run)) in enumerate(
            itertools.zip_longest(every, runs.items(), fillvalue=("", None))
        ):
            if run is None or run.curves is None:
                axes.set_visible(False)
                continue
            seconds, layers = run.curves
            axes.stackplot(seconds, layers, colors=[_SHADES[place % 2] for place in range(len(layers))], lw=0)
            for phase, (start, stop) in run.spans.items():
                axes.axvspan(start, stop, color=_BANDS[phase], alpha=0.2, lw=0, label="" if number else phase)
            title = f"{name}\n{run.seconds:.1f} s, at most {run.growth_bytes / 2**30:.2f} GiB"
            axes.set_title(title, fontsize=9, loc="left")
            axes.set(xlim=(0, None), ylim=(0, None))
            axes.label_outer()
        figure.supxlabel("seconds", fontsize=8)
        figure.supylabel("GiB", fontsize=8)
        figure.legend(loc="outside lower left", ncols=6, frameon=False)
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--model", default="qwen3-1.7b", help=f"{', '.join(SHAPES)}, or a folder")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16", "auto"])
    parser.add_argument("--arms", default=",".join(ARMS), help="comma-separated; default: all")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds of one arm")
    parser.add_argument("--picture", nargs="?", type=Path, const=PICTURE, help=f"copy it there [{PICTURE}]")
    parser.add_argument("--out", type=Path, help="a new folder of the runs, the picture and the report")
    parser.add_argument("--results", type=Path, help="results, as .json and .md")
    add_device(parser)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir(), "shardwise-benchmarks"))
    given = parser.parse_args(argv)
    given.arms = [name for name in ARMS if name in given.arms.split(",")]
    return given


def checkpoint_of(given: argparse.Namespace) -> Path:
    """Return the folder of the model, written if it is one of the known shapes."""
    if given.model not in SHAPES:
        return Path(given.model)
    shape = SHAPES[given.model].tiny() if given.quick else SHAPES[given.model]
    return write(shape, given.dir)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the arms, show the results, and write them. Return 1 if our arm exceeds its limit."""
    given, now = arguments(argv), datetime.now(UTC).isoformat(timespec="seconds")
    folder = checkpoint_of(given)
    out = given.out or Path(tempfile.mkdtemp(prefix="shardwise-startup-"))
    out.mkdir(parents=True, exist_ok=True)
    runs, failed = compare(
        folder,
        out,
        ranks=given.ranks,
        dtype=given.dtype,
        arms=given.arms,
        timeout_s=given.limit,
        device=given.device,
    )
    plain = {name: asdict(replace(run, values={}, curves=None, spans={})) for name, run in runs.items()}
    results: dict[str, Any] = {
        "date": now,
        "command": " ".join(["python -m benchmarks.startup", *(argv if argv is not None else sys.argv[1:])]),
        "commit": commit(),
        "machine": machine(),
        "model": folder.name,
        "ranks": given.ranks,
        "dtype": given.dtype,
        "device": given.device,
        "arms": {name: {**run, "verdict": verdict(runs, name)} for name, run in plain.items()},
        "not_run": failed,
    }
    written = given.results or Path("benchmarks", "results", f"startup-{now[:10]}.json")
    text = "\n".join(page(results)).rstrip() + "\n"
    written.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    written.with_suffix(".md").write_text(text)
    say(text)
    (out / "startup.png").write_bytes(picture := draw(runs))
    if given.picture is not None:
        given.picture.write_bytes(picture)
    draw_report([out / name for name in runs], out / "report")
    say(
        f"{written.with_suffix('.json')}, {written.with_suffix('.md')}, {out}/startup.png, {out}/report/report.html"
    )
    return int(OURS in results["arms"] and not holds(results["arms"][OURS]))


if __name__ == "__main__":
    sys.exit(main())
