"""The parts of ``make gpu-hour``, each a process of its own: ``python -m benchmarks.gpu_parts PART --device cuda``.

Ranks are one to an accelerator. A part prints what it found as JSON on its last line.
"""

import argparse
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from benchmarks import checkpoint, four_bit_peers, gpu, quantized, tenancy, train, trainer
from benchmarks.checkpoints import Shape, write
from benchmarks.place import add_device, machine, own_device, synchronize
from benchmarks.start import with_tokenizer
from benchmarks.training import LEARNING_RATE, MODELS, Job, batches, quieten, smaller, update
from tests.support.local_ranks import LocalRanks, RankError

EIGHT = replace(
    smaller(
        "qwen3-8b",
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=32,
        num_hidden_layers=36,
        max_window_layers=36,
        tie_word_embeddings=False,
    ),
    file_bytes=4_000_000_000,
)
"""The shape of Qwen3-8B: 16.4 GB in bfloat16."""
CALL_S = 900.0


@dataclass(frozen=True)
class Given:
    """Where to measure, and how much: ``--tiny`` shrinks every shape and count."""

    device: str
    is_tiny: bool
    folder: Path

    @property
    def ranks(self) -> int:
        """Accelerators that are visible; 1 on the CPU."""
        import torch

        return 1 if self.device == "cpu" else torch.accelerator.device_count()

    def run(self, function: Callable[..., Any], *args: Any, ranks: int | None = None) -> list[Any]:
        """What each rank returns."""
        size, is_forked = ranks or self.ranks, self.device == "cpu"  # CUDA does not survive a fork
        with LocalRanks(size, timeout_s=CALL_S, device=self.device, is_forked=is_forked) as world:
            return world.run(function, *args)

    def write(self, shape: Shape) -> str:
        return str(write(shape.tiny() if self.is_tiny else shape, self.folder))

    def job(self, shape: Shape, steps: int, dtype: str = "float32", *, lora: bool = False) -> Job:
        words = int((shape.tiny() if self.is_tiny else shape).config["vocab_size"])
        rows, tokens = (1, 8) if self.is_tiny else (4, 512)
        return Job(self.write(shape), steps, rows, tokens, words, dtype, lora)


def versions(given: Given) -> dict[str, Any]:
    """Software, devices, how they are connected."""
    import torch

    found = {"machine": machine(), "ranks": given.ranks, "cuda": torch.version.cuda, "devices": []}
    for name in ("peft", "trl", "bitsandbytes"):
        found[name] = importlib.util.find_spec(name) is not None
    if torch.cuda.is_available():
        found["devices"] = [str(torch.cuda.get_device_properties(n)) for n in range(torch.cuda.device_count())]
        found["nccl"] = str(torch.cuda.nccl.version())
    for name, command in (("topology", ["topo", "-m"]), ("driver", ["-q", "-d", "CLOCK,POWER,PCIE"])):
        try:
            found[name] = subprocess.run(["nvidia-smi", *command], capture_output=True, text=True).stdout
        except OSError:
            found[name] = "no nvidia-smi"
    return found


def tests(given: Given) -> dict[str, Any]:
    """``tests/gpu`` to the end."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-rfEs", "-p", "no:cacheprovider"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        raise RuntimeError(f"pytest exits with {done.returncode}\n" + "\n".join(lines[-60:]))
    return {"summary": lines[-1]}


def launch(given: Given) -> dict[str, Any]:
    """``shardwise train --nproc-per-node`` of a QLoRA, with bitsandbytes installed."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model = with_tokenizer(write(EIGHT.tiny(), given.folder), place / "model")
        (place / "rows.jsonl").write_text('{"text": "w1 w2 w3"}\n' * 8)
        arguments = [f"--model_name_or_path={model}", f"--dataset_name={place / 'rows.jsonl'}"]
        arguments += [f"--output_dir={place / 'out'}", "--report_to=none", "--max_length=64", "--max_steps=2"]
        arguments += ["--use_peft", "--lora_target_modules=all-linear", "--load_in_4bit", "--bf16=false"]
        arguments += ["--use_cpu"] if given.device == "cpu" else []
        program = "from shardwise.cli import main; main()"
        began = time.perf_counter()
        command = [sys.executable, "-c", program, "train", *arguments, "--nproc-per-node", str(given.ranks)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"shardwise train exits with {done.returncode}\n{done.stdout}{done.stderr}"[-4000:])
    has_peer = importlib.util.find_spec("bitsandbytes") is not None
    return {"seconds": time.perf_counter() - began, "bitsandbytes installed": has_peer}


def load(given: Given) -> dict[str, Any]:
    """A checkpoint in the page cache to the device, in fresh processes that take turns; FP8, and packed to NF4."""
    folder, warm_up = given.write(EIGHT), str(write(EIGHT.tiny(), given.folder))
    nbytes = (EIGHT.tiny() if given.is_tiny else EIGHT).nbytes
    rates = given.run(gpu.rates, folder, 1 << 20 if given.is_tiny else 256 << 20, ranks=1)[0]
    runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in gpu.ARMS}
    failed: dict[str, str] = {}
    for _ in range(1 if given.is_tiny else 3):
        for arm, own in runs.items():
            try:
                ranks = given.run(gpu.load, arm, folder, warm_up)
            except RankError as error:  # a peer may fail; the others are still compared
                if arm == "shardwise":
                    raise
                failed[arm] = str(error)[-300:]
                continue
            own.append({name: max(rank[name] for rank in ranks) for name in ranks[0]})
    seconds = {arm: statistics.median(run["seconds"] for run in own) for arm, own in runs.items() if own}
    roof = nbytes / 1e9 / min(rates["pinned to device"], rates["page cache to pinned"]) / given.ranks
    ratios = {arm: seconds["shardwise"] / own for arm, own in seconds.items() if arm != "shardwise"}
    computed = {
        f"{form} on the {'device' if on_device else 'host'}": max(
            given.run(gpu.load_computed, source, warm_up, form == "NF4", on_device)
        )
        for form, source in (("FP8", str(quantized.quantized(Path(folder)))), ("NF4", folder))
        for on_device in (True, False)
    }
    return {"GB/s": rates, "seconds": seconds, "over the roof": seconds["shardwise"] / roof, "over": ratios} | {
        "bytes": nbytes,
        "failed": failed,
        "runs": runs,
        "computed": computed,
    }


def step(given: Given) -> dict[str, Any]:
    """A step of a whole model: by shardwise, FSDP2 by hand, the Trainer; and what the host waits for in one."""
    job = given.job(MODELS["qwen3-1.7b"], 3 if given.is_tiny else 13)
    turns = given.run(train.take_turns, job)
    seconds = {
        arm: statistics.median(
            max(each) for each in list(zip(*(rank[arm]["seconds"] for rank in turns), strict=True))[1:]
        )
        for arm in ("shardwise", "by hand")
    }
    losses = [turns[0][arm]["losses"] for arm in seconds]
    by_trainer = trainer.summary(
        trainer.take_turns(job, 1 if given.is_tiny else 2, given.ranks, CALL_S, given.device)
    )
    return {
        "seconds": seconds,
        "over by hand": seconds["shardwise"] / seconds["by hand"],
        "greatest difference of a loss": max(abs(one - other) for one, other in zip(*losses, strict=True)),
        "Trainer": by_trainer,
        "one step": given.run(waits_and_profile, job)[0],
        "runs": turns,
    }


def waits_and_profile(job: Job) -> dict[str, Any]:
    """Host waits of a steady step as torch warns of them, and its operators by time. Collective: yes."""
    import torch
    import torch.distributed as dist
    from benchmarks.training import bring_up_by_shardwise
    from torch.profiler import profile

    quieten()
    model, device = bring_up_by_shardwise(job).train(), own_device()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    steps = batches(job, 4, dist.get_rank())
    for [batch] in steps[:2]:
        update(model, optimizer, batch)
    synchronize()
    waits: dict[str, int] | str = f"unmeasured: the device is {device}"
    if device.type == "cuda":
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            update(model, optimizer, steps[2][0])
            torch.cuda.set_sync_debug_mode("default")
        places = [f"{one.filename}:{one.lineno}" for one in told if "synchronizing" in str(one.message)]
        waits = {place: places.count(place) for place in dict.fromkeys(places)}
    with profile() as found:
        update(model, optimizer, steps[3][0])
        synchronize()
    by = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
    table = found.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=60)
    return {"host waits": waits, "profile": table}


def qlora(given: Given) -> dict[str, Any]:
    """A base packed to NF4 while it is loaded, and steps of a LoRA on it, against PEFT and bitsandbytes."""
    job = given.job(EIGHT, 3 if given.is_tiny else 11, "bfloat16", lora=True)
    found: dict[str, Any] = {}
    for arm in QLORAS:
        try:
            found[arm] = given.run(qlora_of, arm, job, ranks=1)[0]
        except RankError as error:  # a peer that is not installed, or not for this device
            if arm == "shardwise":
                raise
            found[arm] = {"fails": str(error)[-300:]}
    if given.ranks > 1:
        found["shardwise, all ranks"] = given.run(qlora_of, "shardwise", job)[0]
    return found


QLORAS: dict[str, Callable[[str], Any]] = {
    "shardwise": four_bit_peers.by_shardwise,
    "PEFT and bitsandbytes": four_bit_peers.by_bitsandbytes,
}


def qlora_of(arm: str, job: Job) -> dict[str, Any]:
    """Seconds and peak of bringing one up, of its steps, and bytes of its base. Collective: yes."""
    import torch
    import torch.distributed as dist

    quieten()
    with gpu.Peak() as load_peak:
        start = time.perf_counter()
        model = QLORAS[arm](job.folder)
        synchronize()
        load_s = time.perf_counter() - start
    optimizer = torch.optim.AdamW(four_bit_peers.trained(model), lr=LEARNING_RATE)
    steps = batches(job, job.steps, dist.get_rank())
    with gpu.Peak() as step_peak:
        seconds = []
        for [batch] in steps:
            start = time.perf_counter()
            float(update(model, optimizer, batch))
            seconds.append(time.perf_counter() - start)
    return {
        "load_s": load_s,
        "load_peak_bytes": load_peak.nbytes,
        "base_bytes": four_bit_peers.base_bytes(model),
        "step_s": statistics.median(seconds[1:]),
        "step_peak_bytes": step_peak.nbytes,
    }


def bank(given: Given) -> dict[str, Any]:
    """A step of 8 and of 32 tenants by each backend of a bank, and by PEFT's ``set_adapter``."""
    job = given.job(MODELS["qwen3-1.7b"], 0)
    found: dict[str, Any] = {}
    for count in (2, 4) if given.is_tiny else (8, 32):
        steps = 2 if given.is_tiny else 7
        own = tenancy.TenancyJob(job.folder, job.words, (8,) * count, 1, min(job.tokens, 128), steps, 1, (), 0)
        found[f"{count} tenants"] = given.run(bank_turns, own)[0]
    small = (64, 2, 4, 4, 1) if given.is_tiny else (4096, 32, 128, 8, 5)
    found["products of one layer, s"] = given.run(tenancy.take_products, *small, ranks=1)[0]
    return found


def bank_turns(job: tenancy.TenancyJob) -> dict[str, Any]:
    """Median seconds of a step by arm, and the greatest difference of a loss to that of PEFT. Collective: yes."""
    import torch.distributed as dist

    from shardwise.bank.backends import BackendChoice

    quieten()
    tenants = range(len(job.ranks_of_tenants))
    seconds: dict[str, float] = {}
    losses: dict[str, list[list[float]]] = {}
    begin: list[dict[str, Any]] = []
    rows = [
        [tenancy.ids_of(job, one, number, dist.get_rank(), job.rows) for one in tenants]
        for number in range(job.steps)
    ]
    for arm in (*get_args(BackendChoice), tenancy.SWITCHED):
        if arm == tenancy.SWITCHED:
            step = tenancy.SwitchedAdapters(job, begin).step
            told = [tenancy.timed(partial(step, each)) for each in rows]
        else:
            own = tenancy.bank_of(job, job.ranks_of_tenants, arm)
            if begin:
                for tenant, values in zip(tenants, begin, strict=True):
                    own.load_state_dict(str(tenant), values)
            begin = begin or [own.state_dict(str(tenant))["adapter"] for tenant in tenants]
            told = [tenancy.timed(partial(tenancy.step_of_bank, own, each)) for each in rows]
            del own
        seconds[arm] = statistics.median(each for each, _ in told[1:])
        losses[arm] = [found for _, found in told]
    theirs = [loss for each in losses[tenancy.SWITCHED] for loss in each]
    differences = {
        arm: max(abs(one - other) for one, other in zip((x for each in own for x in each), theirs, strict=True))
        for arm, own in losses.items()
    }
    return {"seconds": seconds, "greatest difference of a loss": differences}


def checkpoints(given: Given) -> dict[str, Any]:
    """Checkpoints of 20 GB (weights and AdamW's moments in float32), or a fifth of the free disk, against DCP's."""
    fitting = shutil.disk_usage(given.folder).free // 5 // 604_000_000 - 1  # bytes of a layer; the embedding is one
    layers, hidden = (2, 128) if given.is_tiny else (min(31, fitting), 2048)
    with tempfile.TemporaryDirectory(dir=given.folder) as out:
        told = given.run(checkpoint.measure, "full", layers, hidden, out, 1 if given.is_tiny else 2)
    arms = checkpoint.summary(told)
    medians = {
        arm: {phase: statistics.median(own[phase][1:]) for phase in ("blocked", "total")}
        for arm, own in arms.items()
    }
    return {"bytes": 12 * told[0]["parameters"], "seconds": medians, "runs": arms}


def estimates(given: Given) -> dict[str, Any]:
    """What ``plan`` says beside what is allocated: a load, a whole training, a LoRA."""
    found: dict[str, Any] = {}
    for name, shape, dtype, lora in (
        ("full, float32", MODELS["qwen3-1.7b"], "float32", False),
        ("LoRA, bfloat16", EIGHT, "bfloat16", True),
    ):
        job = given.job(shape, 3, dtype, lora=lora)
        job = replace(job, rows=1)  # logits are whole here, and in tiles in the estimate
        found[name] = estimate_of(given, job) | given.run(peaks_of, job)[0]
    return found


def estimate_of(given: Given, job: Job) -> dict[str, int]:
    """Estimated bytes on the device of the first rank."""
    from benchmarks.arms import adapter_config

    import shardwise

    plan = shardwise.plan(
        job.folder,
        ranks=given.ranks,
        dtype=job.dtype,
        device=given.device,
        tuning=shardwise.Lora(adapter_config()) if job.lora else shardwise.Full(),
        per_device_train_batch_size=job.rows,
        max_length=job.tokens,
        optim="adamw_torch",
        gradient_checkpointing=False,
    )
    first, on_host = plan.ranks[0], given.device == "cpu"
    assert plan.training is not None
    return {
        "load, estimated": first.host_bytes if on_host else first.device_bytes,
        "step, estimated": plan.training.worst(given.device).bytes_on(given.device),
    }


def peaks_of(job: Job) -> dict[str, int]:
    """Peaks of a load and of steps. Collective: yes."""
    import torch
    import torch.distributed as dist
    from benchmarks.training import bring_up_by_shardwise

    quieten()
    with gpu.Peak() as load_peak:
        model = bring_up_by_shardwise(job).train()
    optimizer = torch.optim.AdamW(four_bit_peers.trained(model), lr=LEARNING_RATE, foreach=True)
    with gpu.Peak() as step_peak:
        for [batch] in batches(job, job.steps, dist.get_rank()):
            update(model, optimizer, batch)
    return {"load, allocated": load_peak.nbytes, "step, allocated": step_peak.nbytes}


PARTS: dict[str, tuple[Callable[[Given], dict[str, Any]], int]] = {
    "versions": (versions, 60),
    "tests": (tests, 600),
    "launch": (launch, 240),
    "load": (load, 600),
    "step": (step, 480),
    "qlora": (qlora, 420),
    "bank": (bank, 480),
    "checkpoints": (checkpoints, 420),
    "estimates": (estimates, 300),
}
"""By name: what is measured, and seconds after which it is ended. Together an hour."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=list(PARTS))
    add_device(parser)
    parser.add_argument("--tiny", action="store_true", help="shapes that take seconds, to see that it runs")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir(), "shardwise-benchmarks"))
    given = parser.parse_args(argv)
    given.dir.mkdir(parents=True, exist_ok=True)
    found = PARTS[given.part][0](Given(given.device, given.tiny, given.dir))
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
