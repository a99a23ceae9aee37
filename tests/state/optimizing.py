"""What the ranks of a test world do with optimizers and their states. Importable, for spawned processes."""

import zlib
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests import load_cases, zoo
from tests.state import sharding
from tests.state.sharding import MAKERS
from tests.state.stating import Even, local, part_of
from tests.support.world import attempt
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import shardwise
from shardwise import Sharding
from shardwise.fsdp.named_tensors import collect_tensors, local_boxes, raw_bytes, strided_view
from shardwise.fsdp.rebind import state_like
from shardwise.options import Ignore

SMALL = shardwise.options.StateOptions(budget_bytes=4096)


class Tied(nn.Module):
    """Uneven rows, a parameter that stays whole, a frozen one, and a head tied to an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1)) for _ in range(2)])
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1][0].bias.requires_grad_(False)


def plain(way: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Even() if way == "tp" else Tied()


def sharded(way: str, seed: int) -> nn.Module:
    model = plain(way, seed)
    if way == "tp":
        load_cases.MESHES[way](model)
    else:
        shardwise.shard(model, Sharding(mesh=sharding.mesh_of(way)))
    return model


def step(model: nn.Module, optimizers: Sequence[Optimizer], seed: int) -> None:
    """With gradients that are the same elements on every sharding; one parameter gets none in the first step."""
    for item in collect_tensors(model):
        if not item.tensor.requires_grad or (seed == 0 and item.fqn == "blocks.0.0.bias"):
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(item.fqn.encode()) + seed)
        whole = torch.randn(item.tensor.shape, generator=generator)
        item.tensor.grad = state_like(item.tensor, item.tensor.dtype)
        for held in local_boxes(item.tensor.grad, item.fqn):
            part = whole
            for dim, (offset, size) in enumerate(zip(held.box.offsets, held.box.sizes, strict=True)):
                part = part.narrow(dim, offset, size)
            strided_view(local(item.tensor.grad), held.local).copy_(part)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def trained(model: nn.Module, maker: str, steps: int) -> list[Optimizer]:
    optimizers = MAKERS[maker](model, 1)
    for seed in range(steps):
        step(model, optimizers, seed)
    return optimizers


def by_name(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """The state of a whole model's optimizers, written out plainly."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = {names[key]: dict(value) for item in optimizers for key, value in item.state.items() if value}
    groups = [
        {**group, "params": [names[key] for key in group["params"]]}
        for item in optimizers
        for group in item.param_groups
    ]
    return {"state": state, "param_groups": groups}


def differences(found: Any, wanted: Any, path: str = "") -> list[str]:
    """What differs, bit for bit."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        faults = [f"{path}: {sorted(found)} for {sorted(wanted)}"] * (found.keys() != wanted.keys())
        for key in found.keys() & wanted.keys():
            faults += differences(found[key], wanted[key], f"{path}/{key}")
        return faults
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        return [
            fault
            for i, (a, b) in enumerate(zip(found, wanted, strict=True))
            for fault in differences(a, b, f"{path}/{i}")
        ]
    if isinstance(found, torch.Tensor) and isinstance(wanted, torch.Tensor):
        if isinstance(found, DTensor) != isinstance(wanted, DTensor) or found.dtype != wanted.dtype:
            return [f"{path}: {type(found).__name__} {found.dtype}"]
        if isinstance(found, DTensor) and found.placements != wanted.placements:
            return [f"{path}: {found.placements}"]
        same = found.shape == wanted.shape and torch.equal(raw_bytes(local(found)), raw_bytes(local(wanted)))
        return [] if same else [f"{path}: other values"]
    return [] if type(found) is type(wanted) and found == wanted else [f"{path}: {found!r} for {wanted!r}"]


def in_order(state: dict[str, Any]) -> dict[str, Any]:
    """Groups and parameters sorted by name: neither order means anything."""
    groups = [{**group, "params": sorted(group["params"])} for group in state["param_groups"]]
    return {"state": state["state"], "param_groups": sorted(groups, key=lambda group: group["params"])}


def full_state(way: str, maker: str) -> list[str]:
    """Against the whole model's, on every rank and on the first alone."""
    model = sharded(way, 1)
    optimizers = trained(model, maker, 2)
    whole = plain(way, 1)
    expected = by_name(whole, trained(whole, maker, 2))
    given: Any = optimizers[0] if len(optimizers) == 1 else optimizers
    every = shardwise.get_optimizer_state_dict(model, given, "full_on_all_ranks", options=SMALL)
    first = shardwise.get_optimizer_state_dict(model, given, "full", options=SMALL)
    faults = differences(every, expected)
    faults += differences(first, expected if not dist.is_initialized() or dist.get_rank() == 0 else {})
    held = {id(value) for item in optimizers for values in item.state.values() for value in values.values()}
    taken = {id(value) for values in every["state"].values() for value in values.values()}
    return faults + ["the optimizers' own tensors were given away"] * bool(held & taken)


def against_torch(maker: str) -> list[str]:
    """Both forms, and both ways."""
    model = sharded("", 1)
    optimizers = trained(model, maker, 2)
    whole = StateDictOptions(full_state_dict=True)
    theirs = get_optimizer_state_dict(model, optimizers, options=whole)
    ours = shardwise.get_optimizer_state_dict(model, optimizers, "full_on_all_ranks")
    faults = differences(ours, theirs, "full")
    sharded_theirs = get_optimizer_state_dict(model, optimizers)
    faults += differences(
        shardwise.get_optimizer_state_dict(model, optimizers, "sharded"), sharded_theirs, "sharded"
    )
    for name, state in (("theirs", theirs), ("their shards", sharded_theirs)):
        target = sharded("", 1)
        fresh = MAKERS[maker](target, 0.5)
        shardwise.set_optimizer_state_dict(target, fresh, state)
        again = shardwise.get_optimizer_state_dict(target, fresh, "full_on_all_ranks")
        faults += differences(in_order(again), in_order(ours), name)
    target = sharded("", 1)
    fresh = MAKERS[maker](target, 1)
    with zoo.silenced():
        set_optimizer_state_dict(target, fresh, ours, options=whole)
    again = shardwise.get_optimizer_state_dict(target, fresh, "full_on_all_ranks")
    for group in again["param_groups"]:  # which torch makes lists
        if "betas" in group:
            group["betas"] = tuple(group["betas"])
    return faults + differences(again, ours, "ours")


def refuse_to_step(*args: Any, **keywords: Any) -> None:
    raise AssertionError("a step was taken")


def there_and_back(way: str, maker: str, provided_by: str, onto: str) -> tuple[list[str], dict[str, Any]]:
    """Trained, handed over to a model and optimizers that are set up in another order, and trained on."""
    source = sharded(way, 1)
    optimizers = trained(source, maker, 2)
    target = sharded(onto, 2)
    theirs = MAKERS[maker](target, 0.5)
    if provided_by == "shards":
        values = shardwise.get_model_state_dict(source, "sharded")
        state: Any = shardwise.get_optimizer_state_dict(source, optimizers, "sharded")
    else:
        values = shardwise.get_model_state_dict(source, "full_on_all_ranks")
        state = part_of(shardwise.get_optimizer_state_dict(source, optimizers, "full_on_all_ranks"), provided_by)
    shardwise.set_model_state_dict(target, values)
    with mock.patch.object(Optimizer, "step", refuse_to_step):
        report = shardwise.set_optimizer_state_dict(target, theirs, state, options=SMALL)
    whole = plain(way, 1)
    whole_optimizers = trained(whole, maker, 2)
    expected = in_order(by_name(whole, whole_optimizers))
    faults = differences(
        in_order(shardwise.get_optimizer_state_dict(target, theirs, "full_on_all_ranks")), expected
    )
    step(target, theirs, 5)
    step(whole, whole_optimizers, 5)
    faults += differences(
        shardwise.get_model_state_dict(target, "full_on_all_ranks"), dict(whole.state_dict()), "then"
    )
    for parameter, values in ((p, v) for item in theirs for p, v in item.state.items()):
        for entry, value in values.items():
            if isinstance(parameter, DTensor) and entry != "step":
                faults += [f"{entry} is not sharded as its parameter"] * (
                    not isinstance(value, DTensor) or value.placements != parameter.placements
                )
    return faults, report.to_dict()


def spoil(fault: str, state: dict[str, Any]) -> Any:
    rank = dist.get_rank()
    values, groups = state["state"], state["param_groups"]
    match fault:
        case "group":
            groups[0]["params"].append(groups[1]["params"].pop())
        case "missing":
            name = groups[0]["params"].pop()
            values.pop(name)
        case "unexpected":
            groups[0]["params"].append("blocks.9.weight")
        case "twice":
            groups[0]["params"].append(groups[0]["params"][0])
        case "lost moment":
            del values["blocks.0.0.weight"]["exp_avg"]
        case "shape":
            values["blocks.0.0.weight"]["exp_avg"] = torch.zeros(4, 5)
        case "numbers":
            groups[0]["params"] = list(range(len(groups[0]["params"])))
        case "layout":
            return values
        case "flattened":
            return {"state.embed.weight.step": 1.0, "param_groups.embed.weight.lr": 0.1}
        case "object":
            values["blocks.0.0.weight"]["exp_avg"] = [1.0]
        case "lost moment on rank 1":
            if rank == 1:
                del values["blocks.0.0.weight"]["exp_avg"]
        case "meta on rank 1":
            if rank == 1:
                values["blocks.0.0.weight"]["exp_avg"] = torch.zeros(7, 5, device="meta")
        case "nobody":
            return None
    return state


def refused(fault: str) -> tuple[str, str, list[str]]:
    """The error, and what has changed of the optimizer."""
    model = sharded("", 1)
    optimizers = trained(model, "adamw", 2)
    before = shardwise.get_optimizer_state_dict(model, optimizers, "full_on_all_ranks")
    state = spoil(fault, shardwise.get_optimizer_state_dict(model, optimizers, "full_on_all_ranks"))
    kind, text = attempt(lambda: shardwise.set_optimizer_state_dict(model, optimizers, state))
    after = shardwise.get_optimizer_state_dict(model, optimizers, "full_on_all_ranks")
    return kind, text, differences(after, before)


def tolerated() -> tuple[list[str], dict[str, Any]]:
    """A parameter that the state does not know, one that it knows beside, and one whose moments do not fit."""
    model = sharded("", 1)
    optimizers = trained(model, "adamw", 2)
    before = shardwise.get_optimizer_state_dict(model, optimizers, "full_on_all_ranks")
    step(model, optimizers, 5)
    expected = shardwise.get_optimizer_state_dict(model, optimizers, "full_on_all_ranks")
    for name in ("embed.weight", "blocks.0.0.weight"):
        before["param_groups"][0]["params"].remove(name)
    before["param_groups"][0]["params"] += ["old.weight", "_orig_mod.head.weight"]
    before["state"]["head.weight"] = before["state"].pop("embed.weight")
    del before["state"]["blocks.0.0.weight"]
    before["state"]["old.weight"] = {"step": torch.tensor(1.0), "exp_avg": torch.ones(3)}
    before["state"]["blocks.1.0.weight"]["exp_avg"] = torch.ones(3)
    report = shardwise.set_optimizer_state_dict(
        model,
        optimizers,
        before,
        on_missing=Ignore(only=("blocks.0.0.weight",)),
        on_unexpected=Ignore(only=("old.*",)),
        on_mismatched=Ignore(only=("blocks.1.0.weight: exp_avg",)),
    )
    after = shardwise.get_optimizer_state_dict(model, optimizers, "full_on_all_ranks")
    kept = {"blocks.0.0.weight": expected["state"]["blocks.0.0.weight"]}
    moment = {"exp_avg": expected["state"]["blocks.1.0.weight"]["exp_avg"]}
    wanted = before["state"] | kept
    wanted["blocks.1.0.weight"] = wanted["blocks.1.0.weight"] | moment
    wanted["embed.weight"] = wanted.pop("head.weight")
    del wanted["old.weight"]
    return differences(after["state"], wanted), report.to_dict()


def without_state() -> tuple[list[str], tuple[str, ...]]:
    """A parameter that had no gradient has no state, there and here."""
    model = sharded("", 1)
    optimizers = MAKERS["adamw"](model, 1)
    step(model, optimizers, 0)
    state = shardwise.get_optimizer_state_dict(model, optimizers, "full_on_all_ranks")
    target = sharded("", 2)
    fresh = MAKERS["adamw"](target, 1)
    report = shardwise.set_optimizer_state_dict(target, fresh, state)
    found = shardwise.get_optimizer_state_dict(target, fresh, "full_on_all_ranks")
    return differences(found, state), report.without_state


def wider() -> tuple[dict[str, Any], list[str]]:
    """State in half precision, for parameters in single."""
    model = sharded("", 1)
    optimizers = trained(model, "adamw", 2)
    state = shardwise.get_optimizer_state_dict(model, optimizers, "full_on_all_ranks")
    for values in state["state"].values():
        values["exp_avg"] = values["exp_avg"].bfloat16()
    fresh = MAKERS["adamw"](model, 1)
    report = shardwise.set_optimizer_state_dict(model, fresh, state)
    found = shardwise.get_optimizer_state_dict(model, fresh, "full_on_all_ranks")
    for values in state["state"].values():
        values["exp_avg"] = values["exp_avg"].float()
    return report.to_dict(), differences(found["state"], state["state"])


def other_setup() -> tuple[str, str]:
    model = sharded("", 1)
    optimizers = trained(model, "adamw", 2)
    if dist.get_rank() == 1:
        optimizers[0].state.popitem()
    return attempt(lambda: shardwise.get_optimizer_state_dict(model, optimizers))
