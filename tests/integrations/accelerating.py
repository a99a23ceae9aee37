"""What the ranks of a test world do with accelerate. Importable, for spawned processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import shardwise
from shardwise.options import EveryRank, FullState

ROWS, LENGTH, STEPS, ACCUMULATION = 10, 8, 3, 2
"""Rows of all ranks in a micro-batch, tokens in a row, and how many steps of how many micro-batches there are."""

OURS, THEIRS = "shardwise", "accelerate"
WAYS = tuple((strategy, efficient) for strategy in (OURS, THEIRS) for efficient in (True, False))


@contextmanager
def launched() -> Iterator[None]:
    """The environment that a launcher gives a rank; accelerate's state is new at the beginning and at the end."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": 1}
    before = dict(os.environ)
    if size > 1:
        os.environ.update({name: str(value) for name, value in names.items()})
    _forget()
    try:
        yield
    finally:
        _forget()
        os.environ.clear()
        os.environ.update(before)


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def plugin(**settings: Any) -> FullyShardedDataParallelPlugin:
    given = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "SHARDED_STATE_DICT", **settings}
    return FullyShardedDataParallelPlugin(fsdp_version=2, **given)


def accelerator_for(strategy: str, efficient: bool = True, **settings: Any) -> Accelerator:
    chosen = plugin(cpu_ram_efficient_loading=efficient) if strategy == THEIRS else None
    return Accelerator(cpu=True, fsdp_plugin=chosen, gradient_accumulation_steps=ACCUMULATION, **settings)


def model_of(checkpoint: str, strategy: str, efficient: bool, lora: Any = None) -> nn.Module:
    """A model as a script of this kind makes it, before ``prepare``."""
    if strategy == OURS and efficient:
        tuning = {} if lora is None else {"tuning": shardwise.Lora(lora)}
        return shardwise.from_pretrained(checkpoint, dtype=torch.float32, **tuning).train()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).train()
    if lora is not None:
        from peft import get_peft_model

        torch.manual_seed(11)
        model = get_peft_model(model, lora)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2)


def schedule_of(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1.0 / (1 + 0.05 * step))


def rows(steps: int = STEPS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 97, (steps * ACCUMULATION * ROWS, LENGTH), generator=generator)


@dataclass
class Seen:
    """What a loop has seen."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def begin(accelerator: Accelerator, model: nn.Module, steps: int = STEPS) -> tuple[Any, ...]:
    """Everything prepared: model, optimizer, schedule, data."""
    optimizer = optimizer_of(model)
    schedule = schedule_of(optimizer)
    data = DataLoader(rows(steps), batch_size=ROWS // accelerator.num_processes)
    if not accelerator.is_fsdp2 or accelerator.state.fsdp_plugin.auto_wrap_policy is None:
        shardwise.shard(model, optimizers=(optimizer,))
    before = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    was_sharded = any(hasattr(parameter, "placements") for parameter in model.parameters())
    prepared = accelerator.prepare(model, optimizer, schedule, data)
    after = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert not was_sharded or before == after, "optimizers keep their very parameters"
    return prepared


def run(accelerator: Accelerator, prepared: tuple[Any, ...], first: int = 0, steps: int = STEPS) -> Seen:
    """Steps of an ordinary accelerate loop."""
    model, optimizer, schedule, data = prepared
    seen, total = Seen(), 0.0
    for number, batch in enumerate(data):
        if not first * ACCUMULATION <= number < steps * ACCUMULATION:
            continue
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            accelerator.backward(loss)
            total += float(accelerator.gather(loss.detach()).mean()) / ACCUMULATION
            if accelerator.sync_gradients:
                parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
                seen.norms.append(float(accelerator.clip_grad_norm_(parameters, 0.5)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            seen.losses.append(total)
            total = 0.0
    return seen


def plain(model: nn.Module, ranks: int, steps: int = STEPS) -> Seen:
    """The same in one process, by torch alone. accelerate takes as many steps of a schedule as there are ranks."""
    optimizer = optimizer_of(model)
    schedule = schedule_of(optimizer)
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    seen = Seen()
    for batches in rows(steps).split(ROWS * ACCUMULATION):
        total = 0.0
        for batch in batches.split(ROWS):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss / ACCUMULATION
            loss.backward()
            total += float(loss.detach())
        seen.norms.append(float(nn.utils.clip_grad_norm_(trained, 0.5)))
        optimizer.step()
        for _ in range(ranks):
            schedule.step()
        optimizer.zero_grad()
        seen.losses.append(total)
    return seen


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in shardwise.model_state(model, FullState(on=EveryRank())).items()}


def same_bits(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> list[str]:
    names = sorted(found.keys() ^ truth.keys())
    return names + [name for name in truth if name in found and not torch.equal(found[name], truth[name])]


def brought_up(checkpoint: str, strategy: str, efficient: bool) -> list[str]:
    """Names of tensors that are not the files', bit for bit, after ``prepare``; buffers too."""
    with launched(), shardwise.integrations.accelerate():
        accelerator = accelerator_for(strategy, efficient)
        model = model_of(checkpoint, strategy, efficient)
        is_meta = [parameter.is_meta for parameter in model.parameters()]
        assert all(is_meta) is (strategy == THEIRS and efficient), is_meta
        model, *_ = begin(accelerator, model)
        truth = AutoModelForCausalLM.from_pretrained
        accelerator.wait_for_everyone()
        os.environ["ACCELERATE_USE_FSDP"] = "false"
        reference = truth(checkpoint, dtype=torch.float32)
        faults = same_bits(whole(model), dict(reference.state_dict()))
        buffers = dict(model.named_buffers())
        return faults + same_bits(buffers, dict(reference.named_buffers()))


def trained(checkpoint: str, strategy: str, efficient: bool) -> tuple[Seen, dict[str, torch.Tensor]]:
    with launched(), shardwise.integrations.accelerate():
        accelerator = accelerator_for(strategy, efficient)
        prepared = begin(accelerator, model_of(checkpoint, strategy, efficient))
        return run(accelerator, prepared), whole(prepared[0])
