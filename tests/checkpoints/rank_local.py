"""Trainings by optimizers of torchao, in workers that have it, for the tests of their checkpoints."""

import importlib
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.loading.on_ranks import attempt
from tests.peers import use_peers
from tests.quiet import quieten
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardwise
from shardwise import Checkpointer, TrainState
from shardwise.fsdp.named_tensors import local_tensor, raw_bytes
from shardwise.fsdp.rebind import inner_tensors

KINDS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")


def call(what: str, *args: Any) -> Any:
    use_peers("bitsandbytes", "torchao")
    return globals()[what](*args)


def _begin(name: str, rows: int = 256, home: str = "torchao", device: str = "cpu") -> tuple[Any, Any]:
    quieten()
    warnings.simplefilter("ignore")
    torch.compiler.set_stance("force_eager")
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(nn.Linear(64, rows), nn.LayerNorm(rows))
    if dist.is_initialized() and dist.get_world_size() > 1:
        fully_shard(model)
    return model, getattr(importlib.import_module(f"{home}.optim"), name)(model.parameters(), lr=1e-2)


def _step(model: Any, optimizer: Any, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    model(torch.randn(3, 64, generator=draw).to(model[0].weight.device)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _taken(model: Any, optimizer: Any) -> dict[str, Any]:
    """All that this rank has, as bytes."""
    found = {name: raw_bytes(local_tensor(value)).tolist() for name, value in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for entry, value in optimizer.state[parameter].items():
            parts = inner_tensors(value) if isinstance(value, torch.Tensor) else {"": torch.tensor(value)}
            found |= {f"{name}: {entry} {part}": raw_bytes(each).tolist() for part, each in parts.items()}
    return found


def save_each(folder: str, cases: list[tuple[str, str]], rows: int = 256) -> dict[str, Any]:
    """Save after two steps; whether what is restored, and what it does next, is equal bit by bit."""
    told: dict[str, Any] = {}
    for name, home in cases:
        own = Path(folder, f"{name} {rows}")
        model, optimizer = _begin(name, rows, home)
        _step(model, optimizer, 0)
        _step(model, optimizer, 1)
        Checkpointer(own).save(2, TrainState(model, optimizer))
        before = _taken(model, optimizer)
        hollow = _begin(name, rows, home, "meta")
        found = {}
        for how, (other, its) in (("fresh", _begin(name, rows, home)), ("meta", hollow)):
            Checkpointer(own).restore(TrainState(other, its))
            found[how] = _taken(other, its) == before
            _step(other, its, 2)
            found[f"{how}, again"] = Checkpointer(own).restore(TrainState(other, its)).mismatched == ()
            found[f"{how}, as saved"] = _taken(other, its) == before
            _step(other, its, 2)
        _step(model, optimizer, 2)
        found["goes on"] = _taken(model, optimizer) == _taken(*hollow)
        told[name] = found | {"parts": len({part.rpartition(" ")[2] for part in before if ": exp_avg " in part})}
    return told


def refused(folder: str) -> dict[str, Any]:
    """What is refused of a checkpoint of two ranks."""
    from shardwise.options import Ignore

    model, optimizer = _begin("AdamW8bit")
    keeper = Checkpointer(Path(folder, "AdamW8bit 256"))
    told: dict[str, Any] = {"other ranks": attempt(keeper.restore, TrainState(model, optimizer))}
    told["untouched"] = len(optimizer.state)
    report = keeper.restore(TrainState(model, optimizer), on_mismatched=Ignore(only=("optimizers",)))
    told["anew"] = (report.mismatched, len(optimizer.state))
    _step(model, optimizer, 0)
    told["handed out"] = attempt(shardwise.get_optimizer_state_dict, model, optimizer)
    return told


def whole_only(folder: str) -> dict[str, Any]:
    """Optimizers that step whole tensors, given for sharded ones."""
    from bitsandbytes.optim import AdamW8bit
    from transformers.optimization import Adafactor

    told: dict[str, Any] = {}
    for kind in (AdamW8bit, Adafactor, torch.optim.Adafactor):
        model, _ = _begin("AdamW8bit")
        given = kind(model.parameters())
        name = kind.__module__.partition(".")[0]
        told[f"{name}, saved"] = attempt(Checkpointer(Path(folder, "none")).save, 1, TrainState(model, given))
        plain = nn.Sequential(nn.Linear(8, 8))
        given = kind(plain.parameters())
        told[f"{name}, sharded"] = attempt(partial(shardwise.shard, optimizers=(given,)), plain)
    return told


def other_blocks(folder: str) -> tuple[str, str]:
    model, optimizer = _begin("AdamW8bit")
    other = type(optimizer)(model.parameters(), block_size=128)
    told: tuple[str, str] = attempt(Checkpointer(Path(folder, "AdamW8bit 256")).restore, TrainState(model, other))
    return told


def made_for_shards() -> dict[str, Any]:
    """What is said of torchao's optimizer of these shards: what stays in 32 bits, and what cannot be."""
    import logging

    from shardwise.fsdp import rebind

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(rebind.__name__).addHandler(handler)
    told: dict[str, Any] = {"lines": lines}
    for rows in (256, 143, 7):
        model, optimizer = _begin("AdamW8bit", rows)
        told[str(rows)] = attempt(rebind.require_sharded_parameters, optimizer, dict(model.named_parameters()))
    return told


def paged(folder: str) -> list[bool]:
    """On one GPU: whether paged state is paged again, is as saved, and goes on alike."""
    (model, optimizer), (other, its) = (_begin("PagedAdamW8bit", 2048, "bitsandbytes", "cuda") for _ in range(2))
    _step(model, optimizer, 0)
    Checkpointer(folder).save(1, TrainState(model, optimizer))
    Checkpointer(folder).restore(TrainState(other, its))
    told = [bool(its.state[other[0].weight]["state1"].is_paged), _taken(model, optimizer) == _taken(other, its)]
    for each in ((model, optimizer), (other, its)):
        _step(*each, 1)
    return [*told, _taken(model, optimizer) == _taken(other, its)]
