"""`generate` tries a model or an adapter, and `inspect` shows an adapter and a URL."""

import re

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tests.cli.running import RUNNER
from tests.support.http_store import HttpStore
from tests.training import tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardwise.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("generate")
    tiny.write_model(place / "model")
    model = AutoModelForCausalLM.from_pretrained(place / "model")
    adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=6, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=2.0, generator=torch.Generator().manual_seed(0))
    adapted.save_pretrained(place / "adapter")
    return place


def answer_of(place, adapted=None):
    """The answer of transformers and PEFT."""
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    model = AutoModelForCausalLM.from_pretrained(place / "model").eval()
    model = model if adapted is None else PeftModel.from_pretrained(model, adapted)
    chat = [{"role": "user", "content": "Hi"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    found = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    return tokenizer.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("adapter", [None, "adapter"])
def test_the_answer_is_that_of_transformers(folder, adapter):
    place = folder / (adapter or "model")
    result = RUNNER.invoke(main, ["generate", str(place), "Hi", "--max-new-tokens=6"], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout.removesuffix("\n") == answer_of(folder, adapter and place)


def test_a_model_without_a_tokenizer_is_an_error(folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folder / "model" / name)
    result = RUNNER.invoke(main, ["generate", str(tmp_path), "Hi"])
    assert (result.exit_code, "its tokenizer has no token" in result.stderr) == (2, True)


def test_the_adapter_has_another_answer(folder):
    assert answer_of(folder) != answer_of(folder, folder / "adapter")


def test_a_missing_folder_is_an_error(tmp_path):
    result = RUNNER.invoke(main, ["generate", str(tmp_path / "nowhere"), "Hi"])
    assert (result.exit_code, "no such directory. Check the path" in result.stderr) == (2, True)


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
