"""What an optimizer keeps, before there is any of it and on trial, and what it takes for a step."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from shardwise.layout import Spread, TensorKind, WorldLayout
from shardwise.models.live_bytes import LiveBytes
from shardwise.models.torch_words import to_torch
from shardwise.models.view import local_tensor
from shardwise.training.optimizing.optimizers import OptimizerRecipe, optimizers_of, parameters_by_part
from shardwise.training.options import TrainOptions

_TRIED_NUMEL = 1 << 16
"""Of the matrix that is really stepped where an optimizer cannot do without memory."""


@dataclass(frozen=True, slots=True)
class OptimizerBytes:
    """Of one parameter: what is kept of it, and the most that a step takes beside that."""

    kept: int
    stepping: int


class OptimizerTrial:
    """Answers for parameters of any shape; each shape is tried once.

    Args:
        recipe: the optimizer.
        is_together: whether it steps all parameters at once, as on accelerators.
    """

    def __init__(self, recipe: OptimizerRecipe, *, is_together: bool) -> None:
        has_foreach = "foreach" in inspect.signature(recipe.kind).parameters
        is_said = any(recipe.settings.get(name) is not None for name in ("foreach", "fused"))
        self.recipe = recipe
        self.is_together = is_together and has_foreach and not is_said
        self._known: dict[tuple[tuple[int, ...], torch.dtype], OptimizerBytes] = {}
        self.is_guessed = False

    def of(self, shape: tuple[int, ...], dtype: torch.dtype) -> OptimizerBytes:
        """Of a parameter of this shape; of one without elements nothing."""
        key = shape, dtype
        if key not in self._known:
            self._known[key] = self._try(shape, dtype) if torch.Size(shape).numel() else OptimizerBytes(0, 0)
        return self._known[key]

    def stepping(self, found: Iterable[OptimizerBytes]) -> int:
        """What a step of parameters takes: of all of them at once, or of one after the other."""
        each = [one.stepping for one in found]
        return sum(each) if self.is_together else max(each, default=0)

    def _try(self, shape: tuple[int, ...], dtype: torch.dtype) -> OptimizerBytes:
        try:
            return self._step(torch.empty(shape, dtype=dtype, device="meta"))
        except Exception:  # whatever it raises: it wants numbers
            self.is_guessed = True
            rows = max(1, _TRIED_NUMEL // max(shape[-1], 1))
            small = (
                (min(rows, shape[0]), *shape[1:])
                if len(shape) == 2
                else (min(_TRIED_NUMEL, torch.Size(shape).numel()),)
            )
            found = self._step(torch.zeros(small, dtype=dtype))
            times = torch.Size(shape).numel() / torch.Size(small).numel()
            return OptimizerBytes(int(found.kept * times), int(found.stepping * times))

    def _step(self, tensor: torch.Tensor) -> OptimizerBytes:
        parameter = nn.Parameter(tensor)
        parameter.grad = torch.zeros_like(tensor)
        optimizer = self.recipe.of({"matrix": parameter})
        watch = LiveBytes((parameter, parameter.grad))
        with watch:
            optimizer.step()
            kept = _state_bytes(optimizer.state[parameter])
            watch.peak = before = watch.live
            optimizer.step()
        return OptimizerBytes(kept, max(watch.peak - before, 0))


def _state_bytes(state: Mapping[str, object]) -> int:
    return sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))


class OptimizersMemory:
    """What the optimizers of a training keep at each position of the mesh.

    Args:
        options: which they are.
        model: tuned, and not sharded.
        world: as it will be.
        is_together: whether they step all parameters at once, as on accelerators.
    """

    def __init__(self, options: TrainOptions, model: nn.Module, world: WorldLayout, *, is_together: bool) -> None:
        parts = optimizers_of(options)
        self.names = " and ".join(recipe.kind.__name__ for recipe in parts.values())
        self._trials = {name: OptimizerTrial(recipe, is_together=is_together) for name, recipe in parts.items()}
        self._alike: Counter[tuple[str, Spread, torch.dtype]] = Counter()
        dealt = parameters_by_part(model, parts)
        part_of = {name: part for part, members in dealt.items() for name in members}
        for tensor in world.first.tensors:
            if tensor.kind is TensorKind.PARAMETER and tensor.requires_grad:
                spread = world.spreads[tensor.fqn]
                self._alike[part_of[tensor.fqn], spread, to_torch(tensor.dtype)] += 1
        self._kept: dict[int, int] = {}

    @property
    def is_guessed(self) -> bool:
        return any(trial.is_guessed for trial in self._trials.values())

    def kept(self, position: int) -> int:
        """Bytes of their state."""
        if position not in self._kept:
            self._kept[position] = sum(count * found.kept for found, count, _ in self._at(position))
        return self._kept[position]

    @cached_property
    def stepping(self) -> int:
        """The most that a step takes beside it; one part steps after the other."""
        each: dict[str, list[OptimizerBytes]] = {}
        for found, count, part in self._at(0):
            each.setdefault(part, []).extend([found] * count)
        return max((self._trials[part].stepping(found) for part, found in each.items()), default=0)

    def _at(self, position: int) -> list[tuple[OptimizerBytes, int, str]]:
        found = []
        for (part, spread, dtype), count in self._alike.items():
            for held in spread.boxes[position]:
                found.append((self._trials[part].of(tuple(held.box.sizes), dtype), count, part))
        return found


class StateBytes:
    """What an optimizer keeps of parameters, by what it keeps of a few numbers after a step."""

    def __init__(self, recipe: OptimizerRecipe) -> None:
        self._recipe = recipe
        self._samples: dict[int, tuple[torch.optim.Optimizer, nn.Parameter]] = {}

    def of(self, parameters: Iterable[torch.Tensor]) -> int:
        """Bytes of the state of this rank's shards of parameters, at most; single numbers are not counted."""
        return sum(map(self._of_one, parameters))

    def _of_one(self, parameter: torch.Tensor) -> int:
        own = local_tensor(parameter)
        optimizer, sample = self._sample(own.ndim)
        kept = 0
        for value in optimizer.state[sample].values():
            if isinstance(value, torch.Tensor) and value.ndim:
                dtype = parameter.dtype if value.dtype is sample.dtype else value.dtype
                kept += dtype.itemsize * value.numel()
        return kept * own.numel() // sample.numel()

    def _sample(self, ndim: int) -> tuple[torch.optim.Optimizer, nn.Parameter]:
        if ndim not in self._samples:
            parameter = nn.Parameter(torch.ones((2,) * ndim, device="cpu"))
            parameter.grad = torch.ones_like(parameter)
            optimizer = self._recipe.of({"sample": parameter})
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()
            self._samples[ndim] = optimizer, parameter
        return self._samples[ndim]
