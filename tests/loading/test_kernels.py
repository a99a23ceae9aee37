"""Kernels of other libraries, and compiled blocks: where they are put, and what is refused."""

import pytest
from peft import LoraConfig
from tests.loading import patching

import shardwise
from shardwise import ConfigError
from shardwise.fsdp.torch_private import is_compiled_in_place
from shardwise.models import kernels
from shardwise.models.four_bit.layers import are_experts_in_four_bits

_LORA = {"tuning": shardwise.Lora(LoraConfig(target_modules=["q_proj"], r=2))}


@pytest.mark.parametrize("recomputes", [False, True])
def test_liger_patches_the_plain_model_on_meta(worlds, qwen3, recomputes):
    """Before adapters, before blocks are recomputed, before sharding; and what it patches runs."""
    norms = [f"model.layers.{layer}.{name}" for layer in range(2) for name in _NORMS]
    for found in worlds(2).run(patching.with_liger, str(qwen3), recomputes):
        (call,) = found["calls"]
        assert call["class"] == "Qwen3ForCausalLM"
        assert call["config"] == {"rope": False}
        assert sorted(call["patched"]) == sorted([*norms, "model.norm"])
        assert call["plain"]
        assert not call["sharded"]
        assert not call["adapted"]
        assert found["differing"] == []
        assert found["keys"] > 2
        assert found["runs"] == ([1, 2] if recomputes else [1])


_NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")


def test_a_model_of_which_liger_knows_nothing(qwen3, caplog, monkeypatch):
    monkeypatch.setattr(patching, "NORMS", ())
    with patching.liger([]):
        shardwise.from_pretrained(qwen3, liger_kernel_config={})
    (record,) = caplog.records
    assert record.getMessage() == "Qwen3ForCausalLM: liger-kernel has no kernels for it. It runs without"


def test_liger_that_is_not_there_is_named(qwen3):
    """By transformers, which also knows the oldest version that it takes."""
    message = r"use_liger_kernel: cannot be applied to Qwen3ForCausalLM, ImportError.* pip install -U liger-kernel"
    with pytest.raises(ConfigError, match=message):
        shardwise.from_pretrained(qwen3, liger_kernel_config={})


def test_kernels_of_the_hub_are_loaded_once_there_are_weights(worlds, qwen3):
    """By transformers' own function, and only if they are asked for: they are code of the hub."""
    for before, found in worlds(2).run(patching.with_hub_kernels, str(qwen3)):
        assert before == []
        assert found == [("Qwen3ForCausalLM", True, "cpu")]


@pytest.mark.parametrize(
    ("keywords", "is_installed", "message"),
    [
        ({}, False, r"use_kernels: the package kernels is not installed.*pip install 'transformers\[kernels\]'"),
        ({"load_weights": False}, True, "use_kernels: kernels are chosen by the device of the weights"),
        ({"sharding": shardwise.Sharding(compile=True)}, True, "use_kernels: transformers does not choose kernels"),
    ],
)
def test_kernels_of_the_hub_are_refused(qwen3, monkeypatch, keywords, is_installed, message):
    monkeypatch.setattr(kernels, "is_kernels_available", lambda: is_installed)
    with pytest.raises(ConfigError, match=message):
        shardwise.from_pretrained(qwen3, use_kernels=True, **keywords)


def test_experts_in_four_bits_keep_their_own_forward(mixtral, tmp_path):
    """Kernels of others read stacks of weights, and would take codes for them."""
    keywords = {"quantization": shardwise.options.Nf4(block_size=32), "tuning": _LORA["tuning"]}
    with patching.liger([]):
        model = shardwise.from_pretrained(mixtral, liger_kernel_config={}, **keywords)
    experts = [module for module in model.modules() if are_experts_in_four_bits(module)]
    assert len(experts) == 2
    assert not any("forward" in vars(module) for module in experts)
    with (
        patching.hub_kernels([]),
        pytest.raises(ConfigError, match=r"use_kernels: model\.layers\.0\.mlp\.experts is in four bits"),
    ):
        shardwise.from_pretrained(mixtral, use_kernels=True, **keywords)


def test_blocks_are_compiled_in_place_and_nothing_else(qwen3):
    model = shardwise.from_pretrained(qwen3, sharding=shardwise.Sharding(compile={"backend": "aot_eager"}))
    compiled = [name for name, module in model.named_modules() if is_compiled_in_place(module)]
    assert compiled == ["model.layers.0", "model.layers.1"]
    assert [*model.state_dict()] == [*shardwise.from_pretrained(qwen3).state_dict()]


def test_an_unknown_compile_is_named():
    with pytest.raises(ConfigError, match=r"compile='inductor' is not known. Pass True, False, or arguments"):
        shardwise.Sharding(compile="inductor")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "keywords", "recomputes", "own"),
    [
        ("qwen3", {}, True, False),
        ("qwen3", _LORA | {"quantization": shardwise.options.Nf4(block_size=32)}, False, True),
        ("mixtral", {}, False, False),  # whose routing depends on the data
    ],
)
def test_compiled_blocks_have_the_losses_of_others(request, worlds, model, keywords, recomputes, own):
    folder = str(request.getfixturevalue(model))
    for found in worlds(2).run(patching.compiled, folder, keywords, recomputes, own):
        assert found["losses"]["True"] == pytest.approx(found["losses"]["False"], abs=1e-6)
        assert found["names"]["True"] == found["names"]["False"]
        assert found["frames"] > 0


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention"])
def test_attention_of_every_kind_is_passed_on(qwen3, attention):
    model = shardwise.from_pretrained(qwen3, attn_implementation=attention)
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("attention", ["flash_attention_2", "kernels-community/flash-attn2"])
def test_attention_whose_package_is_missing_is_named(qwen3, attention):
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM cannot be built from Qwen3Config: ImportError"):
        shardwise.from_pretrained(qwen3, attn_implementation=attention)
