"""`inspect` shows an adapter and a URL."""

import re

import pytest
from peft import LoraConfig, get_peft_model
from tests.cli.running import RUNNER
from tests.support.http_store import HttpStore
from tests.training import tiny
from transformers import AutoModelForCausalLM

from shardwise.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("inspect")
    tiny.write_model(place / "model")
    model = AutoModelForCausalLM.from_pretrained(place / "model")
    adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=6, target_modules="all-linear"))
    adapted.save_pretrained(place / "adapter")
    return place


def test_inspect_shows_an_adapter(folder):
    shown = RUNNER.invoke(main, ["inspect", str(folder / "adapter")], catch_exceptions=False).stdout
    assert re.search(r"^r +2$", shown, re.MULTILINE)
    assert re.search(r"^lora_alpha +6$", shown, re.MULTILINE)
    assert re.search(r'^base_model_name_or_path +".*model"$', shown, re.MULTILINE)


def test_inspect_opens_a_url(folder):
    with HttpStore(folder / "model") as store:
        shown = RUNNER.invoke(main, ["inspect", f"{store.url}/model.safetensors"], catch_exceptions=False).stdout
    here = RUNNER.invoke(main, ["inspect", str(folder / "model" / "model.safetensors")], catch_exceptions=False)
    found = [line.split() for line in shown.splitlines()[2:5]]
    assert found == [line.split() for line in here.stdout.splitlines()[2:5]]
    assert "tensors" in shown
