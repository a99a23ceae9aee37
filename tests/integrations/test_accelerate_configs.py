"""Configurations of accelerate's and of the Trainer's, and wrap policies of others, as shardings."""

import functools
import json
import warnings
from pathlib import Path

import pytest
import torch
from tests.models.small import qwen3
from tests.support.world import require_same_error
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    _recursive_wrap,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer

import shardwise
from shardwise import ConfigError, Sharding
from shardwise.fsdp.policies import select_blocks
from shardwise.options import Classes, MinSize

WRITTEN = Path(__file__).with_name("fsdp.yaml")
"""As ``accelerate config`` writes it."""


def read(source) -> tuple[Sharding, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sharding = Sharding.from_accelerate(source)
    return sharding, [str(item.message) for item in caught]


def test_files_written_by_accelerate_config():
    sharding, told = read(WRITTEN)
    bf16 = torch.bfloat16
    assert sharding == Sharding(
        wrap=Classes(("Qwen3DecoderLayer", "Qwen3Attention")),
        mp_policy=MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16, output_dtype=bf16),
        offload_policy=CPUOffloadPolicy(),
        reshard_after_forward=False,
        activation_checkpointing=True,
    )
    assert len(told) == 1
    assert "state_dict_type=SHARDED_STATE_DICT" in told[0], "what does not carry over is told"
    assert "'sharded'" in told[0]
    named = ["model.layers.0", "model.layers.0.self_attn", "model.layers.1", "model.layers.1.self_attn"]
    assert select_blocks(qwen3(), sharding.wrap) == named


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({}, Sharding(wrap="whole_model")),
        ({"fsdp": True}, Sharding(wrap="no_split_modules")),
        ({"fsdp": "full_shard auto_wrap"}, Sharding(wrap="no_split_modules")),
        (
            {"fsdp": "shard_grad_op auto_wrap offload", "fsdp_config": {"min_num_params": 2000}, "output_dir": "x"},
            Sharding(wrap=MinSize(2000), reshard_after_forward=False, offload_policy=CPUOffloadPolicy()),
        ),
        (
            {"fsdp": True, "bf16": False, "fsdp_config": {"transformer_layer_cls_to_wrap": ["A", "B"]}},
            Sharding(wrap=Classes(("A", "B"))),
        ),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": "1e6"}, Sharding(wrap=MinSize(10**6))),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 0}, Sharding(wrap="whole_model")),
        ({"fsdp_config": {"fsdp_sharding_strategy": 2}}, Sharding(wrap="whole_model", reshard_after_forward=False)),
        (
            {
                "distributed_type": "FSDP",
                "mixed_precision": "no",
                "fsdp_config": {"activation_checkpointing": "no"},
            },
            Sharding(wrap="whole_model", offload_policy=OffloadPolicy(), activation_checkpointing=False),
        ),
    ],
)
def test_each_of_the_ways_to_write_it(source, expected, tmp_path):
    sharding, _ = read(source)
    assert sharding == expected
    (tmp_path / "config.json").write_text(json.dumps(source))
    assert read(tmp_path / "config.json")[0] == expected


def test_keys_of_fsdp1_are_translated_or_reported():
    sharding, told = read(
        {
            "fsdp_sharding_strategy": "FULL_SHARD",
            "fsdp_backward_prefetch": "BACKWARD_PRE",
            "fsdp_forward_prefetch": False,
            "fsdp_use_orig_params": True,
            "fsdp_sync_module_states": True,
            "fsdp_state_dict_type": "FULL_STATE_DICT",
        }
    )
    assert sharding.reshard_after_forward is True
    assert "config of FSDP1" in told[0]
    for name in ("backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states"):
        assert any(note.startswith(f"{name}: ") and "means nothing" in note for note in told), name
    assert any("'full'" in note for note in told)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"fsdp_config": {"fsdp_ofload_params": True}}, "fsdp_ofload_params: no such key. Did you mean 'offload_"),
        ({"fsdp_configs": {}}, "fsdp_configs: no such key"),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, "must be one of FULL_SHARD, SHARD_GRAD_OP, HYBRID"),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, "HYBRID_SHARD: the number of replicas is missing"),
        ({"fsdp_state_dict_type": "LOCAL_STATE_DICT"}, "must be one of FULL_STATE_DICT"),
        ({"sharding_strategy": "FULL_SHARD", "reshard_after_forward": False}, "=False and sharding.*contradict"),
        ({"auto_wrap_policy": "NO_WRAP", "transformer_layer_cls_to_wrap": "A"}, "A contradicts auto_wrap"),
        ({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "min_num_params": 5}, "min_num_params=5 contradicts"),
        ({"fsdp_offload_params": True, "offload_params": False}, "are one key"),
        ({"offload_params": True, "cpu_offload": False}, "cpu_offload=False and offload_params=True are one key"),
        ({"fsdp": "fullshard"}, "must be one of full_shard"),
        ({"fsdp_config": {"offload_params": "maybe"}}, "must be true or false"),
        ({"mixed_precision": "bf16", "fp16": True, "fsdp": True}, "contradict each other"),
        ({"mixed_precision": "fp8", "fsdp_config": {"version": 2}}, "must be one of no, fp32, bf16, fp16"),
        ({"distributed_type": "DEEPSPEED"}, "is not FSDP"),
        ({"fsdp_config": {"ignored_modules": "lm_head"}}, "ignored_modules='lm_head': modules cannot be left out"),
        ({"parallelism_config": {"parallelism_config_tp_size": 2}}, "tp_size=2: a Sharding has shards"),
        (
            {"num_processes": 6, "parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 2}},
            "num_processes=6 contradicts",
        ),
        ({"fsdp": True, "fsdp_config": {"xla": True}}, "FSDP on TPUs is not supported"),
        ({"parallelism_config": {"dp_replicate_size": "two"}}, "dp_replicate_size='two': it must be 1 or more"),
        ({"parallelism_config": {"tp_size": "9" * 5000}}, "tp_size='9+': it must be 1 or more"),
        ({"parallelism_config": {"dp_replicate_sise_size": 2}}, "no such key. Did you mean 'dp_replicate_size'"),
        ({"parallelism_config": [2]}, r"parallelism_config=\[2\]: it must be keys with values"),
        ({"parallelism_config": {True: 2}}, "parallelism_config: the key True is no text"),
        ({"fsdp_config": {True: 2}}, "fsdp_config: the key True is no text"),
        ({True: 2}, "\n  the key True is no text"),
        ({"fsdp_config": {"offload_params": "[Maybe"}}, r"offload_params='\[Maybe': it must be true or false"),
        ({"fsdp_offload_params": "Yes", "offload_params": "Off"}, "=Off and fsdp_offload_params=Yes are one key"),
        ({"fsdp_sharding_strategy": 1, "fsdp_reshard_after_forward": "No"}, "=No and fsdp_sharding_strategy=1 con"),
        ({"fsdp_sharding_strategy": 4, "num_machines": "two"}, "num_machines='two': it must be 1 or more"),
        ({"mixed_precision": "bf16", "fp16": "Yes"}, "mixed_precision=bf16 and fp16=Yes contradict"),
        ({"fsdp": 5}, "fsdp=5: it must be one of full_shard"),
        ({"transformer_layer_cls_to_wrap": 5}, "transformer_layer_cls_to_wrap=5: it must be names of classes"),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": -5}, "min_num_params=-5: it must be a number"),
        ({"fsdp_min_num_params": float("nan")}, "min_num_params=nan: it must be a number"),
        (5, "the configuration=5: it must be the path"),
    ],
)  # fmt: skip
def test_unknown_contradicting_and_unsupported_keys_are_refused_by_name(source, said):
    with pytest.raises(ConfigError, match=said):
        read(source)


def test_every_fault_is_named_at_once(tmp_path):
    file = tmp_path / "bad.yaml"
    file.write_text("fsdp_config: {fsdp_verion: 2, fsdp_state_dict_type: NONE, offload_params: 7}\n")
    with pytest.raises(ConfigError) as caught:
        read(file)
    for word in (
        str(file),
        "fsdp_verion: no such key. Did you mean 'version'?",
        "state_dict_type='NONE'",
        "offload_params=7",
    ):
        assert word in str(caught.value), word


@pytest.mark.parametrize("content", ["- a\n- b\n", "a: [", "\x00", "!!python/object/apply:os.system ['false']"])
def test_a_file_that_is_none_is_refused(content, tmp_path):
    file = tmp_path / "bad.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"bad\.yaml: the configuration"):
        read(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "absent.yaml")


LAYERS = ["model.layers.0", "model.layers.1"]
ATTENTION = [f"{layer}.self_attn" for layer in LAYERS]


def is_attention(module):
    return isinstance(module, Qwen3Attention)


@pytest.mark.parametrize(
    ("wrap", "named"),
    [
        (Qwen3DecoderLayer, LAYERS),
        ({Qwen3Attention}, ATTENTION),
        ([Qwen3DecoderLayer, Qwen3Attention], sorted(LAYERS + ATTENTION)),
        (transformer_auto_wrap_policy, LAYERS),
        (functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Qwen3DecoderLayer}), LAYERS),
        (functools.partial(size_based_auto_wrap_policy, min_num_params=1000), None),
        (is_attention, ATTENTION),
        (functools.partial(lambda_auto_wrap_policy, lambda_fn=is_attention), ATTENTION),
        (ModuleWrapPolicy({Qwen3DecoderLayer}), LAYERS),
        (always_wrap_policy, None),
    ],
)
def test_policies_of_others(wrap, named):
    model = qwen3()
    found = select_blocks(model, Sharding(wrap=wrap).wrap)
    if named is None:
        named = _wrapped_by_torch(model, wrap)
    assert sorted(found) == sorted(named)


def _wrapped_by_torch(model: nn.Module, policy) -> list[str]:
    """What torch's own recursion wraps, with a wrapper that is told from others."""

    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.inner = module

    containers = {nn.ModuleList, nn.ModuleDict}
    other = qwen3()
    names = {id(module): name for name, module in other.named_modules()}
    _recursive_wrap(other, policy, Wrapper, set(), set(), only_wrap_children=True)
    inner = [module.inner for module in other.modules() if isinstance(module, Wrapper)]
    assert type(other) is type(model)
    return [names[id(module)] for module in inner if type(module) not in containers]


def test_a_misspelt_class_among_several_is_refused_by_name():
    class Qwen3DecoderLayr(nn.Module):
        pass

    sharding = Sharding(wrap={Qwen3DecoderLayer, Qwen3DecoderLayr})
    with pytest.raises(shardwise.ShardingError, match="Qwen3DecoderLayr matches nothing in Qwen3ForCausalLM"):
        select_blocks(qwen3(), sharding.wrap)
    sharding, _ = read({"transformer_layer_cls_to_wrap": "Qwen3DecoderLayer,Qwen3Attn"})
    with pytest.raises(shardwise.ShardingError, match="Qwen3Attn matches nothing in Qwen3ForCausalLM"):
        select_blocks(qwen3(), sharding.wrap)


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (functools.partial(transformer_auto_wrap_policy), "must be a set of classes"),
        (functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={"Block"}), "must be a set of"),
        (functools.partial(size_based_auto_wrap_policy, force_leaf_modules={nn.Linear}), "force_leaf_modules"),
        (functools.partial(is_attention, 3), "1 positional arguments. Name them"),
    ],
)
def test_partials_that_cannot_be_honoured(wrap, said):
    with pytest.raises(ConfigError, match=said):
        Sharding(wrap=wrap)


def test_ranks_compare_functions_by_their_names():
    from shardwise.fsdp.wrap import comparable_settings

    assert comparable_settings(Sharding(wrap=is_attention))["wrap"] == f"Matching(function={__name__}.is_attention)"


def test_replicas_are_a_mesh_of_two_axes(worlds):
    from tests.integrations import accelerating

    replicated = {"parallelism_config": {"parallelism_config_dp_replicate_size": 2, "dp_shard_size": 2}}
    by_machine = {"fsdp_config": {"sharding_strategy": "HYBRID_SHARD", "version": 2}, "num_machines": 2}
    for values in ({**replicated, "num_processes": 4}, by_machine):
        assert worlds(4).run(accelerating.hybrid, values) == ["replicate=2, shard=2"] * 4
    # The mesh is made once the ranks have compared their shardings, so that no rank waits for one without it.
    ends = worlds(4).run(accelerating.hybrid_on_some_ranks, replicated)
    require_same_error(ends, "RankMismatchError", "the list of arguments")
    with pytest.raises(ConfigError, match="2 replicas: 1 ranks cannot be divided"):
        shardwise.shard(nn.Linear(8, 8), read(replicated)[0])


def test_replicas_are_a_number_without_a_mesh():
    for replicas in (0, "2"):
        with pytest.raises(ConfigError, match="must be 1 or more, and 1 with a mesh"):
            Sharding(replicas=replicas)
