"""Functions that ranks run in tests of state dicts."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from tests import load_cases, truth
from tests.small_checkpoints import small_qwen3
from tests.state import sharding
from tests.support.world import attempt
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

import shardwise
from shardwise import Sharding
from shardwise.fsdp.named_tensors import local_tensor as local
from shardwise.fsdp.named_tensors import raw_bytes
from shardwise.options import Ignore, Initialize
from shardwise.transfer.move import ShardExchange

SMALL = shardwise.options.StateOptions(budget_bytes=4096)


class Attention(nn.Module):
    """What tensor parallelism deals along rows, along columns, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 16)
        self.o_proj = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)


class Even(nn.Module):
    """A model that meshes of two axes share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList([Attention(), Attention()])
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight


def plain(way: str, seed: int) -> nn.Module:
    """The model whole, the same on every rank."""
    if way not in ("tp", "shard1"):
        return sharding.live_model(seed)
    torch.manual_seed(seed)
    return Even()


def sharded(way: str, seed: int) -> nn.Module:
    """The same model as it is trained."""
    model = plain(way, seed)
    if way in ("tp", "shard1"):
        load_cases.MESHES[way](model)
        return model
    offload = Sharding(offload_policy=CPUOffloadPolicy(pin_memory=False))
    shardwise.shard(model, offload if way == "offload" else Sharding(mesh=sharding.mesh_of(way)))
    if way == "wrapped":
        model.blocks[0] = checkpoint_wrapper(model.blocks[0])
        model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
        return torch.compile(model, backend="eager")  # type: ignore[return-value]
    return model


def state_differences(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """What of a full state is not as ``state_dict()`` of the whole model has it."""
    faults = ["other names"] * (list(state) != list(expected))
    for name in state.keys() & expected.keys():
        found, wanted = state[name], expected[name]
        if type(found) is not torch.Tensor or found.device.type != "cpu" or found.requires_grad:
            faults.append(f"{name} is no plain tensor on the CPU")
        elif found.dtype != wanted.dtype or found.shape != wanted.shape:
            faults.append(f"{name} is {found.shape} {found.dtype}")
        elif not torch.equal(raw_bytes(found), raw_bytes(wanted)):
            faults.append(f"{name} has other values")
    return faults


def full_state(way: str) -> list[str]:
    """Faults of what this rank gets, of both forms."""
    model = sharded(way, 1)
    expected = plain(way, 1).state_dict()
    faults = []
    for form in ("full", "full_on_all_ranks"):
        state = shardwise.get_model_state_dict(model, form, options=SMALL)
        own = shardwise.get_model_state_dict(model, "sharded")["embed.weight"]
        if form == "full" and dist.is_initialized() and dist.get_rank() > 0:
            faults += [f"this rank got {name}" for name in state]
            continue
        faults += state_differences(state, expected)
        faults += ["the tie is lost"] * (state["head.weight"] is not state["embed.weight"])
        state["embed.weight"].fill_(77)
        faults += ["shares memory with the model"] * bool((local(own) == 77).any())
    return faults


def large_state() -> list[str]:
    """Replicas send parts of what is larger than 64 KiB; faults of what this rank gets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 1000))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shardwise.shard(model, Sharding(mesh=sharding.mesh_of("hsdp"), wrap="whole_model"))
    return state_differences(shardwise.get_model_state_dict(model, "full_on_all_ranks"), expected)


def part_of(state: dict[str, torch.Tensor], provided_by: str) -> dict[str, torch.Tensor] | None:
    """The state, on the ranks that are to pass it."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    return state if {"first": rank == 0, "last": rank == last}.get(provided_by, True) else None


def there_and_back(way: str, provided_by: str, onto: str) -> tuple[list[str], dict[str, Any]]:
    """A state from one model to another with other values: what then differs from the first, and the report."""
    target = sharded(onto, 2)
    before = [id(parameter) for parameter in target.parameters()]
    if provided_by == "shards":
        state = shardwise.get_model_state_dict(sharded(way, 1), "sharded")
    else:
        state = part_of(shardwise.get_model_state_dict(sharded(way, 1), "full_on_all_ranks"), provided_by)
    report = shardwise.set_model_state_dict(target, state, options=SMALL)
    inner = getattr(target, "_orig_mod", target)
    faults = sharding.differences(inner, plain(way, 1))
    faults = [fault for fault in faults if ".angles" not in fault and (fault, onto) != ("modes changed", "wrapped")]
    if before != [id(parameter) for parameter in target.parameters()]:
        faults.append("parameters are other objects")
    saved = {id(tensor): tensor for tensor in shardwise.get_model_state_dict(target, "sharded").values()}
    own_bytes = sum(local(tensor).nbytes for tensor in {id(t): t for t in saved.values()}.values())
    return faults, report.to_dict() | {"own_bytes": own_bytes}


def in_a_subgroup() -> list[str]:
    """The last and the first rank of three; the one between takes no part."""
    group = dist.new_group([2, 0])
    if dist.get_rank() == 1:
        return []
    options = shardwise.options.StateOptions(process_group=group)
    model = sharding.live_model(1)
    shardwise.shard(model, options=shardwise.options.StateOptions(process_group=group))
    state = shardwise.get_model_state_dict(model, options=options)
    expected = plain("", 1).state_dict()
    faults = state_differences(state, expected if dist.get_rank(group) == 0 else {})
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).zero_()
    shardwise.set_model_state_dict(model, state, options=options)
    return faults + sharding.differences(model, plain("", 1))


def onto_meta() -> tuple[list[str], dict[str, Any]]:
    """Rank 0 has the state, the model is on meta everywhere."""
    state = plain("", 1).state_dict() if dist.get_rank() == 0 else None
    model = sharding.meta_model()
    shardwise.shard(model)
    before = [id(parameter) for parameter in model.parameters()]
    report = shardwise.set_model_state_dict(model, state)
    assert before == [id(parameter) for parameter in model.parameters()]
    faults = [fault for fault in sharding.differences(model, plain("", 1)) if ".angles" not in fault]
    return faults, report.to_dict()


def spoil(fault: str, state: dict[str, torch.Tensor], parts: dict[str, torch.Tensor]) -> Any:
    """A state with something wrong, on this rank."""
    rank = dist.get_rank()
    name = "blocks.1.linear.weight"
    match fault:
        case "missing":
            del state[name], state["blocks.0.norm.bias"]
        case "unexpected":
            state["blocks.2.linear.weight"] = state[name]
        case "shape":
            state[name] = state[name][:, :-1]
        case "kind":
            state["blocks.0.codes"] = state["blocks.0.codes"].float()
        case "absent on rank 1":
            if rank == 1:
                del state[name]
        case "shape on rank 1":
            if rank == 1:
                state[name] = state[name][:-1]
        case "ties":
            state["head.weight"] = state["head.weight"] + 1
        case "ties on rank 1":
            state["head.weight"] = state["head.weight"] + (rank == 1)
        case "meta on rank 1":
            state[name] = state[name].to("meta") if rank == 1 else state[name]
        case "no tensor":
            state[name] = [1.0]
        case "sparse":
            state[name] = torch.eye(5).to_sparse()
        case "no mapping on rank 1":
            return list(state) if rank == 1 else state
        case "twice":
            state[f"_orig_mod.{name}"] = state[name] + 1
        case "nobody":
            return None
        case "parts of several":
            return parts if rank == 1 else state
    return state


def refused(faults: list[str]) -> list[tuple[str, str, str, list[str]]]:
    """For each fault the error of setting such a state, and what it has changed of the model."""
    model, parts = sharded("", 2), shardwise.get_model_state_dict(sharded("", 3), "sharded")
    found = []
    for fault in faults:
        state = spoil(fault, dict(plain("", 1).state_dict()), parts)
        error = attempt(shardwise.set_model_state_dict, model, state)
        found.append((fault, *error, sharding.differences(model, plain("", 2))))
    return found


def tolerated() -> tuple[list[str], dict[str, Any]]:
    """What is ignored keeps its values, and is told."""
    model = sharded("", 2)
    state = dict(plain("", 1).state_dict())
    state["more"] = torch.ones(3)
    del state["blocks.0.norm.bias"], state["head.weight"]
    state["blocks.0.norm.weight"] = torch.ones(9)
    report = shardwise.set_model_state_dict(
        model,
        {f"_orig_mod.{name}": tensor for name, tensor in state.items()},
        on_missing=Ignore(only=("*.norm.bias",)),
        on_unexpected=Ignore(),
        on_mismatched=Ignore(only=("*.norm.weight",)),
    )
    expected = plain("", 1)
    expected.blocks[0].norm = plain("", 2).blocks[0].norm
    faults = sharding.differences(model, expected)
    return [fault for fault in faults if ".angles" not in fault], report.to_dict()


def cast() -> tuple[list[str], dict[str, Any]]:
    model = sharded("", 2)
    state = dict(plain("", 1).state_dict()) if dist.get_rank() == 0 else {}
    for name in state:
        if name.endswith("linear.weight"):
            state[name] = state[name].double()
    report = shardwise.set_model_state_dict(model, state)
    faults = sharding.differences(model, plain("", 1))
    return [fault for fault in faults if ".angles" not in fault], report.to_dict()


def other_models() -> tuple[str, str]:
    model = sharded("", 1)
    if dist.get_rank() == 1:
        model.register_buffer("more", torch.zeros(1))
    return attempt(lambda: shardwise.get_model_state_dict(model))


def other_arguments() -> tuple[str, str]:
    model = sharded("", 1)
    form = "full" if dist.get_rank() == 0 else "full_on_all_ranks"
    return attempt(lambda: shardwise.get_model_state_dict(model, form))


def unknown_choices() -> list[tuple[str, str]]:
    """Errors of setting and getting with arguments that are wrong on rank 1 alone."""
    net = sharding.net_of(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    values = shardwise.get_model_state_dict(net, "full_on_all_ranks")
    settings = shardwise.get_optimizer_state_dict(net, optimizer, "full_on_all_ranks")
    set_model = partial(shardwise.set_model_state_dict, net, values)
    set_optimizer = partial(shardwise.set_optimizer_state_dict, net, optimizer, settings)
    get_model = partial(shardwise.get_model_state_dict, net)
    get_optimizer = partial(shardwise.get_optimizer_state_dict, net, optimizer)
    calls: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        *((call, {"on_missing": Initialize(("*",))}) for call in (set_model, set_optimizer)),
        *((call, {"on_unexpected": "ignore"}) for call in (set_model, set_optimizer)),
        *((call, {"options": None}) for call in (set_model, set_optimizer, get_model, get_optimizer)),
    ]
    errors = []
    for call, choice in calls:
        errors.append(attempt(partial(call, **choice) if dist.get_rank() == 1 else call))
    return errors


def on_half_of_the_mesh() -> tuple[str, str]:
    """A process group of half of the ranks among which the model is sharded."""
    model = sharded("", 1)
    half = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return "", ""
    options = shardwise.options.StateOptions(process_group=half)
    return attempt(lambda: shardwise.get_model_state_dict(model, options=options))


def of_a_half_alone(folder: str) -> list[tuple[str, str]]:
    """Calls of the first rank alone, with a mesh of it and without its process group."""
    group = dist.new_group([0])
    if dist.get_rank():
        return []
    own = Sharding(mesh=DeviceMesh.from_group(group, "cpu"))
    return [
        attempt(lambda: shardwise.shard(sharding.meta_model(), own)),
        attempt(lambda: shardwise.from_pretrained(folder, sharding=own)),
    ]


def without_values() -> tuple[str, str]:
    model = sharding.meta_model()
    shardwise.shard(model)
    return attempt(lambda: shardwise.get_model_state_dict(model))


def staged(budget: int) -> int:
    """The most that one gathering stages on this rank, while the state is much more."""
    model: Any = sharding.Wide(2)
    shardwise.shard(model)
    most = 0
    begin = ShardExchange._step

    def watch(exchange: ShardExchange, *parts: Any) -> None:
        nonlocal most
        begin(exchange, *parts)
        most = max(most, exchange._staging.nbytes)

    with mock.patch.object(ShardExchange, "_step", watch):
        shardwise.get_model_state_dict(model, options=shardwise.options.StateOptions(budget_bytes=budget))
    return most


# Adapters


def lora(seed: int, adapters: tuple[str, ...]) -> nn.Module:
    """A PEFT model of every kind of part: matrices, embeddings, biases, magnitudes, whole modules."""
    torch.manual_seed(seed)
    config = LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"], use_dora=True, bias="lora_only"
    )
    model = get_peft_model(small_qwen3(), config, adapter_name=adapters[0])
    for name in adapters[1:]:
        model.add_adapter(name, LoraConfig(r=2, target_modules=["v_proj"]))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(f".{adapter}" in name for adapter in adapters):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def adapter_state(adapter: str, adapters: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Against PEFT's own on the whole model; and set again, onto another."""
    model = lora(1, adapters)
    expected = {
        name: tensor.detach().clone()
        for name, tensor in get_peft_model_state_dict(model, adapter_name=adapter).items()
    }
    shardwise.shard(model)
    only = shardwise.options.AdapterOnly(adapter)
    state = shardwise.get_model_state_dict(model, "full_on_all_ranks", only=only)
    faults = state_differences(state, expected)
    target = lora(2, adapters)
    shardwise.shard(target)
    base = {
        name: local(tensor).clone() for name, tensor in shardwise.get_model_state_dict(target, "sharded").items()
    }
    shards = shardwise.get_model_state_dict(model, "sharded", only=only)
    given = state if dist.get_rank() == 0 else None
    for brought in (given, shards):
        shardwise.set_model_state_dict(target, brought, only=only)
        faults += state_differences(
            shardwise.get_model_state_dict(target, "full_on_all_ranks", only=only), expected
        )
    now = shardwise.get_model_state_dict(target, "sharded")
    changed = [name for name, tensor in now.items() if not torch.equal(base[name], local(tensor))]
    return faults, changed


def adapter_faults() -> list[tuple[str, str]]:
    model = lora(1, ("default",))
    calls: list[Callable[[], Any]] = [
        lambda: shardwise.get_model_state_dict(model, only=shardwise.options.AdapterOnly("other")),
        lambda: shardwise.get_model_state_dict(sharding.Net(), only=shardwise.options.AdapterOnly()),
    ]
    return [attempt(call) for call in calls]


def onto_meta_of_transformers() -> tuple[list[str], list[str], tuple[str, ...]]:
    """A sharded model on meta: what differs from the real one afterwards, what is on meta, what was computed."""
    real = small_qwen3()
    with torch.device("meta"):
        model = type(real)(real.config)
    shardwise.shard(model)
    report = shardwise.set_model_state_dict(model, real.state_dict() if dist.get_rank() == 0 else None)
    differing = truth.differences(truth.snapshot(model), truth.snapshot(real))
    attributes = [name for name, tensor in model.named_buffers() if tensor.is_meta]
    rotary = model.model.rotary_emb
    attributes += ["original_inv_freq"] if rotary.original_inv_freq.is_meta else []
    return differing, attributes, report.recomputed
