"""The bank saves adapters as PEFT does, and loads those that PEFT has saved."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from tests import zoo
from tests.bank import banking, test_experts
from tests.bank.banking import logprobs_of, matrices_of, recipes, rows_for, train
from tests.bank.on_ranks import bank_of, here
from tests.support.files import change_json
from tests.truth import require_equal
from transformers import AutoModelForCausalLM

import shardwise
from shardwise.bank.adapter import AdapterStart, constant_lr
from shardwise.options import Ignore


def trained_and_saved(base: Path, folder: Path, members: dict[str, Any]) -> dict[str, Any]:
    """Adapters, and what the model gives with each."""
    where = here() if dist.is_initialized() else {}
    bank = bank_of(base, members)
    train(bank, members, 6, **where)
    shards = [values.to_local() if hasattr(values, "to_local") else values for values in bank._model.parameters()]
    before = [values.clone() for values in shards]
    for name in members:
        bank.save(name, folder / name)
    found = bank.compute_logprobs([(name, rows_for(name, members[name], 0)) for name in members])
    for values in shards:  # a base that is not the one beside which the embeddings were saved
        values.mul_(2)
    changed = [values.clone() for values in shards]
    if "embed_tokens" in str(members.get("cy")):
        with pytest.raises(shardwise.ConfigError, match="was trained with another model.embed_tokens"):
            bank.load("other", folder / "cy", training_state=False)
    for name in members:
        keywords = {
            "optimizer": members[name].optimizer,
            "schedule": members[name].schedule or constant_lr,
            "on_other_base": Ignore(),
        }
        told = bank.load(f"{name}-again", folder / name, **keywords)
        assert told == AdapterStart(bank._adapters[name].steps, bank._adapters[name].windows, 0, 0)
        require_equal(matrices_of(bank, f"{name}-again"), matrices_of(bank, name))
    assert all(one.equal(other) for one, other in zip(shards, changed, strict=True)), "nothing writes to the base"
    for values, kept in zip(shards, before, strict=True):
        values.copy_(kept)
    again = bank.compute_logprobs([(f"{name}-again", rows_for(name, members[name], 0)) for name in members])
    torch.testing.assert_close(again, found)
    return {"adapters": {name: matrices_of(bank, name) for name in members}, "log probabilities": found}


def few() -> dict[str, Any]:
    """An adapter on linear layers, and one on embeddings."""
    return {name: recipes()[name] for name in ("ada", "cy")}


def few_trained_and_saved(base: Path, folder: Path) -> dict[str, Any]:
    return trained_and_saved(base, folder, few())


def require_of_peft(base: Path, folder: Path, found: dict[str, Any], members: dict[str, Any]) -> None:
    for number, (name, recipe) in enumerate(members.items()):
        with zoo.silenced(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
            model = PeftModel.from_pretrained(
                AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder / name
            )
        loaded = {
            key.replace(".default", ""): own.detach() for key, own in model.named_parameters() if "lora_" in key
        }
        require_equal(loaded, found["adapters"][name])
        expected = logprobs_of(model, rows_for(name, recipe, 0))
        torch.testing.assert_close(found["log probabilities"][number], expected, rtol=1e-4, atol=1e-5)


def test_a_saved_adapter_is_an_adapter_of_pefts(base, tmp_path):
    found = trained_and_saved(base, tmp_path, recipes())
    require_of_peft(base, tmp_path, found, recipes())
    config = json.loads((tmp_path / "ada" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8, ["q_proj", "v_proj"])
    assert config["base_model_name_or_path"] == str(base)


def test_adapters_of_experts_are_saved_as_pefts(tmp_path):
    base = banking.save_experts(tmp_path / "base")
    found = trained_and_saved(base, tmp_path, test_experts.members())
    require_of_peft(base, tmp_path, found, test_experts.members())


def test_an_adapter_saved_by_two_ranks(worlds, base, tmp_path):
    first, second = worlds(2).run(few_trained_and_saved, base, tmp_path)
    require_equal(first["adapters"]["cy"], second["adapters"]["cy"])
    require_of_peft(base, tmp_path, first, few())


def test_a_folder_in_the_home_and_a_config_in_the_working_directory(base, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    bank = bank_of(base, {"ada": recipes()["ada"]})
    bank.save("ada", "~/ada")
    assert bank.load("ada", "~/ada").is_resumed


def test_folders_that_are_no_adapter_of_this_base(base, tmp_path):
    bank = bank_of(base, {"ada": recipes()["ada"]})
    with pytest.raises(shardwise.FormatError, match=r"has no adapter_config.json"):
        bank.load("x", tmp_path)
    other = AutoModelForCausalLM.from_pretrained(banking.save_base(tmp_path / "base"), dtype=torch.float32)
    config = LoraConfig(r=4, target_modules="all-linear", exclude_modules=["o_proj"])  # o_proj is stored twice
    get_peft_model(other, config).save_pretrained(tmp_path / "peft")
    bank.load("x", tmp_path / "peft", seed=3)
    assert bank.names == ("ada", "x")
    bank.forward_backward([("x", rows_for("ada", recipes()["ada"], 0))])
    assert bank.optim_step("x").is_taken
    for init, why in (("pissa", "changes the base's weights. Save it as"), ("mica", "freezes lora_B.* Use the")):
        change_json(tmp_path / "peft" / "adapter_config.json", init_lora_weights=init)
        with pytest.raises(shardwise.ConfigError, match=rf"(?s)peft: is not supported .*'{init}': {why}"):
            bank.load("y", tmp_path / "peft")
