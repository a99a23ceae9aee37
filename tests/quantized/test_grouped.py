"""AWQ and GPTQ come up as numbers, each rank's part by itself: bit for bit those of their packages."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import zoo
from tests.quantized import grouped, quantizing
from tests.quantized.test_loading import plain  # noqa: F401 - a fixture
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import shardwise

QUIET = shardwise.options.LoadOptions(progress=False)


@pytest.fixture(scope="module")
def quantized(plain, tmp_path_factory):  # noqa: F811
    return quantizing.folders_of(plain, tmp_path_factory, grouped.KINDS)


@pytest.mark.parametrize("budget", [1 << 14, 1 << 20])
@pytest.mark.parametrize("kind", grouped.KINDS)
def test_one_process(quantized, kind, budget, tmp_path):
    folder, numbers = quantized(kind)
    assert quantizing.go_through(str(folder), numbers, "flat", budget, str(tmp_path)) == []


def test_three_ranks(worlds, quantized, tmp_path):
    for kind in ("awq", "gptq in any order"):
        folder, numbers = quantized(kind)
        found = worlds(3).run(quantizing.go_through, str(folder), numbers, "flat", 1 << 16, str(tmp_path / kind))
        assert found == [[]] * 3, kind


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "size"), [("flat", 2), ("flat", 5), ("shard1", 2), ("shard1", 3)])
def test_ranks(worlds, quantized, tmp_path, mesh, size):
    for kind in grouped.KINDS:
        folder, numbers = quantized(kind)
        found = worlds(size).run(quantizing.go_through, str(folder), numbers, mesh, 1 << 16, str(tmp_path / kind))
        assert found == [[]] * size, kind


@pytest.fixture
def of_packages(tmp_path):
    """A checkpoint of one layer that a package has packed, changed before it is written; and its numbers."""

    def write(name: str, config: dict, change=lambda stored: None) -> torch.Tensor:
        found = load_file(Path(__file__).with_name("grouped.safetensors"))
        stored = {key.partition(".")[2]: value for key, value in found.items() if key.startswith(f"{name}.")}
        numbers = stored.pop("numbers")
        change(stored)
        save_file({f"layer.{key}": value for key, value in stored.items()}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
        return numbers

    return write


def loaded(folder: Path, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    model = nn.Module()
    model.layer = nn.Linear(64, 32, bias=False, dtype=dtype, device="meta")
    shardwise.load(model, folder, options=QUIET)
    return model.layer.weight.detach()


AWQ = {**grouped.AWQ, "group_size": 32}
GPTQ = {**grouped.GPTQ, "group_size": 32}
V2 = {**GPTQ, "checkpoint_format": "gptq_v2"}
AUTO = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "data_type": "int"}
DYNAMIC = {"-:lm_head": {}, r"+:.*layer": {"bits": 8}, "other": {"group_size": -1}}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("awq", AWQ),
        ("awq", {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"}),
        ("gptq", GPTQ),
        ("gptq_act_order", GPTQ),
        ("gptq_8", {**GPTQ, "bits": 8}),
        ("gptq_8", {**GPTQ, "dynamic": DYNAMIC}),
        ("gptq_v2", V2),
        ("gptq_carried", GPTQ),
        ("gptq", AUTO),
        ("gptq", {**AUTO, "packing_format": "auto_round:auto_gptq"}),
        ("gptq_v2", {**AUTO, "packing_format": "auto_round"}),
        ("awq", {**AUTO, "packing_format": "auto_round:auto_awq", "extra_config": {"lm_head": {"bits": 16}}}),
        ("gptq_8", {**AUTO, "extra_config": {"layer": {"bits": 8}, ".*gate": {"bits": 16, "data_type": "float"}}}),
    ],
)
def test_numbers_are_those_of_the_packages(of_packages, tmp_path, name, config, dtype):
    numbers = of_packages(name, config)
    assert torch.equal(loaded(tmp_path, dtype), numbers.to(dtype))


def test_one_group_for_all_inputs(of_packages, tmp_path):
    def halve(stored):
        for name in ("qzeros", "scales"):
            stored[name] = stored[name][:1].clone()
        del stored["g_idx"]

    numbers = of_packages("gptq", {**GPTQ, "group_size": -1}, halve)
    assert torch.equal(loaded(tmp_path)[:, :32], numbers[:, :32])


@pytest.mark.parametrize("kind", ["awq", "gptq in any order"])
def test_experts_that_become_one_stack(tmp_path, kind):
    sizes = {"vocab_size": 97, "hidden_size": 32, "moe_intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = Qwen3MoeConfig(**sizes, **heads, num_experts=3, num_experts_per_tok=2, dtype="bfloat16")
    model = AutoModelForCausalLM.from_config(config)
    zoo.fill(model)
    zoo.save_original(model, tmp_path, max_shard_size="30KB")
    numbers = quantizing.quantize(tmp_path, kind, grouped.KINDS)
    assert sum("experts" in key for key in numbers) == 9
    found = shardwise.from_pretrained(tmp_path, options=shardwise.options.LoadOptions(budget_bytes=1 << 15))
    assert found.model.layers[0].mlp.experts.gate_up_proj.shape == (3, 48, 32)
    assert quantizing.differing(found, {key: value.bfloat16() for key, value in numbers.items()}) == []


def drop(name):
    return lambda stored: stored.pop(name)


def put(name, value):
    return lambda stored: stored.__setitem__(name, value(stored[name]))


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("awq", drop("qzeros"), "qzeros is not stored"),
        ("awq", drop("scales"), "scales is not stored"),
        ("awq", drop("qweight"), "qzeros: its qweight is missing"),
        ("awq", put("qweight", lambda found: found.short()), r"qweight is I16 \(64, 4\)"),
        ("awq", put("qweight", lambda found: found.view(-1)), r"qweight is I32 \(256,\)"),
        ("awq", put("scales", lambda found: found.double()), r"scales is F64 .*F16, BF16, F32"),
        ("awq", put("scales", lambda found: found[:1].clone()), "none of what quantization_config says: 4 bits"),
        ("awq", put("qzeros", lambda found: found[:, :2].clone()), "none of what quantization_config says"),
        ("awq", lambda stored: stored.update(weight=torch.ones(32, 64)), "weight is stored, too"),
        ("awq", lambda stored: stored.update(g_idx=torch.zeros(64).int()), "AWQ none"),
        ("gptq", put("qweight", lambda found: found[:3].clone()), "none of what quantization_config says"),
        ("gptq", put("qweight", lambda found: found[:7].clone()), r"g_idx is I32 \(64,\)\. GPTQ has I32 \(56,\)"),
        ("gptq", put("g_idx", lambda found: found + 1), "g_idx has groups 1 to 2, and there are scales for 0 to 1"),
        ("gptq", put("g_idx", lambda found: found - 1), "g_idx has groups -1 to 0"),
        ("gptq", put("g_idx", lambda found: found.long()), r"g_idx is I64 \(64,\)"),
        ("gptq", put("g_idx", lambda found: found[:32].clone()), r"g_idx is I32 \(32,\)"),
    ],
)
def test_what_does_not_go_together(of_packages, tmp_path, name, change, told):
    of_packages(name, AWQ if name == "awq" else GPTQ, change)
    with pytest.raises(shardwise.FormatError, match=rf"(?s)layer\.{told}|layer\.qweight: .*{told}"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({**AWQ, "version": "gemv"}, "AWQ with version='gemv'"),
        ({**AWQ, "bits": 8}, "AWQ of bits=8"),
        ({**AWQ, "group_size": 0}, "AWQ with group_size=0"),
        ({**GPTQ, "bits": 3}, "GPTQ of bits=3"),
        ({**GPTQ, "group_size": "32"}, "GPTQ with group_size='32'"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "GPTQ with checkpoint_format='marlin'"),
        ({**GPTQ, "pack_dtype": "int16"}, "GPTQ with pack_dtype='int16'"),
        ({**GPTQ, "dynamic": {"x": {"bits": 2}}}, "GPTQ of bits=2"),
        ({**GPTQ, "dynamic": ["x"]}, "GPTQ with dynamic="),
        ({**AUTO, "bits": 2}, "auto-round of bits=2"),
        (
            {**AUTO, "packing_format": "auto_round:llm_compressor"},
            "packing_format=auto_round:llm_compressor of int",
        ),
        ({**AUTO, "data_type": "mx_fp"}, "packing_format=auto of mx_fp"),
        ({**AUTO, "rotation_config": {"r1": True}}, "auto-round with rotation_config"),
        ({**AUTO, "extra_config": ["x"]}, "auto-round with extra_config="),
    ],
)
def test_unknown_settings_are_refused(of_packages, tmp_path, config, told):
    of_packages("gptq", config)
    with pytest.raises(shardwise.ConfigError, match=told):
        loaded(tmp_path)


def test_scales_that_are_not_finite_are_refused_by_name(of_packages, tmp_path):
    of_packages("awq", AWQ, put("scales", lambda found: found.masked_fill(found == found[0, 3], torch.inf)))
    with pytest.raises(shardwise.FormatError, match=r"layer\.scales.*a scale is NaN or infinite"):
        loaded(tmp_path)
