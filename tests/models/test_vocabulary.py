"""Vocabularies that grow or shrink while a model is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from tests import zoo
from tests.conftest import Worlds
from tests.models import on_ranks, reference
from transformers import AutoModelForCausalLM

import shardwise
from shardwise import ConfigError, ExistingLora, Lora
from shardwise.options import ResizeVocab

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
COPIES = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])


@pytest.mark.parametrize(("kind", "rows"), [("tied", "initialized"), ("untied", "mean")])
def test_new_rows_are_alike_on_every_number_of_ranks(
    kind: str, rows: Any, tied: Path, untied: Path, worlds: Worlds
) -> None:
    folder = {"tied": tied, "untied": untied}[kind]
    keywords = {"resize_vocab": ResizeVocab(70, rows)}
    stored = on_ranks.values_after_load(str(folder), {})
    alone = on_ranks.values_after_load(str(folder), keywords)
    assert alone.keys() == stored.keys()
    for name, value in stored.items():
        if name in (EMBEDDING, HEAD):
            assert torch.equal(alone[name][:61], value)
            assert alone[name].shape == (70, 24)
            if rows == "mean":
                wanted = value.double().mean(0).float().expand(9, 24)
                torch.testing.assert_close(alone[name][61:], wanted, rtol=1e-6, atol=1e-8)
            else:
                assert 0.005 < alone[name][61:].std() < 0.05  # initializer_range is 0.02
        else:
            assert torch.equal(alone[name], value)
    for size in (2, 3):
        for found in worlds(size).run(on_ranks.values_after_load, str(folder), keywords):
            assert [name for name in alone if not torch.equal(found[name], alone[name])] == []
    mesh = {"replicate": 2, "shard": 2}
    for found in worlds(4).run(on_ranks.values_after_load, str(folder), keywords, mesh):
        assert [name for name in alone if not torch.equal(found[name], alone[name])] == []


def test_a_model_with_more_tokens_is_saved_as_such(untied: Path, tmp_path: Path) -> None:
    model, report = shardwise.from_pretrained(untied, resize_vocab=70, output_loading_info=True)
    assert report.resized == {EMBEDDING: (61, 70), HEAD: (61, 70)}
    assert "resized     model.embed_tokens.weight: 61 rows to 70" in str(report)
    assert model.config.vocab_size == 70
    shardwise.save(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 70
    with zoo.silenced():
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.get_input_embeddings().weight, model.get_input_embeddings().weight)
    assert again(input_ids=torch.tensor([[69]])).logits.shape == (1, 1, 70)


def test_a_vocabulary_shrinks_and_may_stay(tied: Path) -> None:
    stored = on_ranks.values_after_load(str(tied), {})
    fewer = on_ranks.values_after_load(str(tied), {"resize_vocab": 50})
    assert torch.equal(fewer[EMBEDDING], stored[EMBEDDING][:50])
    same, report = shardwise.from_pretrained(tied, resize_vocab=61, output_loading_info=True)
    assert report.resized == {}
    assert torch.equal(same.get_input_embeddings().weight, stored[EMBEDDING])


def test_copies_of_a_grown_vocabulary_begin_as_it_does(untied: Path, tmp_path: Path, worlds: Worlds) -> None:
    keywords: dict[str, Any] = {"tuning": Lora(COPIES), "resize_vocab": 70}
    plain = on_ranks.values_after_load(str(untied), {"resize_vocab": 70})
    for values in worlds(3).run(on_ranks.values_after_load, str(untied), keywords):
        for name, module in ((EMBEDDING, "model.embed_tokens"), (HEAD, "lm_head")):
            inside = f"base_model.model.{module}"
            copy, original = (
                values[f"{inside}.modules_to_save.default.weight"],
                values[f"{inside}.original_module.weight"],
            )
            assert torch.equal(copy, original)
            assert torch.equal(copy[:61], plain[name][:61])
    adapter = tmp_path / "adapter"
    live = worlds(2).run(on_ranks.save_adapter, str(untied), keywords, str(adapter))
    with zoo.silenced():
        base = AutoModelForCausalLM.from_pretrained(untied, dtype=torch.float32)
        base.resize_token_embeddings(70, mean_resizing=False)
        stock = PeftModel.from_pretrained(base, adapter).eval()
    logits = reference.logits(stock)
    torch.testing.assert_close(live[0][0], logits, rtol=1e-5, atol=1e-5)
    again = {"tuning": ExistingLora(adapter), "resize_vocab": 70}
    for values in worlds(2).run(on_ranks.values_after_load, str(untied), again):
        trained = [name for name in values if "lora_" in name or "modules_to_save" in name]
        assert [name for name in trained if not torch.equal(values[name], live[0][1][name])] == []


def test_a_grown_vocabulary_goes_with_an_adapter_of_other_layers(tied: Path, tmp_path: Path) -> None:
    """PEFT saves embeddings that have another size than those of the base."""
    model = shardwise.from_pretrained(
        tied,
        resize_vocab=70,
        tuning=Lora(LoraConfig(r=2, target_modules=["q_proj"])),
        options=shardwise.options.LoadOptions(seed=3),
    )
    shardwise.save_adapter(model, tmp_path)
    again = on_ranks.values_after_load(str(tied), {"tuning": ExistingLora(tmp_path), "resize_vocab": 70})
    wanted = reference.values_of(model)
    assert [name for name in wanted if not torch.equal(wanted[name], again[name])] == []


def test_an_invalid_size_is_refused(tied: Path) -> None:
    with pytest.raises(ConfigError, match="resize_vocab=0: is not a size"):
        shardwise.from_pretrained(tied, resize_vocab=0)
