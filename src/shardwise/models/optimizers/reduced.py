"""Optimizers whose state is reduced (8-bit, 4-bit, factored): kept rank by rank, or not for shards at all.

torchao's optimizers step DTensors, each rank's shard in blocks of its own: their state fits as many ranks on
the same mesh only. bitsandbytes' optimizers and Adafactor step whole parameters only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.errors import CoverageError, PlacementError
from shardwise.models._torch_private import splitting_dim
from shardwise.models.view import local_tensor

_log = logging.getLogger(__name__)


def _library(kind: type[Optimizer]) -> str:
    """The library that a class, or one that it extends, comes from; "" where its state is not reduced."""
    for each in kind.__mro__:
        home = each.__module__.partition(".")[0]
        if home in ("bitsandbytes", "torchao") or (
            home in ("torch", "transformers") and each.__name__ == "Adafactor"
        ):
            return home
    return ""


def keeps_reduced(optimizer: Optimizer) -> bool:
    """Return whether the moments of an optimizer belong to a rank, and not to a place in the parameter."""
    return bool(_library(type(optimizer)))


def why_whole(kind: type[Optimizer]) -> str | None:
    """Return why a class cannot step sharded parameters, as an error says it; None for any that may."""
    library = _library(kind)
    if library in ("", "torchao"):
        return None
    whose = library + ("'" if library.endswith("s") else "'s")
    return f"{whose} {kind.__name__}: steps whole tensors, not shards. Use torchao's AdamW8bit."


def require_steps_shards(optimizers: Iterable[Optimizer]) -> None:
    """Raise :class:`PlacementError` for optimizers whose parameters are not to be sharded."""
    for optimizer in optimizers:
        if why := why_whole(type(optimizer)):
            raise PlacementError(why)


def require_made_for_shards(optimizer: Optimizer, parameters: Mapping[str, torch.Tensor]) -> None:
    """Check an optimizer that has been made of these parameters; warn of those that torchao keeps in 32 bits.

    Collective: no; the same on every rank.

    Raises:
        PlacementError: it does not step shards, or (torchao's) not shards of several sizes.
    """
    sharded = {name: each for name, each in parameters.items() if isinstance(each, DTensor) and each.requires_grad}
    if sharded:
        require_steps_shards([optimizer])
    if _library(type(optimizer)) != "torchao":
        return
    block: int = vars(optimizer)["block_size"]
    whose = f"torchao's {type(optimizer).__name__}"
    left = []
    for name, each in sharded.items():
        splits = [
            (each.shape[dim], int(size))
            for size, place in zip(each.device_mesh.shape, each.placements, strict=True)
            if (dim := splitting_dim(place)) is not None
        ]
        numel = each.numel() // math.prod(count for _, count in splits)
        if numel >= _LEAST and any(length % count for length, count in splits):
            raise PlacementError(
                f"{whose}: {name}, of shape {tuple(each.shape)}, is cut into shards of several sizes, and a "
                "compiled step takes those of one size. Train on a number of ranks that divides it, or use AdamW."
            )
        if numel < _LEAST or numel % block:
            left.append(name)
    if left:
        _log.warning(
            "%s: keeps 32 bits of %d of %d parameters, such as %s, whose shards have fewer than %d elements or no "
            "multiple of %d",
            *(whose, len(left), len(sharded), left[0], _LEAST, block),
        )


_LEAST = 4096
"""Elements of the smallest shard that torchao keeps in blocks."""


def inner_tensors(value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the plain tensors that this rank's part of a value of state is made of, by name."""
    local: Any = local_tensor(value)
    if not hasattr(local, "__tensor_flatten__"):
        return {"": local}
    names, _ = local.__tensor_flatten__()
    return {name: getattr(local, name) for name in names}


def layout_of(parameters: Iterable[torch.Tensor]) -> list[str]:
    """Return how parameters are sharded, in words that are equal on all ranks."""
    return [
        f"{each.device_mesh.mesh.tolist()} {each.placements}" if isinstance(each, DTensor) else "whole"
        for each in parameters
    ]


def made_again(
    optimizer: Any, parameter: torch.Tensor, entry: str, values: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return a value of state made from its inner tensors, in memory of the kind that the optimizer would have.

    Raises:
        CoverageError: the optimizer keeps other blocks.
    """
    plain = values.get("")
    if _library(type(optimizer)) == "torchao":
        made: torch.Tensor = optimizer._new_buffer(parameter.detach(), entry == "exp_avg")
    elif plain is None:
        raise CoverageError(f"{entry} was saved in another form than {type(optimizer).__name__} has. {_ANEW}")
    elif getattr(optimizer, "is_paged", False) and plain.shape == parameter.shape:
        made = optimizer.get_state_buffer(parameter, dtype=plain.dtype)
    else:
        made = torch.empty_like(plain, device=parameter.device)
    for name, here in inner_tensors(made).items():
        given = values.get(name)
        is_alike = given is not None and (given.shape, given.dtype) == (here.shape, here.dtype)
        if given is None or not is_alike or (name == "qmap" and not torch.equal(given, here.cpu())):
            raise CoverageError(f"{entry} was saved in other blocks than {type(optimizer).__name__} keeps. {_ANEW}")
        here.copy_(given)
    return made


_ANEW = "Make the optimizer as it was made when it was saved, or start it anew."
