"""Training: steps against FSDP2 by hand, and how long it takes to the first one. ``python -m benchmarks.train``.

- step: each turn of an arm is some steps in new processes, from the checkpoint on. The arms: a loop by hand
  over a model of shardwise's; the same loop over one that every rank loads and ``fully_shard`` shards; the
  Hugging Face Trainer over a model of shardwise's. The losses of all must agree. A step takes as long as on its
  slowest rank, and the first of each turn, which sets up, is left out. Memory is the growth of a rank, loading
  included, beside what ``shardwise.plan`` estimates.
- start: from the start of the first process until every rank has done its first step, imports included. Each
  arm is started as its users do: ``shardwise train``; TRL's script by torchrun, with the same arguments, where
  each rank holds the whole model; accelerate as a loop by hand, which needs neither TRL nor a tokenizer,
  without the time of its launcher. The commands compute in float32 unless told otherwise, accelerate in the
  stored dtype, so ``shardwise train`` also runs in bfloat16.
"""

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import meter, results
from benchmarks.harness.checkpoints import SHAPES
from benchmarks.harness.results import Limit, say
from benchmarks.harness.training import LEARNING_RATE, MAX_NORM, Job, batches, load, quieten, train
from tests.support.local_ranks import LocalRanks

OWN_LOOP, BY_HAND, TRAINER = "shardwise", "FSDP2 by hand", "Trainer"
STEP_ARMS = (OWN_LOOP, BY_HAND, TRAINER)
OURS, OURS_AS_STORED, TRL, ACCELERATE = "shardwise train", "shardwise train, bfloat16", "trl sft", "accelerate"
START_ARMS = (OURS, OURS_AS_STORED, TRL, ACCELERATE)
ROWS = ("step", "start")
STEP_RATIO, TRAINER_RATIO, TRL_RATIO, LOSS_DIFFERENCE = 1.03, 1.05, 1.0, 1e-3
FIRST_TOKENS = 21

_LOOK_S = 0.02
_WORDS = 500


# ── steps ─────────────────────────────────────────────────────────────────────────────────────────


def take_turn(arm: str, job: Job) -> dict[str, Any]:
    """Seconds of each step, its losses, and growth of memory. Collective: yes."""
    import torch.distributed as dist

    quieten()
    with meter.MemoryWatch() as memory:
        model = load("fully_shard" if arm == BY_HAND else "shardwise", job)
        if arm == TRAINER:
            seconds, losses = train_by_trainer(model, job)
        else:
            seconds, losses = train(model, batches(job, dist.get_rank()))
    return {"seconds": seconds, "losses": losses, "growth_bytes": memory.growth_bytes}


def train_by_trainer(model: Any, job: Job) -> tuple[list[float], list[float]]:
    """By ShardwiseTrainer, without checkpoints. A step lasts until the next one begins, with logs and callbacks."""
    import torch.distributed as dist
    from benchmarks.harness.loaders import own_device
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from shardwise.integrations import ShardwiseTrainer, for_trainer

    rank, size = dist.get_rank(), dist.get_world_size()
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in variables.items()}, MASTER_ADDR="127.0.0.1")
    begins: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            begins.append(time.perf_counter())

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            begins.append(time.perf_counter())

    class Measured(ShardwiseTrainer, Trainer):  # type: ignore[misc]
        pass

    by_rank = [[ids.tolist() for ids in batches(job, other)] for other in range(size)]
    # The sampler deals batches to the ranks in turn.
    rows = [row for step in zip(*by_rank, strict=True) for ids in step for row in ids]
    trainer = Measured(
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
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[Clock],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [after - before for before, after in itertools.pairwise(begins)], losses


def take_turns(options: Any, job: Job, repeats: int) -> dict[str, list[list[dict[str, Any]]]]:
    """By arm, of each turn what each rank reports."""
    runs: dict[str, list[list[dict[str, Any]]]] = {arm: [] for arm in STEP_ARMS}
    for arm in results.turns(STEP_ARMS, repeats):
        with results.start_ranks(options) as world:
            runs[arm].append(world.run(take_turn, arm, job))
    return runs


def summarize(runs: Mapping[str, list[list[dict[str, Any]]]]) -> dict[str, dict[str, float]]:
    """By arm: the median step, the difference of its losses to those of our loop, and the most growth of a rank."""
    summary = {}
    losses = runs[OWN_LOOP][0][0]["losses"]
    for arm, turns in runs.items():
        steps = [seconds for turn in turns for seconds in results.slowest([rank["seconds"] for rank in turn])]
        pairs = [pair for turn in turns for pair in zip(losses, turn[0]["losses"], strict=True)]
        summary[arm] = {
            "step_s": meter.spread(steps)["median"],
            "loss_difference": max(abs(one - other) / abs(one) for one, other in pairs),
            "growth_bytes": max(rank["growth_bytes"] for turn in turns for rank in turn),
        }
    return summary


def estimate(job: Job, ranks: int, device: str) -> dict[str, int]:
    """Bytes on the first rank by ``shardwise.plan``: of its load, and of a step."""
    from benchmarks.harness.loaders import adapter_config

    import shardwise

    plan = shardwise.plan(
        job.folder,
        ranks=ranks,
        dtype=job.dtype,
        device=device,
        tuning=shardwise.Lora(adapter_config()) if job.lora else shardwise.Full(),
        per_device_train_batch_size=job.rows,
        max_length=job.tokens,
        optim="adamw_torch",
        gradient_checkpointing=False,
    )
    assert plan.training is not None
    first = plan.ranks[0]
    return {
        "load": first.host_bytes if device == "cpu" else first.device_bytes,
        "step": plan.training.worst(device).bytes_on(device),
    }


# ── starts ────────────────────────────────────────────────────────────────────────────────────────


def start_once(arm: str, job: Job, ranks: int, timeout_s: float) -> float:
    """Seconds from the start of the first process until every rank has done its first step."""
    start = meter.timestamp()
    if arm == ACCELERATE:
        with LocalRanks(ranks, timeout_s=timeout_s) as world:
            return max(world.run(take_first_step, job)) - start
    with tempfile.TemporaryDirectory(prefix="shardwise-start-") as folder:
        return run_command(arm, job, ranks, Path(folder), timeout_s)


def take_first_step(job: Job) -> float:
    """Return when accelerate has done it. Collective: yes."""
    import torch.distributed as dist

    quieten()
    train(load("accelerate-efficient", job), batches(job, dist.get_rank()))
    return meter.timestamp()


def run_command(arm: str, job: Job, ranks: int, folder: Path, timeout_s: float) -> float:
    """Seconds until the loss of the first step is printed.

    Raises:
        RuntimeError: the command failed, or took too long.
    """
    model, data, log = write_tokenizer(Path(job.folder), folder / "model"), folder / "data", folder / "log"
    generator = random.Random(0)
    rows = [" ".join(f"w{generator.randrange(_WORDS)}" for _ in range(job.tokens - 1)) for _ in range(4 * ranks)]
    data.mkdir()
    (data / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    arguments = [f"--model_name_or_path={model}", f"--dataset_name={data}", f"--output_dir={folder / 'out'}"]
    arguments += [f"--per_device_train_batch_size={job.rows}", "--max_steps=1", "--logging_steps=1"]
    arguments += ["--use_peft", "--lora_target_modules=all-linear", "--lora_r=16"] * job.lora
    arguments += ["--report_to=none", "--save_strategy=no", f"--bf16={str(arm == OURS_AS_STORED).lower()}"]
    command = [*shardwise_command("train"), *arguments, "--nproc-per-node", str(ranks)]
    if arm == TRL:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *torchrun, "-m", "trl.scripts.sft", "--use_cpu", *arguments]
    with log.open("w") as file:
        start = meter.timestamp()
        process = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            while "'loss'" not in log.read_text():
                if process.poll() is not None or meter.timestamp() - start > timeout_s:
                    raise RuntimeError(f"{arm}: no step in {meter.timestamp() - start:.0f} s\n{log.read_text()}")
                time.sleep(_LOOK_S)
            seconds = meter.timestamp() - start
            if arm == TRL:
                process.terminate()  # torchrun ends its ranks
            if process.wait(timeout_s) and arm != TRL:
                raise RuntimeError(f"{arm}: it failed after its step\n{log.read_text()}")
        finally:
            process.kill()
            process.wait()
    return seconds


def shardwise_command(name: str) -> list[str]:
    return [sys.executable, "-c", "from shardwise.cli import main; main()", name]


def write_tokenizer(folder: Path, into: Path) -> Path:
    """A folder with links to the same files, and a tokenizer of some words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    into.mkdir()
    for path in folder.iterdir():
        (into / path.name).symlink_to(path)
    words = {f"w{number}": number for number in range(_WORDS)} | {"<unknown>": _WORDS, "<end>": _WORDS + 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<end>", "pad_token": "<end>", "unk_token": "<unknown>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(into)
    return into


# ── the program ───────────────────────────────────────────────────────────────────────────────────


def measure_steps(options: argparse.Namespace) -> tuple[dict[str, Any], list[str], list[Limit]]:
    shape = SHAPES[options.model].tiny() if options.tiny else SHAPES[options.model]
    folder, _ = results.write_shape(options, SHAPES[options.model])
    job = Job(str(folder), options.steps, options.rows_per_step, options.tokens, shape.vocab_size)
    runs = take_turns(options, job, options.repeats)
    summary = summarize(runs)
    step_s = summary[OWN_LOOP]["step_s"]
    estimated = estimate(job, options.ranks, options.device)["step"]
    limits = [
        Limit("step / FSDP2 by hand", step_s / summary[BY_HAND]["step_s"], STEP_RATIO),
        Limit("step of the Trainer / our loop", summary[TRAINER]["step_s"] / step_s, TRAINER_RATIO),
        Limit("difference of a loss", max(arm["loss_difference"] for arm in summary.values()), LOSS_DIFFERENCE),
    ]
    lines = [
        f"Steps of {folder.name}, all in float32 by AdamW; {job.rows} rows of {job.tokens} tokens a rank.",
        "",
    ]
    rows = [
        [arm, figures["step_s"], step_s / figures["step_s"], figures["growth_bytes"] / 2**20]
        for arm, figures in summary.items()
    ]
    lines += results.table(["arm", "step, s", "our loop / it", "memory growth MiB"], rows)
    lines += [f"The plan of shardwise estimates {estimated / 2**20:,.0f} MiB.", ""]
    return {"summary": summary, "estimated_bytes": estimated, "turns": runs}, lines, limits


def measure_starts(options: argparse.Namespace) -> tuple[dict[str, Any], list[str], list[Limit]]:
    shape = SHAPES[options.model]
    folder, _ = results.write_shape(options, shape)
    vocab_size = min(shape.vocab_size, 512)
    job = Job(str(folder), 1, 1, FIRST_TOKENS, vocab_size, dtype="auto", lora=options.lora)
    runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in START_ARMS}
    for arm in results.turns(START_ARMS, options.repeats):
        runs[arm].append({"seconds": start_once(arm, job, options.ranks, options.timeout)})
        say(f"  {arm}: first step after {runs[arm][-1]['seconds']:.2f} s")
    seconds = results.medians(runs, "seconds")
    trained = "a LoRA" if options.lora else "all parameters"
    lines = [f"Start to first step of {folder.name}, {trained}, {FIRST_TOKENS} tokens a rank.", ""]
    lines += results.runs_table("arm", runs, OURS)
    limits = [Limit("start to first step / TRL's script", seconds[OURS] / seconds[TRL], TRL_RATIO)]
    return runs, lines, limits


def main(argv: Sequence[str] | None = None) -> int:
    parser = results.parser(__doc__, repeats=3)
    models = [name for name, shape in SHAPES.items() if not shape.is_moe]
    parser.add_argument("--model", default="qwen3-36m", choices=models, help="[qwen3-36m]")
    results.add_choice(parser, "--rows", ROWS, f"of {', '.join(ROWS)}")
    parser.add_argument("--steps", type=int, default=7, help="of a turn [7]")
    parser.add_argument("--rows-per-step", type=int, default=1, help="on each rank [1]")
    parser.add_argument("--tokens", type=int, default=64, help="of a row [64]")
    parser.add_argument("--lora", action="store_true", help="the start of a LoRA, instead of all parameters")
    options = results.parse(parser, argv)
    options.steps = min(options.steps, 3) if options.tiny else options.steps
    report = results.describe(options, "train")
    lines: list[str] = []
    limits: list[Limit] = []
    for row in options.rows:
        figures, described, promised = (measure_steps if row == "step" else measure_starts)(options)
        report[row] = figures
        lines += described
        limits += promised
    return results.publish(options, report, lines, limits)


if __name__ == "__main__":
    sys.exit(main())
