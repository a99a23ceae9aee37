"""Training, measured: shardwise against a loop over FSDP2 written by hand. ``python -m benchmarks.train``.

Three questions, each on gloo ranks of this machine:

- *step*: in the same processes, on the same model and batches, a step of ``train`` and a step by hand take turns.
  The losses of both have to be the same.
- *memory*: in fresh processes, what is in tensors while the optimizer takes its step, over weights, gradients and
  AdamW's two moments; beside it how far the memory of the process grows. (During the passes FSDP2 holds gathered
  groups and their gradients, and libc what has been freed: with shardwise as by hand.)
- *start*: in fresh interpreters, from the start of the process until the first optimizer step has been done on
  every rank, imports included; against accelerate. Of a LoRA of a larger model, as it is stored, and a few tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import meter
from benchmarks.checkpoints import SHAPES, write
from benchmarks.load import Limit, commit, machine

from shardwise.execution.local_ranks import LocalRanks

SMALL = replace(
    SHAPES["qwen3-0.6b"],
    name="qwen3-36m",
    config={
        **SHAPES["qwen3-0.6b"].config,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_hidden_layers": 8,
        "max_window_layers": 8,
        "vocab_size": 16384,
    },
)
MODELS = {SMALL.name: SMALL, "qwen3-0.6b": SHAPES["qwen3-0.6b"], "qwen3-1.7b": SHAPES["qwen3-1.7b"]}
LEARNING_RATE = 1e-6
MAX_NORM = 1.0
FIRST_TOKENS = 8
STEP_LIMIT, MEMORY_LIMIT, START_LIMIT = 1.03, 1.03, 0.6


@dataclass(frozen=True)
class Job:
    """A model's folder, and how much to do: rows and tokens for each rank and step."""

    folder: str
    steps: int
    rows: int
    tokens: int
    words: int
    dtype: str = "float32"
    lora: bool = False


def batches(job: Job, steps: int, rank: int) -> list[list[Any]]:
    """A batch for each step, another on every rank; every token is learned."""
    import torch

    from shardwise.training.data import Batch

    made: list[list[Any]] = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        ids = torch.randint(0, job.words, (job.rows, job.tokens), generator=generator)
        made.append([Batch(ids, torch.ones_like(ids), ids, ids.numel())])
    return made


# ── the arms ──────────────────────────────────────────────────────────────────────────────────────


def bring_up_by_shardwise(job: Job) -> Any:
    import shardwise

    keywords: dict[str, Any] = {"tuning": shardwise.Lora(adapter_config())} if job.lora else {}
    return shardwise.from_pretrained(job.folder, dtype=job.dtype, **keywords)


def bring_up_by_hand(job: Job) -> Any:
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job.folder, dtype=job.dtype)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def bring_up_by_accelerate(job: Job) -> Any:
    from benchmarks.arms import Request, with_accelerate

    def adapt(model: Any) -> Any:
        from peft import get_peft_model

        return get_peft_model(model, adapter_config(), autocast_adapter_dtype=False) if job.lora else model

    return with_accelerate(Request(Path(job.folder), dtype=job.dtype), adapt).model


def adapter_config() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")


def step_by_hand(model: Any, optimizer: Any, batch: Any) -> float:
    """A step as one writes it: forward, loss, backward, clip, update."""
    import torch.nn.functional as F
    from torch.nn.utils import clip_grad_norm_

    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch.labels[:, 1:].flatten())
    loss.backward()
    clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def train_by_hand(model: Any, steps: Sequence[Sequence[Any]]) -> None:
    import torch

    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    for [batch] in steps:
        step_by_hand(model, optimizer, batch)


class Turns(list[Sequence[Any]]):
    """Steps as the loop takes them; nothing here goes on from a position."""

    epochs_done = 0.0

    def name_rows(self, lines: Sequence[int]) -> str:
        return f"rows {list(lines)}"

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Any) -> None:
        """There is nothing to take up."""


def train_by_shardwise(model: Any, steps: Sequence[Sequence[Any]], on_step: Callable[[Any], None] = id) -> Any:
    from shardwise.training.loop import train
    from shardwise.training.options import TrainOptions

    options = TrainOptions(learning_rate=LEARNING_RATE, schedule="constant", max_grad_norm=MAX_NORM)
    return train(model, Turns(steps), options, on_step)


BRING_UP = {
    "shardwise": bring_up_by_shardwise,
    "by hand": bring_up_by_hand,
    "accelerate": bring_up_by_accelerate,
}
TRAIN: dict[str, Callable[[Any, Sequence[Sequence[Any]]], Any]] = {
    "shardwise": train_by_shardwise,
    "by hand": train_by_hand,
    "accelerate": train_by_hand,
}


# ── on each rank ──────────────────────────────────────────────────────────────────────────────────


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
        "shardwise": {"seconds": [step.seconds for step in report.steps], "losses": report.losses},
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
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
    }
    return sum(storages.values())


def quieten() -> None:
    import torch
    import transformers

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def first_step(arm: str, job: Job, rank: int, ranks: int, store: str) -> None:
    """One rank of a training of one step, in an interpreter of its own; prints when it is done."""
    import torch.distributed as dist

    if arm == "accelerate":
        import accelerate  # noqa: F401 - what its users import
    elif arm == "shardwise":
        import shardwise  # noqa: F401
    quieten()
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    TRAIN[arm](BRING_UP[arm](job), batches(job, 1, rank))
    print(meter.timestamp(), flush=True)
    dist.destroy_process_group()


# ── running ───────────────────────────────────────────────────────────────────────────────────────


def start_once(arm: str, job: Job, ranks: int, timeout_s: float) -> float:
    """Seconds from the start of the first process until every rank has done its first step."""
    with tempfile.TemporaryDirectory(prefix="shardwise-start-") as folder:
        began = meter.timestamp()
        processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.train",
                    "--child",
                    json.dumps(
                        {"arm": arm, "job": vars(job), "rank": rank, "ranks": ranks, "store": f"{folder}/store"}
                    ),
                ],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(ranks)
        ]
        try:
            told = [process.communicate(timeout=timeout_s)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{arm}: a rank failed")
    return max(float(text.split()[-1]) for text in told) - began


def measure(job: Job, warm_up: Job, first: Job, ranks: int, repeats: int, timeout_s: float) -> dict[str, Any]:
    with LocalRanks(ranks, timeout_s=timeout_s) as world:
        turns = world.run(take_turns, job)
    memory: dict[str, list[dict[str, int]]] = {}
    for arm in ("shardwise", "by hand"):
        with LocalRanks(ranks, timeout_s=timeout_s) as world:
            memory[arm] = world.run(remember, arm, job, warm_up)
    starts: dict[str, list[float]] = {arm: [] for arm in ("shardwise", "accelerate")}
    for _ in range(min(repeats, 2) if first.lora else repeats):  # minutes each
        for arm, found in starts.items():
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
        "start_s": {arm: statistics.median(seconds) for arm, seconds in starts.items()},
    }


def limits(made: Mapping[str, Any]) -> list[Limit]:
    start = made["start_s"]
    return [
        Limit("step time / by hand", made["step_ratio"], STEP_LIMIT),
        Limit(
            "memory in the steady state / states + largest group",
            made["memory_ratio"]["shardwise"]["steady"],
            MEMORY_LIMIT,
        ),
        Limit("process start to first step / accelerate", start["shardwise"] / start["accelerate"], START_LIMIT),
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
        f"The start is that of {results['start_model']}, as it is stored, with {FIRST_TOKENS} tokens on each rank"
        + (", by a LoRA." if results["start_by_lora"] else "."),
        f"Greatest difference of a step's loss: {made['loss_difference']:.1e} of it.",
        "",
        "| promise | measured | at most | |",
        "|---|--:|--:|---|",
        *(
            f"| {one['name']} | {one['value']:.3f} | {one['most']:g} | {one['verdict']} |"
            for one in results["limits"]
        ),
        "",
        "| arm | step s | start to first step s | weights MiB | brought up MiB | steady MiB | peak MiB |",
        "|---|--:|--:|--:|--:|--:|--:|",
        *(
            f"| {arm} | "
            + (f"{made['step_s'][arm]:.4f}" if arm in made["step_s"] else "-")
            + f" | {'-' if arm not in made['start_s'] else format(made['start_s'][arm], '.2f')} | "
            + (
                " | ".join(f"{mib[arm][name]:.0f}" for name in ("weights", "brought_up", "steady", "peak"))
                if arm in mib
                else "- | - | - | -"
            )
            + " |"
            for arm in BRING_UP
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
    parser.add_argument(
        "--start-model", default=None, choices=sorted(MODELS), help="of which the start is measured"
    )
    parser.add_argument("--ranks", type=int, default=None)
    parser.add_argument("--steps", type=int, default=None, help="of each arm")
    parser.add_argument("--repeats", type=int, default=None, help="of each start")
    parser.add_argument("--rows", type=int, default=1, help="on each rank")
    parser.add_argument("--tokens", type=int, default=64, help="of a row")
    parser.add_argument("--out", type=Path, help="results, as .json and .md beside it")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir(), "shardwise-benchmarks"))
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one measurement")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.child:
        told = json.loads(given.child)
        first_step(told["arm"], Job(**told["job"]), told["rank"], told["ranks"], told["store"])
        return 0
    began = time.perf_counter()
    shape = MODELS[given.model or (SMALL.name if given.quick else "qwen3-0.6b")]
    ranks = given.ranks or (2 if given.quick else 4)
    steps = given.steps or (13 if given.quick else 21)
    folder, tiny = write(shape, given.dir), write(shape.tiny(), given.dir)
    job = Job(str(folder), steps, given.rows, given.tokens, shape.config["vocab_size"])
    warm_up = Job(str(tiny), 1, 1, 16, shape.tiny().config["vocab_size"])
    larger = MODELS[given.start_model or (SMALL.name if given.quick else "qwen3-1.7b")]
    place = str(write(larger, given.dir))
    first = Job(place, 1, 1, FIRST_TOKENS, larger.config["vocab_size"], "auto", lora=larger is not SMALL)
    found = measure(job, warm_up, first, ranks, given.repeats or (2 if given.quick else 5), given.timeout)
    made = summary(found)
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks.train", *(argv if argv is not None else sys.argv[1:])]),
        "commit": commit(),
        "machine": machine(),
        "model": shape.name,
        "start_model": larger.name,
        "start_by_lora": first.lora,
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
