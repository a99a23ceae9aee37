"""Weights into 4 bits and back on one thread: our kernels beside bitsandbytes, and beside other ways to find codes.

Processes of one thread, one after the other; in each, all arms take turns for some rounds. Told are the medians of
processor time: nanoseconds for an element, and GB/s of as many elements in bfloat16. Arms of a kind must give the
same bits. "shardwise" looks codes up by "places". Of ways to find codes: "places" adds a number, looks up what is
in the lower bits of the sum, and compares where these do not tell; "compares" are fifteen with the bounds; "table"
looks up by the upper 16 bits of a float32, and compares once; "search" is torch's ``bucketize``.

    python -m benchmarks.four_bit
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.place import commit, machine

BLOCK = 64
WIDTH = 4096
DTYPES = ("bfloat16", "float16", "float32")
ROUNDS = 3


def arms(rows: int, form: str) -> dict[tuple[str, str], Callable[[], Sequence[Any]]]:
    """What is measured, by its kind and its name: each gives tensors."""
    import torch
    from tests.peers import use_peers

    use_peers("bitsandbytes")
    import bitsandbytes.functional as bnb

    from shardwise.conversion.four_bit import (
        dequantize_rows,
        packed_shape,
        quantize_rows,
        quantize_scales,
        scales_shape,
    )
    from shardwise.tensors import Form4

    known = Form4(form)
    normal = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    packed = torch.empty(packed_shape(normal.shape), dtype=torch.uint8)
    absmax = torch.empty(scales_shape(normal.shape, BLOCK))
    quantize_rows(normal.bfloat16(), BLOCK, known, packed, absmax)
    _, state = bnb.quantize_4bit(normal.bfloat16(), blocksize=BLOCK, quant_type=form)
    flat, offset = absmax.flatten(), absmax.mean()

    def quantize(values: Any) -> Sequence[Any]:
        made = torch.empty_like(packed), torch.empty_like(absmax)
        quantize_rows(values, BLOCK, known, *made)
        return made

    def quantize_theirs(values: Any) -> Sequence[Any]:
        made, found = bnb.quantize_4bit(values, blocksize=BLOCK, quant_type=form)
        return made, found.absmax

    def dequantize(dtype: Any) -> Sequence[Any]:
        out = torch.empty(normal.shape, dtype=dtype)
        dequantize_rows(packed, absmax, BLOCK, known, out)
        return [out]

    def dequantize_theirs(dtype: Any) -> Sequence[Any]:
        state.dtype = dtype
        return [bnb.dequantize_4bit(packed.view(-1, 1), state)]

    def nest_theirs() -> Sequence[Any]:
        made, found = bnb.quantize_blockwise(flat - offset, blocksize=256)
        return made, found.absmax

    found: dict[tuple[str, str], Callable[[], Sequence[Any]]] = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        found[f"quantize {name}", "shardwise"] = partial(quantize, normal.to(dtype))
        found[f"quantize {name}", "bitsandbytes"] = partial(quantize_theirs, normal.to(dtype))
        found[f"dequantize {name}", "shardwise"] = partial(dequantize, dtype)
        found[f"dequantize {name}", "bitsandbytes"] = partial(dequantize_theirs, dtype)
    ranks = {"places": by_places, "compares": by_compares, "table": by_table, "search": by_search}
    for name, way in ranks.items():
        found["ranks", name] = partial(in_chunks, way(known.bounds), normal.mul(20).clamp_(-1, 1).flatten())
    found["nest", "shardwise"] = partial(quantize_scales, flat, offset)
    found["nest", "bitsandbytes"] = nest_theirs
    return found


# Ways to count the bounds that numbers are above: what of a kernel there is a choice in.

Ranks = Callable[[Any, Any], None]
CHUNK = 1 << 17


def in_chunks(ranks: Ranks, values: Any) -> Sequence[Any]:
    """``values``: flat float32."""
    import torch

    out = torch.empty(values.numel(), dtype=torch.uint8)
    for start in range(0, values.numel(), CHUNK):
        ranks(values[start : start + CHUNK], out[start : start + CHUNK])
    return [out]


def by_places(bounds: Sequence[float]) -> Ranks:
    import numpy as np
    import torch

    edges, shift = np.array(bounds, np.float32), np.float32(768)
    signed = np.arange(-(1 << 15), 1 << 15)
    of_edges = (edges + shift).view(np.int32) - shift.view(np.int32)
    found = np.searchsorted(of_edges, signed).astype(np.uint8)
    found[np.isin(signed, of_edges)] = 16
    table = torch.from_numpy(np.roll(found, 1 << 15))
    sums = torch.empty(CHUNK)

    def ranks(values: Any, out: Any) -> None:
        torch.add(values, 768.0, out=sums)
        torch.index_select(table, 0, sums.view(torch.int32).bitwise_and_(0xFFFF), out=out)
        codes = out.numpy()
        unsure = np.flatnonzero(codes == 16)
        codes[unsure] = np.searchsorted(edges, values.numpy()[unsure])

    return ranks


def by_compares(bounds: Sequence[float]) -> Ranks:
    import numpy as np

    above = np.empty(CHUNK, np.bool_)

    def ranks(values: Any, out: Any) -> None:
        numbers, found = values.numpy(), out.numpy()
        np.greater(numbers, np.float32(bounds[0]), out=found.view(np.bool_))
        for bound in bounds[1:]:
            np.greater(numbers, np.float32(bound), out=above)
            np.add(found, above.view(np.uint8), out=found)

    return ranks


def by_table(bounds: Sequence[float]) -> Ranks:
    """Of each upper half: the rank of the least number that has it, and the bound between its numbers, if any."""
    import numpy as np

    edges = np.array(bounds, np.float32)
    upper = np.arange(65536, dtype=np.uint32) << 16
    ends = np.stack([upper, upper | 0xFFFF]).view(np.float32)
    least, most = np.searchsorted(edges, ends.min(0)), np.searchsorted(edges, ends.max(0))
    table = least.astype(np.uint8)
    between = np.where(most > least, np.append(edges, np.float32(np.inf))[least], np.float32(np.inf))
    keys, limits = np.empty(CHUNK, np.intp), np.empty(CHUNK, np.float32)
    above = np.empty(CHUNK, np.bool_)

    def ranks(values: Any, out: Any) -> None:
        numbers, found = values.numpy(), out.numpy()
        np.copyto(keys, numbers.view(np.uint16)[1::2])
        np.take(table, keys, out=found, mode="clip")
        np.take(between, keys, out=limits, mode="clip")
        np.greater(numbers, limits, out=above)
        np.add(found, above.view(np.uint8), out=found)

    return ranks


def by_search(bounds: Sequence[float]) -> Ranks:
    import torch

    edges = torch.tensor(bounds)

    def ranks(values: Any, out: Any) -> None:
        out.copy_(torch.bucketize(values, edges, out_int32=True))

    return ranks


def measure(rows: int, form: str) -> dict[str, dict[str, list[float]]]:
    """In a process of its own: seconds of this thread, by kind and arm.

    Raises:
        RuntimeError: arms of a kind do not give the same bits.
    """
    import torch

    torch.set_num_threads(1)
    found, bits = arms(rows, form), dict[str, str]()
    seconds: dict[str, dict[str, list[float]]] = {}
    for _ in range(ROUNDS):
        for (kind, name), arm in found.items():
            start = time.thread_time()
            made = arm()
            seconds.setdefault(kind, {}).setdefault(name, []).append(time.thread_time() - start)
            whole = hashlib.sha256()
            for tensor in made:
                whole.update(tensor.reshape(-1).view(torch.uint8).numpy())
            if bits.setdefault(kind, whole.hexdigest()) != whole.hexdigest():
                raise RuntimeError(f"{kind}: {name} gives other bits")
    return seconds


def told(rows: int, runs: Sequence[dict[str, dict[str, list[float]]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Medians, for an element of the weight or a scale."""
    counts = {"nest": rows * WIDTH // BLOCK}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for kind, of in runs[0].items():
        count = counts.get(kind, rows * WIDTH)
        for name in of:
            median = statistics.median(second for run in runs for second in run[kind][name])
            found.setdefault(kind, {})[name] = {
                "ns_an_element": round(median / count * 1e9, 3),
                "gb_s_of_bfloat16": round(2 * count / median / 1e9, 3),
            }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small weight, once, to see that it runs")
    parser.add_argument("--form", default="nf4", choices=("nf4", "fp4"))
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args(argv)
    rows, repeats = (64, 1) if given.quick else (given.rows, given.repeats)
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        runs = [pool.apply(measure, (rows, given.form)) for _ in range(repeats)]
    medians = told(rows, runs)
    print(json.dumps(medians, indent=1))
    if not given.quick:
        results = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": f"python -m benchmarks.four_bit --form {given.form} --rows {rows} --repeats {repeats}",
            "commit": commit(),
            "machine": machine(),
            "medians": medians,
            "runs": runs,
        }
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / f"four-bit-{given.form}-{results['date']:.10}.json").write_text(json.dumps(results) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
