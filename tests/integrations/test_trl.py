"""A sharded model trains in TRL's trainers as one that is whole does without us."""

from pathlib import Path

import pytest
from tests.integrations.requirements import require_patched_names
from tests.integrations.runs import Run, compared
from tests.support.local_ranks import LocalRanks

pytest.importorskip("trl")

require_patched_names()


pytestmark = pytest.mark.distributed


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
REPLICATED = pytest.param("replicated lora", marks=pytest.mark.slow)
COPYING = pytest.param("copying lora", marks=pytest.mark.slow)


@pytest.mark.parametrize("model", ["whole", "lora", REPLICATED])
def test_sft(two: LocalRanks, one: LocalRanks, folder: Path, tmp_path: Path, model: str) -> None:
    compared(two, one, Run(str(folder), "sft", model, arguments=EVALUATED), tmp_path)


@pytest.mark.parametrize("model", [pytest.param("whole", marks=pytest.mark.slow), "lora", REPLICATED, COPYING])
def test_dpo(two: LocalRanks, one: LocalRanks, folder: Path, tmp_path: Path, model: str) -> None:
    """The reference of a LoRA is a copy of it as it was, which is not nothing here."""
    compared(two, one, Run(str(folder), "dpo", model), tmp_path)


@pytest.mark.parametrize("changed", ["", "lora_B", "modules_to_save"])
def test_only_an_adapter_that_changes_the_model_is_copied_for_the_reference(folder: Path, changed: str) -> None:
    import torch
    from peft import LoraConfig

    import shardwise
    from shardwise.integrations import for_trainer

    config = LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    model = for_trainer(shardwise.from_pretrained(folder / "causal", tuning=shardwise.Lora(config)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if changed and changed in name:
                parameter += 1
    model.add_adapter("ref", model.peft_config["default"])
    assert ("ref" in model.peft_config) == bool(changed)


@pytest.mark.slow
def test_dpo_of_trl_itself(two: LocalRanks, one: LocalRanks, folder: Path, tmp_path: Path) -> None:
    compared(two, one, Run(str(folder), "dpo", "lora"), tmp_path, by="patches")


@pytest.mark.slow
def test_grpo(two: LocalRanks, folder: Path, tmp_path: Path) -> None:
    """Against DDP on as many ranks, since what is sampled depends on the rank."""
    compared(two, two, Run(str(folder), "grpo", "replicated lora", arguments={"beta": 0.1}), tmp_path)
