"""Modules that become FSDP2 groups, and the dimension that is sharded."""

import pytest
import torch
from tests import zoo
from tests.fsdp.on_fake_ranks import fake_rank
from tests.models.small import qwen3
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel

from shardwise.core.errors import ConfigError, ShardingError
from shardwise.fsdp.policies import Classes, MinSize, select_blocks, shard_dim
from shardwise.fsdp.torch_private import fsdp_policies
from shardwise.fsdp.wrap import Sharding, wrap


def gpt2():
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=32))


LAYERS = ["model.layers.0", "model.layers.1"]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("model_plan", ["model.embed_tokens", *LAYERS]),
        ("no_split_modules", LAYERS),
        ("module_list", LAYERS),
        (Classes(("Qwen3MLP",)), ["model.layers.0.mlp", "model.layers.1.mlp"]),
        (Classes(("Embedding", "Qwen3DecoderLayer")), ["model.embed_tokens", *LAYERS]),
        (MinSize(1900), LAYERS),
        (MinSize(1152), ["model", "model.layers.0.mlp", "model.layers.1.mlp"]),
        (MinSize(1024), ["model", "model.embed_tokens", "model.layers.0.mlp", "model.layers.1.mlp", "lm_head"]),
        ("whole_model", []),
    ],
)
def test_policies_name_modules(policy, expected):
    assert select_blocks(qwen3(tie_word_embeddings=False), policy) == expected


def test_automatic_uses_what_names_the_blocks():
    assert select_blocks(gpt2(), "auto") == ["transformer.h.0", "transformer.h.1"]


def test_a_tower_that_the_plan_misses_has_groups_of_its_own():
    """Every config of transformers has a plan, of which only the layers of text match."""
    model = zoo.meta_model(zoo.Specimen("llava", "llava", "LlavaForConditionalGeneration", "vision-language"))
    planned = select_blocks(model, "model_plan")
    assert not any("vision" in name for name in planned)
    tower = [f"model.vision_tower.{name}" for name in ("embeddings", "encoder.layers.0", "encoder.layers.1")]
    assert select_blocks(model, "auto") == [*planned, *tower]
    # Angles of rotary embeddings enter such blocks in float32, as they do in the root group.
    with fake_rank(0, 2):
        wrapped(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    for name in group_names(model):
        policy, _ = fsdp_policies(model.get_submodule(name))[0]
        assert policy.cast_forward_inputs == (name not in tower), name


@pytest.mark.parametrize("policy", [Classes(("LlamaDecoderLayer",)), "no_split_modules"])
def test_a_policy_that_matches_nothing_is_an_error(policy):
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ShardingError, match="matches nothing in Sequential"):
        select_blocks(model, policy)


def test_each_name_has_to_match():
    """A block whose name is misspelt would stay in the root group without a word."""
    words = r"Qwen3MPL, Qwen4Attention matches nothing in Qwen3ForCausalLM.*Qwen3MLP"
    with pytest.raises(ShardingError, match=words):
        select_blocks(qwen3(), Classes(("Qwen3DecoderLayer", "Qwen4Attention", "Qwen3MPL")))


def test_automatic_without_any_blocks_is_an_error():
    with pytest.raises(ShardingError, match="whole_model"):
        select_blocks(nn.Linear(2, 2), "auto")


def test_parts_that_are_never_called_are_no_groups():
    """torch's attention reads the weights of its output projection itself; lists have no forward."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.MultiheadAttention(8, 2) for _ in range(2)])
    attention = sum(parameter.numel() for parameter in model.layers[0].parameters())
    assert select_blocks(model, MinSize(attention)) == ["layers.0", "layers.1"]
    assert select_blocks(model, MinSize(8)) == ["layers.0", "layers.1"]


def test_shared_parameters_count_once():
    model = nn.Module()
    model.first, model.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    model.second.weight = model.first.weight
    assert select_blocks(model, MinSize(16)) == ["first"]


def test_a_size_that_nothing_has():
    words = r"MinSize\(numel=5000\) matches nothing in Linear, which has 6 elements"
    with pytest.raises(ShardingError, match=words):
        select_blocks(nn.Linear(2, 2), MinSize(5000))
    with pytest.raises(ConfigError, match="numel=0 must be 1 element or more"):
        MinSize(0)


def test_names_of_classes_are_a_tuple():
    for names in ("Linear", nn.Linear, (nn.Linear,), {"Linear": 1}):
        with pytest.raises(ConfigError, match="must be a tuple of names of classes"):
            Classes(names)


def group_names(model):
    return [name for name, module in model.named_modules() if name and isinstance(module, FSDPModule)]


def wrapped(model, *, size=2, **sharding):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("fsdp",))
    wrap(model, Sharding(mesh=mesh, **sharding))
    return model


def test_tied_weights_are_left_to_the_root_group():
    with fake_rank(0, 2):
        model = wrapped(qwen3(tie_word_embeddings=True))
        assert group_names(model) == LAYERS
        assert isinstance(model, FSDPModule)
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_blocks_that_share_a_parameter_are_one_group():
    blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    blocks[2].weight = blocks[0].weight
    model = nn.Module()
    model.blocks = blocks
    with fake_rank(0, 2):
        wrapped(model, wrap="module_list")
        assert isinstance(model.blocks[1], FSDPModule)
        assert model.blocks[2].weight is model.blocks[0].weight
        assert isinstance(model.blocks[2].weight, DTensor)


@pytest.mark.parametrize("policy", ["module_list", Classes(("Linear",))])
def test_a_block_that_is_registered_twice_is_one_block(policy):
    model = nn.Module()
    block = nn.Linear(4, 4)
    model.layers = nn.ModuleList([block, nn.Linear(4, 4), block])
    with fake_rank(0, 2):
        wrapped(model, wrap=policy)
        assert group_names(model) == ["layers.0", "layers.1"]


@pytest.mark.parametrize(
    ("shape", "ranks", "expected"),
    [
        ((128, 3072, 4096), 128, 0),
        ((128, 3072, 4096), 64, 0),
        ((128, 3072, 4096), 1024, 1),
        ((128, 3072, 4096), 96, 1),  # two experts on 64 ranks and none on 32, by FSDP2's own way
        ((128, 4096, 1536), 96, 0),  # only the last dimension is even: pieces of 16 columns
        ((60, 2816, 2048), 48, 0),  # the same, but no other dimension is even
        ((60, 2816, 2048), 8, 0),  # 7.5 a rank, padded to 8: near enough
        ((128, 100, 4096), 1024, 2),
        ((3, 6, 4), 4, 2),
        ((3, 8, 4), 4, 1),
        ((3, 5, 7), 4, 0),  # nothing divides: FSDP2's own way, with an empty rank
        ((512, 4096), 1024, 0),
        ((10,), 16, 0),
    ],
)
def test_the_dimension_that_is_dealt(shape, ranks, expected):
    assert shard_dim(shape, ranks) == expected


@pytest.mark.parametrize(("shape", "expected"), [((3, 6, 4), 0), ((3, 8, 4), 1), ((9, 6, 4), 0)])
def test_rows_of_packed_weights_are_whole(shape, expected):
    assert shard_dim(shape, 4, is_packed=True) == expected
