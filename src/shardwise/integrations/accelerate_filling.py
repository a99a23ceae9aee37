"""accelerate's own FSDP2: what it shards by its plugin is filled shard by shard, and optimizers keep their order.

accelerate has the first rank read a model whole, and broadcast each tensor whole. Here what ``from_pretrained`` has
left on meta (see [Note: Pending]) is read by every rank for itself, and what has values on the first rank (an
adapter, a new head, a model from elsewhere) is handed over in shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.conversion import Expression
from shardwise.engines.model_states import set_model_values
from shardwise.errors import ConfigError, PlacementError
from shardwise.execution.agreed import BroughtValues, StateOptions, StoredValues, Values, by_canonical_names
from shardwise.execution.progress import Clock
from shardwise.execution.world import World
from shardwise.integrations import accelerate_compat as compat
from shardwise.integrations.pending import Awaited, Pending, awaited_in, settle
from shardwise.models.rebind import Bound, look_at, require_steps_shards
from shardwise.models.view import look_inside, without_compile
from shardwise.planning.load_plan import Ignore
from shardwise.planning.matching import Tolerance
from shardwise.storage.reading.local import LocalReader

_awaited: weakref.WeakKeyDictionary[nn.Module, list[Awaited]] = weakref.WeakKeyDictionary()
"""What models wait for that are being prepared: once they are wrapped, their parameters are other objects."""

_FILLING_BUDGET_BYTES = 256 << 20


def prepare_fsdp2(original: Callable[..., Any], accelerator: Any, *objects: Any) -> Any:
    """What takes the place of accelerate's sharding: its own, around which the optimizers are bound by identity.

    (accelerate knows parameters by the address of their memory, which on meta they have none of.)

    Collective: yes, over all ranks.

    Raises:
        PlacementError: an optimizer holds what are no parameters of the model, or has stepped already.
        ConfigError: the model is on meta, and the plugin does not load it.
        DisagreementError: it is so on some ranks only.
    """
    models = [item for item in objects if isinstance(item, nn.Module)]
    if len(models) != 1:
        return original(accelerator, *objects)
    model = without_compile(models[0])
    optimizers = [compat.bare(item) for item in objects if isinstance(item, Optimizer)]
    with World.current(call="prepare") as world:
        bounds, found = world.together(lambda: _look(accelerator, model, optimizers))
        left = [sorted(item.expressions) for item in found]
        world.require_equal(left, "the list of tensors that from_pretrained has left on meta")
    if found:
        _awaited[model] = found
    try:
        result = original(accelerator, *objects)
    finally:
        _awaited.pop(model, None)
    _rebind(model, bounds)
    return result


def load_full_state_dict(
    original: Callable[..., Any],  # noqa: ARG001 - nothing of it is done
    accelerator: Any,  # noqa: ARG001
    model: nn.Module,
    full_sd: Mapping[str, torch.Tensor],
    *others: Any,  # noqa: ARG001 - where shards are to lie is asked of FSDP2
    **keywords: Any,  # noqa: ARG001
) -> nn.Module:
    """What takes the place of the broadcast of a whole state dict to a model that is sharded on meta.

    Collective: yes, over all ranks.
    Memory: this rank's shards, and 256 MiB of staging.

    Raises:
        PlacementError: tensors have values neither on the first rank nor in files.
        CoverageError, DisagreementError, StorageError: as of :func:`~shardwise.engines.loading.load`.
    """
    plain = without_compile(model)
    awaited = _awaited.get(plain, [])
    options = StateOptions(budget_bytes=_FILLING_BUDGET_BYTES)
    in_files = {name for item in awaited for name in item.expressions}
    with World.current(call="prepare") as world, torch.no_grad(), torch.device("cpu"), ExitStack() as stack:
        live = world.together(lambda: _live(full_sd, in_files))
        has_live = world.from_first(lambda: _refuse_lost(full_sd, live, in_files))
        for item in awaited:
            values = _values_of(world, item.pending, item.expressions, options, stack)
            _set(world, plain, values, options)
        if has_live:
            _set(world, plain, BroughtValues(live if world.rank == 0 else {}), options)
    settle(plain)
    return model


def _look(accelerator: Any, model: nn.Module, optimizers: list[Optimizer]) -> tuple[list[Bound], list[Awaited]]:
    held = look_inside(model)
    require_steps_shards(optimizers)
    bounds = look_at(optimizers, held)
    for bound in bounds:
        if bound.tensors or bound.scalars:
            raise PlacementError(
                f"optimizer {bound.index} ({type(bound.optimizer).__name__}) has stepped already, and accelerate "
                "would lose its state; prepare it before its first step, and load its state afterwards"
            )
    found = awaited_in(model)
    plugin = compat.plugin_of(accelerator)
    if found and not plugin.cpu_ram_efficient_loading:
        raise ConfigError(
            f"{type(model).__name__} was left on meta by from_pretrained, since FSDP_CPU_RAM_EFFICIENT_LOADING was "
            "set, but the plugin has cpu_ram_efficient_loading=False; set both, or neither"
        )
    return bounds, found


def _rebind(model: nn.Module, bounds: list[Bound]) -> None:
    """Give optimizers the parameters that have taken the places of theirs."""
    now = {name: item.tensor for item in look_inside(model) for name in item.names}
    for bound in bounds:
        for names, group in zip(bound.groups, bound.optimizer.param_groups, strict=True):
            group["params"] = [now[name] for name in names]


def _live(full_sd: Mapping[str, torch.Tensor], in_files: set[str]) -> dict[str, torch.Tensor]:
    """What has values here and is in no file, by canonical names."""
    named = by_canonical_names({name: value for name, value in full_sd.items() if not value.is_meta}, "the model")
    return {name: value for name, value in named.items() if name not in in_files}


def _refuse_lost(full_sd: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor], in_files: set[str]) -> bool:
    """Raise for what has no values anywhere; whether something has some here."""
    on_meta = {name: value for name, value in full_sd.items() if value.is_meta}
    lost = [name for name in by_canonical_names(on_meta, "the model") if name not in in_files and name not in live]
    if lost:
        raise PlacementError(
            f"{', '.join(lost[:5])}{f' and {len(lost) - 5} more' if len(lost) > 5 else ''}: on meta, in no file, "
            "made or changed from weights that from_pretrained had not read yet (a vocabulary that was resized, "
            "an adapter that begins with the base's weights, a copy of the model). Do that by "
            "shardwise.from_pretrained(resize_vocab=, tuning=), or set cpu_ram_efficient_loading=False"
        )
    return bool(live)


def _values_of(
    world: World, pending: Pending, expressions: Mapping[str, Expression], options: StateOptions, stack: ExitStack
) -> StoredValues:
    reader = stack.enter_context(world.together(lambda: LocalReader(pending.folder)))
    return StoredValues(reader, pending.index, expressions, options.budget_bytes)


def _set(world: World, model: nn.Module, values: Values, options: StateOptions) -> None:
    """Give those tensors their values that there are some for, and leave all others."""
    tolerance = Tolerance(Ignore(), "error", "error")
    set_model_values(world, model, values, only=None, tolerance=tolerance, options=options, clock=Clock())
