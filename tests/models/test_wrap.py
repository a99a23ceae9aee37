"""Which modules become groups, without processes."""

import pytest
import torch
from tests.models.on_fake_ranks import fake_rank
from tests.models.small import qwen3
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.models.policies import Classes
from shardwise.models.wrap import Sharding, wrap

LAYERS = ["model.layers.0", "model.layers.1"]


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


def test_float32_islands_become_groups():
    model = qwen3(tie_word_embeddings=False).to(torch.bfloat16)
    for layer in model.model.layers:
        layer.input_layernorm.to(torch.float32)
    with fake_rank(0, 2):
        wrapped(model, wrap="no_split_modules")
        assert group_names(model) == [
            "model.layers.0",
            "model.layers.0.input_layernorm",
            "model.layers.1",
            "model.layers.1.input_layernorm",
        ]


def test_what_fsdp2_cannot_take_stays_whole():
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 4, dtype=torch.bfloat16))
            self.decay = nn.Parameter(torch.ones(8, dtype=torch.float32))
            self.temperature = nn.Parameter(torch.ones((), dtype=torch.bfloat16))
            self.registers = nn.Parameter(torch.ones(1, 0, 4, dtype=torch.bfloat16))

    model = nn.ModuleList([Mixer(), Mixer()])
    holder = nn.Module()
    holder.layers = model
    with fake_rank(0, 2):
        wrapped(holder, wrap="module_list")
        assert isinstance(holder.layers[0].weight, DTensor)
        assert not isinstance(holder.layers[0].decay, DTensor)
        assert not isinstance(holder.layers[0].temperature, DTensor)
        assert not isinstance(holder.layers[0].registers, DTensor)  # torch would lose its shape


@pytest.mark.parametrize(
    ("shape", "size", "expected"),
    [
        ((8, 6, 4), 4, (2, 6, 4)),
        ((3, 6, 4), 4, (3, 6, 1)),
        ((3, 8, 4), 4, (3, 2, 4)),
        ((3, 5, 7), 4, (1, 5, 7)),  # nothing divides: FSDP2's own way, with an empty rank
        ((3, 8), 4, (1, 8)),
    ],
)
def test_stacked_experts_are_sharded_where_no_rank_stays_empty(shape, size, expected):
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module(), nn.Module()])
    for layer in model.layers:
        layer.experts = nn.Parameter(torch.empty(shape, device="meta"))
    with fake_rank(0, size):
        wrapped(model, size=size, wrap="whole_model")
        assert tuple(model.layers[0].experts.to_local().shape) == expected
