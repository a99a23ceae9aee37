"""How many bytes the state of a named optimizer takes, before there is any."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from shardwise.models.block_codec import counts_of_shards
from shardwise.models.blockwise import BlockwiseOptimizer, blockwise
from shardwise.models.factors import factor_shape
from shardwise.models.view import local_tensor
from shardwise.training.optimizers import OptimizerRecipe


class StateBytes:
    """What an optimizer keeps of parameters, by what it keeps of a few numbers after a step."""

    def __init__(self, recipe: OptimizerRecipe) -> None:
        self._recipe = recipe
        self._samples: dict[int, tuple[torch.optim.Optimizer, nn.Parameter]] = {}

    def of(self, parameters: Iterable[torch.Tensor]) -> int:
        """Bytes of the state of this rank's shards of parameters; single numbers are not counted."""
        return sum(map(self._of_one, parameters))

    def _of_one(self, parameter: torch.Tensor) -> int:
        optimizer, sample = self._sample(parameter.ndim)
        own = local_tensor(parameter)
        entries = optimizer.state[sample]
        found = 0
        keeper = blockwise(optimizer)
        if keeper is not None:
            moments, entries = keeper.apart(entries)
            found += sum(_of_moment(keeper, name, parameter, own) for name in moments)
        for name, value in entries.items():
            if not isinstance(value, torch.Tensor) or not value.ndim:
                continue
            itemsize = own.element_size() if value.dtype is sample.dtype else value.element_size()
            factor = factor_shape(optimizer, name, tuple(own.shape))
            found += itemsize * (own.numel() if factor is None else torch.Size(factor).numel())
        return found

    def _sample(self, ndim: int) -> tuple[torch.optim.Optimizer, nn.Parameter]:
        if ndim not in self._samples:
            parameter = nn.Parameter(torch.ones((2,) * ndim, device="cpu"))
            parameter.grad = torch.ones_like(parameter)
            optimizer = self._recipe.of({"sample": parameter})
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()
            self._samples[ndim] = optimizer, parameter
        return self._samples[ndim]


def _of_moment(keeper: BlockwiseOptimizer, name: str, parameter: torch.Tensor, own: torch.Tensor) -> int:
    if not keeper.keeps_blocks(counts_of_shards(parameter)):
        return 4 * own.numel()
    codec = keeper.codec(name)
    return own.numel() // codec.per_byte + 4 * codec.blocks(own.numel())
