"""Functions that ranks run with arguments that accelerate cannot take."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import patch_environment
from tests.integrations.accelerating import (
    OURS,
    THEIRS,
    accelerator_for,
    alone,
    launched,
    optimizer_of,
    plugin,
    scripted,
)
from tests.loading.on_ranks import attempt
from tests.loading.wrapping import Compiled
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

import shardwise


def _small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def _mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _sharded(model: nn.Module) -> nn.Module:
    mesh = _mesh()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def not_taken(checkpoint: str) -> dict[str, tuple[str, str]]:
    """By what is given, the error."""
    return {name: _told(case, checkpoint) for name, case in CASES.items()}


def _told(case: Callable[[str], Any], checkpoint: str) -> tuple[str, str]:
    with launched(), shardwise.integrations.accelerate():
        return attempt(case, checkpoint)


def _in_part(checkpoint: str) -> None:
    model = _small()
    fully_shard(model[0], mesh=_mesh())
    accelerator_for(OURS).prepare(model, optimizer_of(model))


def _in_ddp(checkpoint: str) -> None:
    model = DistributedDataParallel(_small())
    accelerator_for(OURS).prepare(model, optimizer_of(model))


def _by_tensor_parallelism(checkpoint: str) -> None:
    model = _small()
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight, _mesh(), [Shard(0)]))
    accelerator_for(OURS).prepare(model)


def _on_one_rank(checkpoint: str) -> None:
    model, mesh = _small(), _mesh()
    if dist.get_rank() == 0:
        fully_shard(model, mesh=mesh)
    accelerator_for(OURS).prepare(model)


def _other_optimizer(checkpoint: str) -> None:
    model = _small()
    optimizer = optimizer_of(model)
    accelerator_for(OURS).prepare(_sharded(model), optimizer)


def _of_fsdp1(checkpoint: str) -> None:
    accelerator = accelerator_for(OURS)
    accelerator.state.fsdp_plugin = plugin()
    accelerator.state.fsdp_plugin.fsdp_version = 1
    accelerator.prepare(_sharded(_small()))


def _stepped(checkpoint: str) -> None:
    accelerator = accelerator_for(THEIRS, False)
    model = scripted(checkpoint)
    optimizer = optimizer_of(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.prepare(model, optimizer)


def _resized(checkpoint: str) -> None:
    accelerator = accelerator_for(THEIRS)
    model = scripted(checkpoint)
    model.resize_token_embeddings(120, mean_resizing=False)
    accelerator.prepare(model, optimizer_of(model))


def _initialized(checkpoint: str) -> None:
    accelerator = accelerator_for(THEIRS)
    model = scripted(checkpoint)
    nn.init.normal_(model.lm_head.weight)
    accelerator.prepare(model, optimizer_of(model))


def _copied(checkpoint: str) -> None:
    accelerator = accelerator_for(THEIRS)
    model = copy.deepcopy(scripted(checkpoint))
    accelerator.prepare(model, optimizer_of(model))


def _two_minds(checkpoint: str) -> None:
    accelerator = accelerator_for(THEIRS, False)
    with patch_environment(ACCELERATE_USE_FSDP="True", FSDP_CPU_RAM_EFFICIENT_LOADING="True"):
        model = scripted(checkpoint)
    accelerator.prepare(model, optimizer_of(model))


def _no_such_class(checkpoint: str) -> None:
    chosen = plugin(transformer_cls_names_to_wrap=["Qwen3DecoderLayr"])
    accelerator = Accelerator(cpu=True, fsdp_plugin=chosen)
    model = scripted(checkpoint)
    accelerator.prepare(model, optimizer_of(model))


def _each_alone(checkpoint: str) -> None:
    PartialState()  # which on a machine without GPUs knows of no ranks
    Accelerator(fsdp_plugin=plugin())


def _left_on_one_rank(checkpoint: str) -> None:
    accelerator = accelerator_for(THEIRS)
    if dist.get_rank():
        with alone():
            model = scripted(checkpoint)
    else:
        model = scripted(checkpoint)
    accelerator.prepare(model, optimizer_of(model))


CASES: dict[str, Callable[[str], Any]] = {
    "sharded in part": _in_part,
    "in DDP": _in_ddp,
    "sharded by others": _by_tensor_parallelism,
    "sharded on one rank": _on_one_rank,
    "an optimizer of other parameters": _other_optimizer,
    "on meta": lambda folder: accelerator_for(OURS).prepare(shardwise.from_pretrained(folder, load_weights=False)),
    "two models": lambda _: accelerator_for(OURS).prepare(_sharded(_small()), _sharded(_small())),
    "placements": lambda _: accelerator_for(OURS).prepare(_sharded(_small()), device_placement=[True, True]),
    "a plugin of FSDP1": _of_fsdp1,
    "an optimizer that has stepped": _stepped,
    "a vocabulary resized on meta": _resized,
    "a head initialized on meta": _initialized,
    "a copy of what is on meta": _copied,
    "two minds about loading": _two_minds,
    "a class that is not there": _no_such_class,
    "each rank alone": _each_alone,
    "ranks that are not counted": lambda _: Accelerator().prepare(_sharded(_small())),
    "left on meta on one rank": _left_on_one_rank,
}


def taken(checkpoint: str) -> list[str]:
    """Models that are taken as they are: by plain fully_shard, compiled, with the names of the original classes."""
    faults = []
    settings = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "cpu_ram_efficient_loading": False}
    for what, make in {
        "fully_shard": lambda: _sharded(_small()),
        "compiled": lambda: Compiled(_sharded(_small())),
        "names": lambda: shardwise.from_pretrained(checkpoint),
    }.items():
        with launched(), shardwise.integrations.accelerate():
            names = ["Qwen3DecoderLayer"] if what == "names" else None
            chosen = plugin(**settings, transformer_cls_names_to_wrap=names)
            accelerator = Accelerator(cpu=True, fsdp_plugin=chosen if what == "names" else None)
            model = make()
            before = dict(model.named_parameters())
            optimizer = optimizer_of(model)
            held = [id(parameter) for parameter in optimizer.param_groups[0]["params"]]
            prepared, theirs = accelerator.prepare(model, optimizer)
            if prepared is not model or any(before[name] is not now for name, now in model.named_parameters()):
                faults.append(f"{what}: changed")
            if [id(parameter) for parameter in theirs.param_groups[0]["params"]] != held:
                faults.append(f"{what}: optimizer")
            if not accelerator.is_fsdp2 or accelerator.prepare(model) is not model:
                faults.append(f"{what}: state")
            if isinstance(model, PreTrainedModel):
                with accelerator.no_sync(model):
                    pass
    return faults
