"""Training, measured: shardwise against a loop over FSDP2 written by hand. ``python -m benchmarks.train``.

Three questions, each on gloo ranks of this machine:

- *step*: in the same processes, on the same model and batches, a step of ``train`` and a step by hand take turns.
  The losses of both have to be the same.
- *memory*: in fresh processes, what is in tensors while the optimizer takes its step, over weights, gradients and
  AdamW's two moments; beside it how far the memory of the process grows. (During the passes FSDP2 holds gathered
  groups and their gradients, and libc what has been freed: with shardwise as by hand.)
- *start*: from the start of the process until the first optimizer step has been done on every rank, imports
  included, against accelerate (see ``benchmarks/start.py``). Of a small model trained whole, and of a LoRA of a
  larger one, by the command itself, with a few tokens.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import meter
from benchmarks.checkpoints import write
from benchmarks.limits import Limit
from benchmarks.place import commit, machine
from benchmarks.start import ACCELERATE, ARMS, FIRST_TOKENS, OURS, OURS_AS_STORED, TRL, start_once
from benchmarks.training import (
    BRING_UP,
    LEARNING_RATE,
    MIDDLE,
    MODELS,
    SMALL,
    TRAIN,
    Job,
    batches,
    bring_up_by_hand,
    bring_up_by_shardwise,
    quieten,
    step_by_hand,
    train_by_shardwise,
)
from tests.support.local_ranks import LocalRanks

STEP_LIMIT, MEMORY_LIMIT, START_LIMIT, TRL_START_LIMIT = 1.03, 1.03, 0.6, 1.0


def take_turns(job: Job) -> dict[str, Any]:
    """A step by shardwise, one by hand, and so on. Seconds and losses of each. Collective: yes."""
    import torch
    import torch.distributed as dist

    quieten()
    ours, theirs = bring_up_by_shardwise(job), bring_up_by_hand(job).train()
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    steps = batches(job, job.steps, dist.get_rank())
    seconds: list[float] = []
    losses: list[float] = []

    def by_hand(_: Any) -> None:
        [batch] = steps[len(losses)]
        dist.barrier()
        start = time.perf_counter()
        loss = step_by_hand(theirs, optimizer, batch)
        seconds.append(time.perf_counter() - start)
        mean = torch.tensor(loss)
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
        dist.barrier()

    report = train_by_shardwise(ours, steps, by_hand)
    return {
        "shardwise": {"seconds": report.seconds, "losses": report.losses},
        "by hand": {"seconds": seconds, "losses": losses},
    }


def remember(arm: str, job: Job, warm_up: Job) -> dict[str, int]:
    """Bytes by which this rank's memory grows. Collective: yes."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from shardwise.models.view import local_tensor

    quieten()
    TRAIN[arm](BRING_UP[arm](warm_up), batches(warm_up, 1, dist.get_rank()))  # what libraries allocate once
    others = bytes_in_tensors()
    with meter.MemoryWatch() as memory:
        model = BRING_UP[arm](job)
        brought_up = meter.anonymous_bytes() - memory.before
        held: list[int] = []
        hook = register_optimizer_step_post_hook(lambda *_: held.append(bytes_in_tensors()))
        TRAIN[arm](model, batches(job, 3, dist.get_rank()))
        hook.remove()
    weights = sum(local_tensor(parameter).nbytes for parameter in model.parameters())
    inner = {
        parameter
        for module in model.modules()
        if isinstance(module, FSDPModule) and module is not model
        for parameter in module.parameters()
    }
    groups = [
        sum(parameter.numel() * parameter.itemsize for parameter in module.parameters())
        for module in model.modules()
        if isinstance(module, FSDPModule) and module is not model
    ]
    groups.append(sum(p.numel() * p.itemsize for p in model.parameters() if p not in inner))
    return {
        "weights": weights,
        "largest_group": max(groups),
        "brought_up": brought_up,
        "steady": held[-1] - others,
        "peak": memory.growth,
    }


def bytes_in_tensors() -> int:
    """Bytes of all tensors of this process, each storage once."""
    import torch

    gc.collect()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
    }
    return sum(storages.values())


def measure(
    job: Job, warm_up: Job, firsts: Mapping[str, Job], ranks: int, repeats: int, timeout_s: float
) -> dict[str, Any]:
    """What each rank found, and how long each model took to its first step."""
    with LocalRanks(ranks, timeout_s=timeout_s) as world:
        turns = world.run(take_turns, job)
    memory: dict[str, list[dict[str, int]]] = {}
    for arm in ("shardwise", "by hand"):
        with LocalRanks(ranks, timeout_s=timeout_s) as world:
            memory[arm] = world.run(remember, arm, job, warm_up)
    starts: dict[str, dict[str, list[float]]] = {name: {arm: [] for arm in ARMS} for name in firsts}
    for name, first in firsts.items():
        for _ in range(min(repeats, 2) if first.lora else repeats):  # minutes each
            for arm, found in starts[name].items():
                found.append(start_once(arm, first, ranks, timeout_s))
    return {"turns": turns, "memory": memory, "starts": starts}


def summary(found: Mapping[str, Any]) -> dict[str, Any]:
    """Medians and ratios. A step takes as long as on its slowest rank; the first, which sets FSDP2 up, is out."""
    turns, memory, starts = found["turns"], found["memory"], found["starts"]
    steps = {
        arm: [max(each) for each in zip(*(rank[arm]["seconds"] for rank in turns), strict=True)][1:]
        for arm in ("shardwise", "by hand")
    }
    ratios = [ours / theirs for ours, theirs in zip(steps["shardwise"], steps["by hand"], strict=True)]
    ours, theirs = turns[0]["shardwise"]["losses"], turns[0]["by hand"]["losses"]
    worst = {arm: max(ranks, key=lambda rank: rank["peak"]) for arm, ranks in memory.items()}
    return {
        "step_s": {arm: statistics.median(seconds) for arm, seconds in steps.items()},
        "step_ratio": statistics.median(steps["shardwise"]) / statistics.median(steps["by hand"]),
        "step_ratio_paired": statistics.median(ratios),
        "loss_difference": max(abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True)),
        "memory": worst,
        "memory_ratio": {
            arm: {
                "brought_up": rank["brought_up"] / rank["weights"],
                "steady": rank["steady"] / (4 * rank["weights"] + rank["largest_group"]),
                "peak": rank["peak"] / (4 * rank["weights"] + rank["largest_group"]),
            }
            for arm, rank in worst.items()
        },
        "start_s": {
            name: {arm: statistics.median(seconds) for arm, seconds in arms.items()}
            for name, arms in starts.items()
        },
    }


def limits(made: Mapping[str, Any]) -> list[Limit]:
    return [
        Limit("step time / by hand", made["step_ratio"], STEP_LIMIT),
        Limit(
            "memory in the steady state / states + largest group",
            made["memory_ratio"]["shardwise"]["steady"],
            MEMORY_LIMIT,
        ),
        *(
            Limit(f"{name}: start of {arm} to first step / accelerate", found[arm] / found[ACCELERATE], START_LIMIT)
            for name, found in made["start_s"].items()
            for arm in (OURS, OURS_AS_STORED)
        ),
        *(
            Limit(f"{name}: start of {OURS} to first step / {TRL}", found[OURS] / found[TRL], TRL_START_LIMIT)
            for name, found in made["start_s"].items()
        ),
    ]


def lines(results: Mapping[str, Any]) -> list[str]:
    host, made = results["machine"], results["summary"]
    versions = ", ".join(f"{name} {version}" for name, version in host["versions"].items())
    mib = {arm: {name: value / 2**20 for name, value in rank.items()} for arm, rank in made["memory"].items()}
    return [
        "# Training",
        "",
        f"{results['date']}, commit {results['commit']}, {results['minutes']:.1f} minutes.",
        f"`{results['command']}`",
        f"{host['cpus']} cores ({host['processor']}), {host['memory_bytes'] / 2**30:.0f} GiB.",
        f"Linux {host['kernel']}, Python {host['python']}, {versions}.",
        f"{results['ranks']} gloo ranks train {results['model']} in float32, full, by AdamW.",
        f"Each has {results['rows']} rows of {results['tokens']} tokens for a step.",
        f"The starts: {FIRST_TOKENS} tokens on each rank; accelerate computes in what is stored.",
        f"Greatest difference of a step's loss: {made['loss_difference']:.1e} of it.",
        "",
        "| promise | measured | at most | |",
        "|---|--:|--:|---|",
        *(
            f"| {one['name']} | {one['value']:.3f} | {one['most']:g} | {one['verdict']} |"
            for one in results["limits"]
        ),
        "",
        "| arm | step s | weights MiB | brought up MiB | steady MiB | peak MiB |",
        "|---|--:|--:|--:|--:|--:|",
        *(
            f"| {arm} | {made['step_s'][arm]:.4f} | "
            + " | ".join(f"{rank[name]:.0f}" for name in ("weights", "brought_up", "steady", "peak"))
            + " |"
            for arm, rank in mib.items()
        ),
        "",
        f"| start to first step s | {' | '.join(ARMS)} |",
        f"|---|{'--:|' * len(ARMS)}",
        *(
            f"| {results['firsts'][name]} | {' | '.join(f'{found[arm]:.2f}' for arm in ARMS)} |"
            for name, found in made["start_s"].items()
        ),
        "",
        f"Step time, median of pairs: {made['step_ratio_paired']:.3f}. Largest group: "
        f"{mib['shardwise']['largest_group']:.0f} MiB. Peak over states and largest group: "
        + ", ".join(f"{arm} {ratio['peak']:.3f}" for arm, ratio in made["memory_ratio"].items())
        + ".",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write down; the exit status says whether every promise was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{SMALL.name} on two ranks, a minute or two")
    parser.add_argument("--model", default=None, choices=sorted(MODELS))
    parser.add_argument("--start-models", nargs="*", choices=sorted(MODELS), help="of which the start is measured")
    parser.add_argument("--ranks", type=int, default=None)
    parser.add_argument("--steps", type=int, default=None, help="of each arm")
    parser.add_argument("--repeats", type=int, default=None, help="of each start")
    parser.add_argument("--rows", type=int, default=1, help="on each rank")
    parser.add_argument("--tokens", type=int, default=64, help="of a row")
    parser.add_argument("--out", type=Path, help="results, as .json and .md beside it")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir(), "shardwise-benchmarks"))
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one measurement")
    given = parser.parse_args(argv)
    began = time.perf_counter()
    shape = MODELS[given.model or (SMALL.name if given.quick else MIDDLE.name)]  # two of them fit
    ranks = given.ranks or (2 if given.quick else 4)
    steps = given.steps or (13 if given.quick else 21)
    folder, tiny = write(shape, given.dir), write(shape.tiny(), given.dir)
    job = Job(str(folder), steps, given.rows, given.tokens, shape.config["vocab_size"])
    warm_up = Job(str(tiny), 1, 1, 16, shape.tiny().config["vocab_size"])
    firsts = {}
    for name in given.start_models or ([SMALL.name] if given.quick else [SMALL.name, "qwen3-1.7b"]):
        place, words = write(MODELS[name], given.dir), MODELS[name].config["vocab_size"]
        firsts[name] = Job(str(place), 1, 1, FIRST_TOKENS, words, "auto", lora=name != SMALL.name)
    found = measure(job, warm_up, firsts, ranks, given.repeats or (2 if given.quick else 5), given.timeout)
    made = summary(found)
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks.train", *(argv if argv is not None else sys.argv[1:])]),
        "commit": commit(),
        "machine": machine(),
        "model": shape.name,
        "firsts": {name: f"{name}, {'a LoRA' if first.lora else 'whole'}" for name, first in firsts.items()},
        "ranks": ranks,
        "rows": given.rows,
        "tokens": given.tokens,
        "minutes": (time.perf_counter() - began) / 60,
        "limits": [vars(limit) | {"verdict": limit.verdict} for limit in limits(made)],
        "summary": made,
        "runs": found,
    }
    text = "\n".join(lines(results)) + "\n"
    print(text)
    place = given.out or Path("benchmarks/results", f"train-{datetime.now(UTC):%Y-%m-%d-%H%M}")
    place.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{place}.json").write_text(json.dumps(results, indent=1))
    Path(f"{place}.md").write_text(text)
    differs = made["loss_difference"] > 1e-3
    return 1 if differs or any(limit.verdict == "FAIL" for limit in limits(made)) else 0


if __name__ == "__main__":
    sys.exit(main())
