"""How many bytes the state of a named optimizer takes, before there is any."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from shardwise.models.optimizers.block_codec import counts_of_shards
from shardwise.models.optimizers.blockwise import BlockwiseOptimizer, blockwise
from shardwise.models.optimizers.factors import factor_shape
from shardwise.models.view import local_tensor
from shardwise.training.optimizing.optimizers import OptimizerRecipe


class StateBytes:
    """What an optimizer keeps of parameters, by what it keeps of a few numbers after a step."""

    def __init__(self, recipe: OptimizerRecipe) -> None:
        self._recipe = recipe
        self._samples: dict[int, tuple[torch.optim.Optimizer, nn.Parameter]] = {}

    def of(self, parameters: Iterable[torch.Tensor]) -> int:
        """Bytes of the state of this rank's shards of parameters; single numbers are not counted."""
        return sum(map(self._of_one, parameters))

    def _of_one(self, parameter: torch.Tensor) -> int:
        own = local_tensor(parameter)
        return self.of_shard(tuple(own.shape), counts_of_shards(parameter), parameter.dtype)

    def of_shard(self, shape: tuple[int, ...], counts: frozenset[int], dtype: torch.dtype) -> int:
        """The same of one shard of this shape, where the shards of all ranks have so many elements."""
        optimizer, sample = self._sample(len(shape))
        entries = optimizer.state[sample]
        numel, found = math.prod(shape), 0
        keeper = blockwise(optimizer)
        if keeper is not None:
            moments, entries = keeper.apart(entries)
            found += sum(_of_moment(keeper, name, numel, counts) for name in moments)
        for name, value in entries.items():
            if not isinstance(value, torch.Tensor) or not value.ndim:
                continue
            itemsize = (dtype if value.dtype is sample.dtype else value.dtype).itemsize
            factor = factor_shape(optimizer, name, shape)
            found += itemsize * (numel if factor is None else math.prod(factor))
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


def _of_moment(keeper: BlockwiseOptimizer, name: str, numel: int, counts: frozenset[int]) -> int:
    if not keeper.keeps_blocks(counts):
        return 4 * numel
    codec = keeper.codec(name)
    return numel // codec.per_byte + 4 * codec.blocks(numel)
