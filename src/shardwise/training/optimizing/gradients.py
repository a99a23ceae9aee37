"""Gradients as they are stepped on: clipped by the norm of the whole, and unscaled where the loss was scaled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.errors import ConfigError, TrainingError
from shardwise.models import torch_words
from shardwise.models.view import local_tensor

_TINY = 1e-6
"""What torch adds to a norm before it divides by it."""


def clip_gradients(
    parameters: Sequence[nn.Parameter],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    scale: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> float:
    """Divide gradients by ``scale``, then scale them down to a global norm of at most ``max_norm``.

    Returns the norm they had in between, as one process would have it, the same on every rank: parameters may be
    whole, sharded, replicated and sharded, or sharded over two axes and on several meshes. Where it is not finite,
    the gradients are left as they are.

    Collective: yes, over ``group`` (default: all ranks), once, whatever the placements are.
    Memory: none but for gradients of 16 bits, which are widened one by one.

    Args:
        parameters: on every rank the same, in any order. A mesh of theirs has all ranks of the group, or is one of
            several that do together.
        max_norm: infinity for no limit.
        norm_type: 2, or infinity for the greatest absolute value.
        scale: what the loss was multiplied by; see :class:`GradientScaler`.
        group: the ranks that train together.

    Raises:
        ConfigError: another norm is asked for.
    """
    share = norm_share(parameters, norm_type, _size(group))
    norm = norm_of(reduced(share, norm_type, group).item(), norm_type) / scale
    scale_gradients(parameters, clip_factor(norm, max_norm) / scale)
    return norm


def norm_share(parameters: Sequence[nn.Parameter], norm_type: float, ranks: int) -> torch.Tensor:
    """This rank's share of the global norm: of all ranks' the sum (or for infinity the greatest) is to be taken.

    Shares are of squares. Elements that several ranks hold alike are dealt to them in equal parts, so that one sum
    over all ranks counts every element once: that is why it takes one collective, not one for every mesh.

    Returns: 0-d, float64, on the device of the gradients.

    Raises:
        ConfigError: for a norm that is neither 2 nor infinity.
    """
    if norm_type not in (2.0, math.inf):
        raise ConfigError(f"norm_type={norm_type}: gradients are clipped by their norm of type 2 or infinity")
    holders: dict[float, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            local = local_tensor(_without_partial(parameter))
            if local.numel():
                holders.setdefault(_copies(parameter, ranks), []).append(local)
    if not holders:
        device = parameters[0].device if parameters else None
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = {copies: _norm(tensors, norm_type).double() for copies, tensors in holders.items()}
    device = next(iter(norms.values())).device
    if norm_type == math.inf:
        greatest = torch.stack([norm.to(device) for norm in norms.values()]).max()
        return greatest.nan_to_num(math.inf, math.inf)  # a collective may lose a NaN on looking for the greatest
    return torch.stack([(norm.square() / copies).to(device) for copies, norm in norms.items()]).sum()


def norm_of(total: float, norm_type: float) -> float:
    """The norm, from all ranks' shares."""
    return math.sqrt(total) if norm_type == 2.0 and math.isfinite(total) else total


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients of this norm are to be multiplied by; 1 where it is within the limit or not finite."""
    if not math.isfinite(norm) or norm + _TINY <= max_norm:
        return 1.0
    return max_norm / (norm + _TINY)


def scale_gradients(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Multiply gradients in place. Nothing is touched for a factor of 1."""
    if factor == 1.0:
        return
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            local = local_tensor(parameter.grad)
            alike.setdefault((local.device, local.dtype), []).append(local)
    for tensors in alike.values():
        torch_words.multiply(tensors, factor)


def _norm(tensors: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    wide = [tensor for tensor in tensors if tensor.dtype.itemsize >= 4]
    norms = [
        torch.linalg.vector_norm(tensor, norm_type, dtype=torch.float32)
        for tensor in tensors
        if tensor.dtype.itemsize < 4
    ]
    if wide:
        norms.append(nn.utils.get_total_norm(wide, norm_type))
    total: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type
    )
    return total


def _copies(parameter: nn.Parameter, ranks: int) -> float:
    """How many ranks hold each element of a parameter."""
    if not isinstance(parameter, DTensor):
        return ranks
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return ranks / math.prod(size for size, place in sizes if torch_words.splitting_dim(place) is not None)


def _without_partial(parameter: nn.Parameter) -> torch.Tensor:
    """The gradient, as its parameter is placed: tensor parallelism leaves some for later to be summed."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor) and any(place.is_partial() for place in gradient.placements):
        assert isinstance(parameter, DTensor)
        parameter.grad = gradient.redistribute(placements=parameter.placements)
        return parameter.grad
    return gradient


def _size(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def reduced(share: torch.Tensor, norm_type: float, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All ranks' shares in one. Collective: yes."""
    if _size(group) == 1:
        return share
    total = share.to(torch_words.object_device(group))
    dist.all_reduce(total, dist.ReduceOp.SUM if norm_type == 2.0 else dist.ReduceOp.MAX, group=group)
    return total


@dataclass(frozen=True, slots=True)
class Unscaled:
    """The loss is taken as it is: for float32 and bfloat16, which have the same range."""

    scale: float = 1.0

    def judge(self, grad_norm: float) -> bool:  # noqa: ARG002
        """Whether the optimizer is to take the step. What is not finite is the caller's affair here."""
        return True


class GradientScaler:
    """What a loss is multiplied by: as much as float16 bears, which is found out by trying.

    A step whose gradient is not finite is left out and the scale lowered; after ``patience`` good ones in a row it
    is raised. The verdict is taken from the global norm, which is finite exactly when every element on every rank
    is, and is the same number on every rank: so is the verdict, and no rank has to ask another. On any device.

    Attributes:
        scale: now.
        good_steps: in a row, up to now.
        factor: by which the scale is raised and lowered.
        patience: good steps before it is raised.
    """

    def __init__(self, scale: float = 65536.0, *, factor: float = 2.0, patience: int = 2000) -> None:
        if not (0 < scale < math.inf and 1 < factor < math.inf and patience >= 1):
            raise ConfigError(
                f"scale={scale}, factor={factor}, patience={patience}: the scale must be greater than 0, the "
                "factor than 1, and the patience 1 step or more"
            )
        self.scale = scale
        self.factor = factor
        self.patience = patience
        self.good_steps = 0

    def judge(self, grad_norm: float) -> bool:
        """Whether the optimizer is to take a step with a gradient of this norm; the scale is set for the next.

        Raises:
            TrainingError: no scale is small enough.
        """
        if math.isfinite(grad_norm):
            self.good_steps += 1
            if self.good_steps == self.patience:
                self.scale, self.good_steps = min(self.scale * self.factor, 2.0**126), 0
            return True
        if self.scale < _SMALLEST:
            raise TrainingError(
                f"the gradient is {grad_norm} even where the loss is scaled by {self.scale:g}; train in bfloat16, "
                "lower the learning rate, or look for rows unlike the others"
            )
        self.scale, self.good_steps = self.scale / self.factor, 0
        return False

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint is to keep."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on as it was.

        Raises:
            ConfigError: that is not the state of a scaler.
        """
        scale, good_steps = state.get("scale", 0.0), state.get("good_steps", -1)
        if not (0 < scale < math.inf and good_steps >= 0):
            raise ConfigError(f"{state} is not the state of a gradient scaler: a scale, and good steps up to now")
        self.scale, self.good_steps = float(scale), int(good_steps)


_SMALLEST = 2.0**-14
"""The smallest normal number of float16: a gradient that overflows below it does so by itself."""

Scaling: TypeAlias = Unscaled | GradientScaler
