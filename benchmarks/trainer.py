"""The Hugging Face Trainer on a model of shardwise's, against a loop written by hand. ``python -m
benchmarks.trainer``.

On gloo ranks of this machine, on the same shapes, rows and settings: a few steps of the one, a few of the other,
and so on, each time in fresh processes that begin with the checkpoint, so that one model is in memory at a time. A
step counts from its beginning to the beginning of the next, with what the Trainer does between (logs, callbacks,
the sum by which ranks learn what callbacks of others say). The first step of each turn, which makes the optimizer's
state, is out. The losses of both have to be the same, and those of every turn.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import write
from benchmarks.limits import Limit
from benchmarks.place import add_device, commit, machine, own_device
from benchmarks.training import (
    LEARNING_RATE,
    MAX_NORM,
    MODELS,
    SMALL,
    Job,
    batches,
    bring_up_by_shardwise,
    quieten,
    train_by_shardwise,
)
from tests.support.local_ranks import LocalRanks

OWN, TRAINER = "by hand", "Trainer"
STEP_LIMIT = 1.05


def take_turns(
    job: Job, turns: int, ranks: int, timeout_s: float, device: str = "cpu"
) -> list[dict[str, dict[str, list[float]]]]:
    """Of each rank the seconds and losses of the steps of each, but for the seconds of the first of each turn."""
    found: list[dict[str, dict[str, list[float]]]] = [
        {arm: {"seconds": [], "losses": []} for arm in LOOPS} for _ in range(ranks)
    ]
    for _ in range(turns):
        for arm in LOOPS:
            with LocalRanks(ranks, timeout_s=timeout_s, device=device) as world:
                for rank, (seconds, losses) in enumerate(world.run(take_turn, arm, job)):
                    found[rank][arm]["seconds"] += seconds[1:]
                    found[rank][arm]["losses"] += losses
    return found


def take_turn(arm: str, job: Job) -> tuple[list[float], list[float]]:
    """Seconds and losses of some steps, from the checkpoint on. Collective: yes."""
    quieten()
    return LOOPS[arm](bring_up_by_shardwise(job), job)


def own_loop(model: Any, job: Job) -> tuple[list[float], list[float]]:
    """A loop written by hand, with FSDP2's groups gathered as for the Trainer."""
    import torch.distributed as dist

    report = train_by_shardwise(model, batches(job, job.steps, dist.get_rank()))
    return report.seconds, report.losses


def trainers_loop(model: Any, job: Job) -> tuple[list[float], list[float]]:
    """By ShardwiseTrainer, without checkpoints."""
    import torch.distributed as dist
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from shardwise.integrations import ShardwiseTrainer, for_trainer

    rank, size = dist.get_rank(), dist.get_world_size()
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in told.items()}, MASTER_ADDR="127.0.0.1")
    begun: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *given: Any, **others: Any) -> None:
            begun.append(time.perf_counter())

        def on_train_end(self, *given: Any, **others: Any) -> None:
            begun.append(time.perf_counter())

    mine: Any = type("Measured", (ShardwiseTrainer, Trainer), {})
    of_ranks = [batches(job, job.steps, other) for other in range(size)]
    rows = [
        {"input_ids": ids.tolist(), "labels": ids.tolist()}
        for step in range(job.steps)
        for other in range(size)
        for ids in of_ranks[other][step][0].input_ids
    ]
    trainer = mine(
        model=for_trainer(model),
        args=TrainingArguments(
            output_dir=str(Path(job.folder).parent / "trainer"),
            max_steps=job.steps,
            per_device_train_batch_size=job.rows,
            train_sampling_strategy="sequential",
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            max_grad_norm=MAX_NORM,
            weight_decay=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=own_device().type == "cpu",
        ),
        train_dataset=rows,
        callbacks=[Clock],
    )
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [later - earlier for earlier, later in itertools.pairwise(begun)], losses


LOOPS = {OWN: own_loop, TRAINER: trainers_loop}


def summary(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians, and their ratio. A step takes as long as on its slowest rank."""
    steps = {
        arm: [max(each) for each in zip(*(rank[arm]["seconds"] for rank in turns), strict=True)]
        for arm in (OWN, TRAINER)
    }
    own, theirs = (turns[0][arm]["losses"] for arm in (OWN, TRAINER))
    return {
        "step_s": {arm: statistics.median(seconds) for arm, seconds in steps.items()},
        "step_ratio": statistics.median(steps[TRAINER]) / statistics.median(steps[OWN]),
        "loss_difference": max(abs(one - other) / abs(one) for one, other in zip(own, theirs, strict=True)),
    }


def limits(made: Mapping[str, Any]) -> list[Limit]:
    return [
        Limit(f"{name}: step of the Trainer / by hand", found["step_ratio"], STEP_LIMIT)
        for name, found in made.items()
    ]


def lines(results: Mapping[str, Any]) -> list[str]:
    host, made = results["machine"], results["summary"]
    versions = ", ".join(f"{name} {version}" for name, version in host["versions"].items())
    return [
        "# The Trainer",
        "",
        f"{results['date']}, commit {results['commit']}, {results['minutes']:.1f} minutes.",
        f"`{results['command']}`",
        f"{host['cpus']} cores ({host['processor']}), {host['memory_bytes'] / 2**30:.0f} GiB.",
        f"Linux {host['kernel']}, Python {host['python']}, {versions}.",
        f"{results['ranks']} ranks on {results['device']} train whole models in float32 by AdamW.",
        f"Each has {results['rows']} rows of {results['tokens']} tokens for a step.",
        "",
        "| promise | measured | at most | |",
        "|---|--:|--:|---|",
        *(
            f"| {one['name']} | {one['value']:.3f} | {one['most']:g} | {one['verdict']} |"
            for one in results["limits"]
        ),
        "",
        "| model | by hand s | Trainer s | difference of a loss |",
        "|---|--:|--:|--:|",
        *(
            f"| {name} | {found['step_s'][OWN]:.4f} | {found['step_s'][TRAINER]:.4f} | "
            f"{found['loss_difference']:.1e} |"
            for name, found in made.items()
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write down; the exit status says whether every promise was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{SMALL.name} alone, a minute")
    parser.add_argument("--models", nargs="*", choices=sorted(MODELS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=None, help="of each turn")
    add_device(parser)
    parser.add_argument("--turns", type=int, default=None)
    parser.add_argument("--rows", type=int, default=1, help="on each rank")
    parser.add_argument("--tokens", type=int, default=64, help="of a row")
    parser.add_argument("--out", type=Path, help="results, as .json and .md beside it")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir(), "shardwise-benchmarks"))
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one turn of one of them")
    given = parser.parse_args(argv)
    began = time.perf_counter()
    steps, turns = given.steps or (4 if given.quick else 6), given.turns or (2 if given.quick else 5)
    runs: dict[str, Any] = {}
    for name in given.models or ([SMALL.name] if given.quick else [SMALL.name, "qwen3-0.6b"]):
        folder = write(MODELS[name], given.dir)
        job = Job(str(folder), steps, given.rows, given.tokens, MODELS[name].config["vocab_size"])
        runs[name] = take_turns(job, turns, given.ranks, given.timeout, given.device)
    made = {name: summary(found) for name, found in runs.items()}
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks.trainer", *(argv if argv is not None else sys.argv[1:])]),
        "commit": commit(),
        "machine": machine(),
        "ranks": given.ranks,
        "device": given.device,
        "rows": given.rows,
        "tokens": given.tokens,
        "minutes": (time.perf_counter() - began) / 60,
        "limits": [vars(limit) | {"verdict": limit.verdict} for limit in limits(made)],
        "summary": made,
        "runs": runs,
    }
    text = "\n".join(lines(results)) + "\n"
    print(text)
    place = given.out or Path("benchmarks/results", f"trainer-{datetime.now(UTC):%Y-%m-%d-%H%M}")
    place.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{place}.json").write_text(json.dumps(results, indent=1))
    Path(f"{place}.md").write_text(text)
    differs = any(found["loss_difference"] > 1e-3 for found in made.values())
    return 1 if differs or any(limit.verdict == "FAIL" for limit in limits(made)) else 0


if __name__ == "__main__":
    sys.exit(main())
