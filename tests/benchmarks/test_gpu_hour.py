"""The hour on a GPU, in tiny shapes on a CPU: every part runs, also after one that fails or hangs."""

import json
from pathlib import Path

import pytest
from benchmarks import gpu_hour
from benchmarks.gpu_parts import PARTS


def figures(found: object) -> list[float]:
    """All numbers, but for those of the machine."""
    if isinstance(found, dict):
        return [number for key, inner in found.items() if key != "machine" for number in figures(inner)]
    return [found] if isinstance(found, float) else []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_parts_run_on_a_cpu(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--tiny", "--dir", str(tmp_path / "models"), "--out", str(tmp_path / "gpu")]
    code = gpu_hour.main([*arguments, "--limit", "3"])
    results = json.loads((tmp_path / "gpu.json").read_text())
    parts = results["parts"]
    assert {name: told["outcome"] for name, told in parts.items()} == dict.fromkeys(PARTS, "done"), parts
    assert code == 0
    assert "skipped" in parts["tests"]["found"]["summary"]
    assert parts["load"]["found"]["seconds"].keys() == {"shardwise", "transformers", "dcp"}
    assert len(parts["load"]["found"]["computed"]) == 4
    assert parts["step"]["found"]["greatest difference of a loss"] < 1e-4
    assert parts["step"]["found"]["Trainer"]["loss_difference"] < 1e-4
    assert "aten::" in parts["step"]["found"]["one step"]["profile"]
    assert parts["qlora"]["found"]["shardwise"]["step_s"] > 0
    for told in (parts["bank"]["found"][f"{count} tenants"] for count in (2, 4)):
        assert max(told["greatest difference of a loss"].values()) < 1e-4
        assert len(told["seconds"]) == 3
    assert parts["checkpoints"]["found"]["seconds"].keys() > {"synchronous", "asynchronous", "dcp.save"}
    assert all(number >= 0 for told in parts.values() for number in figures(told["found"]))
    text = (tmp_path / "gpu.md").read_text()
    assert all(f"## {name}" in text for name in PARTS)
    assert "figures mean nothing" in text


def test_a_part_that_fails_or_hangs_is_told_and_the_next_runs(tmp_path: Path) -> None:
    out = ["--device", "cpu", "--tiny", "--out", str(tmp_path / "gpu")]
    file = tmp_path / "no folder"
    file.write_text("")
    assert gpu_hour.main([*out, "--parts", "versions", "launch", "--dir", str(file)]) == 1
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert [told["outcome"] for told in parts.values()] == ["failed with exit code 1"] * 2
    assert "FileExistsError" in parts["launch"]["output"]
    assert gpu_hour.main([*out, "--parts", "launch", "--dir", str(tmp_path), "--limit", "0.001"]) == 1
    [told] = json.loads((tmp_path / "gpu.json").read_text())["parts"].values()
    assert told["outcome"] == "ended after 0 s"
    assert "## launch" in (tmp_path / "gpu.md").read_text()
