"""The benchmark on a tiny model."""

from pathlib import Path

import pytest
from benchmarks import load
from benchmarks.arms import ARMS, why_no_runai
from benchmarks.checkpoints import SHAPES, write
from benchmarks.rank import Job, measure
from tests.conftest import Worlds

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

INSTALLED = [arm for arm in ARMS if arm != "runai" or not why_no_runai()]


def run(worlds: Worlds, arm: str, folder: Path, *, lora: bool = False) -> dict[str, object]:
    return load.summary(worlds(2).run(measure, Job(arm, str(folder), str(folder), lora=lora)))


@pytest.mark.parametrize(
    ("name", "arms", "lora"),
    [
        ("qwen3-0.6b", INSTALLED, False),
        ("qwen3-0.6b", [arm for arm in INSTALLED if arm != "runai"], True),
        ("qwen3-0.6b-hub", ["shardwise", "transformers"], False),
        ("qwen3-moe", ["shardwise", "transformers", "accelerate"], False),
    ],
)
def test_all_arms_make_the_same_model(
    name: str, arms: list[str], lora: bool, worlds: Worlds, tmp_path: Path
) -> None:
    folder = write(SHAPES[name].tiny(), tmp_path)
    found = {arm: load.statistics_of([run(worlds, arm, folder, lora=lora)], 1) for arm in arms}
    assert load.compare(found) == dict.fromkeys(arms, "same")


def test_a_model_with_other_values_is_not_the_same(worlds: Worlds, tmp_path: Path) -> None:
    folder = write(SHAPES["qwen3-0.6b"].tiny(), tmp_path)
    before = load.statistics_of([run(worlds, "shardwise", folder)], 1)
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    after = load.statistics_of([run(worlds, "transformers", folder)], 1)
    verdict = load.compare({"before": before, "after": after})["after"]
    assert verdict.startswith("1 of ")
