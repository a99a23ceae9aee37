"""The parts of ``make gpu``, each a process of its own: ``python -m benchmarks.gpu_parts PART --device cuda``.

Ranks are one to an accelerator. After each measurement a part prints all of its figures so far, as a line of JSON.
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args
from unittest import mock

from benchmarks import checkpoint, four_bit_peers, meter, quantized, tenancy, train, trainer
from benchmarks.checkpoints import Shape, write
from benchmarks.place import add_device, own_device, synchronize
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
SECOND = MODELS["qwen3-1.7b"]
BOUNDS = ("pinned to device", "page cache to pinned")
CALL_S = 900.0
Figures = Iterator[tuple[str, Any]]


@dataclass(frozen=True)
class Bench:
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
        """Return what each rank returns."""
        size, is_forked = ranks or self.ranks, self.device == "cpu"  # CUDA does not survive a fork
        with LocalRanks(size, timeout_s=CALL_S, device=self.device, is_forked=is_forked) as world:
            return world.run(function, *args)

    def write(self, shape: Shape) -> str:
        return str(write(shape.tiny() if self.is_tiny else shape, self.folder))

    def job(self, shape: Shape, steps: int, dtype: str = "float32", *, lora: bool = False) -> Job:
        words = int((shape.tiny() if self.is_tiny else shape).config["vocab_size"])
        rows, tokens = (1, 8) if self.is_tiny else (4, 512)
        return Job(self.write(shape), steps, rows, tokens, words, dtype, lora)


class Peak:
    """The highest memory of the block: ``max_memory_allocated`` of an accelerator, else growth of the process."""

    nbytes = 0

    def __enter__(self) -> "Peak":
        import torch

        self._module: Any = None
        if own_device().type != "cpu":
            self._module = torch.get_device_module(own_device().type)
            self._module.reset_peak_memory_stats()
        else:
            self._watch = meter.MemoryWatch().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._module is not None:
            synchronize()
            self.nbytes = self._module.max_memory_allocated()
        else:
            self._watch.__exit__(*error)
            self.nbytes = self._watch.growth


def tests(bench: Bench) -> Figures:
    """``tests/gpu``: NCCL on one rank, streams, bits of decoding. Beside them, what other parts load is written."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-v", "-rfEs", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-W", "default", "--timeout", "60"]  # a warning of CUDA's is no fault of ours
    lines = [""]
    with (
        ThreadPoolExecutor(1) as writer,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
    ):
        writes = [writer.submit(bench.write, shape) for shape in (EIGHT, SECOND)]
        for line in process.stdout or ():
            print(line, end="", file=sys.stderr, flush=True)  # in the log, should a test hang
            lines.append(line.strip())
    yield "summary", lines[-1]
    for written in writes:
        written.result()
    if process.returncode:
        raise RuntimeError(f"pytest exits with {process.returncode}")


def launch(bench: Bench) -> Figures:
    """``shardwise train --nproc-per-node`` of a QLoRA, with bitsandbytes installed."""
    yield "bitsandbytes installed", importlib.util.find_spec("bitsandbytes") is not None
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model = with_tokenizer(write(EIGHT.tiny(), bench.folder), place / "model")
        (place / "rows.jsonl").write_text('{"text": "w1 w2 w3"}\n' * 8)
        arguments = [f"--model_name_or_path={model}", f"--dataset_name={place / 'rows.jsonl'}"]
        arguments += [f"--output_dir={place / 'out'}", "--report_to=none", "--max_length=64", "--max_steps=2"]
        arguments += ["--use_peft", "--lora_target_modules=all-linear", "--load_in_4bit", "--bf16=false"]
        arguments += ["--use_cpu"] if bench.device == "cpu" else []
        program = "from shardwise.cli import main; main()"
        command = [sys.executable, "-c", program, "train", *arguments, "--nproc-per-node", str(bench.ranks)]
        start = time.perf_counter()
        subprocess.run(command, stdout=sys.stderr, check=True)
        yield "seconds", time.perf_counter() - start


def load(bench: Bench, arms: Sequence[str] = ("shardwise", "transformers")) -> Figures:
    """A checkpoint in the page cache to the device, in fresh processes that take turns."""
    folder, warm_up = bench.write(EIGHT), str(write(EIGHT.tiny(), bench.folder))
    nbytes = (EIGHT.tiny() if bench.is_tiny else EIGHT).nbytes
    rates = bench.run(measure_rates, folder, 1 << 20 if bench.is_tiny else 256 << 20, ranks=1)[0]
    yield "bytes", nbytes
    yield "GB/s", rates
    runs: dict[str, list[dict[str, float]]] = {}
    for _ in range(1 if bench.is_tiny else 2):
        for arm in arms:
            try:
                ranks = bench.run(load_once, arm, folder, warm_up)
            except RankError as error:  # a peer may fail; the others are still compared
                if arm == "shardwise":
                    raise
                yield f"{arm} fails", str(error)[-300:]
                continue
            runs.setdefault(arm, []).append({name: max(rank[name] for rank in ranks) for name in ranks[0]})
            yield "runs", runs
            seconds = {arm: statistics.median(run["seconds"] for run in rounds) for arm, rounds in runs.items()}
            yield "seconds", seconds
            others = seconds | {way: nbytes / 1e9 / rates[way] / bench.ranks for way in BOUNDS}
            yield "shardwise over", {way: others["shardwise"] / each for way, each in others.items()}


def measure_rates(folder: str, block_bytes: int) -> dict[str, Any]:
    """GB/s of one rank by what moves the bytes."""
    import torch

    device = own_device()
    pinned = torch.empty(block_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
    pageable = torch.ones(block_bytes, dtype=torch.uint8)
    target = torch.empty(block_bytes, dtype=torch.uint8, device=device)
    rates = {}
    for way, to, source in (
        ("pinned to device", target, pinned),
        ("pageable to device", target, pageable),
    ):
        to.copy_(source)
        synchronize()
        start = time.perf_counter()
        for _ in range(8):
            to.copy_(source, non_blocking=True)
        synchronize()
        rates[way] = 8 * block_bytes / (time.perf_counter() - start) / 1e9
    files = meter.files_of(Path(folder))
    meter.warm_cache(files)
    nbytes, start = 0, time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(memoryview(pinned.numpy())):
                nbytes += count
    rates["page cache to pinned"] = nbytes / (time.perf_counter() - start) / 1e9
    return rates


def load_once(arm: str, folder: str, warm_up: str) -> dict[str, float]:
    """Seconds of one load from the page cache by shardwise or a peer, and peak memory. Collective: yes."""
    import torch.distributed as dist
    from benchmarks.arms import ARMS, Request
    from transformers import AutoModelForCausalLM

    quieten()
    device = own_device()

    def load(source: str) -> Any:
        if arm == "transformers" and dist.get_world_size() == 1:  # the plain way, without FSDP2
            return AutoModelForCausalLM.from_pretrained(source, dtype="auto", device_map={"": device})
        return ARMS[arm](Request(Path(source))).model

    load(warm_up)
    if dist.get_rank() == 0:
        meter.warm_cache(meter.files_of(Path(folder)))
    with Peak() as peak:
        dist.barrier()
        start = time.perf_counter()
        for parameter in load(folder).parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            assert local.device.type == device.type, f"{arm} left a tensor on {local.device}"
            local.detach().view(-1)[:1].add_(0)
        synchronize()
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "peak_bytes": peak.nbytes}


def more_loads(bench: Bench) -> Figures:
    """DCP; FP8, and packed to NF4, computed on the device and on the host; cuFile."""
    yield from load(bench, ("shardwise", "dcp"))
    folder, warm_up = bench.write(EIGHT), str(write(EIGHT.tiny(), bench.folder))
    computed = {}
    for form, source in (("FP8", str(quantized.quantized(Path(folder)))), ("NF4", folder)):
        for on_device in (True, False):
            name = f"{form} on the {'device' if on_device else 'host'}"
            computed[name] = max(bench.run(load_computed, source, warm_up, form == "NF4", on_device))
            yield "computed", computed
    yield "cuFile, GB/s", bench.run(read_by_cufile, folder, ranks=1)[0]


def load_computed(folder: str, warm_up: str, packs: bool, on_device: bool) -> float:
    """Seconds of a load of FP8, or that packs to NF4, computed on the device or the host. Collective: yes."""
    import torch.distributed as dist

    import shardwise
    from shardwise.execution import device_computing

    quieten()
    form = shardwise.options.Nf4() if packs else "dequantize"
    with mock.patch.object(device_computing, "matches_cpu_bitwise", return_value=on_device):
        shardwise.from_pretrained(warm_up, dtype="bfloat16", quantization=form)
        if dist.get_rank() == 0:
            meter.warm_cache(meter.files_of(Path(folder)))
        dist.barrier()
        start = time.perf_counter()
        shardwise.from_pretrained(folder, dtype="bfloat16", quantization=form)
        synchronize()
        return time.perf_counter() - start


def read_by_cufile(folder: str) -> float | str:
    """GB/s of cuFile (GPUDirect Storage) from files that are not in the page cache."""
    import os

    import torch
    from torch.cuda import gds

    if own_device().type != "cuda":
        return f"unmeasured: the device is {own_device()}"
    files, target = meter.files_of(Path(folder)), torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    try:
        meter.drop_cache(files)
        nbytes, start = 0, time.perf_counter()
        for path in files:
            file, size = gds.GdsFile(str(path), os.O_RDONLY), path.stat().st_size
            for offset in range(0, size - target.numel() + 1, target.numel()):
                file.load_storage(target.untyped_storage(), offset)
                nbytes += target.numel()
        synchronize()
        return nbytes / (time.perf_counter() - start) / 1e9
    except Exception as error:  # no driver, no support in the file system
        return f"unmeasured: {type(error).__name__}: {error}"[:300]


def step(bench: Bench) -> Figures:
    """A step of a whole model: by shardwise, FSDP2 by hand, the Trainer; and what the host waits for in one."""
    job = bench.job(SECOND, 3 if bench.is_tiny else 13)
    turns = bench.run(train.take_turns, job)
    seconds = {}
    for arm in ("shardwise", "by hand"):
        steps = list(zip(*(rank[arm]["seconds"] for rank in turns), strict=True))
        seconds[arm] = statistics.median(max(ranks) for ranks in steps[1:])
    losses = [turns[0][arm]["losses"] for arm in seconds]
    yield "runs", turns
    yield "seconds", seconds
    yield "over by hand", seconds["shardwise"] / seconds["by hand"]
    yield "greatest difference of a loss", max(abs(one - two) for one, two in zip(*losses, strict=True))
    yield "one step", bench.run(waits_and_profile, job)[0]
    repeats = 1 if bench.is_tiny else 2
    yield "Trainer", trainer.summary(trainer.take_turns(job, repeats, bench.ranks, CALL_S, bench.device))


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
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            update(model, optimizer, steps[2][0])
            torch.cuda.set_sync_debug_mode("default")
        places = [f"{one.filename}:{one.lineno}" for one in caught if "synchronizing" in str(one.message)]
        waits = {place: places.count(place) for place in dict.fromkeys(places)}
    with profile() as events:
        update(model, optimizer, steps[3][0])
        synchronize()
    by = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
    table = events.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=60)
    return {"host waits": waits, "profile": table}


QLORAS: dict[str, Callable[[str], Any]] = {
    "shardwise": four_bit_peers.by_shardwise,
    "PEFT and bitsandbytes": four_bit_peers.by_bitsandbytes,
}


def qlora(bench: Bench) -> Figures:
    """A base packed to NF4 while it is loaded, and steps of a LoRA on it, against PEFT and bitsandbytes."""
    job = bench.job(EIGHT, 3 if bench.is_tiny else 11, "bfloat16", lora=True)
    for arm in QLORAS:
        try:
            yield arm, bench.run(qlora_of, arm, job, ranks=1)[0]
        except RankError as error:  # a peer that is not installed, or not for this device
            if arm == "shardwise":
                raise
            yield arm, {"fails": str(error)[-300:]}
    if bench.ranks > 1:
        yield "shardwise, all ranks", bench.run(qlora_of, "shardwise", job)[0]


def qlora_of(arm: str, job: Job) -> dict[str, Any]:
    """Seconds and peak of bringing one up, of its steps, and bytes of its base. Collective: yes."""
    import torch
    import torch.distributed as dist

    quieten()
    with Peak() as load_peak:
        start = time.perf_counter()
        model = QLORAS[arm](job.folder)
        synchronize()
        load_s = time.perf_counter() - start
    optimizer = torch.optim.AdamW(four_bit_peers.trained(model), lr=LEARNING_RATE)
    steps = batches(job, job.steps, dist.get_rank())
    with Peak() as step_peak:
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


def bank(bench: Bench, tenants: int = 8, backends: Sequence[str] = ("auto",)) -> Figures:
    """A step of many tenants by backends of a bank, and by PEFT's ``set_adapter``."""
    job = bench.job(SECOND, 0)
    count, steps = (tenants // 4, 2) if bench.is_tiny else (tenants, 7)
    tenancy_job = tenancy.TenancyJob(job.folder, job.words, (8,) * count, 1, min(job.tokens, 128), steps, 1, (), 0)
    yield "tenants", count
    yield from bench.run(bank_turns, tenancy_job, (*backends, tenancy.SWITCHED))[0].items()


def more_banks(bench: Bench) -> Figures:
    """32 tenants by each backend, and the products of one layer."""
    from shardwise.bank.backends import BackendChoice

    yield from bank(bench, 32, get_args(BackendChoice))
    small = (64, 2, 4, 4, 1) if bench.is_tiny else (4096, 32, 128, 8, 5)
    yield "products of one layer, s", bench.run(tenancy.take_products, *small, ranks=1)[0]


def bank_turns(job: tenancy.TenancyJob, arms: Sequence[str]) -> dict[str, Any]:
    """Median seconds of a step by arm, and the greatest difference of a loss to that of PEFT. Collective: yes."""
    import torch.distributed as dist

    quieten()
    tenants = range(len(job.ranks_of_tenants))
    seconds: dict[str, float] = {}
    losses: dict[str, list[float]] = {}
    begin: list[dict[str, Any]] = []
    rows = [
        [tenancy.ids_of(job, tenant, number, dist.get_rank(), job.rows) for tenant in tenants]
        for number in range(job.steps)
    ]
    for arm in arms:
        if arm == tenancy.SWITCHED:
            step = tenancy.SwitchedAdapters(job, begin).step
            steps = [tenancy.timed(partial(step, each)) for each in rows]
        else:
            adapters = tenancy.bank_of(job, job.ranks_of_tenants, arm)
            for tenant, values in enumerate(begin):  # none for the first arm
                adapters.load_state_dict(str(tenant), values)
            begin = begin or [adapters.state_dict(str(tenant))["adapter"] for tenant in tenants]
            steps = [tenancy.timed(partial(tenancy.step_of_bank, adapters, each)) for each in rows]
            del adapters
        seconds[arm] = statistics.median(each for each, _ in steps[1:])
        losses[arm] = [loss for _, each in steps for loss in each]
    pairs = {arm: zip(losses[arm], losses[tenancy.SWITCHED], strict=True) for arm in losses}
    differences = {arm: max(abs(one - other) for one, other in both) for arm, both in pairs.items()}
    return {"seconds": seconds, "greatest difference of a loss": differences}


def plan(bench: Bench) -> Figures:
    """What ``plan`` says beside what is allocated: a load, a LoRA, a whole training."""
    for name, shape, dtype, lora in (
        ("LoRA, bfloat16", EIGHT, "bfloat16", True),
        ("full, float32", SECOND, "float32", False),
    ):
        job = replace(bench.job(shape, 3, dtype, lora=lora), rows=1)  # logits are whole here, in tiles in the plan
        yield name, estimate_of(bench, job) | bench.run(peaks_of, job)[0]


def estimate_of(bench: Bench, job: Job) -> dict[str, int]:
    """Estimated bytes on the device of the first rank."""
    from benchmarks.arms import adapter_config

    import shardwise

    estimate = shardwise.plan(
        job.folder,
        ranks=bench.ranks,
        dtype=job.dtype,
        device=bench.device,
        tuning=shardwise.Lora(adapter_config()) if job.lora else shardwise.Full(),
        per_device_train_batch_size=job.rows,
        max_length=job.tokens,
        optim="adamw_torch",
        gradient_checkpointing=False,
    )
    first, on_host = estimate.ranks[0], bench.device == "cpu"
    assert estimate.training is not None
    return {
        "load, estimated": first.host_bytes if on_host else first.device_bytes,
        "step, estimated": estimate.training.worst(bench.device).bytes_on(bench.device),
    }


def peaks_of(job: Job) -> dict[str, int]:
    """Peaks of a load and of steps. Collective: yes."""
    import torch
    import torch.distributed as dist
    from benchmarks.training import bring_up_by_shardwise

    quieten()
    with Peak() as load_peak:
        model = bring_up_by_shardwise(job).train()
    optimizer = torch.optim.AdamW(four_bit_peers.trained(model), lr=LEARNING_RATE, foreach=True)
    with Peak() as step_peak:
        for [batch] in batches(job, job.steps, dist.get_rank()):
            update(model, optimizer, batch)
    return {"load, allocated": load_peak.nbytes, "step, allocated": step_peak.nbytes}


def checkpoints(bench: Bench, layers: int = 5) -> Figures:
    """Checkpoints (weights and AdamW's moments in float32) against DCP's: 604 MB for each layer, and 800 MB."""
    fitting = shutil.disk_usage(bench.folder).free // 5 // 604_000_000 - 1
    layers, hidden = (2, 128) if bench.is_tiny else (min(layers, fitting), 2048)
    with tempfile.TemporaryDirectory(dir=bench.folder) as out:
        ranks = bench.run(checkpoint.measure, "full", layers, hidden, out, 1 if bench.is_tiny else 2)
    arms = checkpoint.summary(ranks)
    yield "bytes", 12 * ranks[0]["parameters"]
    yield "runs", arms
    phases = ("blocked", "total")
    yield "seconds", {arm: {phase: statistics.median(arms[arm][phase][1:]) for phase in phases} for arm in arms}


FIRST: dict[str, tuple[Callable[[Bench], Figures], int]] = {
    "tests": (tests, 240),
    "load": (load, 150),
    "qlora": (qlora, 150),
    "bank": (bank, 120),
    "plan": (plan, 120),
    "checkpoint": (checkpoints, 120),
}
"""By name: what is measured, and seconds after which it is ended. What is needed most comes first."""
PARTS = FIRST | {
    "launch": (launch, 240),
    "step": (step, 480),
    "more-loads": (more_loads, 600),
    "more-banks": (more_banks, 480),
    "more-checkpoints": (partial(checkpoints, layers=31), 420),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=list(PARTS))
    add_device(parser)
    parser.add_argument("--tiny", action="store_true", help="shapes that take seconds, to see that it runs")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir(), "shardwise-benchmarks"))
    options = parser.parse_args(argv)
    options.dir.mkdir(parents=True, exist_ok=True)
    figures = {}
    for name, figure in PARTS[options.part][0](Bench(options.device, options.tiny, options.dir)):
        figures[name] = figure
        print(json.dumps(figures), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
