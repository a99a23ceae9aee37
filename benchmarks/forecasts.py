"""``plan`` at 1,024 ranks, in seconds of one processor: Qwen3-235B-A22B and DeepSeek-V3, from headers made up.

DeepSeek-V3 in bfloat16, and in FP8 as it is published.

python -m benchmarks.forecasts
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.place import commit, machine
from tests.verbs.real_shapes import deepseek_v3, in_float8, qwen3_235b

from shardwise.engines.forecasting import forecast
from shardwise.layout import MeshShape
from shardwise.storage.policies import LOCAL

RANKS = 1024
MOST_S = {"qwen3-235b": 5.0, "deepseek-v3": 8.0, "deepseek-v3-fp8": 8.0}


def main() -> int:
    """Measure, write the outcome to ``results``; the exit status says whether all are within their limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    deepseek = deepseek_v3()
    shapes = {"qwen3-235b": qwen3_235b(), "deepseek-v3": deepseek, "deepseek-v3-fp8": deepseek}
    indexes = {name: shape.index() for name, shape in shapes.items()}
    indexes["deepseek-v3-fp8"] = in_float8(indexes["deepseek-v3-fp8"])
    runs: dict[str, list[float]] = {name: [] for name in shapes}
    for _ in range(given.repeats + 1):
        for name, shape in shapes.items():
            index = indexes[name]
            began = time.process_time()
            options = {"model_class": shape.model_class, "dtype": "bfloat16"}
            forecast(Path("/nowhere"), shape.config, index, MeshShape.flat(RANKS), LOCAL, options)
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
