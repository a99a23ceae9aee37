"""Logits that nobody has computed: what a model does to them is written down, to be done to chunks of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from shardwise.errors import TrainingError

LogitsStep: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class RecordedLogits:
    """Stands for logits that nobody has computed, and writes down what is done to each of them.

    Anything that is not done to every logit alike is refused.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, steps: tuple[LogitsStep, ...] = ()) -> None:
        self.dtype = dtype
        self.device = device
        self.steps = steps

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), keywords: dict[str, Any] | None = None
    ) -> RecordedLogits:
        return _record(function.__name__, function, args, keywords or {})

    def __getattr__(self, name: str) -> Callable[..., RecordedLogits]:
        if name not in _ALIKE:
            raise TrainingError(f"the model reads {name!r} of its logits")
        return lambda *args, **keywords: _record(name, getattr(torch.Tensor, name), (self, *args), keywords)

    def __mul__(self, other: Any) -> RecordedLogits:
        return _record("mul", torch.mul, (self, other), {})

    def __truediv__(self, other: Any) -> RecordedLogits:
        return _record("div", torch.div, (self, other), {})

    def __getitem__(self, index: Any) -> RecordedLogits:
        raise TrainingError("the model takes a part of its logits")

    __rmul__ = __mul__


_ALIKE = frozenset({"mul", "div", "true_divide", "tanh", "float", "to", "contiguous", "__mul__", "__rmul__"})
"""Functions and methods of tensors that do the same to every element."""


def _record(
    name: str, function: Callable[..., Any], args: Sequence[Any], keywords: dict[str, Any]
) -> RecordedLogits:
    others = [value for value in (*args, *keywords.values()) if isinstance(value, torch.Tensor)]
    recorded = [value for value in args if isinstance(value, RecordedLogits)]
    if name not in _ALIKE or len(recorded) != 1 or any(o.numel() != 1 or o.requires_grad for o in others):
        raise TrainingError(f"the model applies {name} to its logits")

    def step(logits: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = function(*(logits if value is recorded[0] else value for value in args), **keywords)
        return result

    return RecordedLogits(recorded[0].dtype, recorded[0].device, (*recorded[0].steps, step))


class StandIn(nn.Module):
    """In the place of a head: keeps what it is given. Whatever else is asked of it, the head answers."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.given: list[torch.Tensor] = []
        self._answers = (head,)  # in a tuple, so that it is no part of the model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_answers"][0], name)

    def forward(self, hidden: torch.Tensor) -> RecordedLogits:
        self.given.append(hidden)
        return RecordedLogits(hidden.dtype, hidden.device)
