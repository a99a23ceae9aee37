"""Whole tensors of a sharded model, measured: ``iter_hf_tensors`` against ``full_tensor()`` of every parameter.

    python -m benchmarks.stream --repeats 5

Four gloo ranks hold a model. The arms take turns; each goes through all tensors once, reads a byte of every page,
and lets go of each before the next. The clock runs from a barrier until the last rank is through. Where only the
first rank gets the tensors, the usual way is the same as where all do: every rank gathers every parameter, and all
but one let go of it.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import SHAPES, write
from benchmarks.place import RANKS, commit, machine
from tests.support.local_ranks import LocalRanks

USUAL = "full_tensor() of each parameter"
ARMS = (USUAL, "iter_hf_tensors", "iter_hf_tensors, to the first rank")
AIM = 1 / 3
_PAGE_BYTES = 4096


def measure(folder: str, repeats: int, bucket_bytes: int) -> dict[str, Any]:
    """Seconds of every round by arm, and whether all arms have the same tensors. Collective: yes."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    import shardwise
    from shardwise.models.view import raw_bytes

    torch.set_num_threads(1)
    model = shardwise.from_pretrained(folder, dtype=torch.bfloat16)
    options = shardwise.options.StreamOptions(bucket_bytes=bucket_bytes)

    def usual() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in model.named_parameters():
            yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    walks: dict[str, Callable[[], Iterator[tuple[str, torch.Tensor]]]] = {
        ARMS[0]: usual,
        ARMS[1]: lambda: shardwise.iter_hf_tensors(model, options=options),
        ARMS[2]: lambda: shardwise.iter_hf_tensors(model, to="first_rank", options=options),
    }
    seconds: dict[str, list[float]] = {arm: [] for arm in walks}
    sums: dict[str, dict[str, int]] = {}
    for arm, walk in walks.items():  # first calls, and what is compared, are not timed
        sums[arm] = {
            key: 0 if tensor.is_meta else int(raw_bytes(tensor).view(torch.int16).to(torch.int64).sum())
            for key, tensor in walk()
        }
    for _ in range(repeats):
        for arm, walk in walks.items():
            dist.barrier()
            start = time.perf_counter()
            for _, tensor in walk():
                if not tensor.is_meta:
                    raw_bytes(tensor)[::_PAGE_BYTES].sum()  # memory that nobody looks at may not be there
                del tensor
            dist.barrier()
            seconds[arm].append(time.perf_counter() - start)
    is_same = sums[ARMS[1]] == sums[USUAL] and (dist.get_rank() > 0 or sums[ARMS[2]] == sums[USUAL])
    return {"seconds": seconds, "is_same": is_same, "tensors": len(sums[USUAL])}


def table(results: dict[str, Any]) -> str:
    """The results in Markdown."""
    usual = statistics.median(results["seconds"][USUAL])
    facts = (
        f"{results['date']}, commit {results['commit']}, `{results['command']}`; {results['machine']['cpus']} "
        f"processors ({results['machine']['processor']}), load average "
        f"{results['machine']['load_average_before']:.1f} before. {results['gigabytes']:.2f} GB in "
        f"{results['tensors']} tensors, buckets of {results['bucket_mib']} MiB, {results['repeats']} repeats in "
        f"turn. The aim was a ratio of {AIM:.2f}."
    )
    lines = [
        f"# Whole tensors of {results['model']} on {results['ranks']} ranks",
        "",
        facts,
        "",
        "| arm | median s | lowest | highest | ratio |",
        "|---|--:|--:|--:|--:|",
    ]
    for arm, seconds in results["seconds"].items():
        median = statistics.median(seconds)
        lines.append(f"| {arm} | {median:.2f} | {min(seconds):.2f} | {max(seconds):.2f} | {median / usual:.2f} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--out", type=Path, default=None, help="results, as .json and .md beside it")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "shardwise-benchmarks")
    given = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    shape = SHAPES[given.model]
    folder = write(shape, given.dir)
    results: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python -m benchmarks.stream {' '.join(argv if argv is not None else sys.argv[1:])}".strip(),
        "commit": commit(),
        "machine": machine(),
        "model": given.model,
        "ranks": RANKS,
        "repeats": given.repeats,
        "bucket_mib": given.bucket_mib,
        "gigabytes": shape.nbytes / 1e9,
    }
    with LocalRanks(RANKS, timeout_s=600) as ranks:
        found = ranks.run(measure, str(folder), given.repeats, given.bucket_mib << 20)
    if not all(rank["is_same"] for rank in found):
        raise SystemExit("the arms have different tensors")
    results |= {"tensors": found[0]["tensors"], "seconds": found[0]["seconds"]}
    print(table(results))
    if given.out is not None:
        given.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        given.out.with_suffix(".md").write_text(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
