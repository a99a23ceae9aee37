"""The hour on a GPU, in tiny shapes on a CPU: every part runs, also after one that fails or hangs."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import gpu_hour
from benchmarks.gpu_parts import PARTS


def figures(found: object) -> list[float]:
    """All numbers, but for those of the machine."""
    if isinstance(found, dict):
        return [number for key, inner in found.items() if key != "machine" for number in figures(inner)]
    return [found] if isinstance(found, float) else []


def require_meaningful(part: str, found: dict[str, Any]) -> None:
    match part:
        case "versions":
            assert found["ranks"] == 1
        case "tests":
            assert "skipped" in found["summary"]
        case "launch":
            assert found["seconds"] > 0
        case "load":
            assert (found["seconds"].keys(), len(found["computed"])) == ({"shardwise", "transformers", "dcp"}, 4)
        case "step":
            assert max(found["greatest difference of a loss"], found["Trainer"]["loss_difference"]) < 1e-4
            assert "aten::" in found["one step"]["profile"]
        case "qlora":
            assert found["shardwise"]["step_s"] > 0
        case "bank":
            for told in (found[f"{count} tenants"] for count in (2, 4)):
                assert max(told["greatest difference of a loss"].values()) < 1e-4
                assert len(told["seconds"]) == 3
        case "checkpoints":
            assert found["seconds"].keys() > {"synchronous", "asynchronous", "dcp.save"}
        case _:
            assert found.keys() == {"full, float32", "LoRA, bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_each_part_runs_on_a_cpu(tmp_path: Path, part: str) -> None:
    arguments = ["--device", "cpu", "--tiny", "--dir", str(tmp_path / "models"), "--out", str(tmp_path / "gpu")]
    code = gpu_hour.main([*arguments, "--parts", part])
    [told] = json.loads((tmp_path / "gpu.json").read_text())["parts"].values()
    assert (told["outcome"], code) == ("done", 0), told
    require_meaningful(part, told["found"])
    assert all(number >= 0 for number in figures(told["found"]))
    text = (tmp_path / "gpu.md").read_text()
    assert f"## {part}" in text
    assert "figures mean nothing" in text


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_is_reported_and_the_next_runs(tmp_path: Path) -> None:
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
