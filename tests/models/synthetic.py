"""Made-up sources for conversion rules, where no model is at hand."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

LIST_LENGTH = 4
_SHAPES: tuple[tuple[int, ...], ...] = (
    (24, 8),
    (24,),
    (24, 8, 6),
    (8, 3, 2, 2, 2),
    (24, 24),
    (8, 24),
    (4, 24, 8),
    (48, 16),
    (1, 24, 8),
    (24, 24, 2, 2),
)


def config() -> Any:
    """A config with the attributes that converters read."""
    values = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3, head_dim=6)
    values.get_text_config = lambda: values
    values.text_config = values.vision_config = values
    return values


class Model:
    """A model with the parameter shapes that converters ask for, whatever name they ask."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], default: tuple[int, ...]) -> None:
        self.config = config()
        self._shapes = shapes
        self._default = default

    def get_parameter(self, name: str) -> torch.Tensor:
        return torch.empty(self._shapes.get(name, self._default), device="meta")


def literal(pattern: str) -> str:
    """A name that a target pattern stands for, good enough for a converter's own string work."""
    return pattern.replace("*", "0")


def trials(converter: Any) -> Iterator[tuple[dict[str, list[torch.Tensor]], Model]]:
    """Sources of every plausible shape, distinct values everywhere, with a model to convert them for."""
    numbers = itertools.count(1)
    for shape in _SHAPES:
        sources: dict[str, list[torch.Tensor]] = {}
        for pattern in converter.source_patterns:
            count = LIST_LENGTH if "*" in pattern else 1
            size = int(torch.Size(shape).numel())
            sources[pattern] = [
                torch.arange(size, dtype=torch.float64).view(shape) + 1e6 * next(numbers) for _ in range(count)
            ]
        # `Split` asks for one shape per target, `Transpose(check_dims)` for that of the first.
        parts = len(converter.target_patterns)
        first = (shape[0] // 3, *shape[1:])
        last = (shape[0] - first[0] * (parts - 1), *shape[1:])
        shapes = {literal(target): first for target in converter.target_patterns[:-1]}
        yield sources, Model(shapes | {literal(converter.target_patterns[-1]): last}, shape)
        yield sources, Model({}, shape[::-1])
