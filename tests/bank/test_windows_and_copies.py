"""Windows that are open, settings of a step, copies, loads into an adapter that exists, and names."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.bank.banking import adamw, create, falling, matrices_of, recipes, rows_for, train
from tests.bank.on_ranks import bank_of
from tests.bank.test_isolation import everything
from tests.truth import require_equal

from shardwise.bank import adapter_files
from shardwise.bank.sampling import Sample
from shardwise.core.errors import ConfigError
from shardwise.core.formatting import folder_name
from shardwise.models.lora.adapted_layers import AdapterOutline

ADA = recipes()["ada"]
OPEN = replace(ADA, gradient_accumulation_steps=None)  # type: ignore[arg-type]


def rows(number: int) -> list[Any]:
    return [("ada", rows_for("ada", ADA, number))]


def test_any_number_of_micro_batches_before_a_step(base):
    """The gradient is the mean over all of their tokens; a step without any has zeros."""
    bank, fixed = bank_of(base, {"ada": OPEN}), bank_of(base, {"ada": replace(ADA, gradient_accumulation_steps=3)})
    for number in range(3):
        with torch.no_grad():
            bank.forward_backward(rows(number))
        fixed.forward_backward(rows(number))
    with torch.inference_mode():  # which creates the state of the optimizer
        bank.optim_step("ada")
    fixed.optim_step("ada")
    require_equal(everything(bank, "ada"), everything(fixed, "ada"))
    bank.forward_backward(rows(3))
    bank.zero_grad("ada")
    before = everything(bank, "ada")
    step = bank.optim_step("ada", weight_decay=0.0)
    assert (step.is_taken, step.grad_norm, step.num_supervised_tokens) == (True, 0.0, 0)
    after = everything(bank, "ada")
    torch.testing.assert_close(after["optimizer.exp_avg"], before["optimizer.exp_avg"] * 0.9)
    assert bank.state_dict("ada")["facts"]["steps"] == 2


def test_settings_are_those_of_one_step(base):
    """For each adapter its own, at once; 0 is no clipping, and a rate takes the place of the schedule's."""
    members = {"ada": OPEN, "cy": replace(OPEN, schedule=falling, max_grad_norm=1e-3), "eve": OPEN}
    bank = bank_of(base, members)
    before = {name: bank._adapters[name].settings for name in members}
    bank.forward_backward([(name, rows_for(name, ADA, 0)) for name in members])
    start = {name: bank._adapters[name].flat.detach().clone() for name in members}
    changes = {"ada": {"lr": 0.5, "betas": (0.5, 0.5)}, "cy": {"lr": 0.25, "max_grad_norm": 0}, "eve": {}}
    steps = bank.optim_step(changes)
    assert [step.learning_rate for step in steps.values()] == [0.5, 0.25, 1e-2]
    moved = {name: float((bank._adapters[name].flat.detach() - start[name]).abs().max()) for name in members}
    assert moved["ada"] > 10 * moved["eve"]
    assert bank._adapters["ada"].settings == before["ada"]
    assert bank._adapters["cy"].settings["lr"] == pytest.approx(1e-2 / 2), "the schedule has gone on"
    assert bank._adapters["cy"].max_grad_norm == 1e-3
    bank.forward_backward([("eve", rows_for("eve", ADA, 1))])
    with mock.patch.object(torch.optim.AdamW, "__init__", side_effect=AssertionError("another optimizer")):
        assert bank.optim_step("eve", max_grad_norm=1.0).is_taken
    for wrong in ({"ada": {"lrate": 1}}, {"ada": {}, "cy": {"lr": -1}}, {"ada": 5}, ["ada"], {"gone": {}}):
        with pytest.raises(ConfigError):
            bank.optim_step(wrong)
    with pytest.raises(ConfigError, match="is not a dict of settings by name"):
        bank.optim_step({"ada": {}}, lr=1.0)


def test_a_copy_for_sampling(base, tmp_path):
    """It has the matrices, and neither gradient nor optimizer; the original goes on without it."""
    bank = bank_of(base, {"ada": OPEN})
    train(bank, {"ada": ADA}, 2)
    bank.copy_adapter("ada", "frozen")
    before = matrices_of(bank, "ada")
    require_equal(matrices_of(bank, "frozen"), before)
    train(bank, {"ada": ADA}, 1)
    require_equal(matrices_of(bank, "frozen"), before)
    assert not torch.equal(bank._adapters["ada"].flat, bank._adapters["frozen"].flat)
    assert bank._adapters["frozen"].gradient.is_meta
    batch = rows_for("ada", ADA, 0)
    bank.compute_logprobs([("frozen", batch)])
    bank.generate([Sample("frozen", [1, 2], max_tokens=2)])
    for call in (
        lambda: bank.forward_backward([("frozen", batch)]),
        lambda: bank.optim_step("frozen"),
        lambda: bank.copy_adapter("frozen", "again", training=True),
    ):
        with pytest.raises(ConfigError, match="'frozen': is a copy for sampling"):
            call()
    bank.load_state_dict("frozen", bank.state_dict("ada"))
    require_equal(matrices_of(bank, "frozen"), matrices_of(bank, "ada"))
    bank.save("frozen", tmp_path)
    assert not list(tmp_path.glob("adapter_training*"))
    for new, match in (("ada", "exists already"), ("", "is not a valid adapter name")):
        with pytest.raises(ConfigError, match=match):
            bank.copy_adapter("ada", new)


def test_a_copy_with_its_training_goes_on_alike(base):
    recipe = replace(OPEN, schedule=falling, config={**ADA.config, "lora_dropout": 0.2})
    bank = bank_of(base, {"ada": recipe})
    train(bank, {"ada": replace(ADA, config=recipe.config)}, 2)
    bank.forward_backward(rows(2))
    with torch.inference_mode():
        bank.copy_adapter("ada", "twin", training=True)
    for number in (3, 4):
        batch = rows_for("ada", ADA, number)
        bank.forward_backward([("ada", batch), ("twin", batch)])
        bank.optim_step({"ada": {}, "twin": {}})
    require_equal(everything(bank, "ada"), everything(bank, "twin"))
    assert bank.state_dict("ada")["facts"]["schedule_state"] == bank.state_dict("twin")["facts"]["schedule_state"]


def test_copies_and_states_need_no_other_model(base):
    """The sites of an adapter are known, and its values are replaced."""
    bank = bank_of(base, {"ada": OPEN})
    train(bank, {"ada": ADA}, 1)
    before, state = everything(bank, "ada"), bank.state_dict("ada")
    train(bank, {"ada": ADA}, 1)
    with mock.patch.object(adapter_files, "outline_lora", side_effect=AssertionError("another model")):
        bank.load_state_dict("ada", state)
        bank.copy_adapter("ada", "twin", training=True)
    for name in ("ada", "twin"):
        require_equal(everything(bank, name), before)


def test_only_new_adapters_are_initialized(base, tmp_path):
    bank = bank_of(base, {"ada": OPEN})
    before = matrices_of(bank, "ada")
    bank.save("ada", tmp_path)
    with mock.patch.object(AdapterOutline, "initialize", side_effect=AssertionError("initialized")):
        bank.load("bob", tmp_path, optimizer=OPEN.optimizer)
    require_equal(matrices_of(bank, "bob"), before)


def test_a_load_into_an_adapter_that_exists(base, tmp_path):
    bank = bank_of(base, {"ada": OPEN, "dee": recipes()["dee"]})
    train(bank, {"ada": ADA}, 2)
    bank.save("ada", tmp_path / "ada")
    before = everything(bank, "ada")
    train(bank, {"ada": ADA}, 1)
    with torch.inference_mode():
        start = bank.load("ada", tmp_path / "ada")
    assert (start.steps, start.is_resumed) == (2, True)
    require_equal(everything(bank, "ada"), before)
    assert bank.names == ("ada", "dee")
    train(bank, {"ada": ADA}, 1)
    with pytest.raises(ConfigError, match="has other matrices or scales than 'dee'"):
        bank.load("dee", tmp_path / "ada")
    for name in bank.names:
        bank.delete_adapter(name)
    assert not any(module._forward_hooks for module in bank._model.modules())


def test_an_offloaded_adapter_comes_back_on_use(base):
    """On a CPU nothing is moved; the simulated accelerator has a test of its own."""
    bank = bank_of(base, {"ada": OPEN})
    train(bank, {"ada": ADA}, 1)
    before = everything(bank, "ada")
    bank.offload("ada")
    require_equal(everything(bank, "ada"), before)
    with pytest.raises(ConfigError, match="no adapter named 'bob'"):
        bank.offload("bob")


@pytest.mark.parametrize("name", ["..", ".hidden", "a/b", "%2E", "x" * 300])
def test_folders_of_names_stay_in_theirs(tmp_path, name):
    folder = tmp_path / folder_name(name)
    folder.mkdir()
    assert [folder] == list(tmp_path.iterdir())
    assert not folder.name.startswith(".")


def test_names_are_any_text(base, tmp_path):
    bank = bank_of(base, {})
    for number, name in enumerate(("../x", "ä/名" + "x" * 125)):
        create(bank, name, OPEN)
        bank.forward_backward([(name, rows_for("ada", ADA, 0))])
        bank.optim_step({name: {}})
        root = tmp_path / str(number)
        folder = root / "inner" / folder_name(name)
        bank.save(name, folder)
        bank.load(f"{name[:100]}-2", folder, optimizer=adamw(lr=1e-2, weight_decay=0.1))
        require_equal(matrices_of(bank, f"{name[:100]}-2"), matrices_of(bank, name))
        assert [place.parent for place in root.glob("**/adapter_config.json")] == [folder]
        assert folder.parent == Path(root / "inner")


def test_names_of_folders():
    assert folder_name("ada-1.b_c") == "ada-1.b_c"
    assert (folder_name("a/b"), folder_name(".."), folder_name(".x")) == ("a%2Fb", "%2E.", "%2Ex")
    for name in ("../x", "a/b", "ä ö", "..", ".", ".hidden", "%2E", "名", "a\\b", "x" * 128):
        folder = folder_name(name)
        assert not folder.startswith("."), name
        assert not set(folder) & set("/\\ "), name
    names = ["ä" * 127 + other for other in "äö"]
    assert len({folder_name(name) for name in names}) == 2
    assert max(len(folder_name(name)) for name in names) <= 200
