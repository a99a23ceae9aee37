"""Fused experts in four bits: each rank's part alone, and bit for bit the numbers that bitsandbytes makes."""

import pickle
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from tests import zoo
from tests.bank.four_bits import STACKS, give_numbers
from tests.quantized import four_bit_experts
from tests.quantized.four_bits import draw
from tests.quantized.requirements import needs_packed_shards
from tests.support.world import run_forked
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

import shardwise
from shardwise.options import Nf4

EXPERTS, WIDTH, INNER = 5, 128, 192
"""On three ranks five experts are cut into rows (384 by three) where that is even, else dealt 2, 2 and 1."""


def written(folder: Path, count: int, width: int, inner: int) -> Path:
    sizes = {"vocab_size": 97, "hidden_size": width, "moe_intermediate_size": inner, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False}
    experts = {"num_experts": count, "num_experts_per_tok": 2, "dtype": "bfloat16"}
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, **heads, **experts))
    zoo.fill(model)
    return zoo.save_original(model, folder, max_shard_size="300KB")


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return written(tmp_path_factory.mktemp("experts"), EXPERTS, WIDTH, INNER)


@needs_packed_shards
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("mesh", "size", "form", "scales"),
    [
        ("flat", 3, "nf4", "plain"),
        pytest.param("flat", 2, "fp4", "nested", marks=pytest.mark.slow),
        pytest.param("hsdp", 4, "nf4", "plain", marks=pytest.mark.slow),
    ],
)
def test_bytes_answers_gradients_and_files(plain, tmp_path, mesh, size, form, scales):
    arguments = (str(plain), mesh, form, scales, str(tmp_path))
    assert run_forked(size, four_bit_experts.differing, *arguments) == [[]] * size


@needs_packed_shards
@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["flat", "hsdp"])
def test_a_lora_is_merged_into_dequantized_experts(plain, mesh):
    size = {"flat": 3, "hsdp": 4}[mesh]
    assert run_forked(size, four_bit_experts.wrongly_merged, str(plain), mesh) == [[]] * size


@needs_packed_shards
@pytest.mark.distributed
@pytest.mark.slow
def test_a_lora_is_merged_into_fewer_experts_than_ranks(tmp_path):
    """Only the columns of ``gate_up_proj``, (2, 128, 96) bytes, are even on three ranks, and they are not split."""
    folder = written(tmp_path, 2, 192, 64)
    assert run_forked(3, four_bit_experts.wrongly_merged, str(folder), "flat") == [[]] * 3


def test_a_lora_on_stacks_learns_as_on_their_numbers(plain):
    """PEFT adds to the numbers; on bytes products are added, so that sums are in another order."""
    lora = shardwise.Lora(LoraConfig(r=2, target_modules=["q_proj"], target_parameters=STACKS))
    models = [
        shardwise.from_pretrained(str(plain), dtype="float32", quantization=Nf4(skip_modules=kept), tuning=lora)
        for kept in ((), ("experts",))
    ]
    give_numbers(*(model.get_base_model() for model in models))
    found: list[dict[str, torch.Tensor]] = []
    for model in models:
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        draw(list(trained.values()), 0.1)
        tokens = torch.arange(12).view(1, 12)
        model(input_ids=tokens, labels=tokens).loss.backward()
        found.append({name: parameter.grad for name, parameter in trained.items()})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[1].items():
        assert float((found[0][name] - gradient).norm()) <= 1e-5 * float(gradient.norm()), name


def test_a_stack_alone_may_stay(plain):
    quantization = Nf4(block_size=128)
    model, report = shardwise.from_pretrained(str(plain), quantization=quantization, output_loading_info=True)
    experts = model.model.layers[0].mlp.experts
    assert "down_proj is not quantized: it has 192 columns, not a multiple of block_size=128" in str(report.notes)
    assert experts.down_proj.is_floating_point()
    assert experts.gate_up_proj.shape == (EXPERTS, 2 * INNER, WIDTH // 2)
    tokens = torch.arange(12).view(1, 12)
    logits = model(tokens).logits
    assert logits.isfinite().all()
    assert torch.equal(pickle.loads(pickle.dumps(model))(tokens).logits, logits)
    for implementation in ("eager", "grouped_mm", "batched_mm"):
        model.set_experts_implementation(implementation)
        assert torch.equal(model(tokens).logits, logits), implementation


def test_experts_that_are_multiplied_otherwise_stay(tmp_path):
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = AutoModelForCausalLM.from_config(GptOssConfig(**sizes, **heads, dtype="bfloat16"))
    zoo.fill(model)
    zoo.save_original(model, tmp_path)
    ours, report = shardwise.from_pretrained(tmp_path, quantization=Nf4(), output_loading_info=True)
    assert "down_proj is not quantized: it is stored transposed" in str(report.notes)
    assert ours.model.layers[0].mlp.experts.gate_up_proj.is_floating_point()
    assert not ours.model.layers[0].self_attn.q_proj.weight.is_floating_point()
