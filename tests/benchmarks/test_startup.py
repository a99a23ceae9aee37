"""``python -m benchmarks.startup``: growth, incomplete runs, the limit, and all arms on ranks."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import startup
from benchmarks.checkpoints import write
from benchmarks.startup_arms import ARMS, PHASES
from benchmarks.training import smaller
from tests.observing.synthetic_runs import MIB, make_rank

from shardwise.run_records import read_run

# matplotlib's oldest supported version calls pyparsing by names of which that warns.
old_names = pytest.mark.filterwarnings("ignore::DeprecationWarning")
drawing = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")


def measure(folder: Path, model: Path, *arguments: object) -> tuple[int, dict[str, Any]]:
    """The exit code and the results."""
    results = folder / "results.json"
    code = startup.main(
        ["--model", str(model), "--out", str(folder), "--results", str(results), *map(str, arguments)]
    )
    found: dict[str, Any] = json.loads(results.read_text())
    return code, found


def made_run(run: Path, own: list[list[tuple[float, int, int]]]) -> Path:
    """Ranks with samples of (seconds, own KiB, mapped KiB); load until 1, wrap until 2, optimizer until 3."""
    for rank, samples in enumerate(own):
        lines: list[tuple[float, Any]] = []
        for number, name in enumerate(PHASES):
            lines += [(number + rank / 2, name), (number + 1 + rank / 2, None)]
        for t, kib, mapped in samples:
            lines.append((t, {"anonymous": kib // 2, "shared": kib - kib // 2, "file": mapped}))
        make_rank(run, rank, len(own), lines)
    return run


def test_growth_is_that_of_one_moment_over_the_level_of_each_rank(tmp_path: Path) -> None:
    first = [(0.0, 100 * MIB, 0), (1.0, 160 * MIB, 7 * MIB), (1.5, 130 * MIB, 0), (3.0, 130 * MIB, 0)]
    second = [(0.5, 200 * MIB, 0), (1.5, 240 * MIB, 0), (3.0, 200 * MIB, 0)]  # begins half a second later
    found = startup.run_of(read_run(made_run(tmp_path, [first, second])))
    # At 1.0 the second has grown by 20 and the first by 60; at 1.5 by 40 and 30.
    assert found.growth_bytes == (60 + 20) << 20
    assert found.fullest_bytes == 60 << 20
    assert found.mapped_bytes == 7 << 20
    assert found.seconds == pytest.approx(2.5)
    assert found.phases == pytest.approx({"load": 1.0, "wrap": 1.0, "optimizer": 1.0})
    assert found.curves is not None
    assert max(np.sum(found.curves[1], axis=0)) == pytest.approx(80 / 1024)
    assert found.spans == {"load": (0.0, 1.5), "wrap": (1.5, 2.5), "optimizer": (2.5, 3.5)}


@pytest.mark.parametrize("inner", ["from_pretrained", "wrap"])
def test_a_rank_whose_disk_was_full_before_its_end_is_an_error(tmp_path: Path, inner: str) -> None:
    """With phases of its own within what there is: the optimizer was never written down."""
    run = made_run(tmp_path, [[(0.0, 0, 0), (2.0, MIB, 0)]])
    file = run / "observed" / "rank-00000.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    cut = next(number for number, line in enumerate(lines) if '"wrap"' in line)
    begun = f'{{"t":0,"thread":0,"begin":"{inner}"}}\n{{"t":0.5,"thread":0,"end":true}}\n'
    file.write_text("".join([*lines[:2], begun, *lines[2:cut]]))
    with pytest.raises(RuntimeError, match="rank 0 was not observed to its end"):
        startup.run_of(read_run(run))


@drawing
@old_names
@pytest.mark.slow
@pytest.mark.distributed
def test_who_holds_less_grows_less(tmp_path: Path) -> None:
    """All arms make one model; memory-efficient ones grow less than plain ones, ours as transformers' own."""
    shape = smaller("qwen3-100m", num_hidden_layers=6, max_window_layers=6, vocab_size=16384)
    code, told = measure(tmp_path / "out", write(shape, tmp_path), "--ranks", 4)
    assert code == 0
    assert told["not_run"] == {}
    assert {name: arm["verdict"] for name, arm in told["arms"].items()} == dict.fromkeys(ARMS, "same")
    assert all(arm in (tmp_path / "out" / "report" / "report.html").read_text("utf-8") for arm in ARMS)
    assert (tmp_path / "out" / "startup.png").read_bytes().startswith(b"\x89PNG")
    grown = {name: arm["growth_bytes"] for name, arm in told["arms"].items()}
    assert grown["native-efficient"] < grown["native"]
    assert grown["accelerate-efficient"] < grown["accelerate"]
    least, ours = grown.pop("transformers"), grown.pop("shardwise")
    assert ours < min(grown.values()) / 1.5
    assert ours < 1.1 * least
