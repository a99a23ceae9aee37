"""Every architecture, at every world size, bitwise: ``make sweep``.

Makes a tiny random model of every architecture of the installed transformers (see ``tests/zoo.py``), saves it in
the hub's layout and under internal names, and loads each with ``shardwise.from_pretrained`` on worlds of gloo
processes, in float32 and bfloat16. Parameters, buffers, dtypes and ties are compared, gathered by torch, with what
transformers' own loader makes of the same files in one process. Then says which conversion rules of transformers'
registry no model exercised, and runs a hundred thousand random expressions against direct evaluation.

    make sweep ARGS="--worlds 2,8 --only qwen3,mixtral"
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from tests import truth, zoo
from tests.conversion.random_expressions import check_expression
from tests.quiet import quieten

from shardwise.execution.local_ranks import LocalRanks, RankError


def main() -> int:
    """Run the sweep; the exit status says whether everything was equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="1,2,3,5,8", help="world sizes, with commas")
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
    with tempfile.TemporaryDirectory(prefix="shardwise-sweep-") as folder:
        cases, skipped = prepare(specimens, Path(folder))
        failures = sum(run_world_size(int(size), cases) for size in options.worlds.split(","))
    report_registry(specimens, skipped)
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


def prepare(specimens: Iterable[zoo.Specimen], folder: Path) -> tuple[list[truth.Case], dict[str, str]]:
    """All checkpoints with their truths, and why some architectures have none."""
    cases: list[truth.Case] = []
    skipped: dict[str, str] = {}
    for specimen in specimens:
        try:
            cases += truth.prepare(specimen, folder)
        except zoo.CannotShrink as error:
            skipped[specimen.name] = str(error).replace("\n", " ")[:150]
        except Exception as error:  # transformers cannot save or load it itself
            skipped[specimen.name] = f"not by transformers either: {type(error).__name__}: {error}"[:200]
    say(f"{len(cases)} checkpoints of {len({case.specimen.name for case in cases})} architectures")
    for name, reason in skipped.items():
        say(f"  left out {name}: {reason}")
    return cases, skipped


def run_world_size(size: int, cases: list[truth.Case]) -> int:
    """Load every case on one world of this size; how many were not equal."""
    start = time.perf_counter()
    failures = 0
    ranks = LocalRanks(size, timeout_s=300)
    ranks.run(quieten)
    for case in cases:
        try:
            faults = ranks.run(truth.load_and_compare, case)
        except RankError as error:
            faults = [[str(error)]]
            ranks.close()
            ranks = LocalRanks(size, timeout_s=300)
            ranks.run(quieten)
        found = [f"rank {rank}: {fault}" for rank, items in enumerate(faults) for fault in items]
        if found:
            failures += 1
            say(f"  FAILED {case} on {size}: {len(found)} faults, such as {found[0]}")
    ranks.close()
    equal = len(cases) - failures
    say(f"{size} ranks: {equal} of {len(cases)} loads are bitwise equal ({time.perf_counter() - start:.0f} s)")
    return failures


def report_registry(specimens: list[zoo.Specimen], skipped: dict[str, str]) -> None:
    """Which entries of transformers' registry of conversions no specimen exercised."""
    coverage = zoo.registry_coverage([item for item in specimens if item.name not in skipped])
    missing = sorted(key for key, names in coverage.items() if not names)
    say(f"{len(coverage) - len(missing)} of {len(coverage)} registry entries exercised; not: {', '.join(missing)}")


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
