"""``shardwise serve`` against the bank that it is made of. ``python -m benchmarks.serve``.

In float32, with the unmodified ``tinker`` client in two other processes, and the server's default waits:

- overhead: processor seconds of the server for a forward_backward of 2,048 tokens in 4 rows with its optim_step,
  and those of them that its bank takes, by the clock of its thread. A bank in a process of its own is no measure:
  its processor seconds differ by more than the overhead, since nothing else runs beside it.
- idle: wall seconds of a forward_backward of 16 tokens from a client, and by the bank.
- fused: models in a turn, of eight clients that train in a loop.
- together: requests a second of eight clients at once, and of the same clients one after the other; on two ranks
  with 2 rows of 64 tokens a request, and on one with 4 rows of 512.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.harness import meter, results
from benchmarks.harness.results import Limit

NUM_IDS = 256
"""Ids of rows: those that both bases have."""

SIZES = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
BASES = {
    "small": {"vocab_size": NUM_IDS, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1},
    "36M": {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10},
}
NUM_CLIENTS = 8
RANK = 16
OVERHEAD_S, IDLE_S, FUSED, TWO_RANKS, ONE_RANK = 0.010, 0.015, 7.0, 1.8, 0.95
SERVER, BANK = "server", "bank"
MEASURED = "measured-server"
TOGETHER, IN_TURN = "together", "one after the other"

_models: dict[int, Any] = {}
"""Clients of this process, by number."""

_banks: dict[str, Any] = {}


def save_base(name: str, folder: Path) -> str:
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, **BASES[name])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


def serve_measured(file: str, *words: str) -> None:
    """Run the command ``shardwise`` with these words. A file has the processor seconds in its bank so far."""
    from shardwise.bank.adapter_bank import AdapterBank
    from shardwise.cli import main as shardwise

    used_s = 0.0
    for name in ("forward_backward", "optim_step"):
        method = getattr(AdapterBank, name)

        def measured(*arguments: Any, method: Any = method, **keywords: Any) -> Any:
            nonlocal used_s
            begin_s = time.thread_time()
            try:
                return method(*arguments, **keywords)
            finally:
                used_s += time.thread_time() - begin_s
                Path(file).write_text(str(used_s))

        setattr(AdapterBank, name, measured)
    shardwise(list(words), prog_name="shardwise")


@contextmanager
def serving(base: str, ranks: int, measured: Path | None = None) -> Iterator[tuple[str, int]]:
    """Start a server for the block. Yield its URL and the process of the first rank, if there is only one."""
    command = [sys.executable, "-m", "shardwise"]
    if measured is not None:
        command = [sys.executable, "-m", "benchmarks.serve", MEASURED, str(measured)]
    command += ["serve", base, "--port", "0", "--served-model-name", "base"]
    with subprocess.Popen(
        [*command, "--nproc-per-node", str(ranks)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if line.startswith("serving ")), "")
            if not line:
                raise RuntimeError(f"the server ended with exit code {process.wait()}")
            yield line.split()[-1], process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60.0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def cpu_of(pid: int) -> float:
    """Processor seconds of all threads of a process, to the nanosecond."""
    return (
        sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9
    )


def adapters_per_turn(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    return float(
        next(line.split()[1] for line in text.splitlines() if line.startswith("shardwise_adapters_per_turn "))
    )


def make_ids(seed: int, rows: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, NUM_IDS, (rows, tokens + 1), generator=generator)


# Clients


def connect(url: str, num_clients: int) -> None:
    """Make this process' share of the clients, each with a model."""
    os.environ["TINKER_TELEMETRY"] = "0"
    import tinker

    service = tinker.ServiceClient(base_url=url, api_key="tml-benchmark")
    _models.clear()
    for number in range(dist.get_rank(), num_clients, dist.get_world_size()):
        _models[number] = service.create_lora_training_client("base", rank=RANK, seed=number).result()


def _to_data(ids: torch.Tensor) -> list[Any]:
    from tinker import types

    data = []
    for row in ids.tolist():
        targets = types.TensorData(data=row[1:], dtype="int64", shape=[len(row) - 1])
        weights = types.TensorData(data=[1.0] * (len(row) - 1), dtype="float32", shape=[len(row) - 1])
        inputs = {"target_tokens": targets, "weights": weights}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs=inputs))
    return data


async def _train(number: int, steps: int, rows: int, tokens: int) -> None:
    from tinker import types

    data, adam = _to_data(make_ids(number, rows, tokens)), types.AdamParams(learning_rate=1e-4)
    for _ in range(steps):
        passed = _models[number].forward_backward(data, "cross_entropy")
        stepped = _models[number].optim_step(adam)
        await passed
        await stepped


async def _train_all(steps: int, rows: int, tokens: int) -> None:
    await asyncio.gather(*(_train(number, steps, rows, tokens) for number in _models))


def run_clients(steps: int, rows: int, tokens: int, arm: str, num_clients: int) -> float:
    """Seconds in which all clients take their steps."""
    dist.barrier()
    start = time.perf_counter()
    if arm == TOGETHER:
        asyncio.run(_train_all(steps, rows, tokens))
        dist.barrier()
    else:
        for number in range(num_clients):
            if number in _models:
                asyncio.run(_train(number, steps, rows, tokens))
            dist.barrier()
    return time.perf_counter() - start


def time_passes(count: int, tokens: int) -> list[float]:
    """Wall seconds of passes of one row, by the first client. Only the first process has it."""
    seconds: list[float] = []
    if 0 in _models:
        data = _to_data(make_ids(0, 1, tokens))
        for _ in range(count):
            start = time.perf_counter()
            _models[0].forward_backward(data, "cross_entropy").result()
            seconds.append(time.perf_counter() - start)
    return seconds


# The bank alone


def _open_bank(folder: str) -> Any:
    import shardwise
    from shardwise.ranks.world import World
    from shardwise.serve.engine import Engine
    from shardwise.serve.operations import CreateModel, Turn

    if folder not in _banks:
        torch.set_num_threads(1)  # as the server has, by OMP_NUM_THREADS
        model = shardwise.from_pretrained(folder)
        bank = shardwise.AdapterBank(model)
        # The targets and settings of a model that a client creates.
        create = CreateModel("create", "model", RANK, 0, frozenset({"attn", "mlp", "unembed"}))
        Engine(World.current(call="benchmark"), bank, model).run(Turn((create,)))
        _banks[folder] = bank
    return _banks[folder]


def run_bank(folder: str, count: int, tokens: int) -> list[float]:
    """Wall seconds of passes of one row."""
    from shardwise.bank.rows import Request

    bank = _open_bank(folder)
    [row] = make_ids(0, 1, tokens)
    values = [{"input_ids": row[:-1], "targets": row[1:], "weights": torch.ones(tokens)}]
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        bank.forward_backward([Request("model", values)], gather=True)
        seconds.append(time.perf_counter() - start)
    return seconds


# Measurements


def measure_one_client(
    options: argparse.Namespace, small: str, base: str, count: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """By arm, processor seconds of 4 rows of 512 tokens and a step on a small base; wall seconds of 16 tokens."""
    used_s: dict[str, list[float]] = {SERVER: [], BANK: []}
    measured = options.dir / "serve-bank-seconds"
    with serving(small, 1, measured) as (url, pid), results.start_ranks(options, 1) as clients:
        clients.run(connect, url, 1)
        clients.run(run_clients, count, 4, 512, TOGETHER, 1)  # sets up
        for _ in range(options.repeats):
            begin_s, bank_s = cpu_of(pid), float(measured.read_text())
            clients.run(run_clients, count, 4, 512, TOGETHER, 1)
            used_s[SERVER].append((cpu_of(pid) - begin_s) / count)
            used_s[BANK].append((float(measured.read_text()) - bank_s) / count)
    wall_s: dict[str, list[float]] = {SERVER: [], BANK: []}
    with (
        serving(base, 1) as (url, _),
        results.start_ranks(options, 1) as clients,
        results.start_ranks(options, 1) as bank,
    ):
        clients.run(connect, url, 1)
        for repeat in range(options.repeats + 1):
            [by_client] = clients.run(time_passes, count, 16)
            [by_bank] = bank.run(run_bank, base, count, 16)
            if repeat:
                wall_s[SERVER] += by_client
                wall_s[BANK] += by_bank
    return used_s, wall_s


def measure_clients(
    options: argparse.Namespace, base: str, ranks: int, steps: int, rows: int, tokens: int
) -> tuple[dict[str, list[float]], float]:
    """Requests a second of eight clients, together and one after the other, and models in a turn together."""
    rates: dict[str, list[float]] = {TOGETHER: [], IN_TURN: []}
    with serving(base, ranks) as (url, _), results.start_ranks(options, 2) as clients:
        clients.run(connect, url, NUM_CLIENTS)
        clients.run(run_clients, steps, rows, tokens, TOGETHER, NUM_CLIENTS)
        fused = adapters_per_turn(url)
        for _ in range(options.repeats):
            for arm in results.turns(rates, 1):
                seconds = max(clients.run(run_clients, steps, rows, tokens, arm, NUM_CLIENTS))
                rates[arm].append(NUM_CLIENTS * steps / seconds)
                results.say(f"{ranks} ranks, {arm}: {rates[arm][-1]:.3f} requests/s")
    return rates, fused


def main(argv: Sequence[str] | None = None) -> int:
    parser = results.parser(__doc__, ranks=2, repeats=3)
    options = results.parse(parser, argv)
    report = results.describe(options, "serve")
    name = "small" if options.tiny else "36M"
    base = save_base(name, options.dir / f"serve-{name}")
    small = save_base("small", options.dir / "serve-small")
    count = 2 if options.tiny else 20
    used_s, wall_s = measure_one_client(options, small, base, count)
    results.say(f"one client: processor seconds {used_s}, wall seconds {wall_s}")
    runs = {"overhead": used_s, "idle": wall_s}
    runs["two ranks"], fused = measure_clients(options, base, options.ranks, count, 2, 64)
    runs["one rank"], _ = measure_clients(options, base, 1, 2, 4, 64 if options.tiny else 512)
    medians = {run: {arm: meter.spread(of)["median"] for arm, of in arms.items()} for run, arms in runs.items()}
    words = {
        "overhead": "processor seconds of 2,048 tokens and a step",
        "idle": "wall seconds of 16 tokens",
        "two ranks": f"requests/s, {options.ranks} ranks, 2 rows of 64 tokens",
        "one rank": "requests/s, 1 rank, 4 rows of 512 tokens",
    }
    lines = []
    for run, arms in runs.items():
        rows = []
        for arm, of in arms.items():
            spread = meter.spread(of)
            rows.append((arm, spread["median"], f"{spread['min']:.3g} .. {spread['max']:.3g}"))
        lines += results.table([words[run], "median", "min .. max"], rows)
    limits = [
        Limit(
            "processor seconds above the bank", medians["overhead"][SERVER] - medians["overhead"][BANK], OVERHEAD_S
        ),
        Limit("wall seconds above the bank, 16 tokens", medians["idle"][SERVER] - medians["idle"][BANK], IDLE_S),
        Limit("8 / models in a turn", NUM_CLIENTS / fused, NUM_CLIENTS / FUSED),
        Limit(
            "one after the other / together, 2 ranks",
            medians["two ranks"][IN_TURN] / medians["two ranks"][TOGETHER],
            1 / TWO_RANKS,
        ),
        Limit(
            "one after the other / together, 1 rank",
            medians["one rank"][IN_TURN] / medians["one rank"][TOGETHER],
            1 / ONE_RANK,
        ),
    ]
    about = (
        f"Clients with LoRAs of rank {RANK} on all linear layers. Models in a turn: {fused:.2f} of {NUM_CLIENTS}."
    )
    return results.publish(
        options, {**report, "runs": runs, "models_in_a_turn": fused}, [about, "", *lines], limits
    )


if __name__ == "__main__":
    if sys.argv[1:2] == [MEASURED]:
        serve_measured(*sys.argv[2:])
    sys.exit(main())
