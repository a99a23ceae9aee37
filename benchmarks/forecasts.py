"""``plan`` at 1,024 ranks, in seconds of one processor: Qwen3-235B-A22B and DeepSeek-V3, from headers made up.

DeepSeek-V3 in bfloat16, and in FP8 as it is published; of Qwen3 also trainings, of the whole model and of a LoRA.

python -m benchmarks.forecasts
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.place import commit, machine
from peft import LoraConfig
from tests.engines.real_shapes import deepseek_v3, forecast_of, in_float8, qwen3_235b

from shardwise.formats.contract import CheckpointIndex
from shardwise.layout import MeshShape
from shardwise.tuning.tunings import Full, Lora

RANKS = 1024
MOST_S = {
    "qwen3-235b": 5.0,
    "qwen3-235b, training": 5.0,
    "qwen3-235b, training a LoRA": 5.0,
    "deepseek-v3": 8.0,
    "deepseek-v3-fp8": 8.0,
}


def load(shape: Any, index: CheckpointIndex) -> None:
    """Plan a load."""
    options = {"model_class": shape.model_class, "dtype": "bfloat16"}
    forecast_of(shape.config, index, MeshShape.flat(RANKS), **options)


def training(shape: Any, index: CheckpointIndex, tuning: Full | Lora) -> None:
    """Plan a training, of one row of 4,096 tokens on each rank, with its load."""
    options = {
        "model_class": shape.model_class,
        "dtype": "bfloat16",
        "tuning": tuning,
        "per_device_train_batch_size": 1,
        "max_length": 4096,
        "gradient_checkpointing": True,
    }
    forecast_of(shape.config, index, MeshShape.flat(RANKS), **options)


def main() -> int:
    """Measure, write the outcome to ``results``; the exit status says whether all are within their limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    qwen3, deepseek = qwen3_235b(), deepseek_v3()
    headers, other = qwen3.index(), deepseek.index()
    in_fp8 = in_float8(other)
    plans: dict[str, Callable[[], None]] = {
        "qwen3-235b": lambda: load(qwen3, headers),
        "qwen3-235b, training": lambda: training(qwen3, headers, Full()),
        "qwen3-235b, training a LoRA": lambda: training(
            qwen3, headers, Lora(LoraConfig(r=16, target_modules="all-linear"))
        ),
        "deepseek-v3": lambda: load(deepseek, other),
        "deepseek-v3-fp8": lambda: load(deepseek, in_fp8),
    }
    runs: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(given.repeats + 1):
        for name, plan in plans.items():
            began = time.process_time()
            plan()
            runs[name].append(round(time.process_time() - began, 2))
    medians = {name: statistics.median(found[1:]) for name, found in runs.items()}  # the first imports
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python -m benchmarks.forecasts --repeats {given.repeats}",
        "commit": commit(),
        "machine": machine(),
        "ranks": RANKS,
        "processor_s": medians,
        "at_most_s": MOST_S,
        "runs": runs,
    }
    text = json.dumps(results, indent=1) + "\n"
    (Path(__file__).parent / "results" / f"forecasts-{results['date'][:10]}.json").write_text(text)
    print(text)
    return int(any(medians[name] > most for name, most in MOST_S.items()))


if __name__ == "__main__":
    raise SystemExit(main())
