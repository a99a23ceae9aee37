"""Functions that ranks run in tests of ``shard``."""

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests import truth
from tests.loading.on_ranks import batch, bring_up, loss_and_gradients
from tests.quantized.requirements import SHARDS_PACKED
from tests.support.world import attempt
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

import shardwise
from shardwise.fsdp.named_tensors import collect_tensors, local_boxes, local_tensor, raw_bytes, strided_view
from shardwise.fsdp.wrap import Sharding


class Table(nn.Module):
    """Nothing but buffers: one that is saved, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("angles", torch.zeros(7), persistent=False)


class Mixed(nn.Module):
    """Parameters of every kind, in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(5)  # a float32 island
        self.experts = nn.Parameter(torch.zeros(2, 12, 3, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.zeros((), dtype=torch.bfloat16))
        if SHARDS_PACKED:
            self.codes = nn.Parameter(torch.zeros(9, 2, dtype=torch.int32), requires_grad=False)
        self.packed = nn.Parameter(torch.zeros(7, 4, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.frozen = nn.Parameter(torch.zeros(3, 4, dtype=torch.bfloat16), requires_grad=False)
        self.registers = nn.Parameter(torch.zeros(1, 0, 4, dtype=torch.bfloat16), requires_grad=False)
        self.table = Table()


class Model(nn.Module):
    """Two blocks, and an embedding tied to a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList([Mixed(), Mixed()])
        self.head = nn.Linear(4, 11, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight


def live_model(seed: int = 0) -> Model:
    """Random numbers, the same on every rank that asks."""
    model = Model()
    transposed = torch.zeros(4, 3, dtype=torch.bfloat16).t()  # fully_shard itself would refuse it
    model.blocks[1].frozen = nn.Parameter(transposed, requires_grad=False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.copy_(torch.randint(-8, 8, tensor.shape, generator=generator))
    return marked(model)


def marked(model: Model) -> Model:
    """With what a parameter may have beside its values, and blocks in two modes."""
    model.blocks[0].linear.weight.note = "kept"  # type: ignore[assignment]
    model.blocks[1].linear.weight.grad_dtype = torch.float32
    model.blocks[0].scale.grad_dtype = torch.float32
    model.blocks[1].experts.grad_dtype = None
    model.blocks[1].eval()
    return model


def meta_model() -> Model:
    with torch.device("meta"):
        return marked(Model())


def save(folder: str) -> None:
    """The model as a checkpoint."""
    from safetensors.torch import save_file

    state = {name: tensor.contiguous().clone() for name, tensor in live_model().state_dict().items()}
    del state["head.weight"]
    save_file(state, Path(folder) / "model.safetensors")


def mesh_of(kind: str) -> Any:
    if kind == "hsdp":
        return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return None


def differences(model: nn.Module, expected: nn.Module) -> list[str]:
    """What of this rank's part of a model is not, bit for bit, the same part of a whole one."""
    found = collect_tensors(model)
    wanted = {item.fqn: item for item in collect_tensors(expected)}
    faults = [f"only one has {item.names}" for item in found if item.fqn not in wanted]
    faults += [f"absent: {name}" for name in wanted.keys() - {item.fqn for item in found}]
    for item in found:
        other = wanted[item.fqn]
        if (item.names, item.kind, item.tensor.dtype, item.tensor.requires_grad) != (
            other.names,
            other.kind,
            other.tensor.dtype,
            other.tensor.requires_grad,
        ):
            faults.append(f"{item.fqn} is {item.names}, {item.kind}, {item.tensor.dtype}")
        if vars(item.tensor).get("note") != vars(other.tensor).get("note"):
            faults.append(f"{item.fqn} has lost its attribute")
        # Before torch 2.15, fully_shard knew nothing of it.
        knows = not isinstance(item.tensor, DTensor) or hasattr(torch.Tensor, "_has_grad_dtype_override")
        if knows and item.tensor.grad_dtype != other.tensor.grad_dtype:
            faults.append(f"{item.fqn} takes gradients of {item.tensor.grad_dtype}")
        if item.tensor.is_meta or item.tensor.shape != other.tensor.shape:
            faults.append(f"{item.fqn} is on meta, or has another shape")
            continue
        for held in local_boxes(item.tensor, item.fqn):
            part = other.tensor.detach()
            for dim, (offset, size) in enumerate(zip(held.box.offsets, held.box.sizes, strict=True)):
                part = part.narrow(dim, offset, size)
            if not torch.equal(raw_bytes(strided_view(item.local, held.local)), raw_bytes(part)):
                faults.append(f"{item.fqn} has other values")
    modes = [module.training for module in model.modules()]
    return faults + ["modes changed"] * (modes != [module.training for module in expected.modules()])


def is_live(state: str) -> bool:
    rank = dist.get_rank() if dist.is_initialized() else 0
    match state:
        case "everywhere" | "compiled":
            return True
        case "first":
            return rank == 0
        case "last":
            return rank == dist.get_world_size() - 1
        case "nodes":
            return rank in (1, 2)
        case _:
            return False


def shard_from(state: str, mesh: str, folder: str) -> tuple[list[str], dict[str, Any]]:
    """Shard a model that starts in a certain state; what differs from the whole one, and the report."""
    model = live_model() if is_live(state) else meta_model()
    if state == "buffers":
        for block, source in zip(model.blocks, live_model().blocks, strict=True):
            block.table = source.table
            block.table.training = block.training
    given: nn.Module = torch.compile(model, backend="eager") if state == "compiled" else model  # type: ignore[assignment]
    options = shardwise.options.StateOptions(budget_bytes=4096)
    report = shardwise.shard(given, Sharding(mesh=mesh_of(mesh)), options=options)
    if state in ("meta", "buffers"):
        assert {f"blocks.{n}.linear.weight" for n in (0, 1)} <= set(report.on_meta)
        shardwise.load(model, folder, buffers={"*.angles": table_values})
    faults = differences(model, live_model())
    if dist.is_initialized():
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        faults += ["no groups"] * (len(sharded) < 5)
        faults += ["not sharded"] * (not isinstance(model.blocks[0].experts, DTensor))
    again = shardwise.shard(given, Sharding(mesh=mesh_of(mesh)))
    if again.was_sharded != dist.is_initialized():
        faults.append("sharded twice")
    return faults, report.to_dict()


def table_values(module: nn.Module) -> torch.Tensor:
    """What computes the angles of the first table that is asked for, and then of the second."""
    tables = [block.table.angles for block in live_model().blocks]
    return tables.pop(0) if module.training else tables.pop(1)


def other_values() -> tuple[list[str], dict[str, Any]]:
    """Every rank has a head of its own, and rank 1 another buffer."""
    model = live_model()
    with torch.no_grad():
        model.embed.weight.fill_(dist.get_rank())
        model.blocks[0].table.angles += dist.get_rank() == 1
    report = shardwise.shard(model)
    expected = live_model()
    nn.init.zeros_(expected.embed.weight)
    return differences(model, expected), report.to_dict()


def other_dtypes() -> tuple[list[str], dict[str, Any]]:
    """Rank 0 has the values, in other dtypes than the others' models."""
    if dist.get_rank() == 0:
        model = live_model()
        model.blocks[0].linear.to(torch.float32)
    else:
        model = meta_model()
        if SHARDS_PACKED:
            model.blocks[1].codes = nn.Parameter(
                torch.zeros(9, 2, dtype=torch.int64, device="meta"), requires_grad=False
            )
        model.blocks[1].packed = nn.Parameter(
            torch.zeros(7, 4, dtype=torch.bfloat16, device="meta"), requires_grad=False
        )
    report = shardwise.shard(model)
    return differences(model, live_model()), report.to_dict()


def upcast(state: str) -> tuple[list[str], dict[str, Any]]:
    model = live_model() if is_live(state) else meta_model()
    report = shardwise.shard(model, trained_dtype=torch.float32)
    expected = live_model()
    for parameter in expected.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return differences(model, expected), report.to_dict()


def offload() -> list[str]:
    model = live_model() if is_live("first") else meta_model()
    shardwise.shard(model, Sharding(offload_policy=CPUOffloadPolicy(pin_memory=False)))
    return differences(model, live_model())


def partly_live() -> tuple[list[str], tuple[str, ...]]:
    """No rank has values for one parameter, and only the last one for a buffer."""
    there = dist.get_rank() == dist.get_world_size() - 1
    model = live_model() if is_live("first") else meta_model()
    with torch.device("meta"):
        model.blocks[0].linear.bias = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
    model.blocks[1].table.angles = live_model().blocks[1].table.angles.to("cpu" if there else "meta")
    report = shardwise.shard(model)
    return differences(model, live_model()), report.on_meta


def against_from_pretrained(directory: str) -> tuple[list[str], list[str]]:
    """A transformers model that rank 0 has loaded, against one that all ranks have: values, and gradients."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if dist.get_rank() == 0:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
        model.eval()
    shardwise.shard(model)
    other = bring_up(directory, dtype=torch.float32)
    tokens = batch(model.config.vocab_size, rows=2, seed=dist.get_rank())
    found, wanted = loss_and_gradients(model, tokens), loss_and_gradients(other, tokens)
    assert len(found) > 5
    assert found.keys() == wanted.keys()
    one, two = (truth.snapshot(item) for item in (model, other))
    return truth.differences(one, two), [name for name in found if not torch.equal(found[name], wanted[name])]


# What cannot be


def spoiled(fault: str) -> nn.Module:
    """A model with something wrong with it, perhaps on rank 1 only."""
    there = dist.get_rank() == 1
    model: Any = live_model() if dist.get_rank() == 0 else meta_model()
    if fault == "another architecture" and there:
        model.blocks.append(Mixed())
    elif fault == "another shape" and there:
        model = live_model()
        model.blocks[0].experts = nn.Parameter(torch.zeros(2, 12, 4, dtype=torch.bfloat16))
    elif fault == "untied" and there:
        with torch.device("meta"):
            model.head.weight = nn.Parameter(torch.zeros(11, 4, dtype=torch.bfloat16))
    elif fault == "frozen" and there:
        model.blocks[0].experts.requires_grad_(False)
    elif fault == "other gradients" and there:
        model.blocks[0].experts.grad_dtype = torch.float32
    elif fault == "in part":
        model = live_model()
        fully_shard(model.blocks[0].linear)
    elif fault == "FSDP1":
        model = live_model()
        model.blocks[0].linear = FullyShardedDataParallel(model.blocks[0].linear, device_id=torch.device("cpu"))
    elif fault == "sharded on one rank":
        model = live_model()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if there:
            fully_shard(model, mesh=mesh, ignored_params=set(model.parameters()))
    elif fault == "gradient":
        model = live_model()
        if there:
            model.blocks[1].scale.grad = torch.zeros((), dtype=torch.bfloat16)
    elif fault == "shared memory":
        model = live_model()
        model.head.weight = nn.Parameter(model.embed.weight.data)
    elif fault == "subclass":
        model = live_model()
        model.blocks[0].experts = Special(torch.zeros(2, 12, 3))
    return model


class Special(nn.Parameter):
    """A parameter whose class means something."""


def refused(fault: str, keywords: dict[str, Any]) -> tuple[str, str, bool]:
    """(kind, text) of the error, and whether the model is as it was."""
    model = spoiled(fault)
    before = list(model.parameters())
    kind, text = attempt(lambda: shardwise.shard(model, **keywords))
    same = all(one is other for one, other in zip(model.parameters(), before, strict=True))
    return kind, text, same


def refused_settings(fault: str) -> tuple[str, str, list[str]]:
    """(kind, text) of the error, and what has changed of a model and its optimizer with state."""
    net, count = net_of(0), dist.get_world_size()
    optimizers = momentum(net)
    train(net, optimizers, [], range(1))
    expected, groups = copy.deepcopy(net), [list(group["params"]) for group in optimizers[0].param_groups]
    settings: dict[str, Any] = {
        "divisor": {"reshard_after_forward": count + 1},
        "backend": {"compile": {"backend": "nosuch"}},
        "keyword": {"compile": {"nosuch": 1}},
    }
    if fault == "axes":
        sharding = Sharding(mesh=init_device_mesh("cpu", (1, 1, count), mesh_dim_names=("a", "b", "c")))
    elif fault == "tp":
        sharding = Sharding(mesh=init_device_mesh("cpu", (count,), mesh_dim_names=("tp",)))
    else:
        sharding = Sharding(**settings[fault])
    kind, text = attempt(lambda: shardwise.shard(net, sharding, optimizers=optimizers))
    faults = differences(net, expected)
    for params, group in zip(groups, optimizers[0].param_groups, strict=True):
        if list(map(id, params)) != list(map(id, group["params"])):
            faults.append("other parameters in a group")
    return kind, text, faults + ["no state"] * (len(optimizers[0].state) != len(groups[0]))


def other_arguments() -> tuple[str, str]:
    options = shardwise.options.StateOptions(budget_bytes=4096 << dist.get_rank())
    return attempt(lambda: shardwise.shard(live_model(), options=options))


@dataclass(frozen=True)
class WithFunction(MixedPrecisionPolicy):
    """As torch 2.15 has it; before, FSDP2 does not ask the function."""

    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = None


def a_function_in_the_policy() -> tuple[bool, bool]:
    """Whether the model is sharded, and whether the functions of the ranks lie in different places."""
    functions = [lambda parameter: None for _ in range(dist.get_rank() + 1)]
    places: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(places, id(functions[-1]))
    policy = WithFunction(param_dtype=torch.float32, param_dtype_override_fn=functions[-1])
    model = live_model()
    shardwise.shard(model, Sharding(mp_policy=policy))
    return isinstance(model, FSDPModule), len(set(places)) > 1


# Optimizers


class Net(nn.Module):
    """A small net whose rows no number of ranks shares evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(2)])
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(5, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            rows = rows + block(rows)
        return self.head(rows) * self.gain


def adamw(model: nn.Module, change: float = 1) -> list[Optimizer]:
    """Frozen parameters are in a group, too."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1 * change, "name": "matrices"},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02 * change},
    ]
    return [AdamW(groups[:: 1 if change == 1 else -1], lr=0.01 * change, betas=(0.8 * change, 0.95), foreach=False)]


def fused_adam(model: nn.Module) -> list[Optimizer]:
    return [Adam(model.parameters(), lr=0.01, fused=True)]


def momentum(model: nn.Module, change: float = 1) -> list[Optimizer]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [SGD(parameters[:: 1 if change == 1 else -1], lr=0.05 * change, momentum=0.9, nesterov=True)]


def two(model: nn.Module, change: float = 1) -> list[Optimizer]:
    blocks = {*model.blocks.parameters()}
    others = [p for p in model.parameters() if p not in blocks]
    made = [SGD([*model.blocks.parameters()], lr=0.05 * change, momentum=0.9), AdamW(others, lr=0.02, amsgrad=True)]
    return made[:: 1 if change == 1 else -1]


def tensor_lr(model: nn.Module, change: float = 1) -> list[Optimizer]:
    return [Adam(model.parameters(), lr=torch.tensor(0.01 * change), foreach=False)]


MAKERS: dict[str, Callable[..., list[Optimizer]]] = {
    "adamw": adamw,
    "momentum": momentum,
    "two": two,
    "tensor_lr": tensor_lr,
}
"""Optimizers of a model; with a ``change`` other than 1, with other settings and in another order."""


def net_of(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def train(net: nn.Module, optimizers: list[torch.optim.Optimizer], schedulers: list[Any], steps: range) -> None:
    """Steps on six rows each, which the ranks share."""
    world = dist.get_world_size() if isinstance(net, FSDPModule) else 1
    rank = dist.get_rank() if world > 1 else 0
    for step in steps:
        rows = torch.randn(12, 5, generator=torch.Generator().manual_seed(step))
        share = rows[rank * 12 // world : (rank + 1) * 12 // world]
        net(share).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()


def train_across(maker: str, state: str) -> dict[str, Any]:
    """Three steps whole, then sharded, then three more; against six steps whole."""
    whole = net_of(0)
    makers = {**MAKERS, "fused": fused_adam}
    theirs = makers[maker](whole)
    train(whole, theirs, [torch.optim.lr_scheduler.StepLR(item, 2, 0.5) for item in theirs], range(6))
    if is_live(state):
        net = net_of(0)
    else:
        with torch.device("meta"):
            net = Net()
    mine = makers[maker](net)
    schedulers = [torch.optim.lr_scheduler.StepLR(item, 2, 0.5) for item in mine]
    if is_live(state):
        train(net, mine, schedulers, range(3))
    else:
        for item, scheduler in zip(mine, schedulers, strict=True):
            item.step()  # of nothing: no parameter has a gradient
            for _ in range(3):
                scheduler.step()
    settings = [
        [{key: value for key, value in group.items() if key != "params"} for group in item.param_groups]
        for item in mine
    ]
    report = shardwise.shard(net, optimizers=mine)
    kept = [
        [{key: value for key, value in group.items() if key != "params"} for group in item.param_groups]
        for item in mine
    ]
    assert settings == kept
    held = {id(parameter) for parameter in net.parameters()}
    assert all(id(p) in held for item in mine for group in item.param_groups for p in group["params"])
    for item in mine:
        for parameter, values in item.state.items():
            for name, value in values.items():
                if name != "step" and value is not None:
                    assert type(value) is (DTensor if isinstance(parameter, DTensor) else torch.Tensor), name
    train(net, mine, schedulers, range(3, 6))
    gaps = [
        float((truth.whole(one) - other).abs().max())
        for one, other in zip(net.parameters(), whole.parameters(), strict=True)
    ]
    moved = [
        float((other - start).abs().max())
        for other, start in zip(whole.parameters(), net_of(0).parameters(), strict=True)
    ]
    return {"gap": max(gaps), "moved": min(moved), "rebound": report.rebound}


def other_scalars() -> tuple[dict[str, int], float]:
    """What is reported as different, and a scalar that differs behind the digits that torch prints."""
    net = net_of(0)
    optimizer = SGD(net.parameters(), lr=0.1)
    optimizer.state[net.head.weight] = {"scale": torch.tensor(1.5 + 1e-6 * dist.get_rank())}
    report = shardwise.shard(net, optimizers=(optimizer,))
    return dict(report.differed), float(optimizer.state[net.head.weight]["scale"])


def load_after(folder: str) -> list[str]:
    """An optimizer made of parameters on meta holds those that a load then fills."""
    with torch.device("meta"):
        net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    report = shardwise.shard(net, optimizers=(optimizer,))
    assert set(report.awaiting_load) == {name for name, _ in net.named_parameters()}
    assert all(local_tensor(parameter).isnan().all() for parameter in net.parameters())
    shardwise.load(net, folder)
    assert all(
        one is other for one, other in zip(optimizer.param_groups[0]["params"], net.parameters(), strict=True)
    )
    return differences(net, net_of(3))


def mean_gradient_of_whole(folder: str) -> list[float]:
    """Gradients of a parameter that stays whole, after a load onto meta, with other rows on every rank."""
    with torch.device("meta"):
        net = Net()
    shardwise.shard(net)
    shardwise.load(net, folder)
    rows = torch.full((2, 5), float(dist.get_rank()))
    net(rows).mean().backward()
    whole = net_of(3)
    torch.stack(
        [whole(torch.full((2, 5), float(rank))).mean() for rank in range(dist.get_world_size())]
    ).mean().backward()
    return [float(net.gain.grad), float(whole.gain.grad)]


def strange_optimizer(fault: str) -> tuple[str, str]:
    net = net_of(0)
    parameters = list(net.parameters())
    given: Any = ()
    if fault == "another model":
        given = (torch.optim.SGD(net_of(0).named_parameters(), lr=0.1),)
    elif fault == "twice":
        given = (torch.optim.SGD(parameters, lr=0.1), torch.optim.SGD(parameters[1:2], lr=0.1))
    elif fault == "factored":
        given = (torch.optim.SGD(parameters, lr=0.1, momentum=0.9),)
        given[0].state[net.head.weight] = {"rows": torch.zeros(3)}
    elif fault == "history":
        given = (torch.optim.SGD(parameters, lr=0.1),)
        given[0].state[net.head.weight] = {"old": [torch.zeros(3, 5)]}
    elif fault == "not a sequence":
        given = torch.optim.SGD(parameters, lr=0.1)
    elif fault == "other settings":
        given = (torch.optim.SGD(parameters, lr=0.1 + dist.get_rank()),)
    elif fault == "other order":
        given = (torch.optim.SGD(parameters[:: 1 - 2 * dist.get_rank()], lr=0.1),)
    elif fault == "stale":
        shardwise.shard(net)
        given = (torch.optim.SGD(net_of(0).parameters(), lr=0.1),)
    return attempt(lambda: shardwise.shard(net, optimizers=given))


# Memory


def _rss_anon() -> int:
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


class Wide(nn.Module):
    """Blocks of 8 MiB of float32."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(1024, 2048, bias=False) for _ in range(blocks)])


def memory(budget: int, blocks: int) -> dict[str, int]:
    """How much the anonymous memory of this rank grows, at its peak, in sharding a model that rank 0 has."""
    import threading

    if dist.get_rank() == 0:
        model = Wide(blocks)
    else:
        with torch.device("meta"):
            model = Wide(blocks)
    shardwise.shard(net_of(0))  # imports, threads and process groups
    gc.collect()
    dist.barrier()
    before, peak, done = _rss_anon(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, _rss_anon())

    watcher = threading.Thread(target=watch)
    watcher.start()
    report = shardwise.shard(model, options=shardwise.options.StateOptions(budget_bytes=budget))
    done.set()
    watcher.join()
    after = _rss_anon()
    return {
        "grown": max(peak, after) - before,
        "left": after - before,
        "shards": report.placed_bytes,
        "staging": report.staging_bytes,
    }
