"""Loading, measured: shardwise, its peers and the roof, in one run, in turn. ``python -m benchmarks.load``."""

import argparse
import hashlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import caps, meter, planning, remote, roof
from benchmarks.arms import why_no_runai
from benchmarks.checkpoints import SHAPES, Shape, write
from benchmarks.limits import limits_of
from benchmarks.place import RANKS, SLACK_BYTES, STAGING_BYTES, commit, machine, say
from benchmarks.tables import render
from tests.support.local_ranks import LocalRanks, RankError

PEERS = ("transformers", "accelerate", "set_model_state_dict", "dcp", "runai")
AS_IT_IS, BACKED = "as it is", "memory backed"
"""The machine as a user finds it; and with memory that exists (see README)."""

RUNAI_ON_MOE = "it streams what is stored: nobody stacks the experts for it"

DCP_ON_MOE = "its reader renames nothing: the model's stacked experts are not among the checkpoint's keys"
RANK_0_ON_MOE = "it takes the model's own names; the checkpoint has one tensor per expert"


@dataclass(frozen=True)
class Row:
    """Arms that load the same checkpoint in the same way."""

    name: str
    shape: Shape
    arms: tuple[str, ...]
    dtype: str = "auto"
    cold: bool = False
    lora: bool = False
    state: str = AS_IT_IS
    skipped: Mapping[str, str] = field(default_factory=dict)


def rows_of(models: Sequence[str], arms: Sequence[str], *, quick: bool) -> list[Row]:
    """What to measure, in order: everything on the machine as it is, then with memory that exists."""
    rows: list[Row] = []
    reason = why_no_runai()

    def add(name: str, shape: Shape, wanted: Iterable[str], **more: Any) -> None:
        skipped = {**more.pop("skipped", {}), **({"runai": reason} if reason and "runai" in wanted else {})}
        is_asked = {arm for arm in wanted if arm in arms or (arm in roof.ALL and "roof" in arms)}
        chosen = tuple(arm for arm in wanted if arm in is_asked and arm not in skipped)
        for state in (AS_IT_IS, BACKED):
            rows.append(Row(f"{name}, {state}", shape, chosen, state=state, skipped=skipped, **more))

    ours, readers = ("shardwise", "transformers"), ("shardwise", "transformers", "dcp", "runai")
    for model in models:
        shape = SHAPES[model]
        if shape.is_moe:
            skipped = {"set_model_state_dict": RANK_0_ON_MOE, "dcp": DCP_ON_MOE, "runai": RUNAI_ON_MOE}
            add(f"{model} warm", shape, (*ours, "accelerate", *roof.VARIANTS), skipped=skipped)
        elif shape.stores_head:
            add(f"{model} warm", shape, ours)
        else:
            add(f"{model} warm", shape, ("shardwise", *PEERS, *roof.VARIANTS))
    if not quick:
        dense = [SHAPES[model] for model in models if not SHAPES[model].is_moe and not SHAPES[model].stores_head]
        for shape in dense[:1]:
            add(f"{shape.name} float32", shape, (*readers, *roof.CASTING), dtype="float32")
        for shape in dense[-1:]:
            add(f"{shape.name} with a LoRA", shape, ("shardwise", *PEERS[:-1], *roof.VARIANTS), lora=True)
            add(f"{shape.name} cold", shape, (*readers, "roof"), cold=True)
    return sorted(rows, key=lambda row: row.state != AS_IT_IS)


# ── running ───────────────────────────────────────────────────────────────────────────────────────


_TICKS_S = 0.04
"""What the kernel's counting of processor time in ticks may be off by."""
_DISTURBED_SHARE = 0.1
_SECOND_CHANCES = 1


def order_of(arms: Sequence[str], repeat: int) -> list[str]:
    """The arms in the order of a round: another in each, since the memory an arm leaves is what the next one finds.

    The first round is in the order of the rows.
    """
    order = list(arms)
    if repeat:
        random.Random(repeat).shuffle(order)
    return order


def run_row(row: Row, root: Path, repeats: int, timeout_s: float, patience_s: float) -> dict[str, Any]:
    """All arms of a row, once in each round; each time in fresh processes.

    Where the ranks could not be given priority, a load during which others took more than a tenth of the machine
    is done again, once; the less disturbed of the two counts.
    """
    folder, warm_up = write(row.shape, root), write(row.shape.tiny(), root)
    meter.warm_cache(meter.files_of(folder))
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in row.arms}
    placed_bytes = row.shape.nbytes * (2 if row.dtype == "float32" else 1)
    conditions = {
        "cold": row.cold,
        "patience_s": patience_s,
    }
    backed_bytes = min(placed_bytes * 5 // 4, meter.available_bytes() // 3) // RANKS

    def once(arm: str, state: str = row.state) -> dict[str, Any]:
        is_backed = state == BACKED
        made = {**conditions, "backed_bytes": backed_bytes if is_backed else 0}
        if arm in roof.ALL:
            return summary(roof.measure(arm, folder, RANKS, **made))
        how = {"dtype": row.dtype, "lora": row.lora, "wants_priority": True, "watched": is_backed, **made}
        return summary(load_once(arm, folder, warm_up, timeout_s, **how))

    disturbed = 0
    alone: dict[str, list[float]] = {}
    for repeat in range(repeats):
        for arm in order_of(row.arms, repeat):
            run = once(arm)
            for _ in range(_SECOND_CHANCES):
                if run["priority"] or run["others_share"] <= _DISTURBED_SHARE:
                    break
                disturbed += 1
                run = min(run, once(arm), key=lambda run: run["others_share"])
            runs[arm].append(run)
            if row.state == BACKED and arm != "shardwise":
                alone.setdefault(arm, []).append(once(arm, AS_IT_IS)["wall_s"])
            say(
                f"  {row.name} {repeat + 1}/{repeats} {arm:<24} {run['wall_s']:7.3f} s"
                f"   (others {run['others_share']:.0%})"
            )
    nbytes = sum(path.stat().st_size for path in meter.files_of(folder))
    arms = {arm: statistics_of(found, nbytes) for arm, found in runs.items()}
    for arm, walls in alone.items():
        arms[arm]["alone_s"] = statistics.median(walls)
    return {
        "state": row.state,
        "name": row.name,
        "shape": row.shape.name,
        "bytes": row.shape.nbytes,
        "dtype": row.dtype,
        "cold": row.cold,
        "lora": row.lora,
        "arms": arms,
        "skipped": dict(row.skipped),
        "disturbed": disturbed,
        "priority": all(run["priority"] for found in runs.values() for run in found),
        "same_model": compare(arms),
        "runs": runs,
    }


def load_once(arm: str, folder: Path, warm_up: Path, timeout_s: float, **more: Any) -> list[dict[str, Any]]:
    from benchmarks.rank import Job, measure

    with LocalRanks(RANKS, timeout_s=timeout_s) as ranks:
        return ranks.run(measure, Job(arm, str(folder), str(warm_up), **more))


def summary(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One run, over its ranks: wall time from the first start to the last stop, sums of what was used."""
    start = min(rank["start"] for rank in ranks)
    run: dict[str, Any] = {
        "wall_s": max(rank["stop"] for rank in ranks) - start,
        "returned_s": max(rank["returned"] for rank in ranks) - start,
        "user_s": sum(rank["usage"]["user_s"] for rank in ranks),
        "system_s": sum(rank["usage"]["system_s"] for rank in ranks),
        "minor_faults": sum(rank["usage"]["minor_faults"] for rank in ranks),
        "major_faults": sum(rank["usage"]["major_faults"] for rank in ranks),
        "others_share": 0.0,
        "priority": all(rank["priority"] for rank in ranks),
        "cached_fraction": ranks[0]["cached_fraction"],
    }
    ours = run["user_s"] + run["system_s"]
    busy = max(rank["machine_busy_s"] for rank in ranks)
    capacity = run["wall_s"] * len(os.sched_getaffinity(0))
    run["others_share"] = max(0.0, busy - ours - _TICKS_S) / capacity
    if "sums" in ranks[0]:
        run["growth_bytes"] = [rank["growth_bytes"] for rank in ranks]
        run["local_bytes"] = [rank["local_bytes"] for rank in ranks]
        run["checksums"], run["placements"] = combine([rank["sums"] for rank in ranks])
        private = [rank["growth_bytes"] / max(1, rank["local_bytes"]) for rank in ranks]
        run["all_private"] = min(private) > 0.97  # else the clock stopped before all values were in memory
        facts = [rank["facts"] for rank in ranks]
        if facts[0]:
            run["phases"] = {
                phase: max(fact["seconds"].get(phase, 0.0) for fact in facts) for phase in facts[0]["seconds"]
            }
            run["read_phase_s"] = max(
                fact["seconds"].get("read", 0.0) + fact["seconds"].get("materialize", 0.0) for fact in facts
            )
            run["read_fraction"] = sum(fact["read_bytes"] for fact in facts) / facts[0]["checkpoint_bytes"]
            run["reads"] = sum(fact["reads"] for fact in facts)
        profiles = [rank["profile"] for rank in ranks if rank.get("profile")]
        if profiles:
            run["profile"] = profiles[0]
    return run


def combine(sums: Sequence[Mapping[str, tuple[str, str, int, int]]]) -> tuple[dict[str, str], dict[str, str]]:
    """Checksums and placements by name, from those of all ranks.

    Raises:
        RuntimeError: when copies of a tensor differ, or ranks hold different tensors.
    """
    checksums: dict[str, str] = {}
    placements: dict[str, str] = {}
    if any(list(found) != list(sums[0]) for found in sums):
        raise RuntimeError("the ranks hold different tensors")
    for name in sums[0]:
        copies: dict[int, int] = {}
        for found in sums:
            what, placement, value, copy = found[name]
            copies[copy] = (copies.get(copy, 0) + value) % (1 << 64)
            placements[name] = placement
            checksums[name] = f"{what} {value:016x}"
        if len(set(copies.values())) > 1:
            raise RuntimeError(f"the copies of {name} differ")
        checksums[name] = f"{sums[0][name][0]} {next(iter(copies.values())):016x}"
    return checksums, placements


def statistics_of(runs: Sequence[Mapping[str, Any]], nbytes: int) -> dict[str, Any]:
    """Medians and extremes of one arm's runs."""
    gigabytes = nbytes / 1e9
    walls = [run["wall_s"] for run in runs]
    found: dict[str, Any] = {
        "wall_s": {"median": statistics.median(walls), "min": min(walls), "max": max(walls)},
        "user_s": statistics.median(run["user_s"] for run in runs),
        "system_s": statistics.median(run["system_s"] for run in runs),
        "minor_faults_per_gb": statistics.median(run["minor_faults"] for run in runs) / gigabytes,
        "major_faults_per_gb": statistics.median(run["major_faults"] for run in runs) / gigabytes,
        "cached_fraction": [run["cached_fraction"] for run in runs],
        "others_share": statistics.median(run["others_share"] for run in runs),
    }
    last = runs[-1]
    if "growth_bytes" in last:
        found["growth_bytes"] = max(max(run["growth_bytes"]) for run in runs)
        found["local_bytes"] = max(last["local_bytes"])
        excess = [
            grown - held
            for run in runs
            for grown, held in zip(run["growth_bytes"], run["local_bytes"], strict=True)
        ]
        found["excess_bytes"] = max(excess)
        found["all_private"] = all(run["all_private"] for run in runs)
        if any(run["checksums"] != last["checksums"] for run in runs):
            raise RuntimeError("two runs of one arm made different models")
        found["checksums"] = last["checksums"]
        found["placements"] = last["placements"]
        for run in runs:
            del run["checksums"], run["placements"]
    if "phases" in last:
        found["phases"] = {
            phase: statistics.median(run["phases"].get(phase, 0.0) for run in runs) for phase in last["phases"]
        }
        found["read_phase_s"] = statistics.median(run["read_phase_s"] for run in runs)
        found["read_fraction"] = last["read_fraction"]
        found["reads"] = last["reads"]
    return found


def compare(arms: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Whether each arm made the model that shardwise made; checksums are then replaced by their digest."""
    with_sums = {arm: found for arm, found in arms.items() if "checksums" in found}
    if not with_sums:
        return {}
    first = next(iter(with_sums))
    wanted, placed = with_sums[first]["checksums"], with_sums[first]["placements"]
    verdicts: dict[str, str] = {}
    for arm, found in with_sums.items():
        names = sorted(wanted.keys() | found["checksums"].keys())
        differing = [name for name in names if wanted.get(name) != found["checksums"].get(name)]
        elsewhere = [name for name in names if placed.get(name) != found["placements"].get(name)]
        verdict = "same" if not differing else f"{len(differing)} of {len(names)} differ, such as {differing[0]}"
        if elsewhere:
            verdict += f"; {len(elsewhere)} sharded otherwise, such as {elsewhere[0]}"
        verdicts[arm] = verdict
    for found in with_sums.values():
        text = json.dumps(found.pop("checksums"), sort_keys=True)
        found["checksum"] = hashlib.sha256(text.encode()).hexdigest()
        del found["placements"]
    return verdicts


def capped(shape: Shape, root: Path, arms: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Each arm once, with every rank held by the kernel to its shard, the staging budget and 32 MiB."""
    folder, warm_up = write(shape, root), write(shape.tiny(), root)
    cap = -(-shape.nbytes // RANKS) + STAGING_BYTES + SLACK_BYTES
    found: dict[str, Any] = {"shape": shape.name, "cap_bytes": cap, "model_bytes": shape.nbytes, "arms": {}}
    if reason := caps.why_not():
        return found | {"skipped": reason}
    if cap >= shape.nbytes:
        return found | {"skipped": "the model is smaller than the staging budget allows for"}
    for arm in arms:
        try:
            run = summary(load_once(arm, folder, warm_up, timeout_s, cap_bytes=cap))
            found["arms"][arm] = {"outcome": "loaded", "wall_s": run["wall_s"]}
        except RankError as error:
            killed = [rank for rank, story in error.failures.items() if "exit code -9" in story]
            rank, story = next(iter(error.failures.items()))
            outcome = (
                f"killed: rank {', '.join(map(str, killed))}"
                if killed
                else f"rank {rank}: {story.splitlines()[-1]}"
            )
            found["arms"][arm] = {"outcome": outcome}
        caps.clean_up()
        say(f"  {shape.name} capped at {cap >> 20} MiB: {arm} {found['arms'][arm]['outcome']}")
    return found


def replicated(shape: Shape, root: Path, timeout_s: float) -> dict[str, Any]:
    """How much of the checkpoint is read with two replicas of two shards each."""
    folder, warm_up = write(shape, root), write(shape.tiny(), root)
    run = summary(load_once("shardwise", folder, warm_up, timeout_s, replicas=2))
    say(f"  {shape.name} 2x2: read {run['read_fraction']:.3f} of the checkpoint")
    return {"shape": shape.name, "wall_s": run["wall_s"], "read_fraction": run["read_fraction"]}


# ── limits ────────────────────────────────────────────────────────────────────────────────────────


# ── the program ──────────────────────────────────────────────────────────────────


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    parser.add_argument("--models", default=None, help=f"comma-separated, of {', '.join(SHAPES)}; default: all")
    parser.add_argument("--arms", default=None, help=f"comma-separated, of shardwise, {', '.join(PEERS)}, roof")
    parser.add_argument("--repeats", type=int, default=None, help="of each arm; default 5, with --quick 3")
    parser.add_argument("--quick", action="store_true", help="qwen3-0.6b; shardwise, transformers and the roof")
    parser.add_argument("--others", action="store_true", help="no rows, but what comes after them")
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--out", type=Path, default=None, help="results, as .json and .md beside it")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "shardwise-benchmarks")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one load")
    parser.add_argument("--idle-wait", type=float, default=3.0, help="seconds to wait for an idle machine")
    parser.add_argument("--profile", metavar="ARM", help="profile one arm on rank 0; --rows LoRA: an adapter too")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    given = arguments(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    models = given.models.split(",") if given.models else ["qwen3-0.6b"] if given.quick else list(SHAPES)
    arms = ["shardwise", "transformers", "roof"] if given.quick else ["shardwise", *PEERS, "roof"]
    arms = given.arms.split(",") if given.arms else arms
    repeats = given.repeats or (3 if given.quick else 5)
    if given.profile:
        shape = SHAPES[models[0]]
        folder, warm_up = write(shape, given.dir), write(shape.tiny(), given.dir)
        how = {"lora": "LoRA" in given.rows, "profile": True, "wants_priority": True}
        run = summary(load_once(given.profile, folder, warm_up, given.timeout, **how))
        say(run["profile"])
        return 0
    began = time.monotonic()
    rows = [row for row in rows_of(models, arms, quick=given.quick) if given.rows in row.name and not given.others]
    results: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python -m benchmarks.load {' '.join(argv if argv is not None else sys.argv[1:])}".strip(),
        "commit": commit(),
        "machine": machine(),
        "ranks": RANKS,
        "repeats": repeats,
        "rows": [],
    }
    for row in rows:
        say(row.name)
        results["rows"].append(run_row(row, given.dir, repeats, given.timeout, given.idle_wait))
    if given.others or (not given.quick and not given.rows):
        largest = max((SHAPES[model] for model in models), key=lambda shape: shape.nbytes)
        wanted = [arm for arm in ("shardwise", "transformers", "accelerate") if arm in arms]
        results["capped"] = capped(largest, given.dir, wanted, given.timeout)
        results["replicated"] = replicated(SHAPES[models[0]], given.dir, given.timeout)
        say("over HTTP")
        shape = SHAPES[models[0]]
        folder, warm_up = write(shape, given.dir), write(shape.tiny(), given.dir)
        results["remote"] = remote.measure(folder, warm_up, RANKS, min(repeats, 3), given.timeout)
        say("planning")
        results["planning"] = planning.measure(repeats)
    results["limits"] = [vars(limit) | {"verdict": limit.verdict} for limit in limits_of(results)]
    results["minutes"] = (time.monotonic() - began) / 60
    out = (
        given.out
        or Path(__file__).parent / "results" / f"load-{results['date'][:10]}-{results['commit'][:12]}.json"
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    stem = str(out).removesuffix(".json")
    Path(f"{stem}.json").write_text(json.dumps(results, indent=1) + "\n")
    text = render(results)
    Path(f"{stem}.md").write_text(text)
    say(text)
    say(f"written to {stem}.json and {stem}.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
