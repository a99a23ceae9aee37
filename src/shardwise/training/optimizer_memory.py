"""What an optimizer keeps, and takes for a step: it takes two, with matrices that have no memory."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.models.live_bytes import LiveBytes
from shardwise.training.optimizers import OptimizerRecipe

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
