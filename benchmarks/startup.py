"""Bringing a model up, by ``shardwise bench startup``: figures and the picture of the README.

``python -m benchmarks.startup``. Four ranks bring Qwen3-1.7B's shape up, by every arm. ``--picture`` also
copies the picture to where the README shows it.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import SHAPES, write
from benchmarks.place import RANKS, commit, machine, say

PICTURE = Path("docs", "images", "startup.png")
_MIB = 1 << 20


def measure(folder: Path, out: Path, options: Sequence[str]) -> tuple[dict[str, Any], int]:
    """What the command says, and its exit code."""
    command = [sys.executable, "-m", "shardwise", "bench", "startup", str(folder), "--out", str(out), "--json"]
    done = subprocess.run([*command, *options], stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"shardwise bench startup ended with {done.returncode}")
    told: dict[str, Any] = json.loads(done.stdout)
    told["model"] = folder.name
    del told["files"]  # they are gone with their folder
    for run in told["arms"].values():
        run["folder"] = Path(run["folder"]).name
    return told, done.returncode


def page(results: Mapping[str, Any]) -> Iterator[str]:
    """Markdown."""
    place, told = results["machine"], results["startup"]
    yield f"# A model coming up: {results['model']}, {told['ranks']} ranks, as {told['dtype']}"
    yield ""
    yield (
        f"{results['date']}, commit {results['commit']}, `{results['command']}`; {place['cpus']} cores "
        f"({place['processor']}), {place['memory_bytes'] / 2**30:.0f} GiB, Linux {place['kernel']}, "
        + ", ".join(f"{name} {version}" for name, version in place["versions"].items())
        + ". Files in the page cache; fresh processes for each arm."
    )
    yield ""
    yield "| arm | seconds to wrapped | growth, MiB | fullest rank, MiB | mapped files, MiB | values |"
    yield "|---|--:|--:|--:|--:|---|"
    for name, arm in told["arms"].items():
        most = [f"{arm[key] / _MIB:,.0f}" for key in ("growth_bytes", "fullest_bytes", "mapped_bytes")]
        yield f"| {name} | {arm['seconds']:.2f} | {' | '.join(most)} | {arm['values']} |"
    yield ""
    for name, reason in told["not_run"].items():
        yield f"{name} did not run: {reason}."
        yield ""
    if ours := told["arms"].get("shardwise"):
        verdict = "holds" if told["holds"] else "DOES NOT HOLD"
        grown, most_bytes = ours["growth_bytes"] / _MIB, ours["limit_bytes"] / _MIB
        yield f"Limit of our arm: {grown:,.0f} MiB of at most {most_bytes:,.0f} MiB, {verdict}."


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--model", default="qwen3-1.7b", choices=list(SHAPES))
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--dtype", default="float32", help="auto: as it is stored")
    parser.add_argument("--arms", default=None)
    parser.add_argument("--picture", nargs="?", type=Path, const=PICTURE, help=f"copy it there [{PICTURE}]")
    parser.add_argument("--out", type=Path, help="results, as .json and .md beside it")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir(), "shardwise-benchmarks"))
    given = parser.parse_args(argv)
    shape = SHAPES[given.model].tiny() if given.quick else SHAPES[given.model]
    folder = write(shape, given.dir)
    options = ["--ranks", str(given.ranks), "--dtype", given.dtype]
    options += ["--arms", given.arms] if given.arms else []
    results: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks.startup", *(argv if argv is not None else sys.argv[1:])]),
        "commit": commit(),
        "machine": machine(),
        "model": shape.name,
    }
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardwise-startup-") as run:
        results["startup"], code = measure(folder, Path(run, "out"), options)
        drawn = Path(run, "out", "startup.png")
        if given.picture is not None and drawn.is_file():
            given.picture.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(drawn, given.picture)
            say(f"{given.picture}: {given.picture.stat().st_size / 1000:.0f} kB")
    results["minutes"] = (time.monotonic() - began) / 60
    out = given.out or Path("benchmarks", "results", f"startup-{results['date'][:10]}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(page(results)).rstrip() + "\n"
    out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    out.with_suffix(".md").write_text(text)
    say(text)
    say(f"written to {out.with_suffix('.json')} and {out.with_suffix('.md')}")
    return code


if __name__ == "__main__":
    sys.exit(main())
