"""Sharding of a model in place: collect tensors, agree, wrap, and move values."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.core.layout import TensorKind
from shardwise.core.reports import ShardReport
from shardwise.fsdp import wrap
from shardwise.fsdp.named_tensors import collect_tensors, is_sharded, unwrap
from shardwise.fsdp.policies import group_parameters
from shardwise.fsdp.rebind import bind_optimizers, require_steps_shards
from shardwise.fsdp.wrap import Sharding, TrainedDtype, require_movable, require_trainable_dtype
from shardwise.ranks.call_arguments import check_options, get_hints, get_world
from shardwise.ranks.world import Clock, World
from shardwise.state.shard_transfer import IncomingShards, agree_on_sources, wrap_without_values
from shardwise.state.state_values import StateOptions
from shardwise.transfer.move import distribute
from shardwise.transfer.replicas import require_alike_models


def _report(world: World, model: nn.Module, sharding: Sharding, clock: Clock) -> ShardReport:
    """Return the report of a model as it is now, without what was moved."""
    refs = collect_tensors(model)
    mesh = sharding.mesh
    parameters = [item for item in refs if item.kind is TensorKind.PARAMETER]
    replicated: list[str] = []
    if mesh is not None:
        replicated = [item.fqn for item in parameters if not isinstance(item.tensor, DTensor)]
    return ShardReport(
        rank=world.rank,
        world_size=world.size,
        mesh="" if mesh is None else wrap.describe_mesh(mesh),
        was_sharded=False,
        parameters=sum(item.tensor.numel() for item in parameters),
        placed_bytes=sum(item.local.nbytes for item in refs if not item.tensor.is_meta),
        on_meta=tuple(item.fqn for item in refs if item.tensor.is_meta),
        replicated=tuple(replicated),
        tied={name: item.fqn for item in refs for name in item.names[1:]},
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
    lowest rank with the most values of the model sends the other ranks their shards (full tensors for buffers). If
    values differ, this rank's values are used, and ``report.differed`` names the tensors. If no rank has
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
            and DistributedDataParallel are unwrapped; drop the latter, which keeps full parameters.
        sharding: mesh, wrap policy, mixed precision, offload. Without a mesh, all ranks form one. Without a process
            group nothing is sharded.
        optimizers: optimizers of the model's parameters, on every rank in the same order.
        trained_dtype: dtype of the trained parameters: ``torch.float32``, or ``"unchanged"`` for the one they have.
        options: budget, process group, timeouts.

    Raises:
        ConfigError: an argument cannot be honored.
        ShardingError: the policy matches nothing, the model is partly sharded, or parameters or optimizer state
            cannot be moved.
        RankMismatchError: ranks have different models, optimizers, arguments, or dtypes without a common choice.
        RankLostError: a rank has been lost.

    Every error is the same on every rank, but for that of a mesh with other ranks than the group, which is raised
    where it is passed. All but the last come before anything is changed.
    """
    model, clock = unwrap(model), Clock()
    world = get_world(options, "shard")
    wrap.require_same_ranks(sharding, world.group)
    with world, torch.device("cpu"):
        with clock.phase("agree"):
            arguments = {"model": model, "sharding": sharding, "options": options, "trained_dtype": trained_dtype}
            with world.collective("check the arguments"):
                check_options(get_hints(shard), arguments)
                require_trainable_dtype(trained_dtype)
                settings = repr((wrap.comparable_settings(sharding), trained_dtype, options.budget_bytes))
            # Before the mesh, whose process groups all ranks create together.
            world.require_equal(settings, "the list of arguments (mesh, policies, modes, budget)")
            with world.collective("build the mesh"):
                sharding = wrap.with_mesh(sharding, options.process_group)
            with world.collective("collect the tensors"):
                refs = collect_tensors(model)
                was_sharded = is_sharded(model, refs)
            world.require_equal(was_sharded, "the state of the model (sharded already, or not)")
            with world.collective("bind the optimizers"):
                bounds = bind_optimizers(optimizers, refs)
            # Optimizers have been checked to be the model's, which is all there is to do.
            if was_sharded:
                return replace(_report(world, model, sharding, clock), was_sharded=True)
            with world.collective("check that the model can be sharded"):
                # Here, since nothing can be undone once the values are only in the sources.
                require_movable(refs)
                if sharding.mesh is not None:
                    require_steps_shards(optimizers)
                    wrap.require_shardable(model, group_parameters(model, sharding.wrap), sharding)
                wrap.blocks_to_prepare(model, sharding)
            require_alike_models(world, refs, bounds)
        # Which ranks have values, and whether these are equal. No tensor is moved yet.
        with clock.phase("compare"):
            sources = agree_on_sources(world, refs, bounds, trained_dtype)
        # Up to here nothing has been changed. From here on the values are only in `sources`.
        with clock.phase("wrap"):
            with world.collective("wrap on meta"):
                groups = wrap_without_values(model, refs, bounds, sharding, sources)
            with world.collective("plan the exchange"):
                shards = IncomingShards(model, sources)
        with clock.phase("exchange"):
            with world.collective("plan transfers"):
                transfers = shards.transfers(world)
            # Shards get memory round by round, as sources give up their full tensors.
            traffic = distribute(
                world, transfers, shards.prepare, budget_bytes=options.budget_bytes, device=shards.device
            )
        with clock.phase("finish"), world.collective("set up the sharded model"):
            awaiting_load = shards.finish(bounds, sharding, options.budget_bytes)
        return replace(
            _report(world, model, sharding, clock),
            groups=groups,
            sent_bytes=traffic.sent_bytes,
            received_bytes=traffic.received_bytes,
            kept_bytes=traffic.kept_bytes,
            staging_bytes=traffic.staging_bytes,
            awaiting_load=tuple(awaiting_load),
            cast=sources.cast,
            differed=sources.differed,
            rebound=tuple(bound.count() for bound in bounds),
        )
