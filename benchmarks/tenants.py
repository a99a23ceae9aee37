"""Many LoRAs at once, measured: a bank against what one does without. ``python -m benchmarks.tenants``.

On gloo ranks of this machine, float32, arms in turn in the same processes:

- *turns*: a step of all tenants: through a bank at once; by PEFT's ``set_adapter`` with an optimizer for each, on a
  base that FSDP2 shards alike; and by our own trainings of one LoRA each, one after the other. The losses have to
  be the same. Beside it the bytes and calls of collectives of a step.
- *share*: as many tokens a step in all, of 1 tenant or more; and of one training with ``tuning=Lora``. Then how
  long a tenant takes to come, to be saved and to go.
- *products*: of many small tenants in one layer, the adapters' own forward and backward products alone, grouped and
  one after the other, in float32 and bfloat16.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import write
from benchmarks.limits import Limit
from benchmarks.place import add_device, commit, machine
from benchmarks.tenancy import IN_TURN, JOINT, SWITCHED, TenancyJob, share, take_products, take_turns
from benchmarks.training import smaller
from tests.support.local_ranks import LocalRanks

SHAPE = smaller(
    "qwen3-8m",
    hidden_size=256,
    intermediate_size=768,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    num_hidden_layers=8,
    max_window_layers=8,
    vocab_size=4096,
)
RANKS_OF_TENANTS = (4, 8, 8, 16, 16, 16, 32, 32)
SWITCHED_LIMIT, BYTES_LIMIT, IN_TURN_LIMIT, SHARE_LIMIT = 0.5, 1.1, 1.0, 1 / 0.85


def slowest(ranks: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Medians of repeats: of each step the slowest rank; the first step of a repeat, which sets up, is out."""
    return [
        statistics.median([max(each) for each in zip(*repeat, strict=True)][1:])
        for repeat in zip(*ranks, strict=True)
    ]


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summary(found: Mapping[str, Any]) -> dict[str, Any]:
    turns, shares, products = found["turns"], found["share"], found["products"]
    steps = {arm: slowest([rank["seconds"][arm] for rank in turns]) for arm in (JOINT, SWITCHED, IN_TURN)}
    losses = turns[0]["losses"]
    parted = {name: slowest([rank["seconds"][name] for rank in shares]) for name in shares[0]["seconds"]}
    return {
        "step_s": {arm: spread(seconds) for arm, seconds in steps.items()},
        "joint_over": {
            arm: spread([one / other for one, other in zip(steps[JOINT], steps[arm], strict=True)])
            for arm in (SWITCHED, IN_TURN)
        },
        "loss_difference": {
            arm: max(
                abs(one - other) / abs(other)
                for ours, theirs in zip(losses[JOINT], losses[arm], strict=True)
                for one, other in zip(ours, theirs, strict=True)
            )
            for arm in (SWITCHED, IN_TURN)
        },
        "bytes": turns[0]["bytes"],
        "gathered_bytes": {arm: gathered(counts) for arm, counts in turns[0]["bytes"].items()},
        "bring_up_s": max(rank["bring_up_s"] for rank in turns),
        "share_s": {name: spread(seconds) for name, seconds in parted.items()},
        "share_over_one": {
            name: spread([one / other for one, other in zip(seconds, parted["1"], strict=True)])
            for name, seconds in parted.items()
        },
        "comings_ms": {
            others: {
                what: 1e3 * statistics.median([max(each) for each in zip(*runs, strict=True)])
                for what, runs in (
                    (what, [rank["comings"][others][what] for rank in shares])
                    for what in ("create", "save", "remove")
                )
            }
            for others in shares[0]["comings"]
        },
        "products_ms": {
            dtype: {name: 1e3 * statistics.median(seconds) for name, seconds in own.items()}
            for dtype, own in products.items()
        },
        "grouped_over_loop": {
            dtype: statistics.median([one / other for one, other in zip(own["grouped"], own["loop"], strict=True)])
            for dtype, own in products.items()
        },
    }


def gathered(counts: Mapping[str, int]) -> int:
    """Bytes of gathers alone: what a base costs, and adapters do not."""
    return sum(nbytes for name, nbytes in counts.items() if "gather" in name)


def limits(made: Mapping[str, Any], tenants: int) -> list[Limit]:
    most = max((name for name in made["share_over_one"] if name.isdigit()), key=int)
    bytes_ratio = made["gathered_bytes"][JOINT] / made["gathered_bytes"][SWITCHED]
    return [
        Limit("step / PEFT's set_adapter", made["joint_over"][SWITCHED]["median"], SWITCHED_LIMIT),
        Limit("step / one training after the other", made["joint_over"][IN_TURN]["median"], IN_TURN_LIMIT),
        Limit(f"gathered bytes / PEFT's set_adapter, times {tenants}", bytes_ratio * tenants, BYTES_LIMIT),
        Limit(f"{most} tenants / 1, as many tokens", made["share_over_one"][most]["median"], SHARE_LIMIT),
    ]


def lines(results: Mapping[str, Any]) -> Iterator[str]:
    host, made, job = results["machine"], results["summary"], results["job"]
    versions = ", ".join(f"{name} {version}" for name, version in host["versions"].items())
    yield from ("# Many LoRAs at once", "")
    yield f"{results['date']}, commit {results['commit']}, {results['minutes']:.1f} minutes.  "
    yield f"`{results['command']}`  "
    yield f"{host['cpus']} cores ({host['processor']}), {host['memory_bytes'] / 2**30:.0f} GiB.  "
    yield f"Linux {host['kernel']}, Python {host['python']}, {versions}.  "
    yield (
        f"{results['ranks']} gloo ranks, {results['model']} in float32; LoRAs of ranks "
        f"{', '.join(map(str, job['ranks_of_tenants']))} on q_proj and v_proj, {job['rows']} rows of "
        f"{job['tokens']} tokens for each on each rank; {job['repeats']} repeats of {job['steps']} steps, arms in "
        "turn."
    )
    yield from ("", "| promise | measured | at most | |", "|---|--:|--:|---|")
    for one in results["limits"]:
        yield f"| {one['name']} | {one['value']:.3f} | {one['most']:g} | {one['verdict']} |"
    yield ""
    yield (
        "| a step of all tenants | ms | min .. max | bank / it | min .. max | gathered MiB | other MiB | calls "
        "| losses differ by |"
    )
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for arm, took in made["step_s"].items():
        ratio = made["joint_over"].get(arm)
        told = f"{ratio['median']:.3f} | {ratio['min']:.3f} .. {ratio['max']:.3f}" if ratio else "- | -"
        counts, gathers = made["bytes"][arm], made["gathered_bytes"][arm]
        others = sum(nbytes for name, nbytes in counts.items() if name != "collectives") - gathers
        differs = made["loss_difference"].get(arm)
        yield (
            f"| {arm} | {1e3 * took['median']:.1f} | {1e3 * took['min']:.1f} .. {1e3 * took['max']:.1f} | {told} "
            f"| {gathers / 2**20:.1f} | {others / 2**20:.2f} | {counts['collectives']} "
            f"| {'-' if differs is None else f'{differs:.1e}'} |"
        )
    yield from ("", f"To bring up one training of one LoRA takes {made['bring_up_s']:.2f} s, beside its steps.", "")
    yield f"| {results['shared_tokens']} tokens a step, of | ms | min .. max | over one tenant | min .. max |"
    yield "|---|--:|--:|--:|--:|"
    for name, took in made["share_s"].items():
        ratio = made["share_over_one"][name]
        who = f"{name} tenants" if name.isdigit() else f"one training, {name}"
        yield (
            f"| {who} | {1e3 * took['median']:.1f} | {1e3 * took['min']:.1f} .. {1e3 * took['max']:.1f} "
            f"| {ratio['median']:.3f} | {ratio['min']:.3f} .. {ratio['max']:.3f} |"
        )
    yield from ("", "| beside so many tenants, ms | create | save | remove |", "|---|--:|--:|--:|")
    for others, took in made["comings_ms"].items():
        yield f"| {others} | {took['create']:.1f} | {took['save']:.1f} | {took['remove']:.2f} |"
    yield ""
    yield f"| {results['products']}, ms | grouped | loop | grouped / loop |"
    yield "|---|--:|--:|--:|"
    for dtype, took in made["products_ms"].items():
        yield f"| {dtype} | {took['grouped']:.2f} | {took['loop']:.2f} | {made['grouped_over_loop'][dtype]:.3f} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write down; the exit status says whether every promise was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two repeats of few steps, to see that it runs")
    parser.add_argument("--ranks", type=int, default=2)
    add_device(parser)
    parser.add_argument("--steps", type=int, default=None, help="of each arm and repeat")
    parser.add_argument("--repeats", type=int, default=None)
    parser.add_argument("--out", type=Path, help="results, as .json and .md beside it")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir(), "shardwise-benchmarks"))
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one measurement")
    given = parser.parse_args(argv)
    began = time.perf_counter()
    shape = SHAPE.tiny() if given.quick else SHAPE
    job = TenancyJob(
        folder=str(write(shape, given.dir)),
        words=shape.config["vocab_size"],
        ranks_of_tenants=RANKS_OF_TENANTS,
        rows=2,
        tokens=16 if given.quick else 64,
        steps=given.steps or (3 if given.quick else 21),
        repeats=given.repeats or (2 if given.quick else 5),
        counts=(1, 2, 4) if given.quick else (1, 2, 4, 8, 16, 32),
        shared_rows=8 if given.quick else 4096 // 64 // given.ranks,
    )
    small = (256, 4, 8, 8) if given.quick else (1024, 32, 8, 8)  # width, tenants, tokens of each, rank
    found = measure(job, small, given.ranks, given.timeout, given.device)
    made = summary(found)
    kept = limits(made, len(RANKS_OF_TENANTS))
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks.tenants", *(argv if argv is not None else sys.argv[1:])]),
        "commit": commit(),
        "machine": machine(),
        "model": shape.name,
        "ranks": given.ranks,
        "device": given.device,
        "job": asdict(job),
        "shared_tokens": job.shared_rows * given.ranks * job.tokens,
        "products": f"{small[1]} tenants of {small[2]} tokens, rank {small[3]}, a layer of {small[0]} x {small[0]}",
        "minutes": (time.perf_counter() - began) / 60,
        "limits": [vars(limit) | {"verdict": limit.verdict} for limit in kept],
        "summary": made,
        "runs": found,
    }
    text = "\n".join(lines(results)) + "\n"
    print(text)
    place = given.out or Path("benchmarks/results", f"tenants-{datetime.now(UTC):%Y-%m-%d-%H%M}")
    place.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{place}.json").write_text(json.dumps(results, indent=1))
    Path(f"{place}.md").write_text(text)
    differs = max(made["loss_difference"].values()) > 1e-3
    return 1 if differs or any(limit.verdict == "FAIL" for limit in kept) else 0


def measure(
    job: TenancyJob, small: tuple[int, int, int, int], ranks: int, timeout_s: float, device: str = "cpu"
) -> dict[str, Any]:
    """What each rank found; products are of one process."""
    with LocalRanks(ranks, timeout_s=timeout_s, device=device) as world:
        turns = world.run(take_turns, job)
    with LocalRanks(ranks, timeout_s=timeout_s, device=device) as world:
        shares = world.run(share, job)
    with LocalRanks(1, timeout_s=timeout_s, device=device) as world:
        [products] = world.run(take_products, *small, job.repeats)
    return {"turns": turns, "share": shares, "products": products}


if __name__ == "__main__":
    sys.exit(main())
