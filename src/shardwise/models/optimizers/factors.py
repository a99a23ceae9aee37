"""What optimizers keep of a parameter that is not of its shape, but of some of its dimensions: Adafactor's factors.

A factor is a mean over one of the last two dimensions, so it is of one shape on any number of ranks. It is sharded
where its parameter is, but for the dimension that it is a mean over: of that every rank has the mean of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from shardwise.errors import PlacementError
from shardwise.models._torch_private import splitting_dim
from shardwise.models.view import local_tensor

_TORCH: Mapping[str, int] = {"row_var": -1, "col_var": -2}
_TRANSFORMERS: Mapping[str, int] = {"exp_avg_sq_row": -1, "exp_avg_sq_col": -2}
"""The dimension that each is a mean over. transformers' Adafactor leaves it out, torch's has one element there."""


def kind_of(optimizer: Optimizer) -> type[Optimizer]:
    """The class that users know; see :mod:`~shardwise.models.shard_steps`."""
    kind: type[Optimizer] = getattr(type(optimizer), "taught", type(optimizer))
    return kind


def factor_shape(optimizer: Optimizer, entry: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of a factor of a parameter of this shape; None for what is none."""
    kind = kind_of(optimizer)
    if len(shape) < 2:
        return None
    if kind is getattr(torch.optim, "Adafactor", None) and entry in _TORCH:
        dim = _TORCH[entry]
        return (*shape[:dim], 1, *shape[len(shape) + dim + 1 :])
    if kind.__module__ == "transformers.optimization" and entry in _TRANSFORMERS:
        dim = _TRANSFORMERS[entry]
        return (*shape[:dim], *shape[len(shape) + dim + 1 :])
    return None


def factor_like(parameter: torch.Tensor, entry: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a factor of this shape, sharded as it is to be.

    Raises:
        PlacementError: it is of a class that does not step shards.
    """
    own = local_tensor(parameter)
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=dtype, device=own.device)
    if entry not in _TORCH:
        raise PlacementError(
            f"{entry}, of shape {shape}, is a factor of an optimizer that does not step shards; "
            "take torch.optim.Adafactor"
        )
    dim = parameter.ndim + _TORCH[entry]
    local = torch.zeros((*own.shape[:dim], 1, *own.shape[dim + 1 :]), dtype=dtype, device=own.device)
    return placed_factor(parameter, local, dim)


def placed_factor(parameter: DTensor, local: torch.Tensor, dim: int) -> torch.Tensor:
    """A rank's own part of a factor over this dimension as a DTensor."""
    shape = torch.Size((*parameter.shape[:dim], 1, *parameter.shape[dim + 1 :]))
    placements = [Replicate() if splitting_dim(each) == dim else each for each in parameter.placements]
    made: torch.Tensor = DTensor.from_local(
        local,
        parameter.device_mesh,
        placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    return made


def has_unknown_shards(parameter: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a value belongs to a sharded parameter and does not say which part it is."""
    return isinstance(parameter, DTensor) and not isinstance(value, DTensor)
