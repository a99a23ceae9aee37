"""Conversion rules on recorded tensors against the same rules on real ones."""

import random
from typing import Any

import pytest
import torch
from tests import zoo
from tests.core.random_expressions import random_box
from tests.models import synthetic
from transformers import conversion_mapping
from transformers import core_model_loading as hf

from shardwise.core.computed import copies
from shardwise.core.expression import Stored
from shardwise.core.tensors import Box, DType
from shardwise.models import tracing
from shardwise.models.tracing import NotStructural, Recorded


def registry_converters() -> dict[str, Any]:
    """Every converter of transformers' registry, under its key and patterns."""
    found = {}
    for key in zoo.registry_keys():
        for item in conversion_mapping.get_checkpoint_conversion_mapping(key) or []:
            if isinstance(item, hf.WeightConverter):
                found[f"{key}: {item.source_patterns} -> {item.target_patterns} {item.operations}"] = item
    return found


def compare(converter: Any, sources: dict[str, list[torch.Tensor]], model: Any, rng: random.Random) -> int:
    """How many elements of random boxes agreed; an assertion where they do not, None-like 0 where it cannot run."""
    target = synthetic.literal(converter.target_patterns[0])
    real = tracing.convert(converter, target, sources, model)
    values = {
        f"{pattern}/{number}": value for pattern, found in sources.items() for number, value in enumerate(found)
    }
    recorded = {
        pattern: [
            Recorded(Stored(f"{pattern}/{number}", tuple(value.shape), DType.F64), value.dtype)
            for number, value in enumerate(found)
        ]
        for pattern, found in sources.items()
    }
    traced = tracing.convert(converter, target, recorded, model)
    assert traced.keys() == real.keys()
    compared = 0
    for name, value in real.items():
        expression = traced[name].expression
        assert expression.shape == tuple(value.shape)
        for box in (Box.whole(expression.shape), random_box(rng, expression.shape)):
            found = torch.full(box.sizes, -1.0, dtype=torch.float64)
            for copy in copies(expression, box):
                flat = values[copy.leaf.key].contiguous()
                source = torch.as_strided(flat, copy.source.sizes, copy.source.strides, copy.source.offset)
                torch.as_strided(found, copy.target.sizes, copy.target.strides, copy.target.offset).copy_(source)
            where = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            assert torch.equal(found, value[where])
            compared += found.numel()
    return compared


def agreements(converter: Any) -> int:
    """Elements that agreed over all trials; trials on which the real rule itself fails do not count."""
    rng = random.Random(0)
    compared = 0
    for sources, model in synthetic.trials(converter):
        try:
            tracing.convert(converter, synthetic.literal(converter.target_patterns[0]), sources, model)
        except Exception:
            continue
        compared += compare(converter, sources, model, rng)
    return compared


def test_every_converter_of_the_registry_is_an_index_map():
    converters = registry_converters()
    assert len(converters) > 100
    without_trial = [name for name, converter in converters.items() if agreements(converter) == 0]
    assert without_trial == []
    back = [agreements(converter.reverse_transform()) for converter in converters.values()]
    assert sum(map(bool, back)) > 100


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x + 1,
        lambda x: x * x,
        lambda x: x.to(torch.float16),
        lambda x: x.sum(0),
        lambda x: torch.cat([x, torch.zeros(2, 3)]),
        lambda x: x.expand(5, 2, 3),
        lambda x: x.flip(0),
    ],
)
def test_operations_that_compute_are_not_structural(operation):
    with pytest.raises(NotStructural):
        operation(Recorded(Stored("w", (2, 3), DType.F32), torch.float32))


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x[1:, ::2],
        lambda x: x[-1],
        lambda x: x.view(-1, 2).t().contiguous(),
        lambda x: x.unflatten(0, (2, 2)).transpose(0, 2).flatten(1),
        lambda x: torch.stack(x.unbind(1)[::-1], -1),
        lambda x: torch.cat(x.split([1, 3], 0)[::-1]),
        lambda x: x[None].squeeze(0).unsqueeze(-1).squeeze(),
        lambda x: torch.hstack([x, x]).narrow(1, 3, 5),
        lambda x: x.movedim(0, 1).reshape(-1).clone().detach(),
    ],
)
def test_movements_are_followed(operation):
    values = torch.arange(24.0, dtype=torch.float64).view(4, 6)
    wanted = operation(values)
    expression = operation(Recorded(Stored("w", (4, 6), DType.F64), torch.float64)).expression
    found = torch.full(wanted.shape, -1.0, dtype=torch.float64)
    for copy in copies(expression, Box.whole(tuple(wanted.shape))):
        source = torch.as_strided(values, copy.source.sizes, copy.source.strides, copy.source.offset)
        torch.as_strided(found, copy.target.sizes, copy.target.strides, copy.target.offset).copy_(source)
    assert torch.equal(found, wanted)
