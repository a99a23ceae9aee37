"""Memory of trainings, estimate and measured. ``python -m benchmarks.training_memory``.

Each cell is a model, what of it is trained, whether its blocks are recomputed, a number of ranks on this machine's
processors, and rows and tokens of a batch. Forecast: ``shardwise.plan``. Measured, in new processes: the most by
which RssAnon + RssShmem grow after imports, on the rank where that is most, through a load and three steps of
``SFTTrainer``; and the bytes of weights, gradients and optimizer states after the optimizer's step.

glibc keeps blocks of less than 32 MiB that are freed, in a heap that is soon full of holes, so it is told to give
back what is larger than 64 KiB (as ``MALLOC_MMAP_THRESHOLD_=65536`` does).

``--cell 36m,lora,keep,2`` (several times) picks cells. ``tests/planning/test_training_estimate.py`` compares the
estimate with cells that were recorded.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import meter
from benchmarks.checkpoints import write
from benchmarks.place import commit, machine, say
from benchmarks.training import MIDDLE, MODELS, SMALL, quieten
from tests.support.local_ranks import LocalRanks

SHAPES = {"36m": SMALL, "159m": MIDDLE, "0.6b": MODELS["qwen3-0.6b"], "1.7b": MODELS["qwen3-1.7b"]}
TRAINED = ("full", "lora", "nf4")
LIBRARY_BYTES = 64 << 20
"""Of libraries and the allocator of a rank."""

LIMIT = 0.10
STEPS = 3
_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of malloc.h."""


@dataclass(frozen=True)
class Cell:
    """One training; ``trained`` is one of :data:`TRAINED`, ``keeps`` is ``keep`` or ``again``."""

    model: str
    trained: str
    keeps: str
    ranks: int
    rows: int = 2
    tokens: int = 512

    @classmethod
    def of(cls, text: str) -> Cell:
        model, trained, keeps, ranks, *more = text.split(",")
        return cls(model, trained, keeps, int(ranks), *map(int, more))

    def options(self) -> dict[str, Any]:
        """Keyword arguments of ``from_pretrained`` and ``plan``."""
        from peft import LoraConfig

        import shardwise

        lora = shardwise.Lora(LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"))
        options: dict[str, Any] = {
            "dtype": "float32",
            "tuning": shardwise.Full() if self.trained == "full" else lora,
        }
        if self.trained == "nf4":
            options["quantization"] = shardwise.options.Nf4()
        return options


CELLS = [
    Cell("36m", trained, keeps, ranks) for trained in TRAINED for keeps in ("keep", "again") for ranks in (1, 2)
]


def measure(cell: Cell, folder: str) -> dict[str, int]:
    """Bytes on this rank. Collective: yes."""
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 64 << 10)
    import torch.distributed as dist
    import trl as _trl
    from tokenizers import Tokenizer, models
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from transformers import PreTrainedTokenizerFast

    import shardwise
    from shardwise.integrations import ShardwiseTrainer, for_trainer

    trl: Any = _trl
    quieten()
    rank, size = dist.get_rank(), dist.get_world_size()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    kind: Any = type("Measured", (ShardwiseTrainer, trl.SFTTrainer), {})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<pad>",
    )
    from datasets import Dataset

    ids = [[1 + (row + token) % 200 for token in range(cell.tokens)] for row in range(cell.rows * size * STEPS)]
    arguments = trl.SFTConfig(
        output_dir=str(Path(folder).parent / "memory"),
        max_steps=STEPS,
        per_device_train_batch_size=cell.rows,
        max_length=cell.tokens,
        gradient_checkpointing=cell.keeps == "again",
        bf16=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    held: list[int] = []
    with meter.MemoryWatch() as memory:
        model = shardwise.from_pretrained(folder, **cell.options())
        hook = register_optimizer_step_post_hook(lambda optimizer, *_: held.append(bytes_held(model, optimizer)))
        rows = Dataset.from_dict({"input_ids": ids})
        kind(model=for_trainer(model), args=arguments, train_dataset=rows, processing_class=tokenizer).train()
        hook.remove()
    return {"peak": memory.growth, "held": held[-1]}


def bytes_held(model: Any, optimizer: Any) -> int:
    """Bytes of weights, gradients and optimizer states on this rank, each storage once."""
    import torch

    from shardwise.models.view import local_tensor

    found = [*model.parameters(), *model.buffers()]
    found += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    found += [value for state in optimizer.state.values() for value in state.values()]
    storages = [local_tensor(value).untyped_storage() for value in found if isinstance(value, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def estimate(cell: Cell, folder: str) -> dict[str, Any]:
    """The same by ``plan``."""
    import shardwise

    made = shardwise.plan(
        folder,
        ranks=cell.ranks,
        device="cpu",
        per_device_train_batch_size=cell.rows,
        max_length=cell.tokens,
        gradient_checkpointing=cell.keeps == "again",
        **cell.options(),
    ).training
    assert made is not None
    worst = made.worst("cpu")
    held = made.weight_bytes + made.gradient_bytes + made.optimizer_bytes[0]
    return {"peak": worst.bytes_on("cpu"), "held": held, "phase": worst.phase, "terms": dict(worst.host)}


def compare(cell: Cell, folder: str) -> dict[str, Any]:
    """Forecast and measurement of the rank that needs most."""
    with LocalRanks(cell.ranks, timeout_s=560) as world:
        measured = max(world.run(measure, cell, folder), key=lambda one: one["peak"])
    foreseen = estimate(cell, folder)
    most = (1 + LIMIT) * foreseen["peak"] + LIBRARY_BYTES
    return {
        "cell": asdict(cell),
        "foreseen": foreseen,
        "measured": measured,
        "ratio": measured["peak"] / foreseen["peak"],
        "held_ratio": measured["held"] / foreseen["held"],
        "is_within": (1 - LIMIT) * foreseen["peak"] <= measured["peak"] <= most,
    }


def line(row: dict[str, Any]) -> str:
    cell, plan, fact = row["cell"], row["foreseen"], row["measured"]
    return (
        f"| {cell['model']} | {cell['trained']} | {cell['keeps']} | {cell['ranks']} "
        f"| {cell['rows']} x {cell['tokens']} | {row['held_ratio']:.3f} "
        f"| {plan['peak'] / 2**20:.0f} ({plan['phase']}) | {fact['peak'] / 2**20:.0f} | {row['ratio']:.3f} "
        f"| {'within' if row['is_within'] else 'OUT'} |"
    )


HEAD = (
    "| model | trained | activations | ranks | rows | held, ratio | peak MiB estimate | measured | ratio | |\n"
    "|---|---|---|--:|---|--:|--:|--:|--:|---|"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", action="append", help="MODEL,TRAINED,keep|again,RANKS[,ROWS,TOKENS]")
    parser.add_argument("--out", type=Path, help="results, as .json")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir(), "shardwise-benchmarks"))
    given = parser.parse_args(argv)
    rows = []
    print(HEAD)
    for cell in [Cell.of(text) for text in given.cell] if given.cell else CELLS:
        rows.append(compare(cell, str(write(SHAPES[cell.model], given.dir))))
        say(line(rows[-1]))
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "runs": [{"rows": rows}],
    }
    place = given.out or Path("benchmarks/results", f"training-memory-{datetime.now(UTC):%Y-%m-%d-%H%M}.json")
    place.write_text(json.dumps(results, indent=1))
    return 0 if all(row["is_within"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
