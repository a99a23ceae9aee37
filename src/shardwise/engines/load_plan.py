"""Plans a load on one rank, before anything is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shardwise.conversion import Bindings, SmallestBlocks, computed_leaves, rows_stored
from shardwise.engines.load_options import LoadOptions
from shardwise.engines.opening import OpenSource
from shardwise.errors import CoverageError, PlacementError
from shardwise.execution.memory.free import available_memory
from shardwise.execution.memory.garbage import collected_later
from shardwise.execution.memory.materialize import Managers, devices_of, home_of, managers_of, offloads_shards
from shardwise.execution.ranks.world import World
from shardwise.execution.reading.place import Arrangement, Destination, arrange
from shardwise.execution.reading.shared_reads import SharingPeers, peers_in
from shardwise.formats.checkpoint_index import CheckpointIndex
from shardwise.layout import Origin, TensorKind
from shardwise.models import pretrained
from shardwise.models.additions import NOTHING_ADDED, Additions, Drawn
from shardwise.models.initialize import BufferRules, ComputedBuffer, Initialisers, unfit_programs
from shardwise.models.placement import padded_numels, refuse_subclasses
from shardwise.models.programs import Program
from shardwise.models.view import Held, layout_of, look_inside
from shardwise.planning.forecasts.own_forecast import Available, Homes, forecast_rank
from shardwise.planning.loads.load_plan import Consent, Init, LoadPlan, ModelRules, plan_load
from shardwise.report.forecast_parts import RankForecast


@dataclass(frozen=True)
class LoadRequest:
    """All that a load needs beside the model and the checkpoint."""

    bindings: Bindings
    consent: Consent
    buffers: BufferRules
    options: LoadOptions
    already_read_bytes: int = 0
    additions: Additions = NOTHING_ADDED
    is_tuned: bool = False
    notes: tuple[str, ...] = ()


def tie_declared(model: nn.Module, held: Sequence[Held], bindings: Bindings) -> None:
    """Tie what the model's class declares tied, where the checkpoint holds it once and the model not yet shares it.

    Raises:
        PlacementError: when the model is already sharded, so that it is too late.
    """
    by_name = {name: item for item in held for name in item.names}
    loose = {
        target: source
        for target, source in pretrained.declared_ties(model).items()
        if target in by_name
        and source in by_name
        and by_name[target] is not by_name[source]
        and not (bindings.offers.get(target) and bindings.offers.get(source))
    }
    if not loose:
        return
    target, source = next(iter(loose.items()))
    if any(isinstance(item.tensor, DTensor) for item in held):
        raise PlacementError(
            f"{target} is declared tied to {source}, but the sharded model holds them apart; call "
            "model.tie_weights() before fully_shard"
        )
    assert isinstance(model, PreTrainedModel)
    pretrained.tie(model, set(by_name) - set(bindings.offers), set())


@dataclass(frozen=True)
class PreparedLoad:
    """All that one rank has decided before anything is read.

    Attributes:
        home: where the model computes.
        managers: what FSDP2 manages of it.
        items: what is read into which tensors.
        peers: with whom a tensor's bytes could be shared, for those that have somebody.
        own: how the others are read.
        start_at: see :func:`~shardwise.execution.reading.place.arrange`.
        settings: what the model's config says.
    """

    request: LoadRequest
    held: list[Held]
    initialisers: Initialisers
    computed: Mapping[str, ComputedBuffer]
    plan: LoadPlan
    programs: Mapping[str, Program]
    home: torch.device
    managers: Managers
    items: Sequence[Destination]
    peers: Mapping[str, SharingPeers]
    own: Arrangement
    start_at: float
    forecast: RankForecast
    available: Available
    settings: Mapping[str, str]

    def arrange(self, names: Collection[str], source: OpenSource) -> Arrangement:
        """How these tensors are read."""
        items = (item for item in self.items if item.fqn in names)
        policy, budget_bytes = source.reader.policy, self.request.options.budget_bytes
        return arrange(items, source.index, policy, budget_bytes, self.start_at)


@collected_later()
def prepare(world: World, model: nn.Module, source: OpenSource, ask: Callable[[], LoadRequest]) -> PreparedLoad:
    """Decide, on this rank alone."""
    request = ask()
    options = request.options
    held = look_inside(model)
    refuse_subclasses(held)
    initialisers = Initialisers(model, held, request.additions)
    computed = initialisers.buffers(request.buffers, seed=options.seed)
    plan = make_plan(initialisers, computed, source.index, request)
    programs = foresee_initial_values(initialisers, plan, options)
    home, managers = home_of(held, options.device), managers_of(model)
    by_name = {item.fqn: item for item in held}
    items = destinations(plan, by_name, devices_of(held, managers, home))
    whole = (item for item in items if rows_stored(item.expression) is None)
    possible = ((item.fqn, peers_in(options.shared_reads, by_name[item.fqn].tensor, world)) for item in whole)
    peers = {name: found for name, found in possible if found is not None}
    policy = source.reader.policy
    alone = [item for item in items if item.fqn not in peers]
    own = arrange(alone, source.index, policy, options.budget_bytes, world.place)
    forecast = foresee_memory(held, managers, plan, source, options, home, world.rank)
    brings_up = any(item.tensor.is_meta for item in held)
    available = available_memory(home) if brings_up else Available()
    return PreparedLoad(
        request,
        held,
        initialisers,
        computed,
        plan,
        programs,
        home,
        managers,
        items,
        peers,
        own,
        world.place,
        forecast,
        available,
        pretrained.settings_of(request.additions.base or model),
    )


def foresee_memory(
    held: Sequence[Held],
    managers: Managers,
    plan: LoadPlan,
    source: OpenSource,
    options: LoadOptions,
    home: torch.device,
    rank: int,
) -> RankForecast:
    """What the load will take on this rank, every rank reading for itself."""
    homes = Homes.of(
        plan,
        source.reader.policy,
        device=home.type,
        budget_bytes=options.budget_bytes,
        offloads_shards=home.type != "cpu" and offloads_shards(managers),
    )
    return forecast_rank(plan, source.index, rank, homes, source.reader.policy, padded_numels(held, managers))


def foresee_initial_values(initialisers: Initialisers, plan: LoadPlan, options: LoadOptions) -> dict[str, Program]:
    """How the missing tensors will be initialised, and that they can be.

    Raises:
        CoverageError: naming those that no initialiser writes, or that need more than the budget.
    """
    drawn = [
        name
        for name, read in plan.reads().items()
        if rows_stored(read.expression) is not None and isinstance(initialisers.additions.new_rows, Drawn)
    ]
    programs = initialisers.programs([*plan.names(Init), *drawn])
    faults = unfit_programs(programs, options.budget_bytes)
    if faults:
        raise CoverageError("tensors are missing that cannot be initialised:\n  " + "\n  ".join(faults))
    return programs


def make_plan(
    initialisers: Initialisers,
    computed: Mapping[str, ComputedBuffer],
    index: CheckpointIndex,
    request: LoadRequest,
) -> LoadPlan:
    """The plan, with what is computed checked against the budget."""
    additions = request.additions

    def origin_of(item: Held) -> Origin:
        return computed[item.fqn].origin if item.kind is TensorKind.BUFFER else initialisers.origin_of(item)

    layout = layout_of(initialisers.held, origin_of)
    rules = rules_of(additions.base or initialisers.model)
    plan = plan_load(index, layout, request.bindings, rules, request.consent, additions.known_as)
    blocks = SmallestBlocks()
    for name, read in plan.reads().items():
        for leaf in computed_leaves(read.expression):
            if (nbytes := blocks.nbytes(leaf)) > request.options.budget_bytes:
                raise CoverageError(
                    f"{name} is computed by {leaf.operation.label} from {len(leaf.sources)} tensors, which needs "
                    f"{nbytes:,} bytes at once; the budget is {request.options.budget_bytes:,}: raise budget_bytes"
                )
    return plan


def rules_of(model: nn.Module) -> ModelRules:
    """What a model's class passes over on purpose, where it is not in the checkpoint, or in no model."""
    return ModelRules(*pretrained.ignore_patterns(model))


def destinations(
    plan: LoadPlan, by_name: Mapping[str, Held], devices: Mapping[str, torch.device]
) -> list[Destination]:
    """What to read into where."""
    boxes = {name: plan.layout.by_name[name].boxes for name in plan.reads()}
    return [
        Destination(name, read.expression, boxes[name], by_name[name].tensor.dtype, devices[name])
        for name, read in plan.reads().items()
    ]
