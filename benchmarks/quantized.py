"""Loading a quantized checkpoint as numbers, against the same model stored in bfloat16.

``python -m benchmarks.quantized``. Four gloo ranks bring Qwen3-1.7B's shape up in bfloat16, from files in bfloat16
and from files of which the matrices are in FP8 by blocks of 128 x 128, in turn. Each load has processes of its own,
which load a tiny model first. The files are in the page cache.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import SHAPES, write
from benchmarks.place import commit, machine, say
from tests.support.local_ranks import LocalRanks

BLOCK = 128
LIMIT = 1.3


def quantized(folder: Path) -> Path:
    """A copy of a checkpoint with its matrices in FP8, and random scales; made once."""
    import torch
    from safetensors.torch import load_file, save_file

    out = folder.with_name(f"{folder.name}-fp8")
    if (out / "config.json").is_file():
        return out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    index: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = {}
        for key, tensor in load_file(file).items():
            if tensor.ndim == 2 and key.endswith("proj.weight"):
                tensors[key] = tensor.to(torch.float8_e4m3fn)
                tensors[f"{key}_scale_inv"] = torch.rand([-(-size // BLOCK) for size in tensor.shape])
            else:
                tensors[key] = tensor
        save_file(tensors, out / file.name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file.name)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    told = json.loads((folder / "config.json").read_text())
    told["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (out / "config.json").write_text(json.dumps(told))
    return out


def load(folder: str, warm_up: str) -> dict[str, Any]:
    """One load on every rank. Collective: yes."""
    import torch
    import torch.distributed as dist

    import shardwise

    options = shardwise.options.LoadOptions(progress=False)
    shardwise.from_pretrained(warm_up, dtype=torch.bfloat16, options=options)
    dist.barrier()
    start = time.perf_counter()
    _, report = shardwise.from_pretrained(folder, dtype=torch.bfloat16, options=options, output_loading_info=True)
    dist.barrier()
    return {"seconds": time.perf_counter() - start, "read_bytes": report.read_bytes}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="results, as .json")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir(), "shardwise-benchmarks"))
    given = parser.parse_args(argv)
    shape = SHAPES["qwen3-1.7b"]
    tiny = write(shape.tiny(), given.dir)
    plain = tiny if given.quick else write(shape, given.dir)
    folders = {"bfloat16": plain, "fp8": quantized(plain)}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in folders}
    for _ in range(given.repeats):
        for name, folder in folders.items():
            with LocalRanks(given.ranks, timeout_s=300) as world:
                found = world.run(load, str(folder), str(tiny))
            runs[name].append(max(found, key=lambda one: one["seconds"]))
            say(f"{name}: {runs[name][-1]['seconds']:.2f} s")
    seconds = {name: [run["seconds"] for run in own] for name, own in runs.items()}
    ratio = statistics.median([one / other for one, other in zip(seconds["fp8"], seconds["bfloat16"], strict=True)])
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks.quantized", *(argv if argv is not None else sys.argv[1:])]),
        "commit": commit(),
        "machine": machine(),
        "model": plain.name,
        "ranks": given.ranks,
        "ratio": ratio,
        "limit": LIMIT,
        "runs": runs,
    }
    medians = ", ".join(f"{name} {statistics.median(own):.2f} s" for name, own in seconds.items())
    print(f"{plain.name}, {given.ranks} ranks: {medians}; ratio {ratio:.2f} (at most {LIMIT})")
    place = given.out or Path("benchmarks/results", f"quantized-{datetime.now(UTC):%Y-%m-%d-%H%M}.json")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(results, indent=1))
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
