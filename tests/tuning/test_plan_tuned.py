"""What a plan tells of training, against what is then held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from peft import LoraConfig
from tests.conftest import Worlds
from tests.tuning import on_ranks, reference
from tests.tuning.own import OnlyNorms
from tests.tuning.test_tune import ALL_LINEAR, COPIES, DORA, NARROW

import shardwise
from shardwise import ConfigError, ExistingLora, Freeze, Full, Lora
from shardwise.cli.main import main
from shardwise.engines.tuning_arguments import tuning_named
from shardwise.options import Replicated

TUNINGS: dict[str, Any] = {
    "full": Full(),
    "freeze": Freeze(1, extra_modules=("lm_head",)),
    "lora": Lora(ALL_LINEAR),
    "dora": Lora(DORA),
    "copies": Lora(COPIES),
    "replicated": Lora(NARROW, adapters=Replicated()),
    "one's own": OnlyNorms(),
}


@pytest.mark.distributed
@pytest.mark.parametrize("name", TUNINGS)
def test_what_is_foreseen_is_what_is_held(name: str, half: Path, worlds: Worlds) -> None:
    keywords: dict[str, Any] = {"tuning": TUNINGS[name], "resize_vocab": 70}
    foreseen = shardwise.plan(half, ranks=3, device="cpu", **keywords)
    for rank, (held, report) in enumerate(worlds(3).run(on_ranks.held_in_training, str(half), keywords)):
        training = foreseen.training[rank]
        assert foreseen.ranks[rank].shard_bytes == report["placed_bytes"] == report["forecast"]["shard_bytes"]
        assert foreseen.ranks[rank].read_bytes == report["read_bytes"] == report["forecast"]["read_bytes"]
        assert foreseen.ranks[rank].host_bytes == report["forecast"]["host_bytes"]
        assert foreseen.trainable_parameters == report["trainable_parameters"]
        assert foreseen.parameters == report["parameters"]
        assert held["weights"] <= training.weight_bytes <= held["weights"] + held["padding"]
        assert training.optimizer_bytes == held["moments"]
        assert held["gradients"] <= training.gradient_bytes <= held["gradients"] + held["padding"]
        assert training.gathered_bytes == held["largest"]


def test_counts_are_those_of_peft(half: Path) -> None:
    foreseen = shardwise.plan(half, ranks=2, device="cpu", tuning=Lora(COPIES))
    trainable, every = reference.stock(half, COPIES, torch.bfloat16).get_nb_trainable_parameters()
    assert (foreseen.trainable_parameters, foreseen.parameters) == (trainable, every)
    assert f"trainable params: {trainable:,} || all params: {every:,} || trainable%: " in str(foreseen)
    assert "activations come on top" in str(foreseen)
    assert shardwise.plan(half, ranks=2, device="cpu").training == ()


def test_the_command_line_knows_tunings(half: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(main, ["plan", str(half), "--ranks", "2", "--device", "cpu", *arguments])

    for words in ("full", "freeze=1,modules=self_attn,extra=lm_head", "lora=4,alpha=8,targets=q_proj+v_proj"):
        result = run("--tuning", words, "--resize-vocab", "70")
        assert result.exit_code == 0, result.output
        assert "trainable params: " in result.output
    shardwise.save_adapter(shardwise.from_pretrained(half, tuning=Lora(NARROW)), tmp_path)
    assert "trainable params: " in run("--tuning", str(tmp_path)).output
    assert isinstance(tuning_named(str(tmp_path)), ExistingLora)
    for words, message in (
        ("lore=3", "did you mean lora?"),
        ("freeze=two", "'two' is not a number"),
        ("lora=4,target=q_proj", "lora has no target; its settings are: alpha, targets"),
        ("lora=4,targets=q_prj", "the nearest are q_proj"),
    ):
        result = run("--tuning", words)
        assert result.exit_code == 2, result.output
        assert message in result.output


def test_a_tuning_that_cannot_be_is_refused_before_it_runs(half: Path) -> None:
    with pytest.raises(ConfigError, match="nearest are q_proj"):
        shardwise.plan(half, ranks=2, device="cpu", tuning=Lora(LoraConfig(target_modules=["q_prj"])))
