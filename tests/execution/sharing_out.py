"""What ranks do in the tests of shares."""

import torch
import torch.distributed as dist
from tests import ways
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import ShardwiseError
from shardwise.execution.replicas import agree_on_shares
from shardwise.execution.world import World
from shardwise.models.view import collect_tensors


class Block(nn.Module):
    """Rows that do not divide, a bias, a scalar, an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(96, 64, bias=False)
        self.wide = nn.Linear(96, 210)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.empty(0, 4))


class Blocks(nn.Module):
    """Tied matrices, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(96, 210, bias=False)
        self.head.weight = self.blocks[0].wide.weight
        self.register_buffer("table", torch.arange(40_000, dtype=torch.float32))
        self.register_buffer("forgotten", torch.ones(3), persistent=False)


def sharded(mesh: str) -> nn.Module:
    torch.manual_seed(0)
    model = Blocks()
    if dist.is_initialized():
        ways.MESHES[mesh](model)
    return model


def shares_are_exact(mesh: str) -> list[str]:
    """Names of which the ranks do not give each element once, or a rank gives what it does not hold."""
    model = sharded(mesh)
    held = collect_tensors(model)
    with World.current() as world:
        shares = agree_on_shares(world, held, "first_rank").by_name
        rank = world.rank
    faults = [] if "forgotten" not in shares else ["forgotten is not saved"]
    for item in held:
        if not item.kind.is_saved:
            continue
        for name in item.names:
            counts = torch.zeros(item.tensor.shape)
            for box in (box for boxes in shares[name] for box in boxes):
                counts[tuple(slice(at, at + n) for at, n in zip(box.offsets, box.sizes, strict=True))] += 1
            if not bool((counts == 1).all()):
                faults.append(name)
        given = sum(box.numel for box in shares[item.fqn][rank])
        if isinstance(item.tensor, DTensor) and given > item.local.numel():
            faults.append(f"{item.fqn}: gives more than it holds")
    return faults


def error_of(what: str) -> tuple[str, str]:
    """What agreeing raises on this rank when rank 1's model is not as it should be."""
    model = Blocks()
    if dist.get_rank() == 1:
        if what == "meta":
            model.blocks[0].q_proj = nn.Linear(96, 64, bias=False, device="meta")
        elif what == "dtype":
            model.blocks[0].q_proj.to(torch.bfloat16)
        elif what == "shape":
            model.blocks[0].q_proj = nn.Linear(96, 32, bias=False)
    try:
        with World.current() as world:
            agree_on_shares(world, collect_tensors(model), "first_rank")
    except ShardwiseError as error:
        return type(error).__name__, str(error)
    return "", ""


def error_of_half_a_mesh() -> tuple[str, str]:
    """A process group of half of the ranks among which the model is sharded."""
    model = sharded("flat")
    half = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return "", ""
    try:
        with World.current(half) as world:
            agree_on_shares(world, collect_tensors(model), "first_rank")
    except ShardwiseError as error:
        return type(error).__name__, str(error)
    return "", ""
