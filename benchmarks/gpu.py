"""What only a GPU can show, in minutes: ``python -m benchmarks.gpu``, or ``make gpu``.

Parts, what is needed most first, each a process of its own that is ended after its time. Ranks are one to an
accelerator. After each measurement a part prints all of its figures so far, as a line of JSON: what it measured
before it failed or was ended is kept, and the next part runs. No network: weights are drawn at random. Results
are written after each part, to ``benchmarks/results/gpu-DATE.{json,md}``.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Self, get_args
from unittest import mock

from benchmarks import bank, checkpoint, quantized, train
from benchmarks.harness import meter, results
from benchmarks.harness.checkpoints import SHAPES, Shape, write
from benchmarks.harness.loaders import LOADERS, Request, own_device, synchronize
from benchmarks.harness.results import ROOT, say
from benchmarks.harness.training import LEARNING_RATE, Job, batches, quieten, trained_parameters, update
from benchmarks.harness.training import load as load_model
from tests.support.local_ranks import RankError

EIGHT, SECOND = SHAPES["qwen3-8b"], SHAPES["qwen3-1.7b"]
BOUNDS = ("pinned to device", "page cache to pinned")
Figures = Iterator[tuple[str, Any]]
_LONGEST_TEXT = 20_000


@dataclass(frozen=True)
class Bench:
    """Where to measure, and how much: ``tiny`` shrinks every shape and count."""

    device: str
    tiny: bool
    folder: Path
    timeout: float = 900.0

    @property
    def ranks(self) -> int:
        """Accelerators that are visible; 1 on the CPU."""
        import torch

        return 1 if self.device == "cpu" else torch.accelerator.device_count()

    def run(self, function: Callable[..., Any], *args: Any, ranks: int | None = None) -> list[Any]:
        """Return what each rank returns."""
        with results.start_ranks(self, ranks) as world:
            return world.run(function, *args)

    def write(self, shape: Shape) -> str:
        return str(write(shape.tiny() if self.tiny else shape, self.folder))

    def job(self, shape: Shape, steps: int, dtype: str = "float32", *, lora: bool = False) -> Job:
        vocab_size = (shape.tiny() if self.tiny else shape).vocab_size
        rows, tokens = (1, 8) if self.tiny else (4, 512)
        return Job(self.write(shape), steps, rows, tokens, vocab_size, dtype, lora)


class Peak:
    """The highest memory of the block: ``max_memory_allocated`` of an accelerator, else growth of the process."""

    def __enter__(self) -> Self:
        import torch

        kind = own_device().type
        self._module: Any = None if kind == "cpu" else torch.get_device_module(kind)
        if self._module is None:
            self._watch = meter.MemoryWatch().__enter__()
        else:
            self._module.reset_peak_memory_stats()
        return self

    def __exit__(self, *error: object) -> None:
        if self._module is None:
            self._watch.__exit__(*error)
            self.nbytes = self._watch.growth_bytes
        else:
            synchronize()
            self.nbytes = self._module.max_memory_allocated()


# ── the parts ─────────────────────────────────────────────────────────────────────────────────────


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
    for writing in writes:
        writing.result()
    if process.returncode:
        raise RuntimeError(f"pytest exits with {process.returncode}")


def launch(bench: Bench) -> Figures:
    """``shardwise train --nproc-per-node`` of a QLoRA, with bitsandbytes installed."""
    yield "bitsandbytes installed", importlib.util.find_spec("bitsandbytes") is not None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        model = train.write_tokenizer(write(EIGHT.tiny(), bench.folder), out / "model")
        (out / "rows.jsonl").write_text('{"text": "w1 w2 w3"}\n' * 8)
        arguments = [f"--model_name_or_path={model}", f"--dataset_name={out / 'rows.jsonl'}"]
        arguments += [f"--output_dir={out / 'out'}", "--report_to=none", "--max_length=64", "--max_steps=2"]
        arguments += ["--use_peft", "--lora_target_modules=all-linear", "--load_in_4bit", "--bf16=false"]
        arguments += ["--use_cpu"] if bench.device == "cpu" else []
        command = [*train.shardwise_command("train"), *arguments, "--nproc-per-node", str(bench.ranks)]
        start = time.perf_counter()
        subprocess.run(command, stdout=sys.stderr, check=True)
        yield "seconds", time.perf_counter() - start


def load(bench: Bench, arms: Sequence[str] = ("shardwise", "transformers")) -> Figures:
    """A checkpoint in the page cache to the device, in new processes that take turns."""
    folder, warm_up = bench.write(EIGHT), str(write(EIGHT.tiny(), bench.folder))
    nbytes = (EIGHT.tiny() if bench.tiny else EIGHT).nbytes
    rates = bench.run(measure_rates, folder, 1 << 20 if bench.tiny else 256 << 20, ranks=1)[0]
    yield "bytes", nbytes
    yield "GB/s", rates
    runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for arm in results.turns(arms, 1 if bench.tiny else 2):
        try:
            ranks = bench.run(load_once, arm, folder, warm_up)
        except RankError as error:  # a peer may fail; the others are still compared
            if arm == "shardwise":
                raise
            yield f"{arm} fails", str(error)[-300:]
            continue
        runs[arm].append({name: max(rank[name] for rank in ranks) for name in ranks[0]})
        seconds = results.medians(runs, "seconds")
        others = seconds | {way: nbytes / 1e9 / rates[way] / bench.ranks for way in BOUNDS}
        yield "runs", runs
        yield "seconds", seconds
        yield "shardwise over", {way: seconds["shardwise"] / each for way, each in others.items()}


def measure_rates(folder: str, block_bytes: int) -> dict[str, Any]:
    """GB/s of one rank by what moves the bytes."""
    import torch

    device = own_device()
    pinned = torch.empty(block_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
    pageable = torch.ones(block_bytes, dtype=torch.uint8)
    target = torch.empty(block_bytes, dtype=torch.uint8, device=device)
    rates = {}
    for way, source in (("pinned to device", pinned), ("pageable to device", pageable)):
        target.copy_(source)
        synchronize()
        start = time.perf_counter()
        for _ in range(8):
            target.copy_(source, non_blocking=True)
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
    from transformers import AutoModelForCausalLM

    quieten()
    device = own_device()

    def load(source: str) -> Any:
        if arm == "transformers" and dist.get_world_size() == 1:  # the plain way, without FSDP2
            return AutoModelForCausalLM.from_pretrained(source, dtype="auto", device_map={"": device})
        return LOADERS[arm](Request(source)).model

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
    for form, source in (("FP8", str(quantized.write_fp8(Path(folder)))), ("NF4", folder)):
        for on_device in (True, False):
            name = f"{form} on the {'device' if on_device else 'host'}"
            computed[name] = max(bench.run(load_computed, source, warm_up, form == "NF4", on_device))
            yield "computed", computed
    yield "cuFile, GB/s", bench.run(read_by_cufile, folder, ranks=1)[0]


def load_computed(folder: str, warm_up: str, packs: bool, on_device: bool) -> float:
    """Seconds of a load of FP8, or that packs to NF4, computed on the device or the host. Collective: yes."""
    import torch.distributed as dist

    import shardwise
    from shardwise.transfer import read

    quieten()
    form = shardwise.options.Nf4() if packs else "dequantize"
    with mock.patch.object(read, "matches_cpu_bitwise", return_value=on_device):
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
    """A step of a whole model: by our loop, FSDP2 by hand, the Trainer; and what the host waits for in one."""
    job = bench.job(SECOND, 3 if bench.tiny else 13)
    runs = train.take_turns(bench, job, 1)
    summary = train.summarize(runs)
    yield "runs", runs
    yield "seconds", {arm: figures["step_s"] for arm, figures in summary.items()}
    yield "over by hand", summary[train.OWN_LOOP]["step_s"] / summary[train.BY_HAND]["step_s"]
    yield "Trainer over our loop", summary[train.TRAINER]["step_s"] / summary[train.OWN_LOOP]["step_s"]
    yield "greatest difference of a loss", max(figures["loss_difference"] for figures in summary.values())
    yield "one step", bench.run(waits_and_profile, job)[0]


def waits_and_profile(job: Job) -> dict[str, Any]:
    """Host waits of a steady step as torch warns of them, and its operators by time. Collective: yes."""
    import torch
    import torch.distributed as dist
    from torch.profiler import profile

    quieten()
    model, device = load_model("shardwise", job).train(), own_device()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    steps = batches(replace(job, steps=4), dist.get_rank())
    for ids in steps[:2]:
        update(model, optimizer, ids)
    synchronize()
    waits: dict[str, int] | str = f"unmeasured: the device is {device}"
    if device.type == "cuda":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            update(model, optimizer, steps[2])
            torch.cuda.set_sync_debug_mode("default")
        places = [f"{one.filename}:{one.lineno}" for one in caught if "synchronizing" in str(one.message)]
        waits = {place: places.count(place) for place in dict.fromkeys(places)}
    with profile() as events:
        update(model, optimizer, steps[3])
        synchronize()
    by = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
    table = events.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=60)
    return {"host waits": waits, "profile": table}


QLORAS = {"shardwise": quantized.ON_NF4, "PEFT and bitsandbytes": quantized.BITSANDBYTES}


def qlora(bench: Bench) -> Figures:
    """A base packed to NF4 while it is loaded, and steps of a LoRA on it, against PEFT and bitsandbytes."""
    job = bench.job(EIGHT, 3 if bench.tiny else 11, "bfloat16", lora=True)
    for name, arm in QLORAS.items():
        try:
            yield name, bench.run(train_qlora, arm, job, ranks=1)[0]
        except RankError as error:  # a peer that is not installed, or not for this device
            if name == "shardwise":
                raise
            yield name, {"fails": str(error)[-300:]}
    if bench.ranks > 1:
        yield "shardwise, all ranks", bench.run(train_qlora, quantized.ON_NF4, job)[0]


def train_qlora(arm: str, job: Job) -> dict[str, Any]:
    """Seconds and peak of a load and of steps, and bytes of the base. Collective: yes."""
    import torch
    import torch.distributed as dist

    quieten()
    with Peak() as load_peak:
        start = time.perf_counter()
        model = quantized.load_for_lora(arm, job.folder)
        synchronize()
        load_s = time.perf_counter() - start
    optimizer = torch.optim.AdamW(trained_parameters(model), lr=LEARNING_RATE)
    steps = batches(job, dist.get_rank())
    with Peak() as step_peak:
        seconds = []
        for ids in steps:
            start = time.perf_counter()
            float(update(model, optimizer, ids))
            seconds.append(time.perf_counter() - start)
    return {
        "load_s": load_s,
        "load_peak_bytes": load_peak.nbytes,
        "base_bytes": quantized.base_bytes(model),
        "step_s": meter.spread(seconds[1:])["median"],
        "step_peak_bytes": step_peak.nbytes,
    }


def many_loras(bench: Bench, adapters: int = 8, backends: Sequence[str] = ("auto",)) -> Figures:
    """A step of many adapters by backends of a bank, and by PEFT's ``set_adapter``."""
    job = bench.job(SECOND, 0)
    count, steps = (adapters // 4, 2) if bench.tiny else (adapters, 7)
    yield "adapters", count
    bank_job = bank.BankJob(job.folder, job.vocab_size, (8,) * count, 1, min(job.tokens, 128), steps)
    yield from bench.run(step_banks, bank_job, backends)[0].items()


def more_banks(bench: Bench) -> Figures:
    """32 adapters by each backend, and the products of one layer."""
    from shardwise.bank.kernels import BackendChoice

    yield from many_loras(bench, 32, get_args(BackendChoice))
    small = (64, 2, 4, 4, 1) if bench.tiny else (4096, 32, 128, 8, 5)
    yield "products of one layer, s", bench.run(bank.measure_products, *small, ranks=1)[0]


def step_banks(job: bank.BankJob, backends: Sequence[str]) -> dict[str, Any]:
    """Median seconds of a step by arm, and the greatest difference of a loss to that of PEFT. Collective: yes."""
    quieten()
    adapters = range(len(job.ranks_of_adapters))
    batches = [[job.ids(adapter, number, job.rows) for adapter in adapters] for number in range(job.steps)]
    seconds: dict[str, float] = {}
    losses: dict[str, list[float]] = {}
    weights: list[dict[str, Any]] = []
    for arm in (*backends, bank.SWITCHED):
        if arm == bank.SWITCHED:
            model: Any = bank.SwitchedAdapters(job, weights)
        else:
            model = bank.build_bank(job, job.ranks_of_adapters, arm)
            for adapter, values in enumerate(weights):  # all arms begin with those of the first
                model.load_state_dict(str(adapter), values)
            weights = weights or [model.state_dict(str(adapter))["adapter"] for adapter in adapters]
        taken, reached = bank.take_steps(model, batches)
        del model  # its memory is needed by the next one
        seconds[arm] = meter.spread(taken[1:])["median"]
        losses[arm] = [loss for each in reached for loss in each]
    pairs = {arm: zip(losses[arm], losses[bank.SWITCHED], strict=True) for arm in losses}
    differences = {arm: max(abs(one - other) for one, other in both) for arm, both in pairs.items()}
    return {"seconds": seconds, "greatest difference of a loss": differences}


def plan(bench: Bench) -> Figures:
    """What ``plan`` says beside what is allocated: a load, a LoRA, a whole training."""
    for name, shape, dtype, lora in (
        ("LoRA, bfloat16", EIGHT, "bfloat16", True),
        ("full, float32", SECOND, "float32", False),
    ):
        job = replace(bench.job(shape, 3, dtype, lora=lora), rows=1)  # logits are whole here, in tiles in the plan
        estimated = train.estimate(job, bench.ranks, bench.device)
        estimates = {f"{phase}, estimated": nbytes for phase, nbytes in estimated.items()}
        yield name, estimates | bench.run(measure_peaks, job)[0]


def measure_peaks(job: Job) -> dict[str, int]:
    """Peaks of a load and of steps. Collective: yes."""
    import torch
    import torch.distributed as dist

    quieten()
    with Peak() as load_peak:
        model = load_model("shardwise", job).train()
    optimizer = torch.optim.AdamW(trained_parameters(model), lr=LEARNING_RATE, foreach=True)
    with Peak() as step_peak:
        for ids in batches(job, dist.get_rank()):
            update(model, optimizer, ids)
    return {"load, allocated": load_peak.nbytes, "step, allocated": step_peak.nbytes}


def checkpoints(bench: Bench, layers: int = 5) -> Figures:
    """Checkpoints (weights and AdamW's moments in float32) against DCP's: 604 MB for each layer, and 800 MB."""
    fitting = shutil.disk_usage(bench.folder).free // 5 // 604_000_000 - 1
    shape = checkpoint.full_shape(*((2, 128) if bench.tiny else (min(layers, fitting), 2048)))
    with tempfile.TemporaryDirectory(dir=bench.folder) as out:
        ranks = bench.run(checkpoint.measure, "full", shape, out, 1 if bench.tiny else 2)
    rounds = checkpoint.join(ranks)
    later = {arm: of[1:] for arm, of in rounds.items()}
    blocked, total = results.medians(later, "seconds"), results.medians(later, "total")
    yield "bytes", 12 * ranks[0]["parameters"]
    yield "runs", rounds
    yield "seconds", {arm: {"blocked": blocked[arm], "total": total[arm]} for arm in rounds}


FIRST: dict[str, tuple[Callable[[Bench], Figures], int]] = {
    "tests": (tests, 240),
    "load": (load, 150),
    "qlora": (qlora, 150),
    "bank": (many_loras, 120),
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


# ── running them ──────────────────────────────────────────────────────────────────────────────────


def run_part(command: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Run a process: its figures, which are its last line of JSON, and the end of its log unless it is done."""
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=out, stderr=log, cwd=ROOT, env=_environment(), start_new_session=True
        )
        try:
            code = process.wait(limit_s)
            outcome = f"failed with exit code {code}" if code else "done"
        except subprocess.TimeoutExpired:
            outcome = f"ended after {limit_s:.0f} s"
        finally:  # with all processes that it started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        log.seek(0)
        lines = [line for line in out if line.startswith("{") and line.endswith("}\n")]
        text = log.read()
    result: dict[str, Any] = {"outcome": outcome, "seconds": time.perf_counter() - start}
    result["figures"] = json.loads(lines[-1]) if lines else {}
    return result if outcome == "done" else result | {"log": text[-_LONGEST_TEXT:]}


def _environment() -> dict[str, str]:
    """The packages that tests have beside the environment are installed for the parts, as a user has them."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    peer = Path(sys.prefix, "peers", "bitsandbytes")
    if peer.is_dir():
        paths.append(str(peer))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}


def _devices() -> str:
    try:
        return subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout
    except OSError:
        return "no nvidia-smi"


def to_markdown(report: Mapping[str, Any]) -> str:
    parts, left_out = report["parts"], report["left out"]
    lines = [
        f"# On {report['device']}" + (" (tiny shapes: figures mean nothing)" if report["tiny"] else ""),
        "",
        f"{report['date']}, commit {report['commit']}, {report['minutes']:.1f} minutes.",
        f"`{report['command']}`",
        f"Left out, for lack of time: `--parts {' '.join(left_out)}`" if left_out else "Nothing was left out.",
        "",
        *results.table(
            ["part", "outcome", "s"],
            [(name, part["outcome"], round(part["seconds"])) for name, part in parts.items()],
        ),
    ]
    for name, part in {"machine": {"figures": report["machine"]}, **parts}.items():
        lines += [f"## {name}", ""]
        log = {"log": part["log"]} if "log" in part else {}
        for key, text in _flatten(part["figures"] | log, ()):
            lines += ["", f"{key}:", "```", text.strip(), "```", ""] if "\n" in text else [f"- {key}: {text}"]
        lines += [""]
    return "\n".join(lines)


def _flatten(figures: Any, name: tuple[str, ...]) -> list[tuple[str, str]]:
    """Every figure with its name; single runs are in the JSON file alone."""
    if isinstance(figures, Mapping):
        return [line for key, value in figures.items() if key != "runs" for line in _flatten(value, (*name, key))]
    return [(", ".join(name), f"{figures:.4g}" if isinstance(figures, float) else str(figures))]


def run_here(part: str, bench: Bench) -> int:
    """Measure a part in this process."""
    bench.folder.mkdir(parents=True, exist_ok=True)
    figures = {}
    for name, figure in PARTS[part][0](bench):
        figures[name] = figure
        print(json.dumps(figures), flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; the exit status says whether all that began were done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="an accelerator of which each rank has one [cuda], or cpu")
    parser.add_argument("--tiny", action="store_true", help="shapes that take seconds, to see that it runs")
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(FIRST))
    parser.add_argument("--minutes", type=float, default=12.0, help="a part that does not fit is left out [12]")
    parser.add_argument("--out", type=Path, help="results, as .json and .md beside it")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir(), "shardwise-benchmarks"))
    parser.add_argument("--here", choices=list(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.here:
        return run_here(options.here, Bench(options.device, options.tiny, options.dir))
    start = time.perf_counter()
    arguments = ["--device", options.device, "--dir", str(options.dir.absolute()), *["--tiny"] * options.tiny]
    report: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks.gpu", *(argv if argv is not None else sys.argv[1:])]),
        "commit": results.commit(),
        "device": options.device,
        "tiny": options.tiny,
        "machine": {**results.machine(), "devices": _devices()},
        "parts": {},
        "left out": [],
    }
    out = options.out or ROOT / "benchmarks" / "results" / f"gpu-{datetime.now(UTC):%Y-%m-%d-%H%M}"
    out.parent.mkdir(parents=True, exist_ok=True)
    for name in options.parts:
        limit_s = PARTS[name][1]
        left_s = 60 * options.minutes - (time.perf_counter() - start)
        if left_s < limit_s / 2:
            report["left out"].append(name)
            say(f"{name}: left out, because it takes up to {limit_s:.0f} s and {max(left_s, 0):.0f} s are left")
        else:
            say(f"{name}: at most {min(limit_s, left_s):.0f} s")
            command = [sys.executable, "-m", "benchmarks.gpu", "--here", name, *arguments]
            report["parts"][name] = run_part(command, min(limit_s, left_s))
            say(f"{name}: {report['parts'][name]['outcome']}, {report['parts'][name]['seconds']:.0f} s")
        report["minutes"] = (time.perf_counter() - start) / 60
        Path(f"{out}.json").write_text(json.dumps(report, indent=1))
        Path(f"{out}.md").write_text(to_markdown(report))
    say(f"{out}.md")
    return int(any(part["outcome"] != "done" for part in report["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
