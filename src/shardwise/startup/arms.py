"""Carries the arms out, on every rank: first what loads, then what shards.

[Note: Arms] Each arm is as a careful user of it would write it, in the way that costs it least. Where rank 0 alone
loads, the others have their model on meta from the beginning and open no file; ``from_pretrained`` of transformers,
told by accelerate's environment to spare memory, has them read everything, and that is not held against accelerate.
``fsdp2_prepare_model`` is called as ``Accelerator.prepare`` calls it: ``Accelerator`` itself offers FSDP on
accelerators only, and one code is to run everywhere. What no checkpoint holds, buffers, comes from rank 0 there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.execution.processes.launched import this_device
from shardwise.startup.kinds import OURS
from shardwise.verbs.pretrained import from_pretrained


@dataclass(frozen=True, slots=True)
class StartupJob:
    """A folder with a checkpoint, "auto" or the name of a dtype, and the folder of the run of this arm."""

    model: str
    dtype: str
    run: str


@dataclass(frozen=True, slots=True)
class ArmSteps:
    """What an arm does in ``load``, and in ``wrap``, which makes the model of what came of the first."""

    load: Callable[[StartupJob], Any]
    wrap: Callable[[Any], nn.Module]


def on_meta(job: StartupJob) -> Any:
    """The model without values, in the dtype that is asked for."""
    config = AutoConfig.from_pretrained(job.model)
    dtype = (config.dtype or torch.float32) if job.dtype == "auto" else getattr(torch, job.dtype)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def _as_it_is(model: nn.Module) -> nn.Module:
    """Loading has sharded it already."""
    return model


def _whole(job: StartupJob) -> Any:
    return AutoModelForCausalLM.from_pretrained(job.model, dtype=job.dtype)


# ── torch ─────────────────────────────────────────────────────────────────────────────────────────


def _wrap(model: Any) -> nn.Module:
    """The blocks that the model's class names, and the rest."""
    blocks = set(model._no_split_modules or ())
    mesh = init_device_mesh(this_device().type, (dist.get_world_size(),))
    for module in [*model.modules()]:
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    wrapped: nn.Module = model
    return wrapped


@dataclass(frozen=True, slots=True)
class _WholeOnFirst:
    """A model on meta, and on rank 0 its values, by name; elsewhere none."""

    model: Any
    values: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


def _load_on_first(job: StartupJob) -> _WholeOnFirst:
    if dist.get_rank():
        return _WholeOnFirst(on_meta(job), {}, {})
    model = _whole(job)
    stored, buffers = model.state_dict(), dict(model.named_buffers())
    names = {*dict(model.named_parameters()), *buffers}  # a tied parameter once
    values = {name: tensor for name, tensor in stored.items() if name in names}
    return _WholeOnFirst(on_meta(job), values, buffers)


def _wrap_and_broadcast(found: _WholeOnFirst) -> nn.Module:
    model = _wrap(found.model)
    # Not strict: a tied head is the embedding's parameter.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(model, dict(found.values), options=options)
    found.model.tie_weights()
    _buffers_from_first(model, found.buffers)
    return model


def _buffers_from_first(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Give every buffer that is on meta on some rank, as all are that no file holds, rank 0's values."""
    device = this_device()
    lacks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lacks, [name for name, _, buffer in _buffers_of(model) if buffer.is_meta])
    wanted = {name for names in lacks for name in names}
    for name, owner, buffer in _buffers_of(model):
        if name in wanted:
            value = values[name].to(device) if name in values else torch.empty_like(buffer, device=device)
            dist.broadcast(value, src=0)
            owner._buffers[name.rpartition(".")[2]] = value


def _buffers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    for name, buffer in [*model.named_buffers()]:
        yield name, model.get_submodule(name.rpartition(".")[0]), buffer


# ── accelerate ────────────────────────────────────────────────────────────────────────────────────


def _load_for_accelerate(job: StartupJob) -> Any:
    if not dist.get_rank():
        model = _whole(job)
        _buffers_from_first(model, dict(model.named_buffers()))
        return model
    model = on_meta(job)
    _buffers_from_first(model, {})
    return model


def _prepare(model: Any, *, is_efficient: bool) -> nn.Module:
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=is_efficient,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=True,
    )
    accelerator: Any = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision="no",
        is_main_process=dist.get_rank() == 0,
        device=this_device(),
    )
    prepared: nn.Module = fsdp2_prepare_model(accelerator, model)
    return prepared


# ── transformers ──────────────────────────────────────────────────────────────────────────────────


def _distributed(job: StartupJob) -> Any:
    from transformers import DistributedConfig

    config = DistributedConfig(fsdp_size=dist.get_world_size())
    return AutoModelForCausalLM.from_pretrained(job.model, dtype=job.dtype, distributed_config=config)


STEPS: Mapping[str, ArmSteps] = {
    OURS: ArmSteps(lambda job: from_pretrained(job.model, dtype=job.dtype), _as_it_is),
    "native": ArmSteps(_whole, _wrap),
    "native-efficient": ArmSteps(_load_on_first, _wrap_and_broadcast),
    "accelerate": ArmSteps(_whole, lambda model: _prepare(model, is_efficient=False)),
    "accelerate-efficient": ArmSteps(_load_for_accelerate, lambda model: _prepare(model, is_efficient=True)),
    "transformers": ArmSteps(_distributed, _as_it_is),
}
