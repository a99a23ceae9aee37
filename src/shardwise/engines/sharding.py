"""Shards a model in place, asked for by values or in words: looks, agrees, wraps, and hands values over."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.errors import ConfigError
from shardwise.execution.memory.free import require_budget
from shardwise.execution.moving.distribute import distribute
from shardwise.execution.moving.exchange import Traffic
from shardwise.execution.ranks.line import Patience
from shardwise.execution.ranks.progress import Clock
from shardwise.execution.ranks.world import World
from shardwise.execution.states.arrivals import Arrivals, wrap_without_values
from shardwise.execution.states.supply import compare, require_alike_models, survey
from shardwise.layout import TensorKind
from shardwise.models.four_bits.four_bit_live import choose_to_pack, pack_model
from shardwise.models.four_bits.quantization import FourBit
from shardwise.models.optimizers.rebind import Bound, look_at
from shardwise.models.optimizers.reduced import require_steps_shards
from shardwise.models.placement import is_sharded, refuse_unmovable
from shardwise.models.trained_dtype import TrainedDtype
from shardwise.models.view import Held, look_inside
from shardwise.models.wrapping import wrap
from shardwise.models.wrapping.groups import group_parameters
from shardwise.models.wrapping.policies import (
    Automatic,
    Classes,
    MinSize,
    ModelPlan,
    ModuleListBlocks,
    NoSplitModules,
    WholeModel,
    WrapPolicy,
)
from shardwise.models.wrapping.wrap import Sharding
from shardwise.planning.states.sources import ValuesFrom
from shardwise.report.state_report import ShardReport
from shardwise.tuning.lora import let_merge_in_four_bits


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
        require_budget(self.budget_bytes)


@dataclass(frozen=True, slots=True)
class ShardCall:
    """What :func:`~shardwise.verbs.shard.shard` is asked for, beside the model."""

    sharding: Sharding
    optimizers: Sequence[Optimizer]
    values_from: ValuesFrom
    trained_dtype: TrainedDtype
    options: ShardOptions
    quantization: FourBit | None = None

    def words(self, sharding: Sharding) -> str:
        """What of it ranks must have in common, with the sharding that has a mesh."""
        options = self.options
        told = (wrap.in_words(sharding), self.values_from, self.trained_dtype, options.budget_bytes, options.nodes)
        return repr(told)


def carry_out_shard(world: World, model: nn.Module, call: ShardCall, clock: Clock) -> ShardReport:
    """Look, agree, compare, wrap, exchange and finish: the same steps for every model and every world size.

    Collective: yes.
    """
    options = call.options
    with clock.phase("agree"):
        settled = world.together(lambda: wrap.with_mesh(call.sharding, options.process_group))
        world.require_equal(repr(call.quantization), "the quantization")
        held = world.together(lambda: look_inside(model))
        was_sharded = world.together(lambda: is_sharded(model, held))
        world.require_equal(was_sharded, "the state of the model (sharded already, or not)")
        if was_sharded and call.quantization is not None:
            raise ConfigError("quantization packs a model before it is sharded, and this one is; leave it out")
        bounds = world.together(lambda: look_at(call.optimizers, held))
        if was_sharded:
            return _report(world, model, settled, clock, _Done(was_sharded=True))
        world.together(lambda: _refuse(model, held, settled, call.optimizers))
        world.require_equal(call.words(settled), "the list of arguments (mesh, policies, modes, budget)")
        require_alike_models(world, held, bounds)
        notes: tuple[str, ...] = ()
        if (kind := call.quantization) is not None:
            chosen = world.together(lambda: choose_to_pack(model, kind, call.optimizers))
            let_merge_in_four_bits()
            held, bounds = [], []  # so that each weight is let go of when it has been packed
            notes = world.together(lambda: pack_model(model, chosen, kind))
            held = world.together(lambda: look_inside(model))
            bounds = world.together(lambda: look_at(call.optimizers, held))
        found = survey(world, held, bounds, call.values_from, _nodes(world, options))
    with clock.phase("compare"):
        supply = compare(world, found, held, bounds, call.values_from, call.trained_dtype)
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
    done = _Done(groups, traffic, supply.cast, supply.differed, tuple(awaiting), tuple(bounds), notes)
    return _report(world, model, settled, clock, done)


def _refuse(model: nn.Module, held: Sequence[Held], sharding: Sharding, optimizers: Sequence[Optimizer]) -> None:
    refuse_unmovable(held)
    if sharding.mesh is not None:
        require_steps_shards(optimizers)
        group_parameters(model, sharding.wrap)
    wrap.blocks_to_prepare(model, sharding)


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
    notes: tuple[str, ...] = ()
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
        notes=done.notes,
        seconds=clock.seconds,
    )


def _mesh_in_words(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or tuple(f"axis{axis}" for axis in range(mesh.ndim))
    return ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))


def sharding_named(wrap: str, *, param_dtype: str | None, offload: bool) -> Sharding:
    """How a model is sharded, from words; see :func:`wrap_named`.

    Raises:
        ConfigError: when a word is unknown.
    """
    dtype = None if param_dtype is None else getattr(torch, param_dtype, None)
    if param_dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"param_dtype={param_dtype!r} is not a floating dtype of torch, such as bfloat16")
    return Sharding(
        wrap=wrap_named(wrap),
        mp_policy=MixedPrecisionPolicy(param_dtype=dtype),
        offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
    )


def wrap_named(text: str) -> WrapPolicy:
    """The wrap policy of this name.

    These are auto, model-plan, no-split, module-lists, whole, classes=NAME,NAME, and min-size=ELEMENTS.

    Raises:
        ConfigError: when there is none, with the nearest there is.
    """
    policies: dict[str, WrapPolicy] = {
        "auto": Automatic(),
        "model-plan": ModelPlan(),
        "no-split": NoSplitModules(),
        "module-lists": ModuleListBlocks(),
        "whole": WholeModel(),
    }
    word, _, names = text.partition("=")
    if word == "classes" and all(names.split(",")):
        return Classes(tuple(names.split(",")))
    if word == "min-size" and names.isdecimal():
        return MinSize(int(names))
    if text in policies:
        return policies[text]
    known = [*policies, "classes=NAME,NAME", "min-size=ELEMENTS"]
    near = difflib.get_close_matches(text, known, n=1, cutoff=0.0)[0]
    raise ConfigError(f"there is no wrap policy {text!r}; did you mean {near}? There are {', '.join(known)}")
