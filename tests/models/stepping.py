"""Passes of small models on ranks: blocks that are recomputed, gradients that are clipped."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from tests import truth
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from shardwise.core.errors import ConfigError
from shardwise.fsdp import wrap
from shardwise.fsdp.gradients import average_replicated_gradients, clip_gradients, require_synchronized
from shardwise.fsdp.policies import MinSize
from shardwise.fsdp.wrap import Sharding
from shardwise.ranks.world import World

WORDS = 96


@dataclass
class Batch:
    input_ids: torch.Tensor
    labels: torch.Tensor


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: truth.whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


class Scaled(nn.Module):
    """A stack of blocks with a parameter that has no dimensions and so stays whole on every rank."""

    def __init__(self, blocks: int = 2, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList([ScaledBlock(width) for _ in range(blocks)])
        self.head = nn.Linear(width, WORDS)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return SimpleNamespace(logits=self.head(hidden))


class ScaledBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.scale * torch.tanh(self.linear(hidden))


def qwen3(**changes: Any) -> nn.Module:
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "initializer_range": 0.1}
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**sizes | heads | {"tie_word_embeddings": False} | changes)
    return transformers.Qwen3ForCausalLM(config)


def dropping() -> nn.Module:
    """With dropout in attention and in what follows it."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=3, n_embd=64, n_head=2, vocab_size=WORDS, n_positions=32)
    config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.2
    config._attn_implementation = "eager"
    return transformers.GPT2LMHeadModel(config)


def batch(rows: int = 2, tokens: int = 12, seed: int = 0) -> Batch:
    """Every third token is not learned."""
    torch.manual_seed(seed)
    ids = torch.randint(0, WORDS, (rows, tokens))
    labels = ids.masked_fill(torch.arange(tokens) % 3 == 2, -100)
    return Batch(ids, labels)


def share_of(whole_batch: Batch) -> Batch:
    """This rank's rows; where there are none, one of which nothing is learned."""
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    rows = slice(rank, None, size)
    ids = whole_batch.input_ids[rows]
    if not len(ids):
        ids = torch.zeros((1, 2), dtype=torch.int64)
        return Batch(ids, torch.full_like(ids, -100))
    return Batch(ids, whole_batch.labels[rows])


def hsdp() -> Any:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


def sharded(model: nn.Module, **sharding: Any) -> nn.Module:
    """As ``from_pretrained`` and ``shard`` leave a model; itself where there are no ranks."""
    chosen = Sharding(**{"mesh": wrap.default_mesh()} | sharding)
    wrap.prepare_blocks(model, chosen)
    if chosen.mesh is not None:
        wrap.wrap(model, chosen)
        average_replicated_gradients(model, chosen.mesh)
    return model


def stepped(model: nn.Module, given: Batch) -> tuple[float, float]:
    """The loss and the norm of the gradient, which is clipped."""
    model.zero_grad()
    loss = model(input_ids=given.input_ids, labels=given.labels).loss
    loss.backward()
    return loss.item(), clip_gradients(list(model.parameters()), 0.1)


@contextmanager
def counting(model: nn.Module) -> Iterator[dict[str, int]]:
    """How often each module whose name ends in "mlp" is run."""
    counts: dict[str, int] = {}
    handles = []
    for name, module in model.named_modules():
        if name.endswith("mlp"):

            def count(*_: Any, name: str = name) -> None:
                counts[name] = counts.get(name, 0) + 1

            handles.append(module.register_forward_pre_hook(count))
    yield counts
    for handle in handles:
        handle.remove()


# ── blocks ────────────────────────────────────────────────────────────────────────────────────────


def recomputed(build: Callable[[], nn.Module], sharding: dict[str, Any], every: int) -> dict[str, Any]:
    """A step with and without activation checkpointing, from the same random state."""
    found: dict[str, Any] = {}
    for name, changes in {"kept": {}, "recomputed": {"activation_checkpointing": every}}.items():
        model = sharded(build(), **sharding, **changes).train()
        rank = dist.get_rank() if dist.is_initialized() else 0
        with counting(model) as counts:
            given = share_of(batch(4))
            torch.manual_seed(7 + rank)
            output = model(input_ids=given.input_ids, labels=given.input_ids)
            output.loss.backward()
        found[name] = {
            "loss": output.loss.item(),
            "random": float(torch.rand(())),
            "gradients": gradients(model),
            "names": [name for name, _ in model.named_parameters()],
            "runs": counts,
        }
    return found


def islands() -> nn.Module:
    """In bfloat16 but for its norms, which become groups inside of blocks."""
    model = qwen3(attention_dropout=0.2, attn_implementation="eager").to(torch.bfloat16)
    for module in model.modules():
        if type(module).__name__ == "Qwen3RMSNorm":
            module.float()
    return model


def islands_recomputed() -> dict[str, Any]:
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    return recomputed(islands, {"mp_policy": policy}, 1)


def dropout_recomputed(every: int, offload: bool) -> dict[str, Any]:
    return recomputed(dropping, {"offload_policy": CPUOffloadPolicy()} if offload else {}, every)


# ── steps ─────────────────────────────────────────────────────────────────────────────────────────


class Mixed(nn.Module):
    """Parameters of every placement: replicated, sharded, and both on several meshes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = {
            "plain": (5, 4),
            "scalar": (),
            "fsdp": (7, 4),
            "hybrid": (6, 4),
            "both": (8, 6),
            "experts": (4, 6, 4),
            "rows": (8, 4),
        }
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))


def norms(max_norm: float) -> dict[str, Any]:
    """The norm of gradients that lie on one, two and other meshes, and the gradients after they are clipped."""
    model = Mixed()
    torch.manual_seed(1)
    values = {name: torch.randn(p.shape) * 1.5 for name, p in model.named_parameters()}
    if dist.is_initialized():
        size = dist.get_world_size()
        line = init_device_mesh("cpu", (size,), mesh_dim_names=("fsdp",))
        grid = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
        places = {
            "fsdp": (line, [Shard(0)]),
            "hybrid": (grid, [Replicate(), Shard(0)]),
            "both": (grid, [Shard(0), Shard(1)]),
            "experts": (grid["tensor"], [Shard(0)]),
            "rows": (line, [Shard(0)]),
        }
        for name, (mesh, placements) in places.items():
            value = distribute_tensor(getattr(model, name).data, mesh, placements)
            setattr(model, name, nn.Parameter(value))
            # An embedding that is split by rows (tensor parallelism) has a whole gradient.
            placements = [Replicate()] if name == "rows" else placements
            values[name] = distribute_tensor(values[name], mesh, placements)
    for name, parameter in model.named_parameters():
        parameter.grad = values[name]
    norm = clip_gradients(list(model.parameters()), max_norm)
    return {"norm": norm, "gradients": gradients(model)}


def replicate(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make each parameter a DTensor that is whole on all ranks, as tensor parallelism has norms."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()])))


def unsynchronized() -> list[str]:
    """What is said of models whose ranks would drift apart."""
    world = World.current()
    said = []

    def added() -> nn.Module:
        model = sharded(qwen3())
        for layer in model.model.layers:
            layer.mlp.register_parameter("adapter", nn.Parameter(torch.ones(3)))
        return model

    def on_a_part() -> nn.Module:
        model = qwen3()
        mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("rows", "columns"))
        fully_shard(model, mesh=mesh["rows"])
        return model

    def split() -> nn.Module:
        model = qwen3()
        mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
        replicate(model, mesh["tp"])
        fully_shard(model, mesh=mesh["dp"])
        return model

    def frozen() -> nn.Module:
        return split().requires_grad_(False)

    for build in (added, qwen3, on_a_part, split, frozen):
        try:
            require_synchronized(build(), world.size)
        except ConfigError as error:
            said.append(str(error))
    model = sharded(Scaled())
    require_synchronized(model, world.size)
    require_synchronized(nn.parallel.DistributedDataParallel(qwen3()), world.size)
    require_synchronized(qwen3().requires_grad_(False), world.size)
    return said


def groups(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def resharded(after: Any) -> dict[str, Any]:
    """What is whole between the forward and the backward pass, and the gradients."""
    model = sharded(qwen3(), reshard_after_forward=after, wrap=MinSize(1500))
    given = share_of(batch(4))
    loss = model(input_ids=given.input_ids, labels=given.labels).loss
    layer = model.model.layers[0].mlp.gate_proj.weight
    kept = "whole" if not isinstance(layer, DTensor) else str(tuple(layer.device_mesh.shape))
    loss.backward()
    return {"kept": kept, "gradients": gradients(model), "groups": groups(model)}


def refused_reshard(after: int) -> str:
    try:
        sharded(qwen3(), reshard_after_forward=after)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def averaged_experts() -> list[torch.Tensor | None]:
    """Gradients of four experts of which rank 0 uses the first two, and rank 1 the second and third."""
    torch.manual_seed(0)
    experts = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(4))
    average_replicated_gradients(experts, init_device_mesh("cpu", (2,)))
    rank = dist.get_rank()
    first, second = experts[rank](torch.ones(1, 2)), experts[rank + 1](torch.ones(1, 2))
    ((rank + 1) * (first + second).sum()).backward()
    return [expert.weight.grad for expert in experts]


def averaged(reentrant: bool) -> tuple[int, list[torch.Tensor], list[torch.Tensor]]:
    """All-reduces of two backward passes, the gradients after them, and this rank's own of one pass."""
    torch.manual_seed(0)
    net = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
    rows = torch.full((2, 3), dist.get_rank() + 1.0)

    def run() -> None:
        hidden = net[0](rows)
        hidden = checkpoint(net[1], hidden, use_reentrant=True) if reentrant else net[1](hidden)
        net[2](hidden).square().sum().backward()

    run()
    own = [copy.deepcopy(parameter.grad) for parameter in net.parameters()]
    net.zero_grad()
    average_replicated_gradients(net, init_device_mesh("cpu", (dist.get_world_size(),)))
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums:
        run()
        run()
    return sums.call_count, [parameter.grad for parameter in net.parameters()], own


def summed(divided: Sequence[str]) -> dict[str, torch.Tensor]:
    """Gradients of two passes, with a divisor of the caller's own in some of the groups."""
    net: Any = sharded(Scaled())
    assert groups(net) == ["", "blocks.0", "blocks.1"]
    for name in groups(net):
        net.get_submodule(name).set_force_sum_reduction_for_comms(True)  # gloo has no other
    for name in divided:
        net.get_submodule(name).set_gradient_divide_factor(0.5)
    given = share_of(batch())
    for _ in range(2):
        net(given.input_ids).logits.sum().backward()
    return gradients(net)
