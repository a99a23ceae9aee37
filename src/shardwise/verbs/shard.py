"""``shard``: a model that is live, on meta, or both, becomes one that FSDP2 has sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.engines.asked import hints_of, require_meant, world_of
from shardwise.engines.clock import Clock
from shardwise.errors import ConfigError
from shardwise.execution.moving.distribute import distribute
from shardwise.execution.moving.exchange import Traffic
from shardwise.execution.ranks.line import Patience
from shardwise.execution.ranks.world import World
from shardwise.execution.states.arrivals import Arrivals, wrap_without_values
from shardwise.execution.states.supply import compare, require_alike_models, survey
from shardwise.layout import TensorKind
from shardwise.models import wrap
from shardwise.models.groups import group_parameters
from shardwise.models.rebind import Bound, look_at
from shardwise.models.standing import is_sharded, refuse_unmovable
from shardwise.models.trained import AsItIs, TrainedDtype
from shardwise.models.view import Held, look_inside, without_compile
from shardwise.models.wrap import Sharding
from shardwise.planning.states.sources import Anyone, ValuesFrom
from shardwise.report.shard_report import ShardReport


@dataclass(frozen=True, slots=True)
class ShardOptions:
    """How a sharding is carried out; none of it changes the values.

    Attributes:
        budget_bytes: staging memory of each rank, on the device that the ranks' backend moves.
        process_group: the ranks of the mesh; None is the default group, or this process alone.
        nodes: the machine of each rank, by any name; None asks for the boot of its kernel.
        patience: how long ranks wait for each other.
    """

    budget_bytes: int = 64 << 20
    process_group: dist.ProcessGroup | None = None
    nodes: tuple[str, ...] | None = None
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        if self.budget_bytes < 4096:
            raise ConfigError(f"budget_bytes={self.budget_bytes} is less than a page (4096)")


def shard(
    model: nn.Module,
    sharding: Sharding = Sharding(),  # noqa: B008 - frozen
    *,
    optimizers: Sequence[Optimizer] = (),
    values_from: ValuesFrom = Anyone(),  # noqa: B008
    trained_dtype: TrainedDtype = AsItIs(),  # noqa: B008
    options: ShardOptions = ShardOptions(),
) -> ShardReport:
    """Shard a model in place with ``fully_shard``, whatever state it is in, and bind its optimizers to the shards.

    Every tensor may be live (with values) on all ranks, on some, or on none. Where it is live on some, the others
    get their shards, or for buffers the whole, from these; where on none, it stays on meta for
    :func:`~shardwise.verbs.load.load` to fill. A model that is sharded already is left alone.

    Parameters become new objects that keep ``requires_grad``, attributes and ties. Optimizers keep their groups,
    settings and state; schedulers of theirs go on. Parameters on meta that an optimizer holds, or whose gradients
    have to be averaged because they stay whole, get memory at once, filled with NaN, so that ``load`` keeps them.

    Collective: yes, over ``options.process_group`` (default: all ranks), whose ranks are those of the mesh.
    Memory: this rank's shards and ``options.budget_bytes``; beside that, a source holds of its whole tensors what
    it has not given yet. What the caller keeps a reference to is not freed.

    Args:
        model: any module, of the same names, shapes, ties and ``requires_grad`` on every rank; compiled ones are
            seen through.
        sharding: mesh, wrap policy, mixed precision, offload. Without a mesh, all ranks form one; without a process
            group nothing is sharded.
        optimizers: those that were made of the model's parameters, on every rank in the same order.
        values_from: whose values count.
        trained_dtype: ``Upcast(torch.float32)`` keeps trained parameters in a wider dtype.
        options: budget, process group, machines, patience.

    Raises:
        ConfigError: an argument cannot be honoured.
        PlacementError: the policy matches nothing; the model is sharded in part; parameters or optimizer state
            cannot be handed over as they are.
        DisagreementError: ranks have different models, optimizers, arguments, or values where they must not.
        RankLostError: a rank has been lost.

    Every error is the same on every rank. All but the last come before anything is changed.
    """
    clock = Clock()
    with world_of(options, "shard") as world, torch.device("cpu"):
        with clock.phase("agree"):
            model = world.together(lambda: _asked(model, sharding, values_from, trained_dtype, options))
            settled = world.together(lambda: wrap.with_mesh(sharding, options.process_group))
            held = world.together(lambda: look_inside(model))
            was_sharded = world.together(lambda: is_sharded(model, held))
            world.require_equal(was_sharded, "the state of the model (sharded already, or not)")
            bounds = world.together(lambda: _look_at(optimizers, held))
            if was_sharded:
                return _report(world, model, settled, clock, _Done(was_sharded=True))
            world.together(lambda: _refuse(model, held, settled))
            world.require_equal(
                _in_words(settled, values_from, trained_dtype, options),
                "the list of arguments (mesh, policies, modes, budget)",
            )
            require_alike_models(world, held, bounds)
            found = survey(world, held, bounds, values_from, _nodes(world, options))
        with clock.phase("compare"):
            supply = compare(world, found, held, bounds, values_from, trained_dtype)
        with clock.phase("wrap"):
            groups = world.together(lambda: wrap_without_values(model, held, bounds, settled, supply))
            arrivals = world.together(lambda: Arrivals(model, supply))
        with clock.phase("exchange"):
            shipments = world.together(lambda: arrivals.shipments(world))
            traffic = distribute(
                world, shipments, arrivals.prepare, budget_bytes=options.budget_bytes, device=arrivals.home
            )
        with clock.phase("finish"):
            awaiting = world.together(lambda: arrivals.finish(bounds, settled))
        done = _Done(groups, traffic, supply.cast, supply.differed, tuple(awaiting), tuple(bounds))
        return _report(world, model, settled, clock, done)


def _asked(
    model: nn.Module,
    sharding: Sharding,
    values_from: ValuesFrom,
    trained_dtype: TrainedDtype,
    options: ShardOptions,
) -> nn.Module:
    """The model, when everything is of the kind that is meant."""
    given = {"model": model, "sharding": sharding, "values_from": values_from}
    require_meant(hints_of(shard), {**given, "trained_dtype": trained_dtype, "options": options})
    return without_compile(model)


def _look_at(optimizers: Sequence[Optimizer], held: Sequence[Held]) -> list[Bound]:
    return look_at(optimizers, {item.tensor: item.fqn for item in held if isinstance(item.tensor, nn.Parameter)})


def _refuse(model: nn.Module, held: Sequence[Held], sharding: Sharding) -> None:
    refuse_unmovable(held)
    if sharding.mesh is not None:
        group_parameters(model, sharding.wrap)
    wrap.blocks_to_prepare(model, sharding)


def _in_words(
    sharding: Sharding, values_from: ValuesFrom, trained_dtype: TrainedDtype, options: ShardOptions
) -> str:
    """The arguments that have to be the same on every rank."""
    return repr((wrap.in_words(sharding), values_from, trained_dtype, options.budget_bytes, options.nodes))


def _nodes(world: World, options: ShardOptions) -> tuple[str, ...] | None:
    if options.nodes is not None and len(options.nodes) != world.size:
        raise ConfigError(f"nodes names the machines of {len(options.nodes)} ranks, and there are {world.size}")
    return options.nodes


@dataclass(frozen=True, slots=True)
class _Done:
    """What there is to report."""

    groups: tuple[str, ...] = ()
    traffic: Traffic = field(default_factory=Traffic)
    cast: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    differed: Mapping[str, int] = field(default_factory=dict)
    awaiting: tuple[str, ...] = ()
    bounds: tuple[Bound, ...] = ()
    was_sharded: bool = False


def _report(world: World, model: nn.Module, sharding: Sharding, clock: Clock, done: _Done) -> ShardReport:
    held = look_inside(model)
    mesh = sharding.mesh
    parameters = [item for item in held if item.kind is TensorKind.PARAMETER]
    return ShardReport(
        rank=world.rank,
        world_size=world.size,
        mesh="" if mesh is None else _mesh_in_words(mesh),
        was_sharded=done.was_sharded,
        parameters=sum(item.tensor.numel() for item in parameters),
        placed_bytes=sum(item.local.nbytes for item in held if not item.tensor.is_meta),
        groups=done.groups,
        sent_bytes=done.traffic.sent_bytes,
        received_bytes=done.traffic.received_bytes,
        kept_bytes=done.traffic.kept_bytes,
        staging_bytes=done.traffic.staging_bytes,
        on_meta=tuple(item.fqn for item in held if item.tensor.is_meta),
        awaiting_load=done.awaiting,
        cast=done.cast,
        differed=done.differed,
        replicated=tuple(
            item.fqn for item in parameters if mesh is not None and not isinstance(item.tensor, DTensor)
        ),
        tied={name: item.fqn for item in held for name in item.names[1:]},
        rebound=tuple(bound.count() for bound in done.bounds),
        seconds=clock.seconds,
    )


def _mesh_in_words(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or tuple(f"axis{axis}" for axis in range(mesh.ndim))
    return ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))
