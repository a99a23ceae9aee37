"""Saved adapters that are damaged: every flipped bit is found before anything goes on from it."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from peft import LoraConfig, get_peft_model
from tests import zoo
from tests.bank import banking, resuming
from tests.bank.banking import matrices_of, recipes, train
from tests.bank.on_ranks import bank_of, here
from tests.bank.test_resume import put
from tests.support.files import contents
from tests.support.world import said
from tests.truth import require_equal
from transformers import AutoModelForCausalLM

import shardwise
from shardwise.cli import main
from shardwise.options import Ignore

RECORD = "adapter_model.fingerprints.json"


@pytest.fixture(scope="module")
def saved(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of an adapter that was saved in the middle of a window."""
    folder = tmp_path_factory.mktemp("saved")
    adapters = {"ada": resuming.members()["ada"]}
    bank = bank_of(base, adapters)
    train(bank, adapters, resuming.HALF)
    bank.save("ada", folder)
    return contents(folder)


def flips(files: dict[str, bytes], count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """So many files with one bit flipped: half of these in headers, which have the settings."""
    draw = random.Random(seed)
    for number in range(count):
        name = sorted(files)[number % len(files)]
        content = bytearray(files[name])
        header = int.from_bytes(content[:8], "little") + 8
        is_short = not name.endswith(".safetensors") or (number // len(files)) % 2 == 0
        end = min(header, len(content)) if is_short and name.endswith(".safetensors") else len(content)
        content[draw.randrange(end)] ^= 1 << draw.randrange(8)
        yield name, bytes(content)


@pytest.mark.parametrize("count", [16, pytest.param(120, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_found(base, tmp_path, saved, count):
    bank = bank_of(base, {})
    put(tmp_path, saved)
    for name, content in flips(saved, count, seed=count):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(shardwise.FormatError, match=name):
            bank.load("ada", tmp_path, schedule=banking.falling)
        if "training" not in name:
            with pytest.raises(shardwise.FormatError, match=name):
                bank.load("ada", tmp_path, training_state=False)
        assert bank.names == ()
        assert CliRunner().invoke(main, ["verify", str(tmp_path)]).exit_code != 0
        (tmp_path / name).write_bytes(saved[name])
    assert bank.load("ada", tmp_path, schedule=banking.falling).is_resumed
    assert CliRunner().invoke(main, ["verify", str(tmp_path)]).exit_code == 0


def test_a_learning_rate_of_one_flipped_bit(base, tmp_path, saved):
    """It is text in a header, and as good a number as before."""
    put(tmp_path, saved)
    file = next(tmp_path.glob("adapter_training.*"))
    content = file.read_bytes()
    assert content.count(b'\\"initial_lr\\": 0.01') == 1
    file.write_bytes(content.replace(b'\\"initial_lr\\": 0.01', b'\\"initial_lr\\": 0.09'))
    assert shardwise.verify(tmp_path).damaged_files == (f"{file.name}: its header",)
    with pytest.raises(shardwise.FormatError, match=rf"(?s)is not what was saved.*{file.name}: its header"):
        bank_of(base, {}).load("ada", tmp_path, schedule=banking.falling)


def test_a_training_without_checksums_is_refused(base, tmp_path, saved):
    """Its record was not copied along; its matrices may still be taken."""
    put(tmp_path, {name: content for name, content in saved.items() if name != RECORD})
    bank = bank_of(base, {})
    with pytest.raises(shardwise.FormatError, match=rf"adapter_training.*{RECORD} has no checksums of it"):
        bank.load("ada", tmp_path, schedule=banking.falling)
    assert bank.names == ()
    assert not bank.load("ada", tmp_path, training_state=False).is_resumed


def test_an_adapter_of_pefts_has_no_checksums(base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with zoo.silenced():
        get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(tmp_path)
    assert not bank_of(base, {}).load("x", tmp_path).is_resumed


@pytest.mark.parametrize("what", ["matrices", "moments"])
def test_values_that_are_not_finite_are_refused(base, tmp_path, what):
    """Unless they are asked for."""
    members = {"ada": recipes()["ada"]}
    bank = bank_of(base, members)
    train(bank, members, 2)
    adapter = bank._adapters["ada"]
    values = adapter.flat.detach() if what == "matrices" else adapter.optimizer.state[adapter.flat]["exp_avg"]
    values[3] = float("nan")
    bank.save("ada", tmp_path)
    state = bank.state_dict("ada")
    fresh = bank_of(base, {})
    named = "lora_A" if what == "matrices" else "exp_avg"
    match = rf"{named}.* has 1 values of \d+ that are not finite. Accept them by on_not_finite=Ignore\(\)"
    with pytest.raises(shardwise.FormatError, match=match):
        fresh.load("ada", tmp_path)
    assert fresh.names == ()
    assert fresh.load("ada", tmp_path, on_not_finite=Ignore(only=(f"*{named}*",))).is_resumed
    other = bank_of(base, members)
    before = matrices_of(other, "ada")
    with pytest.raises(shardwise.FormatError, match=rf"(?s)the state of 'ada': is not a valid state.*{match}"):
        other.load_state_dict("ada", state)
    require_equal(matrices_of(other, "ada"), before)
    other.load_state_dict("ada", state, on_not_finite=Ignore())
    words = r"on_not_finite='no' is not known. Pass one of 'error', Ignore"
    with pytest.raises(shardwise.ConfigError, match=words):
        other.load_state_dict("ada", state, on_not_finite="no")


def load_damaged(base: Path, folder: Path) -> list[Any]:
    bank = bank_of(base, {})
    told = said(lambda: bank.load("ada", folder, schedule=banking.falling))
    return [told, bank.names, here()["size"]]


def test_damage_is_one_error_on_all_ranks(worlds, base, tmp_path, saved):
    put(tmp_path, saved)
    name, content = next(flips({name: own for name, own in saved.items() if "training" in name}, 1, seed=3))
    (tmp_path / name).write_bytes(content)
    first, second = worlds(2).run(load_damaged, base, tmp_path)
    assert first == second
    assert first[0].startswith(f"FormatError: {tmp_path}: is not what was saved")
    assert name in first[0]
