"""What a GPU shows, in tiny shapes on a CPU: every part runs, also after one that fails or is left out."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import gpu
from benchmarks.gpu import FIRST, PARTS


def numbers(figures: object) -> list[float]:
    if isinstance(figures, dict):
        return [number for value in figures.values() for number in numbers(value)]
    return [figures] if isinstance(figures, float) else []


def require_meaningful(part: str, figures: dict[str, Any]) -> None:
    match part:
        case "tests":
            assert "skipped" in figures["summary"]
        case "launch":
            assert figures["seconds"] > 0
        case "load":
            assert figures["shardwise over"].keys() > {"transformers", "pinned to device"}
        case "more-loads":
            assert (figures["seconds"].keys(), len(figures["computed"])) == ({"shardwise", "dcp"}, 4)
        case "step":
            assert figures["greatest difference of a loss"] < 1e-4
            assert figures["seconds"].keys() == {"shardwise", "FSDP2 by hand", "Trainer"}
            assert "aten::" in figures["one step"]["profile"]
        case "qlora":
            assert figures["shardwise"]["step_s"] > 0
        case "bank" | "more-banks":
            assert max(figures["greatest difference of a loss"].values()) < 1e-4
            assert len(figures["seconds"]) == (2 if part == "bank" else 3)
        case "checkpoint":
            assert figures["seconds"].keys() > {"synchronous", "asynchronous", "dcp.save"}
        case "plan":
            assert figures.keys() == {"full, float32", "LoRA, bfloat16"}


BY_COMMAND = ("tests", "launch", "plan")
"""Parts that a process of their own is tried for: two start programs, and one is enough of the others."""


@pytest.mark.slow
@pytest.mark.parametrize("part", [part for part in PARTS if part not in {*BY_COMMAND, "more-checkpoints"}])
def test_each_part_runs_on_a_cpu(tmp_path: Path, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All but a larger checkpoint."""
    assert gpu.run_here(part, gpu.Bench("cpu", True, tmp_path)) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    require_meaningful(part, figures)
    assert all(number >= 0 for number in numbers(figures))


@pytest.mark.slow
@pytest.mark.parametrize("part", BY_COMMAND)
def test_each_part_runs_by_the_command(tmp_path: Path, part: str) -> None:
    arguments = ["--device", "cpu", "--tiny", "--dir", str(tmp_path / "models"), "--out", str(tmp_path / "gpu")]
    code = gpu.main([*arguments, "--parts", part])
    [result] = json.loads((tmp_path / "gpu.json").read_text())["parts"].values()
    assert (result["outcome"], code) == ("done", 0), result
    require_meaningful(part, result["figures"])
    assert all(number >= 0 for number in numbers(result["figures"]))
    text = (tmp_path / "gpu.md").read_text()
    assert f"## {part}" in text
    assert "figures mean nothing" in text


@pytest.mark.slow
def test_the_next_part_runs_after_one_that_fails(tmp_path: Path) -> None:
    file = tmp_path / "no folder"
    file.write_text("")
    arguments = ["--device", "cpu", "--tiny", "--dir", str(file), "--out", str(tmp_path / "gpu")]
    assert gpu.main([*arguments, "--parts", "load", "bank"]) == 1
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert [result["outcome"] for result in parts.values()] == ["failed with exit code 1"] * 2
    assert "FileExistsError" in parts["bank"]["log"]


def test_parts_without_time_are_left_out(tmp_path: Path) -> None:
    assert gpu.main(["--device", "cpu", "--tiny", "--out", str(tmp_path / "gpu"), "--minutes", "0"]) == 0
    assert json.loads((tmp_path / "gpu.json").read_text())["left out"] == list(FIRST)
    assert f"`--parts {' '.join(FIRST)}`" in (tmp_path / "gpu.md").read_text()


@pytest.mark.parametrize(("end", "outcome"), [("exit(3)", "failed with exit code 3"), ("print('late')", "done")])
def test_what_was_measured_before_a_failure_is_kept(end: str, outcome: str) -> None:
    result = gpu.run_part([sys.executable, "-c", f'print(\'{{"s": 1}}\\n{{"s": 2}}\'); {end}'], 60)
    assert (result["outcome"], result["figures"]) == (outcome, {"s": 2})


def test_a_part_that_hangs_is_ended() -> None:
    result = gpu.run_part([sys.executable, "-c", "import threading; threading.Event().wait()"], 0)
    assert result["outcome"] == "ended after 0 s"
