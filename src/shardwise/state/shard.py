"""Sharding of a model in place: collect tensors, agree, wrap, and move values."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.core.layout import TensorKind
from shardwise.core.reports import ShardReport
from shardwise.fsdp import wrap
from shardwise.fsdp.named_tensors import TensorRef, collect_tensors, is_sharded, without_compile
from shardwise.fsdp.policies import group_parameters
from shardwise.fsdp.rebind import Bound, bind_optimizers, require_steps_shards
from shardwise.fsdp.wrap import Sharding, TrainedDtype, require_movable, require_trainable_dtype
from shardwise.ranks.call_arguments import check_options, get_hints, get_world
from shardwise.ranks.world import Clock, World
from shardwise.state.shard_transfer import IncomingShards, SourceTable, agree_on_sources, wrap_without_values
from shardwise.state.state_values import StateOptions
from shardwise.transfer.move import distribute
from shardwise.transfer.replicas import require_alike_models


def _report(world: World, model: nn.Module, sharding: Sharding, clock: Clock) -> ShardReport:
    held = collect_tensors(model)
    mesh = sharding.mesh
    parameters = [item for item in held if item.kind is TensorKind.PARAMETER]
    return ShardReport(
        rank=world.rank,
        world_size=world.size,
        mesh="" if mesh is None else wrap.describe_mesh(mesh),
        was_sharded=False,
        parameters=sum(item.tensor.numel() for item in parameters),
        placed_bytes=sum(item.local.nbytes for item in held if not item.tensor.is_meta),
        on_meta=tuple(item.fqn for item in held if item.tensor.is_meta),
        replicated=tuple(
            item.fqn for item in parameters if mesh is not None and not isinstance(item.tensor, DTensor)
        ),
        tied={name: item.fqn for item in held for name in item.names[1:]},
        seconds=clock.seconds,
    )


def shard(
    model: nn.Module,
    sharding: Sharding = Sharding(),  # noqa: B008 - frozen
    *,
    optimizers: Sequence[Optimizer] = (),
    trained_dtype: TrainedDtype = "unchanged",
    options: StateOptions = StateOptions(),  # noqa: B008
) -> ShardReport:
    """Shard a model in place with ``fully_shard``, whatever state it is in, and bind its optimizers to the shards.

    Every tensor may be live (with values) on all ranks, on some, or on none. If some ranks have its values, the
    lowest of those that have the most of the model sends the others their shards (full tensors for buffers). If
    values differ, those of that rank replace the others', and ``report.differed`` names the tensors. If no rank has
    values, the tensor stays on meta for :func:`~shardwise.loading.load.load` to fill. A model that is sharded
    already is left alone.

    Parameters become new objects that keep ``requires_grad``, attributes and ties. Optimizers keep their groups,
    settings and state, and their schedulers stay valid. Parameters on meta that an optimizer holds, or whose
    gradients have to be averaged because they stay whole, get memory at once, filled with NaN, so that ``load``
    keeps them.

    Collective: yes, over ``options.process_group`` (default: all ranks), whose ranks are those of the mesh. Memory:
    this rank's shards and ``options.budget_bytes``. A source also holds its full tensors until they have been sent.
    Tensors that the caller still refers to are not freed.

    Args:
        model: any module, with the same names, shapes, ties and ``requires_grad`` on every rank. Compiled modules
            are unwrapped.
        sharding: mesh, wrap policy, mixed precision, offload. Without a mesh, all ranks form one. Without a process
            group nothing is sharded.
        optimizers: those that were made of the model's parameters, on every rank in the same order.
        trained_dtype: dtype of the trained parameters: ``torch.float32``, or ``"unchanged"`` for the one they have.
        options: budget, process group, timeouts.

    Raises:
        ConfigError: an argument cannot be honored.
        ShardingError: the policy matches nothing, the model is partly sharded, or parameters or optimizer state
            cannot be moved.
        RankMismatchError: ranks have different models, optimizers, arguments, or dtypes without a common choice.
        RankLostError: a rank has been lost.

    Every error is the same on every rank. All but the last come before anything is changed.
    """
    model, clock = without_compile(model), Clock()
    with get_world(options, "shard") as world, torch.device("cpu"):
        with clock.phase("agree"):
            given = {"model": model, "sharding": sharding, "options": options}
            with world.collective("check the arguments"):
                _check_arguments(given, trained_dtype)
            with world.collective("build the mesh"):
                settled = wrap.with_mesh(sharding, options.process_group)
            with world.collective("collect the tensors"):
                held = collect_tensors(model)
                was_sharded = is_sharded(model, held)
            world.require_equal(was_sharded, "the state of the model (sharded already, or not)")
            with world.collective("bind the optimizers"):
                bounds = bind_optimizers(optimizers, held)
            if was_sharded:
                return replace(_report(world, model, settled, clock), was_sharded=True)
            with world.collective("check that the model can be sharded"):
                _require_shardable(model, held, settled, optimizers)
            settings = (wrap.comparable_settings(settled), trained_dtype, options.budget_bytes)
            world.require_equal(repr(settings), "the list of arguments (mesh, policies, modes, budget)")
            require_alike_models(world, held, bounds)
        with clock.phase("compare"):
            supply = agree_on_sources(world, held, bounds, trained_dtype)
        moved = _move(world, model, held, bounds, settled, supply, options, clock)
        return replace(_report(world, model, settled, clock), **moved)


def _check_arguments(given: Mapping[str, Any], trained_dtype: TrainedDtype) -> None:
    check_options(get_hints(shard), {**given, "trained_dtype": trained_dtype})
    require_trainable_dtype(trained_dtype)


def _require_shardable(
    model: nn.Module, held: Sequence[TensorRef], sharding: Sharding, optimizers: Sequence[Optimizer]
) -> None:
    require_movable(held)
    if sharding.mesh is not None:
        require_steps_shards(optimizers)
        wrap.require_shardable_dtypes(model, group_parameters(model, sharding.wrap))
    wrap.blocks_to_prepare(model, sharding)


def _move(
    world: World,
    model: nn.Module,
    held: list[TensorRef],
    bounds: list[Bound],
    sharding: Sharding,
    supply: SourceTable,
    options: StateOptions,
    clock: Clock,
) -> dict[str, Any]:
    """Wrap the model and move values. Return fields of the report. Collective: yes."""
    with clock.phase("wrap"):
        with world.collective("wrap on meta"):
            groups = wrap_without_values(model, held, bounds, sharding, supply)
        with world.collective("plan the exchange"):
            arrivals = IncomingShards(model, supply)
    with clock.phase("exchange"):
        with world.collective("plan transfers"):
            handovers = arrivals.transfers(world)
        traffic = distribute(
            world, handovers, arrivals.prepare, budget_bytes=options.budget_bytes, device=arrivals.device
        )
    with clock.phase("finish"), world.collective("set up the sharded model"):
        awaiting = arrivals.finish(bounds, sharding, options.budget_bytes)
    return {
        "groups": groups,
        "sent_bytes": traffic.sent_bytes,
        "received_bytes": traffic.received_bytes,
        "kept_bytes": traffic.kept_bytes,
        "staging_bytes": traffic.staging_bytes,
        "awaiting_load": tuple(awaiting),
        "cast": supply.cast,
        "differed": supply.differed,
        "rebound": tuple(bound.count() for bound in bounds),
    }
