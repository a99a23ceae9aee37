"""The memory of trainings, foreseen and measured. ``python -m benchmarks.training_memory``.

Each cell is a model, what is trained of it, whether blocks are computed again, and a number of ranks on the
processors of this machine, as ``shardwise train`` has them. Foreseen: ``plan_training``. Measured, in new
processes: the most that RssAnon + RssShmem grow over what they are once everything is imported, on the rank where
that is most, through bringing the model up and three steps; and what is in tensors when the optimizer has taken its
step (weights, gradients, state), over the same of the plan.

glibc keeps blocks of less than 32 MiB that are freed, in a heap that is soon full of holes ([Note: Holes]). So it
is told to give back what is larger than 64 KiB (as MALLOC_MMAP_THRESHOLD_=65536 does); ``--heap`` measures it as
it is.

[Note: Holes] torch asks for memory at multiples of 64 bytes. glibc 2.36 takes up to 96 bytes more, and frees what
is over at once: into a thread's cache or a fast bin, where it is not joined with its neighbours and is soon lent
to somebody small. The block beside it, when it is freed, is then some bytes too short for the next one of its own
size, and that goes to the top of the heap. Without these two, what is freed is joined and used again, and most of
the holes are gone: ``GLIBC_TUNABLES=glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0``.

``--cell demo,full,keep,1`` (several times) picks cells; ``--quick`` the small ones.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import meter
from benchmarks.checkpoints import write
from benchmarks.place import commit, machine, say
from benchmarks.training import MIDDLE, MODELS, SMALL, Job, Turns, batches, quieten, smaller

from shardwise.execution.processes.local_ranks import LocalRanks

DEMO = smaller(
    "demo",
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_hidden_layers=2,
    max_window_layers=2,
    vocab_size=512,
)
SHAPES = {"demo": DEMO, "36m": SMALL, "159m": MIDDLE, "0.6b": MODELS["qwen3-0.6b"], "1.7b": MODELS["qwen3-1.7b"]}
_LORA = {"method": "lora", "r": 16, "lora_alpha": 16, "target_modules": "all-linear"}
TRAINED: dict[str, dict[str, Any]] = {
    "full": {"tuning": {"method": "full"}},
    "full-sgd": {"tuning": {"method": "full"}, "optimizer": {"name": "sgd"}},
    "lora": {"tuning": _LORA},
    "nf4": {"tuning": _LORA, "quantization": "nf4"},
    "nf4-nested": {"tuning": _LORA, "quantization": {"scales": "nested"}},
}
"""Sections of a configuration; the last two train a LoRA on a base in four bits. With SGD, which keeps no state,
all of 1.7 billion parameters are trained within 24 GiB."""

ALLOCATOR_BYTES = 64 << 20
"""What libraries and the allocator of a rank may take for themselves."""

HELD_LIMIT, PEAK_LIMIT = 0.05, 0.05
STEPS = 3
_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of malloc.h; once it is set, it is so for good."""

_OF_MALLOC = ("MALLOC_", "GLIBC_TUNABLES")


@dataclass(frozen=True)
class Cell:
    """One training."""

    model: str
    trained: str
    """Of :data:`TRAINED`."""
    keeps: str
    """``keep`` activations, or compute blocks ``again``."""
    ranks: int
    rows: int = 2
    tokens: int = 512

    @classmethod
    def of(cls, text: str) -> Cell:
        model, trained, keeps, ranks, *more = text.split(",")
        return cls(model, trained, keeps, int(ranks), *map(int, more))

    def config(self, folder: str) -> Any:
        """As ``shardwise train`` would be told."""
        from shardwise.training.configuration.config import config_of

        return config_of(
            {
                "model": {"name": folder},
                "data": {"train": "none.jsonl", "max_length": self.tokens},
                "output": {"directory": "none"},
                "training": {"batch_size": self.rows, "max_steps": STEPS},
                "sharding": {"activation_checkpointing": self.keeps == "again"},
                "checkpoints": {"every": None},
                **TRAINED[self.trained],
            }
        )


QUICK = [
    Cell(model, trained, keeps, ranks)
    for model in ("demo", "36m")
    for trained in TRAINED
    for keeps in ("keep", "again")
    for ranks in (1, 2)
]
ALL = [
    Cell(model, trained, keeps, ranks)
    for model in ("demo", "36m", "0.6b", "1.7b")
    for trained in TRAINED
    for keeps in ("keep", "again")
    for ranks in (1, 2, 4)
]


def needed(cell: Cell, folder: str, has_heap: bool) -> dict[str, int]:
    """Bytes on this rank. Collective: yes, where there are ranks."""
    if not has_heap:
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 64 << 10)
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from shardwise.execution.moving.group_gather import gather_in_windows
    from shardwise.execution.processes.launched import this_device
    from shardwise.execution.ranks.world import World
    from shardwise.training.configuration.config_values import (
        loss_of,
        quantization_of,
        resolved,
        sharding_of,
        tuning_of,
    )
    from shardwise.training.loop import train
    from shardwise.training.prepare import ModelRequest, load_model

    quieten()
    config = resolved(cell.config(folder), this_device())
    options = config.options()
    job = Job(folder, STEPS, cell.rows, cell.tokens, 256)
    steps = [_with_padding(step) for step in batches(job, STEPS, World.current().rank)]
    held: list[int] = []
    model: Any = None
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: held.append(bytes_held(model, optimizer)))
    with meter.MemoryWatch() as memory:
        sharding = sharding_of(config.sharding, options)
        model, _ = load_model(
            ModelRequest(
                folder,
                options,
                tuning_of(config.tuning),
                sharding,
                quantization=quantization_of(config.quantization),
            )
        )
        brought_up = meter.anonymous_bytes() - memory.before
        gather_in_windows(model, World.current())
        train(model, Turns(steps), options, loss=loss_of(config.training))
    hook.remove()
    return {"peak": memory.growth, "held": held[-1], "brought_up": brought_up}


def bytes_held(model: Any, optimizer: Any) -> int:
    """Of weights, gradients and the optimizer's state on this rank, each storage once."""
    import torch

    from shardwise.models.view import local_tensor

    found = [*model.parameters(), *model.buffers()]
    found += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    found += [value for state in optimizer.state.values() for value in state.values()]
    storages = [local_tensor(value).untyped_storage() for value in found if isinstance(value, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _with_padding(step: list[Any]) -> list[Any]:
    """The last row of a batch is shorter than the others, as rows are."""
    [batch] = step
    if len(batch.input_ids) == 1:
        return step
    mask, labels = batch.attention_mask.clone(), batch.labels.clone()
    mask[-1, -8:], labels[-1, -8:] = 0, -100
    return [replace(batch, attention_mask=mask, labels=labels)]


def foreseen(cell: Cell, folder: str) -> dict[str, int]:
    """The same, by the plan."""
    from shardwise.training.foretelling.foreseeing import plan_training

    plan = plan_training(cell.config(folder), ranks=cell.ranks, device="cpu")
    [step] = [phase for phase in plan.phases if phase.phase == "optimizer"]
    held = sum(step.host.get(term, 0) for term in ("weights", "gradients", "optimizer state"))
    return {"peak": plan.peak_bytes, "held": held, "phase": plan.worst.phase, "terms": dict(plan.worst.host)}  # type: ignore[dict-item]


def measured(cell: Cell, folder: str, has_heap: bool) -> dict[str, int]:
    """On the rank that needs most. One rank alone has no process group, as ``shardwise train`` has none then."""
    if cell.ranks > 1:
        with LocalRanks(cell.ranks, timeout_s=560) as world:
            found = world.run(needed, cell, folder, has_heap)
        return max(found, key=lambda one: one["peak"])
    command = [
        sys.executable,
        "-m",
        "benchmarks.training_memory",
        "--alone",
        json.dumps([asdict(cell), folder, has_heap]),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, int] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return result


def compared(cell: Cell, folder: str, has_heap: bool) -> dict[str, Any]:
    plan, fact = foreseen(cell, folder), measured(cell, folder, has_heap)
    ratio = fact["peak"] / plan["peak"]
    slack = ALLOCATOR_BYTES / plan["peak"]
    return {
        "cell": asdict(cell),
        "foreseen": plan,
        "measured": fact,
        "ratio": ratio,
        "held_ratio": fact["held"] / plan["held"],
        "is_within": 1 - PEAK_LIMIT <= ratio <= 1 + PEAK_LIMIT + slack
        and abs(fact["held"] / plan["held"] - 1) <= HELD_LIMIT,
    }


def line(row: dict[str, Any]) -> str:
    cell, plan, fact = row["cell"], row["foreseen"], row["measured"]
    return (
        f"| {cell['model']} | {cell['trained']} | {cell['keeps']} | {cell['ranks']} "
        f"| {cell['rows']} x {cell['tokens']} "
        f"| {plan['held'] / 2**20:.1f} | {fact['held'] / 2**20:.1f} | {row['held_ratio']:.3f} "
        f"| {plan['peak'] / 2**20:.0f} ({plan['phase']}) | {fact['peak'] / 2**20:.0f} | {row['ratio']:.3f} "
        f"| {'within' if row['is_within'] else 'OUT'} |"
    )


HEAD = (
    "| model | trained | activations | ranks | rows | held MiB foreseen | fact | ratio | peak MiB foreseen | fact "
    "| ratio | |\n|---|---|---|--:|---|--:|--:|--:|--:|--:|--:|---|"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small models alone")
    parser.add_argument("--heap", action="store_true", help="glibc as it is: it keeps much of what is freed")
    parser.add_argument("--cell", action="append", help="MODEL,TRAINED,keep|again,RANKS[,ROWS,TOKENS]")
    parser.add_argument("--out", type=Path, help="results, as .json")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir(), "shardwise-benchmarks"))
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.alone:
        values, folder, has_heap = json.loads(given.alone)
        print(json.dumps(needed(Cell(**values), folder, has_heap)))
        return 0
    cells = [Cell.of(text) for text in given.cell] if given.cell else QUICK if given.quick else ALL
    rows = []
    print(HEAD)
    for cell in cells:
        rows.append(compared(cell, str(write(SHAPES[cell.model], given.dir)), given.heap))
        say(line(rows[-1]))
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(
            ["python -m benchmarks.training_memory", *(argv if argv is not None else sys.argv[1:])]
        ),
        "commit": commit(),
        "machine": machine(),
        "heap": given.heap,
        "malloc": {name: value for name, value in os.environ.items() if name.startswith(_OF_MALLOC)},
        "rows": rows,
    }
    place = given.out or Path("benchmarks/results", f"training-memory-{datetime.now(UTC):%Y-%m-%d-%H%M}.json")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(results, indent=1))
    return 0 if all(row["is_within"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
