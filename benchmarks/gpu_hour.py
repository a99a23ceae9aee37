"""What only a GPU can show, in an hour: ``python -m benchmarks.gpu_hour``, or ``make gpu-hour``.

The parts of :mod:`benchmarks.gpu_parts` in order, each a process of its own that is ended after its time. A part
that fails or is ended does not keep the next from running. No network: weights are drawn at random. Results are
written after each part, to ``benchmarks/results/gpu-DATE.{json,md}``.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts import PARTS
from benchmarks.place import add_device, commit, say

ROOT = Path(__file__).parents[1]
_LONGEST_TEXT = 6000


def run_part(name: str, arguments: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Run one part; what it found, or the end of what it said."""
    command = [sys.executable, "-m", "benchmarks.gpu_parts", name, *arguments]
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=out, stderr=log, cwd=ROOT, env=_environment(), start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        texts = []
        for file in (out, log):
            file.seek(0)
            texts.append(file.read())
    told: dict[str, Any] = {"seconds": time.perf_counter() - began}
    if code == 0:
        return told | {"outcome": "done", "found": json.loads(texts[0].strip().splitlines()[-1])}
    outcome = f"ended after {limit_s:.0f} s" if code is None else f"failed with exit code {code}"
    return told | {"outcome": outcome, "output": "".join(texts)[-_LONGEST_TEXT:]}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part with all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment() -> dict[str, str]:
    """The packages that tests have beside the environment are installed for the parts, as a user has them."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    peer = Path(sys.prefix, "peers", "bitsandbytes")
    if peer.is_dir():
        paths.append(str(peer))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}


def lines(results: Mapping[str, Any]) -> list[str]:
    """The results in Markdown."""
    text = [
        f"# An hour on {results['device']}" + (" (tiny shapes: figures mean nothing)" if results["tiny"] else ""),
        "",
        f"{results['date']}, commit {results['commit']}, {results['minutes']:.1f} minutes.",
        f"`{results['command']}`",
        "",
        "| part | outcome | s |",
        "|---|---|--:|",
        *(f"| {name} | {told['outcome']} | {told['seconds']:.0f} |" for name, told in results["parts"].items()),
    ]
    for name, told in results["parts"].items():
        text += ["", f"## {name}", ""]
        if "found" not in told:
            text += ["```", told["output"], "```"]
            continue
        figures = dict(_flat(told["found"], ()))
        short = {key: value for key, value in figures.items() if "\n" not in value}
        text += ["| what | value |", "|---|--:|", *(f"| {key} | {value} |" for key, value in short.items())]
        for key in figures.keys() - short.keys():
            text += ["", f"{key}:", "", "```", figures[key].strip(), "```"]
    return text


def _flat(found: Any, name: tuple[str, ...]) -> list[tuple[str, str]]:
    """Every figure with its name; single runs are in the JSON file alone."""
    if isinstance(found, Mapping):
        return [line for key, value in found.items() if key != "runs" for line in _flat(value, (*name, str(key)))]
    return [(", ".join(name), f"{found:.4g}" if isinstance(found, float) else str(found))]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; the exit status says whether all were done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    parser.set_defaults(device="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes that take seconds, to see that it runs")
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--limit", type=float, default=1.0, help="times the limit of each part")
    parser.add_argument("--out", type=Path, help="results, as .json and .md beside it")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir(), "shardwise-benchmarks"))
    given = parser.parse_args(argv)
    arguments = ["--device", given.device, "--dir", str(given.dir.absolute()), *["--tiny"] * given.tiny]
    began, parts = time.perf_counter(), dict[str, Any]()
    place = given.out or ROOT / "benchmarks" / "results" / f"gpu-{datetime.now(UTC):%Y-%m-%d-%H%M}"
    place.parent.mkdir(parents=True, exist_ok=True)
    for name in given.parts:
        say(f"{name}: at most {PARTS[name][1] * given.limit:.0f} s")
        parts[name] = run_part(name, arguments, PARTS[name][1] * given.limit)
        say(f"{name}: {parts[name]['outcome']}, {parts[name]['seconds']:.0f} s")
        results = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(["python -m benchmarks.gpu_hour", *(argv if argv is not None else sys.argv[1:])]),
            "commit": commit(),
            "device": given.device,
            "tiny": given.tiny,
            "minutes": (time.perf_counter() - began) / 60,
            "parts": parts,
        }
        Path(f"{place}.json").write_text(json.dumps(results, indent=1))
        Path(f"{place}.md").write_text("\n".join(lines(results)) + "\n")
    say(f"{place}.md")
    return int(any(told["outcome"] != "done" for told in parts.values()))


if __name__ == "__main__":
    sys.exit(main())
