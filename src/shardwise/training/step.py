"""One optimizer step's work: forward, backward, clip."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.errors import TrainingError
from shardwise.execution.world import World
from shardwise.training.data import IGNORED, Batch
from shardwise.training.options import TrainOptions


def parameter_groups(parameters: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameters by what AdamW does to them.

    Matrices decay, norms and biases do not. Sharded parameters and whole ones are apart, since torch's fused loops
    take no mixture of them.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.ndim >= 2, isinstance(parameter, DTensor)), []).append(parameter)
    return [
        {"params": members, "weight_decay": weight_decay if decays else 0.0}
        for (decays, _), members in groups.items()
    ]


def backward(
    world: World,
    model: nn.Module,
    batches: Sequence[Batch],
    device: torch.device,
    options: TrainOptions,
    *,
    scale: float,
) -> float:
    """Add the gradients of all micro-batches; returns this rank's summed loss.

    ``scale`` is the weight of a token's loss. FSDP2 averages gradients over the ranks; as their sum is meant, the
    number of ranks is a factor of it.

    Collective: yes.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for index, batch in enumerate(batches):
        if isinstance(model, FSDPModule) and world.size > 1:
            model.set_requires_gradient_sync(index == len(batches) - 1)
        with computing_in(model, device, options):
            loss = summed_loss(model, batch.to(device))
        (loss * scale).backward()
        total += loss.detach()
    return float(total)


def summed_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The cross entropy of a batch's supervised tokens, summed, in float32."""
    output = model(**batch.inputs(), use_cache=False)
    wanted = batch.labels[:, 1:]
    learned = wanted != IGNORED
    logits: torch.Tensor = output.logits[:, :-1]
    return F.cross_entropy(logits[learned].float(), wanted[learned], reduction="sum")


def computing_in(model: nn.Module, device: torch.device, options: TrainOptions) -> AbstractContextManager[object]:
    """Mixed precision for a model that is not sharded; a sharded one has it in its FSDP2 policy."""
    if options.dtype == "float32" or isinstance(model, FSDPModule):
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, options.dtype))


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> float:
    """Scale gradients down to a global norm of at most ``max_norm``; returns the norm they had.

    The norm is taken apart for tensors placed alike, as torch takes no mixture of sharded and whole ones, and of
    the whole: whole gradients are the same on every rank and count once.

    Collective: yes, where gradients are sharded.
    """
    alike: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad
            place = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
            alike.setdefault(place, []).append(parameter)
    if not alike:
        return 0.0
    norms: list[torch.Tensor] = []
    for members in alike.values():
        norm = nn.utils.get_total_norm([member.grad for member in members if member.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack([norm.double() for norm in norms]))
    for members in alike.values():
        nn.utils.clip_grads_with_norm_(members, max_norm, total)
    return float(total)


def require_finite(step: int, loss: float, grad_norm: float) -> None:
    """Stop before the optimizer takes in what is not a number. Both are the same on every rank."""
    for name, value in (("loss", loss), ("gradient norm", grad_norm)):
        if not math.isfinite(value):
            raise TrainingError(
                f"step {step}: the {name} is {value}; the parameters are still those of step {step - 1}. Lower the "
                "learning rate, or look for rows unlike the others"
            )


def sum_over_ranks(world: World, device: torch.device, *values: float) -> list[float]:
    """Each value's sum over all ranks. Collective: yes."""
    if world.size == 1:
        return list(values)
    sums = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(sums, group=world.group)
    return [float(value) for value in sums.tolist()]
