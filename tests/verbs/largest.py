"""A verb of one's own, as small as it can be: which of a sharded model's parameters has the largest value."""

from __future__ import annotations

from torch import nn

from shardwise.engines.asked import agree_on_call, hints_of, require_meant, world_of
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
