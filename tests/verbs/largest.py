"""A verb of one's own, as small as it can be: which of a sharded model's parameters has the largest value."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tests.verbs.on_ranks import attempt
from torch import nn
from torch.distributed.fsdp import fully_shard

from shardwise.engines.arguments import agree_on_call, hints_of, require_meant, world_of
from shardwise.engines.load_options import LoadOptions
from shardwise.models.view import look_inside


def largest(model: nn.Module, *, options: LoadOptions = LoadOptions()) -> tuple[str, float]:  # noqa: B008 - frozen
    """The name of the parameter with the largest absolute value, and that value; the same on every rank.

    Collective: yes, over ``options.process_group``. Memory: none that grows with the model.

    Raises:
        ConfigError: an argument is not what is meant.
        DisagreementError: ranks ask for different things.
    """

    def look() -> tuple[nn.Module, dict[str, str]]:
        require_meant(hints_of(largest), {"model": model, "options": options})
        return model, {"parameters": str(len(list(model.parameters())))}

    with world_of(options, "largest") as world:
        held = look_inside(agree_on_call(world, look))

        def own() -> tuple[str, float]:
            found = [(item.fqn, item.local.abs().max().item()) for item in held if item.local.numel()]
            return max(found, key=lambda pair: pair[1], default=("", float("-inf")))

        return max(world.each(own), key=lambda pair: pair[1])


def on_ranks() -> tuple[tuple[str, float], tuple[str, float]]:
    """What the verb says of a sharded model, and what is so; then ranks ask for different things."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    name, value = max(
        ((name, tensor.abs().max().item()) for name, tensor in model.named_parameters()), key=lambda pair: pair[1]
    )
    fully_shard(model)
    return largest(model), (name, value)


def told_to_odd_ranks() -> tuple[str, str]:
    """The error where the first rank brings another model."""
    layers = 2 if dist.get_rank() else 1
    return attempt(lambda: largest(nn.Sequential(*[nn.Linear(2, 2) for _ in range(layers)])))
