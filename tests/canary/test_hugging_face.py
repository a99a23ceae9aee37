"""The meaning of unexported names of transformers, PEFT and accelerate."""

from pathlib import Path
from unittest import mock

import accelerate.utils.constants as accelerate_names
import pytest
import torch
import transformers
from torch import nn
from transformers import core_model_loading, modeling_utils, trainer_utils

from shardwise.checkpoints import trainer_folders
from shardwise.files.accelerate_saves import MODEL, OPTIMIZER
from shardwise.fsdp import policies
from shardwise.integrations import trainer_restoring
from shardwise.models import build, initial_programs, pretrained, revert, tracing
from shardwise.models.four_bit import layers
from shardwise.models.lora import peft_private

SIZES = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 4, "num_hidden_layers": 2, "head_dim": 8}
SMALL = {**SIZES, "num_attention_heads": 1, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def mixtral() -> transformers.PreTrainedModel:
    config = transformers.MixtralConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1)
    return transformers.MixtralForCausalLM(config)


@pytest.fixture(scope="module")
def llama() -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, tie_word_embeddings=True))


def test_conversion_objects(mixtral: transformers.PreTrainedModel) -> None:
    """A key of the hub's leads to a name and a converter's pattern; that runs on the tensors of all its keys."""
    transforms = pretrained.get_conversion_transforms(mixtral, {"^old": "new"})
    renamings = [item for item in transforms if isinstance(item, core_model_loading.WeightRenaming)]
    converters = [item for item in transforms if isinstance(item, core_model_loading.WeightConverter)]
    assert renamings[0].rename_source_key("old.weight")[0] == "new.weight"
    stem = "model.layers.1.block_sparse_moe.experts"
    names = dict(mixtral.state_dict())
    found = {
        key: core_model_loading.rename_source_key(key, renamings, converters, mixtral.base_model_prefix, names)
        for key in (f"{stem}.0.w1.weight", f"{stem}.1.w1.weight", f"{stem}.0.w3.weight", f"{stem}.1.w3.weight")
    }
    assert {name for name, _ in found.values()} == {"model.layers.1.mlp.experts.gate_up_proj"}
    (target,) = {name for name, _ in found.values()}
    (converter,) = {
        id(item): item for item in converters if found[f"{stem}.0.w1.weight"][1] in item.source_patterns
    }.values()
    sources: dict[str, list[torch.Tensor]] = {}
    for number, (_, pattern) in enumerate(found.values()):
        assert pattern is not None
        sources.setdefault(pattern, []).append(torch.full((4, 8), float(number)))
    made = tracing.convert(converter, target, sources, mixtral)
    assert set(made) == {target}
    assert made[target].shape == (2, 8, 8)
    assert made[target][:, ::4, 0].tolist() == [[0, 2], [1, 3]]  # expert by expert, gate before up
    assert converter.was_used(), "it has been asked for a key that it matches"


def test_conversions_are_left_on_the_model_and_run_backwards(
    mixtral: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    mixtral.save_pretrained(tmp_path)
    loaded = transformers.MixtralForCausalLM.from_pretrained(tmp_path)
    used = revert.get_saved_conversions(loaded)
    assert any(item.was_used() for item in used)
    reverted = core_model_loading.revert_weight_conversion(loaded, loaded.state_dict())
    assert "model.layers.0.block_sparse_moe.experts.1.w2.weight" in reverted
    assert revert.get_saved_conversions(mixtral), "a model that was not loaded has its class's own"


def test_ties_plans_and_lists_of_a_model(llama: transformers.PreTrainedModel) -> None:
    assert pretrained.get_declared_ties(llama) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert set(modeling_utils._get_tied_weight_keys(llama)) == {"lm_head.weight"}
    assert policies._no_split_classes(llama) == {"LlamaDecoderLayer"}
    assert llama.base_model_prefix == "model"
    assert pretrained.count_text_layers(llama) == 2
    assert pretrained.get_attention_implementation(llama) == "sdpa"
    config = transformers.T5Config(d_model=4, d_kv=2, d_ff=4, num_layers=1, num_heads=2, vocab_size=8)
    t5 = transformers.T5ForConditionalGeneration(config)
    assert pretrained.get_unquantized_names(t5) == ["wo"]
    kept = pretrained.get_kept_dtypes(t5, torch.float16)
    name = "encoder.block.0.layer.1.DenseReluDense.wo.weight"
    assert kept(name) is torch.float32
    assert kept(name.replace("wo", "wi")) is None


def test_building_and_initializing(llama: transformers.PreTrainedModel, tmp_path: Path) -> None:
    built = build.build_on_meta(transformers.LlamaForCausalLM, llama.config, torch.bfloat16, tmp_path)
    assert {(tensor.is_meta, tensor.dtype) for tensor in built.parameters()} == {(True, torch.bfloat16)}
    found, config = build.find_auto_class(llama.config, transformers.AutoModelForCausalLM)
    assert (found, config) == (transformers.LlamaForCausalLM, llama.config)
    fresh = initial_programs.built_without_weights(llama)
    assert type(fresh) is type(llama)
    assert all(tensor.is_meta for tensor in fresh.parameters())
    rotary = dict(fresh.named_buffers())["model.rotary_emb.inv_freq"]
    assert torch.equal(rotary, dict(llama.named_buffers())["model.rotary_emb.inv_freq"])
    ones = torch.ones(2)
    with pretrained.not_initializing():
        nn.init.zeros_(ones)
    assert ones.tolist() == [1, 1]
    model = transformers.LlamaForCausalLM(llama.config)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(7)
    norm, linear = model.model.norm, model.model.layers[0].mlp.up_proj
    pretrained.run_initializers(model, {norm})
    assert norm.weight.tolist() == [1] * 8
    assert bool((linear.weight == 7).all()), "only the modules that were named"
    seen = []
    with pretrained.replace_init_function("ones_", lambda tensor: seen.append(tensor)):
        pretrained.run_initializers(model, {norm})
    assert [id(tensor) for tensor in seen] == [id(norm.weight)]
    pretrained.mark_initialized(norm.weight)
    with torch.no_grad():
        norm.weight.fill_(7)
    pretrained.run_initializers(model, {norm})
    assert norm.weight.tolist() == [7] * 8, "what is marked is passed over"


def test_generation_asks_whether_ranks_have_finished(llama: transformers.PreTrainedModel) -> None:
    with mock.patch.object(llama, "_has_unfinished_sequences", return_value=False, create=False) as asked:
        tokens = torch.ones(1, 2, dtype=torch.int64)
        assert llama.generate(tokens, max_new_tokens=2, synced_gpus=True).shape == (1, 2)
    asked.assert_called_once_with(False, True, device=tokens.device)


def test_layers_of_peft(llama: transformers.PreTrainedModel) -> None:
    with torch.device("meta"):
        base = transformers.LlamaForCausalLM(llama.config)
    config = peft_private.lora_config(r=2, target_modules=["q_proj"], modules_to_save=["model.norm"])
    model = peft_private.inject(base, config, "mine", is_new=True)
    assert base._tp_size is None, "no tensor parallelism, so that PEFT gathers nothing"
    targets = peft_private.get_targets(model, "mine")
    assert targets.modules == tuple(f"model.layers.{number}.self_attn.q_proj" for number in range(2))
    assert targets.copied == ("model.norm",)
    ((original, copy),) = peft_private.copies(model, "mine")
    assert type(original) is type(copy)
    assert original is not copy
    name, layer = next(peft_private.layers(model))
    assert name.endswith("layers.0.self_attn.q_proj")
    assert [(type(item), what) for item, what in peft_private.matrices(layer, "mine")] == [
        (nn.Linear, "weight")
    ] * 2
    assert layer.lora_A["mine"].weight.shape == (2, 8)
    assert peft_private.magnitude(layer, "mine") is None
    assert peft_private.has_row_norms(layer)
    patterned = peft_private.lora_config(r=2, rank_pattern={"q_proj": 4}, alpha_pattern={"layers.0.k_proj": 3})
    assert peft_private.rank_and_alpha(patterned, "layers.0.q_proj") == (4, 8)
    assert peft_private.rank_and_alpha(patterned, "layers.0.k_proj") == (2, 3)


def test_fused_experts(mixtral: transformers.PreTrainedModel) -> None:
    (experts, *_) = [module for module in mixtral.modules() if layers.are_fused_experts(module)]
    assert not layers.are_fused_experts(mixtral)
    assert not layers.are_expert_parallel(experts)
    assert (experts.has_gate, experts.has_bias, experts.is_transposed) == (True, False, False)
    gate, up = torch.randn(3, 4), torch.randn(3, 4)
    expected = nn.functional.silu(gate) * up
    torch.testing.assert_close(layers.apply_activation(experts, torch.cat([gate, up], 1)), expected)
    eager = layers.eager_experts(type(experts))
    assert eager is not type(experts).forward
    assert not hasattr(eager, "__wrapped__")


def test_files_of_accelerate_and_of_the_trainer() -> None:
    assert MODEL.stem == accelerate_names.FSDP_MODEL_NAME
    assert OPTIMIZER.stem == accelerate_names.OPTIMIZER_NAME
    assert transformers.trainer.TRAINER_STATE_NAME == trainer_folders.STATE_FILE
    assert transformers.trainer.OPTIMIZER_NAME == trainer_restoring._OPTIMIZER_FILE
    assert transformers.trainer.SCHEDULER_NAME in trainer_restoring._NOT_READ
    assert trainer_utils.PREFIX_CHECKPOINT_DIR == "checkpoint"
