"""Every architecture, at every world size, bitwise: ``make sweep``.

Makes a tiny random model of every architecture of the installed transformers (see ``tests/zoo.py``), saves it in
the hub's layout and under internal names, and loads each with ``shardwise.from_pretrained`` on worlds of gloo
processes, in float32 and bfloat16. Parameters, buffers, dtypes and ties are compared, gathered by torch, with what
transformers' own loader makes of the same files in one process. Then runs a hundred thousand random expressions
against direct evaluation.

    make sweep ARGS="--worlds 2,8 --only qwen3,mixtral"
    make sweep ARGS="--mesh hsdp,tp,ep,shard1 --storage local,http --layouts original,half"
    make sweep ARGS="--saves --worlds 1,2,3,5"

``--mesh`` and ``--storage`` take the ways of ``tests/load_cases.py``: hybrid sharding, FSDP over tensor or expert
parallel parameters, column shards; files on disk, in memory, over HTTP from this machine, in a bucket.
``--saves`` also saves what was loaded, and compares the files with transformers' (``tests/round_trips.py``).
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests import load_cases, round_trips, truth, zoo
from tests.core.random_expressions import check_expression
from tests.load_cases import Way
from tests.quiet import quieten
from tests.support.http_store import HttpStore
from tests.support.local_ranks import LocalRanks, RankError


def main() -> int:
    """Run the sweep; the exit status says whether everything was equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="", help="world sizes, with commas; default: what suits the mesh")
    parser.add_argument("--mesh", default="flat", help="with commas: flat, hsdp, tp, ep, shard1")
    parser.add_argument("--storage", default="local", help="with commas: local, memory, http, bucket")
    parser.add_argument("--layouts", default="", help="of checkpoints, with commas; default: all")
    parser.add_argument("--saves", action="store_true", help="save what was loaded, and compare the files")
    parser.add_argument("--only", default="", help="names of specimens, with commas; default: all")
    parser.add_argument("--families", default="", help="families of specimens, with commas; default: all")
    parser.add_argument("--expressions", type=int, default=100_000, help="random expressions to check")
    options = parser.parse_args()
    quieten()
    wanted = set(filter(None, options.only.split(",")))
    families = set(filter(None, options.families.split(",")))
    specimens = [
        item
        for item in all_specimens()
        if (not wanted or item.name in wanted) and (not families or item.family in families)
    ]
    layouts = tuple(filter(None, options.layouts.split(","))) or tuple(truth.LAYOUTS | truth.FURTHER_LAYOUTS)
    failures = 0
    with tempfile.TemporaryDirectory(prefix="shardwise-sweep-") as folder, HttpStore(folder) as store:
        cases = prepare(specimens, Path(folder), layouts)
        for mesh in options.mesh.split(","):
            for size in sizes_for(mesh, options.worlds):
                chosen = [Way(mesh, storage, store.url) for storage in options.storage.split(",")]
                failures += run_world_size(size, cases, chosen, Path(folder, "saves") if options.saves else None)
    start = time.perf_counter()
    for seed in range(options.expressions):
        check_expression(seed)
    say(f"{options.expressions:,} random expressions agree ({time.perf_counter() - start:.0f} s)")
    say(f"{failures} failures")
    return 1 if failures else 0


def all_specimens() -> list[zoo.Specimen]:
    """Causal language models first, then those that exercise further conversion rules."""
    causal = zoo.causal_lm_specimens()
    names = {item.name for item in causal}
    return causal + [item for item in zoo.converter_specimens() if item.name not in names]


def sizes_for(mesh: str, worlds: str) -> list[int]:
    """The world sizes asked for, else those that suit a mesh."""
    if worlds:
        return [int(size) for size in worlds.split(",")]
    return [1, 2, 3, 5, 8] if mesh == "flat" else [load_cases.WORLDS[mesh]]


def prepare(specimens: Iterable[zoo.Specimen], folder: Path, layouts: Sequence[str]) -> list[truth.Case]:
    """All checkpoints with their truths; why some architectures have none is said."""
    cases: list[truth.Case] = []
    skipped: dict[str, str] = {}
    for specimen in specimens:
        try:
            cases += truth.prepare(specimen, folder, layouts=layouts)
        except zoo.CannotShrink as error:
            skipped[specimen.name] = str(error).replace("\n", " ")[:150]
        except Exception as error:  # transformers cannot save or load it itself
            skipped[specimen.name] = f"not by transformers either: {type(error).__name__}: {error}"[:200]
    say(f"{len(cases)} checkpoints of {len({case.specimen.name for case in cases})} architectures")
    for name, reason in skipped.items():
        say(f"  left out {name}: {reason}")
    return cases


def run_world_size(size: int, cases: list[truth.Case], chosen: Sequence[Way], saves: Path | None) -> int:
    """Load every case in these ways on one world of this size, and save it; how many were not equal."""
    failures = 0
    ranks = LocalRanks(size)
    ranks.run(quieten)
    for way in chosen:
        start = time.perf_counter()
        failed = others = 0
        for case in cases:
            try:
                if saves is None:
                    faults = ranks.run(load_cases.load_and_compare, case, way)
                else:
                    faults = ranks.run(round_trips.save_and_compare, case, way, str(saves))
            except RankError as error:
                faults = [[str(error)]]
                ranks.close()
                ranks = LocalRanks(size)
                ranks.run(quieten)
            if None in faults:
                others += 1
                continue
            found = [f"rank {rank}: {fault}" for rank, items in enumerate(faults) for fault in items]
            if found:
                failed += 1
                say(f"  FAILED {case} on {size}, {way}: {len(found)} faults, such as {found[0]}")
        tried = len(cases) - others
        seconds = time.perf_counter() - start
        what = "loads" if saves is None else "saves"
        say(f"{size} ranks, {way}: {tried - failed} of {tried} {what} are bitwise equal ({seconds:.0f} s)")
        failures += failed
    ranks.close()
    return failures


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
