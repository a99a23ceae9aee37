"""Forecasts of a sharded model, compared with ``fully_shard``."""

from dataclasses import replace

import pytest
import torch
from tests import zoo
from tests.fsdp.on_fake_ranks import fake_rank
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardwise.core.errors import ShardingError
from shardwise.core.layout import MeshShape, ModelLayout, Origin
from shardwise.fsdp import torch_private
from shardwise.fsdp.named_tensors import boxes_at, build_layout, collect_tensors, padded_numels
from shardwise.fsdp.policies import Classes
from shardwise.fsdp.wrap import Sharding, wrap
from shardwise.loading.estimate_layout import predict_layout

FLAT = [MeshShape.flat(size) for size in (1, 2, 3, 5, 8, 16)]
HYBRID = [MeshShape(("replicate", "shard"), sizes) for sizes in ((2, 4), (3, 1), (1, 5), (4, 16))]


def nowhere(item):
    return Origin.NOWHERE


def foreseen(model, mesh, policy=None):
    return predict_layout(model, model, policy or "auto", mesh, nowhere, {})


def really_sharded(model, mesh, rank, policy=None):
    """The model after ``fully_shard`` as one rank, what it holds, and the elements of each parameter's memory."""
    device_mesh = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)
    wrap(model, Sharding(mesh=device_mesh, wrap=policy or "auto"))
    held = collect_tensors(model)
    # torch keeps the coordinate of the first fake rank of a process, so it is given here.
    coordinate = (rank // mesh.sizes[-1], rank % mesh.sizes[-1])[-len(mesh.sizes) :]
    tensors = []
    for item, tensor in zip(held, build_layout(held, nowhere).tensors, strict=True):
        if isinstance(item.tensor, DTensor):
            strides = tuple(item.local.stride())
            placements = item.tensor.placements
            boxes = boxes_at(tensor.shape, placements, mesh.sizes, coordinate, strides)
            assert sum(part.box.numel for part in boxes) == item.local.numel()
            tensor = replace(tensor, boxes=boxes)
        tensors.append(tensor)
    return held, ModelLayout(tuple(tensors)), padded_numels(held, torch_private.fsdp_params(model))


def assert_as_foreseen(make, mesh, policy=None):
    world = foreseen(make(), mesh, policy)
    for rank in sorted({0, 1 % mesh.ranks, mesh.ranks // 2, mesh.ranks - 1}):
        with fake_rank(rank, mesh.ranks):
            model = make()
            held, layout, padded = really_sharded(model, mesh, rank, policy)
        boxes = {name: spread.boxes[mesh.position(rank)] for name, spread in world.spreads.items()}
        assert layout.tensors == tuple(replace(item, boxes=boxes[item.fqn]) for item in world.rank0.tensors)
        for item in held:
            memory = padded.get(item.fqn, item.tensor.numel())
            assert world.spreads[item.fqn].padded_numel == memory, item.fqn
        fqns = {item.tensor: item.fqn for item in held}
        groups = [{fqns[param.sharded_param] for param in group.fsdp_params} for group in param_groups(model)]
        expected = [set(group.parameters) for group in world.groups if group.parameters]
        assert sorted(map(sorted, groups)) == sorted(map(sorted, expected))


def param_groups(model):
    """FSDP2's own groups; several modules may share one."""
    return list({id(group): group for group in torch_private.iter_fsdp_param_groups(model)}.values())


def specimen(name, dtype=torch.float32):
    (found,) = (item for item in zoo.representative_specimens() if item.name == name)
    return lambda: zoo.meta_model(found, dtype=dtype)


NAMES = [item.name for item in zoo.representative_specimens()]


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_is_foreseen(name):
    for mesh in (MeshShape.flat(3), MeshShape(("replicate", "shard"), (2, 8))):
        assert_as_foreseen(specimen(name), mesh)


@pytest.mark.parametrize("mesh", [*FLAT, *HYBRID], ids=str)
def test_every_mesh_is_foreseen(mesh):
    assert_as_foreseen(specimen("qwen3_5_moe_text", torch.bfloat16), mesh)


@pytest.mark.parametrize("policy", ["whole_model", "module_list", Classes(("LlamaMLP", "LlamaAttention"))])
def test_every_policy_is_foreseen(policy):
    assert_as_foreseen(specimen("llama"), MeshShape.flat(4), policy)


class Odd(nn.Module):
    """Everything that FSDP2 does not accept: see each line."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Mixer(), Mixer()])
        self.embed = nn.Linear(6, 9, dtype=torch.bfloat16)
        self.head = nn.Linear(6, 9, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight  # tied across blocks
        self.register_buffer("turned", torch.zeros(4, 6).t(), persistent=False)  # not contiguous


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8, dtype=torch.float32)  # a module of another dtype
        self.weight = nn.Parameter(torch.ones(8, 4, dtype=torch.bfloat16))
        self.decay = nn.Parameter(torch.ones(3, dtype=torch.float32))  # another dtype beside that one
        self.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16))
        self.registers = nn.Parameter(torch.ones(1, 0, 4, dtype=torch.bfloat16))
        self.experts = nn.Parameter(torch.ones(3, 8, 5, dtype=torch.bfloat16))  # fewer than ranks
        self.many = nn.Parameter(torch.ones(9, 6, 8, dtype=torch.bfloat16))  # not even on dim 0
        self.frozen = nn.Parameter(torch.ones(7, dtype=torch.float64), requires_grad=False)
        self.gate = Gate()


class Gate(nn.Module):
    """Its own parameters are of one dtype, what is inside of it is of another."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(5, dtype=torch.float32))
        self.linear = nn.Linear(5, 5, dtype=torch.bfloat16)


def odd():
    with torch.device("meta"):
        return Odd()


@pytest.mark.parametrize("mesh", [*FLAT, *HYBRID], ids=str)
def test_parameters_that_fsdp2_rejects_are_rejected_by_the_estimate(mesh):
    assert_as_foreseen(odd, mesh, "module_list")


def test_reasons_for_staying_whole():
    world = foreseen(odd(), MeshShape.flat(4), "module_list")
    assert {name: reason for name, reason in world.whole.items() if "layers.0" in name} == {
        "layers.0.decay": "its module has most of its parameters in another dtype",
        "layers.0.scale": "it has no dimensions",
        "layers.0.registers": "it has no elements",
        "layers.0.gate.bias": "its group is of another dtype, and no module around it can be a group of its own",
    }


def test_a_parameter_that_is_not_contiguous_is_named():
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(4, 6)])
    model.layers[1].weight = nn.Parameter(torch.empty(4, 6, device="meta").t())
    with pytest.raises(ShardingError, match=r"layers\.1\.weight: has shape \(6, 4\) and strides \(1, 6\)"):
        foreseen(model, MeshShape.flat(2), "module_list")
