"""Experts that are stored in four bits stay so on request: bytes as they are stored, and the same numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from tests.quantized import stored_experts
from tests.quantized.four_bits import answers_of
from tests.quantized.requirements import needs_packed_shards
from tests.quantized.stored_experts import STACKS, opened, packed_stacks
from tests.quantized.test_four_bit_experts import plain as mixture  # noqa: F401 - a fixture
from tests.truth import require_equal
from transformers import AutoModelForCausalLM, Mxfp4Config

import shardwise


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt_oss")
    stored_experts.make_gpt_oss(folder)
    return folder


@pytest.fixture(scope="module", params=["plain", pytest.param("nested", marks=pytest.mark.slow)])
def one_by_one(request, tmp_path_factory: pytest.TempPathFactory, mixture: Path) -> tuple[Path, dict[str, Any]]:  # noqa: F811
    folder = tmp_path_factory.mktemp("one_by_one")
    return folder, stored_experts.make_packed_one_by_one(mixture, folder, is_nested=request.param == "nested")


def wanted_of_gpt_oss(folder: Path) -> dict[str, Any]:
    stored = load_file(folder / "model.safetensors")
    stacks = {key.removesuffix("_blocks"): values.flatten(-2) for key, values in stored.items() if "_blocks" in key}
    stacks |= {key: values for key, values in stored.items() if key.endswith("_scales")}
    return {"stacks": stacks, "internally": False, **stored_experts.as_alone(str(folder))}


@needs_packed_shards
@pytest.mark.parametrize("size", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_mxfp4_on_ranks(worlds, gpt_oss, tmp_path, size):
    wanted = wanted_of_gpt_oss(gpt_oss)
    told = worlds(size).run(stored_experts.differing, str(gpt_oss), wanted, str(tmp_path))
    assert told == [[]] * size


def test_mxfp4_is_saved_as_it_was_stored(gpt_oss, tmp_path):
    model = opened(str(gpt_oss), "as_stored")
    stored = load_file(gpt_oss / "model.safetensors")
    for names in ("hub", "internal"):
        given = {} if names == "hub" else {"names": "internal"}
        shardwise.save(model, tmp_path / names, **given)
        require_equal(load_file(tmp_path / names / "model.safetensors"), stored)
    require_equal(dict(shardwise.iter_hf_tensors(model)), stored)
    configs = (json.loads((place / "config.json").read_text()) for place in (gpt_oss, tmp_path / "hub"))
    first, second = (config["quantization_config"] for config in configs)
    assert first == second
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hub", quantization_config=Mxfp4Config(dequantize=True), experts_implementation="eager"
    )
    require_equal(answers_of(model), answers_of(theirs))


def test_without_a_request_experts_become_numbers(gpt_oss):
    for given in ({}, {"quantization": "dequantize"}, {"quantization_config": Mxfp4Config(dequantize=True)}):
        model = shardwise.from_pretrained(str(gpt_oss), **given)
        assert not packed_stacks(model)
        assert not hasattr(model.config, "quantization_config")
    asked = shardwise.from_pretrained(str(gpt_oss), quantization_config=Mxfp4Config())
    assert len(packed_stacks(asked)) == 2 * 2 * len(STACKS)


def test_experts_that_cannot_stay_as_stored_are_refused(gpt_oss, mixture, tmp_path):  # noqa: F811
    with pytest.raises(shardwise.ConfigError, match=r"'as_stored': the checkpoint is not stored in four bits"):
        shardwise.from_pretrained(str(mixture), quantization="as_stored")
    with pytest.raises(shardwise.ConfigError, match=r"quantization='as_stored' keeps them in four bits"):
        shardwise.from_pretrained(str(gpt_oss), quantization="as_stored", tuning=shardwise.Full())
    shardwise.save(shardwise.from_pretrained(str(gpt_oss)), tmp_path)
    model = shardwise.from_pretrained(str(gpt_oss), quantization="as_stored")
    with pytest.raises(shardwise.ConfigError, match=r"gate_up_proj: weights are not quantized to MXFP4"):
        shardwise.load(model, tmp_path)


def test_a_lora_learns_as_on_numbers(gpt_oss):
    """Of experts too. PEFT adds to the numbers, here products are added: sums are in another order."""
    found, wanted = (stored_experts.learned(str(gpt_oss), kept) for kept in ("as_stored", "dequantize"))
    assert len(wanted) == 1 + 2 * 2 * 4
    assert stored_experts.distance(found, wanted) < 1e-5


@needs_packed_shards
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 5])
def test_a_lora_learns_on_ranks_as_alone(worlds, gpt_oss, size):
    wanted = stored_experts.learned(str(gpt_oss), "dequantize")
    assert max(worlds(size).run(stored_experts.far_from, str(gpt_oss), wanted)) < 1e-5


def test_an_adapter_is_saved_and_not_merged(gpt_oss, tmp_path):
    lora = shardwise.Lora(LoraConfig(**stored_experts.LORA, init_lora_weights=False))
    model = opened(str(gpt_oss), "as_stored", dtype=torch.float32, tuning=lora)
    shardwise.save_adapter(model, tmp_path / "adapter")
    plain, again = (
        opened(str(gpt_oss), kept, dtype=torch.float32, tuning=shardwise.ExistingLora(tmp_path / "adapter"))
        for kept in ("dequantize", "as_stored")
    )
    tokens = torch.arange(12).view(1, 12)
    with model.disable_adapter():
        assert not torch.allclose(model(tokens).logits, again(tokens).logits, rtol=0.05, atol=0.05)
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    torch.testing.assert_close(again(tokens).logits, plain(tokens).logits, rtol=1e-4, atol=1e-4)
    for merge in (model.merge_adapter, model.merge_and_unload):
        words = r"mlp\.experts: is in four bits, and cannot be merged into"
        with pytest.raises(shardwise.ConfigError, match=words):
            merge()
    shardwise.merge_adapter(gpt_oss, tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.float32, experts_implementation="eager"
    )
    torch.testing.assert_close(model(tokens).logits, merged(tokens).logits, rtol=0.05, atol=0.05)


@needs_packed_shards
def test_experts_that_were_packed_one_by_one(worlds, one_by_one, tmp_path):
    """Of bitsandbytes, before experts were fused: the bytes of all are stacked, and not packed again."""
    folder, stored = one_by_one
    model = opened(str(folder), "as_stored")
    stacks = packed_stacks(model)
    for name in {name.rpartition(".")[0] for name in stacks}:
        for number in range(5):
            parts = {
                part: stored[f"{name}.{number}.{part}_proj.weight"].view(-1, w)
                for part, w in {"gate": 64, "up": 64, "down": 96}.items()
            }
            assert torch.equal(stacks[f"{name}.gate_up_proj"][number], torch.cat([parts["gate"], parts["up"]]))
            assert torch.equal(stacks[f"{name}.down_proj"][number], parts["down"])
    wanted = {"stacks": {name: item.detach() for name, item in stacks.items()}, "internally": True}
    wanted |= stored_experts.as_alone(str(folder))
    require_equal(answers_of(model), wanted["answers"])
    assert worlds(3).run(stored_experts.differing, str(folder), wanted, str(tmp_path / "out")) == [[]] * 3
    with pytest.raises(shardwise.ConfigError, match="files of bitsandbytes have no form for them"):
        shardwise.save(model, tmp_path / "hub")
    assert not packed_stacks(opened(str(folder), None))
