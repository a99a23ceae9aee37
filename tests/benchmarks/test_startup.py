"""``python -m benchmarks.startup``: growth, and all arms on ranks."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks import startup
from benchmarks.harness.checkpoints import smaller, write
from benchmarks.startup import RankRecord

MIB = 1 << 20

# matplotlib's oldest supported version calls pyparsing by names of which that warns.
old_names = pytest.mark.filterwarnings("ignore::DeprecationWarning")
drawing = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")


def test_growth_is_that_of_one_moment_over_the_level_of_each_rank() -> None:
    first = [(0.0, 100, 0), (1.0, 160, 7), (1.5, 130, 0), (3.0, 130, 0)]
    second = [(0.5, 200, 0), (1.5, 240, 0), (3.0, 200, 0)]  # begins half a second later
    ranks = [
        RankRecord([(t, own * MIB, mapped * MIB) for t, own, mapped in samples], [t + late for t in (0, 1, 2, 3)])
        for late, samples in ((0.0, first), (0.5, second))
    ]
    figures, timeline = startup.summarize(ranks)
    # At 1.0 the second has grown by 20 and the first by 60; at 1.5 by 40 and 30.
    assert figures["growth_bytes"] == (60 + 20) * MIB
    assert figures["fullest_bytes"] == 60 * MIB
    assert figures["mapped_bytes"] == 7 * MIB
    assert figures["seconds"] == pytest.approx(2.5)
    assert figures["phases"] == pytest.approx({"load": 1.0, "wrap": 1.0, "optimizer": 1.0})
    assert max(np.sum(timeline.growth, axis=0)) == pytest.approx(80 / 1024)
    assert timeline.spans == {"load": (0.0, 1.5), "wrap": (1.5, 2.5), "optimizer": (2.5, 3.5)}


@drawing
@old_names
@pytest.mark.slow
@pytest.mark.distributed
def test_all_arms_make_one_model_and_ours_grows_as_transformers_own(tmp_path: Path) -> None:
    """Arms that load everything on a rank grow half as much again, at least, whatever they hold at one moment."""
    model = write(smaller("qwen3-100m", num_hidden_layers=6, vocab_size=16384), tmp_path)
    paths = ["--out", f"{tmp_path}/results", "--picture", f"{tmp_path}/startup.png", "--dir", str(tmp_path)]
    assert startup.main(["--model", str(model), "--ranks", "2", *paths]) == 0
    report = json.loads((tmp_path / "results.json").read_text())
    assert report["failures"] == {}
    assert {arm: of["values"] for arm, of in report["arms"].items()} == dict.fromkeys(startup.ARMS, "same")
    assert (tmp_path / "startup.png").read_bytes().startswith(b"\x89PNG")
    growth = {arm: of["growth_bytes"] for arm, of in report["arms"].items()}
    least, ours = growth.pop("transformers"), growth.pop("shardwise")
    assert ours < min(growth.values()) / 1.5
    assert ours < 1.25 * least
