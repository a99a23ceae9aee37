"""Plans of trainings, compared with the memory that ranks then hold."""

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tests.conftest import Worlds
from tests.models import on_ranks, reference
from tests.models.own import OnlyNorms
from tests.models.test_tunings import ALL_LINEAR, COPIES, DORA, NARROW

import shardwise
from shardwise import ExistingLora, Full, Lora
from shardwise.cli import main
from shardwise.loading.option_syntax import build_tuning

TUNINGS: dict[str, Any] = {
    "full": Full(),
    "lora": Lora(ALL_LINEAR),
    "dora": Lora(DORA),
    "replicated": Lora(NARROW, placement="replicated"),
    "one's own": OnlyNorms(),
}


@pytest.mark.parametrize("name", TUNINGS)
def test_estimated_bytes_are_the_allocated_bytes(name: str, half: Path, worlds: Worlds) -> None:
    keywords: dict[str, Any] = {"tuning": TUNINGS[name], "resize_vocab": 70}
    foreseen = shardwise.plan(half, ranks=3, device="cpu", **keywords)
    for rank, (held, report) in enumerate(worlds(3).run(on_ranks.held_in_training, str(half), keywords)):
        training = foreseen.training
        assert foreseen.ranks[rank].shard_bytes == report["placed_bytes"] == report["estimate"]["shard_bytes"]
        assert foreseen.ranks[rank].read_bytes == report["estimate"]["read_bytes"]
        assert report["read_bytes"] == pytest.approx(foreseen.ranks[rank].read_bytes, abs=4096)
        assert foreseen.ranks[rank].host_bytes == report["estimate"]["host_bytes"]
        assert foreseen.trainable_parameters == report["trainable_parameters"]
        assert foreseen.parameters == report["parameters"]
        assert held["weights"] <= foreseen.ranks[rank].padded_bytes <= held["weights"] + held["padding"]
        assert 0 <= training.weight_bytes - foreseen.ranks[rank].padded_bytes < 100  # other buffers
        assert training.optimizer_bytes[rank] == held["moments"]
        assert held["gradients"] <= training.gradient_bytes <= held["gradients"] + held["padding"]
        assert foreseen.largest_group.gathered_bytes == held["largest"]


def test_counts_are_those_of_peft(half: Path) -> None:
    foreseen = shardwise.plan(half, ranks=2, device="cpu", tuning=Lora(COPIES))
    trainable, every = reference.stock(half, COPIES, torch.bfloat16).get_nb_trainable_parameters()
    assert (foreseen.trainable_parameters, foreseen.parameters) == (trainable, every)
    assert f"trainable params: {trainable:,} || all params: {every:,} || trainable%: " in str(foreseen)
    assert "activations not included" in str(foreseen)
    assert shardwise.plan(half, ranks=2, device="cpu").training is None


def test_tunings_by_text(half: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(main, ["plan", str(half), "--ranks", "2", "--device", "cpu", *arguments])

    for words in ("full", "freeze=1,modules=self_attn,extra=lm_head", "lora=4,alpha=8,targets=q_proj+v_proj"):
        result = run("--tuning", words)
        assert result.exit_code == 0, result.output
        assert "trainable params: " in result.output
    shardwise.save_adapter(shardwise.from_pretrained(half, tuning=Lora(NARROW)), tmp_path)
    assert "trainable params: " in run("--tuning", str(tmp_path)).output
    assert isinstance(build_tuning(str(tmp_path)), ExistingLora)
    for words, message in (
        ("lore=3", "is not known. Pass full, freeze=N"),
        ("freeze=two", "is not known"),
        ("lora=4,target=q_proj", "is not known"),
        ("lora=4,targets=q_prj", "The nearest are q_proj"),
        ("q_proj" * 50, "is not known"),  # longer than the name of a file
    ):
        result = run("--tuning", words)
        assert result.exit_code == 2, result.output
        assert message in result.output
