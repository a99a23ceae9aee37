"""Checkpoints of a training, measured: how long it waits, synchronously and not, and against torch's own.

    python -m benchmarks.checkpoint                 # a full tuning, some minutes
    python -m benchmarks.checkpoint --what lora     # the adapter of a 1.7B model and its AdamW
    python -m benchmarks.checkpoint --way restore   # back again, with every byte compared and without

Four gloo ranks hold a model of random values and its AdamW with moments, in float32. The arms take turns; the clock
of a rank runs from a barrier until the call returns, and the slowest rank counts. With the asynchronous arms it
goes on until the checkpoint is complete. "the copy alone" is what no asynchronous checkpoint can do without: every
rank copies its own shards to memory that is there already. Every arm syncs what it writes to the disk. torch's
arms write the model and its moments only.

A restore puts values into a model and an optimizer that are there: from the page cache, which is as quick as memory
is, so that comparing costs most there; and from the disk, as after a machine was lost. "Not compared" is the same
checkpoint, whose facts name no checksums, as before there were any.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.place import RANKS, add_device, commit, machine, own_device, synchronize
from tests.support.local_ranks import LocalRanks

ARMS = ("synchronous", "asynchronous", "dcp.save", "dcp.async_save", "the copy alone")
AIM = 0.15
LORA_AIM_S, LORA_WAIT_AIM_S = 1.0, 0.12
RESTORES = ("compared", "not compared", "compared, from the disk", "not compared, from the disk")
RESTORE_AIM = 0.05


def measure(what: str, layers: int, hidden: int, out: str, repeats: int) -> dict[str, Any]:
    """Seconds of every round by arm. Collective: yes."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model, parameters = _lora() if what == "lora" else _full(layers, hidden)
    optimizer = torch.optim.AdamW(parameters, lr=1e-5)
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    arms = _arms(what, model, optimizer, out)
    rounds: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for number in range(repeats + 1):  # the first round is told apart: imports, plans, fresh memory
        for arm, run in arms.items():
            dist.barrier()
            rounds[arm].append(run(number))
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(f"{out}/torch", ignore_errors=True)
                os.sync()
            dist.barrier()
    return {"rounds": rounds, "parameters": sum(parameter.numel() for parameter in parameters)}


def measure_restore(what: str, layers: int, hidden: int, out: str, repeats: int) -> dict[str, Any]:
    """Seconds of every round by arm. Collective: yes."""
    import torch
    import torch.distributed as dist

    import shardwise
    from shardwise import Checkpointer, TrainState

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model, parameters = _lora() if what == "lora" else _full(layers, hidden)
    optimizer = torch.optim.AdamW(parameters, lr=1e-5)
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    state = TrainState(model, optimizer)
    only = shardwise.options.AdapterOnly() if what == "lora" else None
    Checkpointer(f"{out}/compared", only=only).save(1, state)
    if dist.get_rank() == 0:
        _without_checksums(Path(out, "compared", "step-1"), Path(out, "not compared", "step-1"))
    rounds: dict[str, list[dict[str, float]]] = {arm: [] for arm in RESTORES}
    for number in range(repeats + 1):
        for arm in RESTORES if number % 2 else reversed(RESTORES):
            folder, _, is_cold = arm.partition(", ")
            if is_cold and dist.get_rank() == 0:
                _forget(Path(out, folder, "step-1"))
            dist.barrier()
            start = time.perf_counter()
            report = Checkpointer(f"{out}/{folder}", only=only).restore(state)
            elapsed = time.perf_counter() - start
            assert bool(report.checked_bytes) == (folder == "compared")
            rounds[arm].append({"blocked": elapsed, "total": elapsed, **report.seconds})
    return {"rounds": rounds, "parameters": sum(parameter.numel() for parameter in parameters)}


def _forget(step: Path) -> None:
    """Have the page cache let go of a checkpoint."""
    for path in step.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _without_checksums(step: Path, copy: Path) -> None:
    from dataclasses import replace

    from shardwise.checkpoints.header import HEADER, CheckpointHeader

    shutil.copytree(step, copy, copy_function=os.link)
    facts = replace(CheckpointHeader.from_bytes((step / HEADER).read_bytes(), HEADER), checksums={})
    (copy / HEADER).unlink()
    (copy / HEADER).write_bytes(facts.to_bytes())


def _full(layers: int, hidden: int) -> tuple[Any, list[Any]]:
    import torch
    from torch.distributed.fsdp import fully_shard
    from transformers import Qwen3ForCausalLM

    with torch.device("meta"):
        model = Qwen3ForCausalLM(_config(layers, hidden, 32768))
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device=own_device())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_(0, 0.02)
    return model, list(model.parameters())


def _lora() -> tuple[Any, list[Any]]:
    """Qwen3-1.7B's shapes in bfloat16, whose base is never touched, with an adapter of r=16 in float32."""
    import torch
    from peft import LoraConfig, get_peft_model
    from torch.distributed.fsdp import fully_shard
    from transformers import Qwen3ForCausalLM

    with torch.device("meta"):
        base = Qwen3ForCausalLM(_config(28, 2048, 151936)).to(torch.bfloat16)
        model = get_peft_model(
            base,
            LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
            autocast_adapter_dtype=True,
        )
    for block in model.base_model.model.model.layers:
        frozen = {p for p in block.parameters() if not p.requires_grad}
        fully_shard(block, ignored_params=frozen)
    model.to_empty(device=own_device())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter.normal_(0, 0.02)
    return model, trained


def _config(layers: int, hidden: int, vocabulary: int) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )


def _arms(what: str, model: Any, optimizer: Any, out: str) -> dict[str, Callable[[int], dict[str, float]]]:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    import shardwise
    from shardwise import Checkpointer, TrainState
    from shardwise.models.view import local_tensor

    only = shardwise.options.AdapterOnly() if what == "lora" else None
    state = TrainState(model, optimizer)
    ours = {mode: Checkpointer(f"{out}/{mode}", mode=mode, keep=1, only=only) for mode in ("sync", "async")}

    def save(mode: Any) -> Callable[[int], dict[str, float]]:
        def run(number: int) -> dict[str, float]:
            start, processor = time.perf_counter(), time.thread_time()
            report = ours[mode].save(number, state)
            blocked, processor = time.perf_counter() - start, time.thread_time() - processor
            ours[mode].wait()
            total = time.perf_counter() - start
            return {"blocked": blocked, "total": total, "processor": processor, **report.seconds}

        return run

    def sharded() -> dict[str, Any]:
        values, moments = get_state_dict(model, optimizer)
        return {"model": values, "optimizer": moments}

    def torch_save(number: int) -> dict[str, float]:
        start = time.perf_counter()
        dcp.save(sharded(), checkpoint_id=f"{out}/torch/{number}")
        return {"blocked": time.perf_counter() - start, "total": time.perf_counter() - start}

    def torch_async(number: int) -> dict[str, float]:
        start = time.perf_counter()
        future = dcp.async_save(sharded(), checkpoint_id=f"{out}/torch/{number}")
        blocked = time.perf_counter() - start
        future.result()
        return {"blocked": blocked, "total": time.perf_counter() - start}

    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors = [*trained, *(value for values in optimizer.state.values() for value in values.values())]
    local = [local_tensor(tensor) for tensor in tensors]
    is_pinned = own_device().type != "cpu"
    memory = [torch.zeros_like(tensor, device="cpu", pin_memory=is_pinned) for tensor in local]

    def copy(number: int) -> dict[str, float]:
        start = time.perf_counter()
        for target, source in zip(memory, local, strict=True):
            target.copy_(source, non_blocking=True)
        synchronize()
        return {"blocked": time.perf_counter() - start, "total": time.perf_counter() - start}

    arms = dict(
        zip(
            ARMS,
            (save("sync"), save("async"), torch_save, torch_async, copy),
            strict=True,
        )
    )
    if what == "lora":  # torch would write the base, too
        del arms["dcp.save"], arms["dcp.async_save"]
    return arms


def summary(ranks: list[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """By arm and phase, the slowest rank of every round; the first round is the first number."""
    found: dict[str, dict[str, list[float]]] = {}
    for arm, rounds in ranks[0]["rounds"].items():
        phases = rounds[0]
        found[arm] = {
            phase: [max(rank["rounds"][arm][number][phase] for rank in ranks) for number in range(len(rounds))]
            for phase in phases
        }
    return found


def table(results: Mapping[str, Any]) -> str:
    """The results in Markdown."""
    place = results["machine"]
    head = (
        f"{results['date']}, commit {results['commit']}, `{results['command']}`; {place['cpus']} processors "
        f"({place['processor']}), load average {place['load_average'][0]:.1f}; "
        f"{results['parameters'] / 1e6:.0f} million trained parameters on {results['ranks']} ranks, "
        f"{results['device']}"
    )
    rows = [
        head,
        "",
        "| arm | first, s | blocked, s (median, all) | complete after, s |",
        "|---|--:|--:|--:|",
    ]
    for arm, phases in results["arms"].items():
        blocked = phases["blocked"][1:]
        every = ", ".join(f"{value:.3f}" for value in blocked)
        rows.append(
            f"| {arm} | {phases['blocked'][0]:.2f} | {statistics.median(blocked):.3f} ({every}) | "
            f"{statistics.median(phases['total'][1:]):.2f} |"
        )
    rows += ["", *results["verdicts"]]
    return "\n".join(rows)


def verdicts(what: str, arms: Mapping[str, Mapping[str, list[float]]]) -> list[str]:
    """The aims, and what they came to."""
    if RESTORES[0] in arms:
        return [_cost(arms, *RESTORES[:2]), f"From the disk: {_cost(arms, *RESTORES[2:])}"]
    sync, beside, copy = (
        statistics.median(arms[arm]["blocked"][1:]) for arm in ("synchronous", "asynchronous", "the copy alone")
    )
    bound = LORA_WAIT_AIM_S if what == "lora" else max(AIM * sync, copy)  # else of a synchronous one, or the copy
    processor = statistics.median(arms["asynchronous"]["processor"][1:])
    waits = (
        f"Training waits {beside:.3f} s for an asynchronous checkpoint: {beside / sync:.3f} of a synchronous one, "
        f"{beside / copy:.2f} of the copy alone. The aim is {bound:.3f} s: "
        f"{'met' if beside <= bound else 'missed'}. Processor time of the slowest rank: {processor:.3f} s."
    )
    lines = [waits]
    if what == "lora":
        lines.append(
            f"A synchronous checkpoint of the adapter takes {sync:.3f} s; the aim is {LORA_AIM_S} s: "
            f"{'met' if sync < LORA_AIM_S else 'missed'}."
        )
    return lines


def _cost(arms: Mapping[str, Mapping[str, list[float]]], compared: str, other: str) -> str:
    middle = statistics.median(arms[compared]["blocked"][1:]) / statistics.median(arms[other]["blocked"][1:]) - 1
    best = min(arms[compared]["blocked"][1:]) / min(arms[other]["blocked"][1:]) - 1
    verdict = "met" if middle <= RESTORE_AIM else "missed"
    return (
        f"Comparing every byte of a restore costs {middle:.1%} of it (the quickest rounds: {best:.1%}); the aim is "
        f"{RESTORE_AIM:.0%}: {verdict}."
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--what", choices=("full", "lora"), default="full")
    parser.add_argument("--way", choices=("save", "restore"), default="save")
    parser.add_argument("--ranks", type=int, default=RANKS)
    add_device(parser)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--dir", type=Path, default=None, help="where to save; default: the system's temporary folder"
    )
    parser.add_argument("--results", type=Path, default=None, help="a folder for the results")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=given.dir) as out,
        LocalRanks(given.ranks, timeout_s=1800, device=given.device) as ranks,
    ):
        function = measure if given.way == "save" else measure_restore
        told = ranks.run(function, given.what, given.layers, given.hidden, out, given.repeats)
    arms = summary(told)
    results = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "command": " ".join(["python -m benchmarks.checkpoint", *sys.argv[1:]]),
        "machine": {**machine(), "load_average": os.getloadavg()},
        "ranks": given.ranks,
        "device": given.device,
        "parameters": told[0]["parameters"],
        "arms": arms,
        "verdicts": verdicts(given.what, arms),
    }
    text = table(results)
    print(text)
    if given.results is not None:
        what = given.what if given.way == "save" else f"restore-{given.what}"
        name = f"checkpoint-{what}-{results['date']}-{results['commit'].split()[0]}"
        (given.results / f"{name}.json").write_text(json.dumps(results, indent=1))
        (given.results / f"{name}.md").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
