"""What only a GPU can show, in minutes: ``python -m benchmarks.gpu``, or ``make gpu``.

The parts of :mod:`benchmarks.gpu_parts`, what is needed most first, each a process of its own that is ended after
its time. What a part measured before it failed or was ended is kept, and the next one runs. No network: weights are
drawn at random. Results are written after each part, to ``benchmarks/results/gpu-DATE.{json,md}``.
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

from benchmarks.gpu_parts import FIRST, PARTS
from benchmarks.place import add_device, commit, machine, say

ROOT = Path(__file__).parents[1]
_LONGEST_TEXT = 20_000


def run_part(command: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Run a process: its figures, which are its last line of JSON, and the end of its log unless it is done."""
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=out, stderr=log, cwd=ROOT, env=_environment(), start_new_session=True
        )
        try:
            code = process.wait(limit_s)
            outcome = f"failed with exit code {code}" if code else "done"
        except subprocess.TimeoutExpired:
            outcome = f"ended after {limit_s:.0f} s"
        finally:  # with all processes that it started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        log.seek(0)
        lines = [line for line in out if line.startswith("{") and line.endswith("}\n")]
        text = log.read()
    result: dict[str, Any] = {"outcome": outcome, "seconds": time.perf_counter() - start}
    result["figures"] = json.loads(lines[-1]) if lines else {}
    return result if outcome == "done" else result | {"log": text[-_LONGEST_TEXT:]}


def _environment() -> dict[str, str]:
    """The packages that tests have beside the environment are installed for the parts, as a user has them."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    peer = Path(sys.prefix, "peers", "bitsandbytes")
    if peer.is_dir():
        paths.append(str(peer))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}


def _devices() -> str:
    try:
        return subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout
    except OSError:
        return "no nvidia-smi"


def to_markdown(results: Mapping[str, Any]) -> str:
    parts, left_out = results["parts"], results["left out"]
    lines = [
        f"# On {results['device']}" + (" (tiny shapes: figures mean nothing)" if results["tiny"] else ""),
        "",
        f"{results['date']}, commit {results['commit']}, {results['minutes']:.1f} minutes.",
        f"`{results['command']}`",
        f"Left out, for lack of time: `--parts {' '.join(left_out)}`" if left_out else "Nothing was left out.",
        "",
        "| part | outcome | s |",
        "|---|---|--:|",
        *(f"| {name} | {part['outcome']} | {part['seconds']:.0f} |" for name, part in parts.items()),
    ]
    for name, part in {"machine": {"figures": results["machine"]}, **parts}.items():
        lines += ["", f"## {name}", ""]
        log = {"log": part["log"]} if "log" in part else {}
        for key, text in _flatten(part["figures"] | log, ()):
            lines += ["", f"{key}:", "```", text.strip(), "```", ""] if "\n" in text else [f"- {key}: {text}"]
    return "\n".join(lines) + "\n"


def _flatten(figures: Any, name: tuple[str, ...]) -> list[tuple[str, str]]:
    """Every figure with its name; single runs are in the JSON file alone."""
    if isinstance(figures, Mapping):
        return [line for key, value in figures.items() if key != "runs" for line in _flatten(value, (*name, key))]
    return [(", ".join(name), f"{figures:.4g}" if isinstance(figures, float) else str(figures))]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; the exit status says whether all that began were done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    parser.set_defaults(device="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes that take seconds, to see that it runs")
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(FIRST))
    parser.add_argument("--minutes", type=float, default=12.0, help="a part that does not fit is left out")
    parser.add_argument("--out", type=Path, help="results, as .json and .md beside it")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir(), "shardwise-benchmarks"))
    options = parser.parse_args(argv)
    start = time.perf_counter()
    arguments = ["--device", options.device, "--dir", str(options.dir.absolute()), *["--tiny"] * options.tiny]
    commands = {name: [sys.executable, "-m", "benchmarks.gpu_parts", name, *arguments] for name in PARTS}
    results: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks.gpu", *(argv if argv is not None else sys.argv[1:])]),
        "commit": commit(),
        "device": options.device,
        "tiny": options.tiny,
        "machine": {**machine(), "devices": _devices()},
        "parts": {},
        "left out": [],
    }
    place = options.out or ROOT / "benchmarks" / "results" / f"gpu-{datetime.now(UTC):%Y-%m-%d-%H%M}"
    place.parent.mkdir(parents=True, exist_ok=True)
    for name in options.parts:
        limit_s = PARTS[name][1]
        left_s = 60 * options.minutes - (time.perf_counter() - start)
        if left_s < limit_s / 2:
            results["left out"].append(name)
            say(f"{name}: left out, because it takes up to {limit_s:.0f} s and {max(left_s, 0):.0f} s are left")
        else:
            say(f"{name}: at most {min(limit_s, left_s):.0f} s")
            results["parts"][name] = run_part(commands[name], min(limit_s, left_s))
            say(f"{name}: {results['parts'][name]['outcome']}, {results['parts'][name]['seconds']:.0f} s")
        results["minutes"] = (time.perf_counter() - start) / 60
        Path(f"{place}.json").write_text(json.dumps(results, indent=1))
        Path(f"{place}.md").write_text(to_markdown(results))
    say(f"{place}.md")
    return int(any(part["outcome"] != "done" for part in results["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
