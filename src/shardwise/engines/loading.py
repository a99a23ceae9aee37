"""Loads a checkpoint into a model: plan, agree, materialize, read, fill, audit, report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shardwise._face import found_at
from shardwise.conversion import Bindings, SmallestBlocks, computed_leaves, computes, rows_stored, stored_leaves
from shardwise.engines.arguments import (
    OpenSource,
    Source,
    agree_on_call,
    hints_of,
    open_source,
    require_meant,
    world_of,
)
from shardwise.errors import CoverageError, PlacementError
from shardwise.execution.audit import audit, require_equal_buffers, unequal_twins
from shardwise.execution.memory import (
    Managers,
    available_memory,
    collected_later,
    devices_of,
    home_of,
    managers_of,
    materialize,
    offloads_shards,
    require_budget,
)
from shardwise.execution.patience import Patience
from shardwise.execution.progress import Clock, ProgressBar, agree_on
from shardwise.execution.reading import Arrangement, Destination, Placer, arrange
from shardwise.execution.world import World
from shardwise.formats.checkpoint_index import CheckpointIndex
from shardwise.layout import LocalBox, ModelLayout, Origin, TensorKind, TensorLayout, first_rows, last_rows
from shardwise.models import pretrained
from shardwise.models.build import NOTHING_ADDED, Additions, RowNorms
from shardwise.models.initialize import BufferRules, ComputedBuffer, Initialisers, unfit_programs
from shardwise.models.key_conversions import bind
from shardwise.models.pretrained import mark_loaded
from shardwise.models.view import (
    Held,
    layout_of,
    look_inside,
    meta_leftovers,
    padded_numels,
    refuse_subclasses,
    strided_view,
    without_compile,
)
from shardwise.planning.load_memory import Available, Homes, forecast_rank, spare_tensors, stored_tensors
from shardwise.planning.load_plan import (
    Consent,
    Init,
    Keep,
    LoadPlan,
    ModelRules,
    OnMissing,
    OnUnexpected,
    Read,
    Recompute,
    Tie,
    plan_load,
)
from shardwise.report.reports import LoadReport, RankForecast
from shardwise.storage.contract import StorageReader
from shardwise.storage.machine import processor_count
from shardwise.storage.names import HubOptions, is_url
from shardwise.tensors import Box

if TYPE_CHECKING:
    from shardwise.models.initialize import Program
    from shardwise.planning.moves import Boxes


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a load is carried out; none of it changes which values are loaded, but for ``seed``.

    Attributes:
        seed: for tensors that are initialised, together with their FQN.
        budget_bytes: host memory, beyond the shards, that one rank may use for staging and for conversions that
            compute.
        device: where an unsharded model on meta is brought up; sharded ones go to the device of their mesh.
        progress: show a bar on the first rank (where there is a terminal, and transformers' bars are not off).
        process_group: the ranks that load together; None is the default group, or this process alone.
        patience: how long ranks wait for each other.
        shared_reads: whether one rank reads what several hold (replicas) and sends it to the others: "auto" does
            so if the storage is remote, "always" and "never" are the other choices.
        check_memory: refuse a load whose forecast exceeds free memory before anything is read.
    """

    seed: int = 0
    budget_bytes: int = 256 << 20
    device: torch.device | None = None
    progress: bool = True
    process_group: dist.ProcessGroup | None = None
    patience: Patience = field(default_factory=Patience)
    shared_reads: SharedReads = "auto"
    check_memory: bool = True

    def __post_init__(self) -> None:
        require_budget(self.budget_bytes)


@dataclass
class Load:
    """A load: what is asked for, and once it is prepared what this rank has decided.

    Attributes:
        already_read_bytes: read before the load, to decide ties.
        is_tuned: whether the caller chose what is trained.
        home: device on which the model computes.
        managers: FSDP2's parameter groups.
        items: destinations of all that is read.
        shared: the boxes by rank of tensors that ranks read together.
        own: how the other items are read.
        settings: what the model's config says.
    """

    bindings: Bindings
    consent: Consent
    buffers: BufferRules
    options: LoadOptions
    already_read_bytes: int = 0
    additions: Additions = NOTHING_ADDED
    is_tuned: bool = False
    notes: tuple[str, ...] = ()
    held: list[Held] = field(init=False)
    initialisers: Initialisers = field(init=False)
    computed: Mapping[str, ComputedBuffer] = field(init=False)
    plan: LoadPlan = field(init=False)
    programs: Mapping[str, Program] = field(init=False)
    home: torch.device = field(init=False)
    managers: Managers = field(init=False)
    items: Sequence[Destination] = field(init=False)
    shared: Mapping[str, Sequence[Boxes]] = field(init=False)
    own: Arrangement = field(init=False)
    forecast: RankForecast = field(init=False)
    available: Available = field(init=False)
    settings: Mapping[str, str] = field(init=False)


class BaseForm:
    """How layers keep their weights: as numbers, unless a subclass says otherwise. Called in this order."""

    def in_numbers(self, layout: ModelLayout, held: Sequence[Held]) -> ModelLayout:  # noqa: ARG002
        """Return the layout of the tensors that a checkpoint's keys are bound to."""
        return layout

    def offered(self, model: nn.Module, bindings: Bindings) -> Bindings:  # noqa: ARG002
        """Return what is offered for the tensors that are kept."""
        return bindings

    def with_room(self, model: nn.Module, bindings: Bindings) -> Bindings:  # noqa: ARG002
        """Give the sharded model room for what is read on the way, and offer that, too."""
        return bindings

    def made_later(self, model: nn.Module) -> frozenset[str]:  # noqa: ARG002
        """Return names of tensors that nothing is read into, because :meth:`complete` makes them."""
        return frozenset()

    def complete(self, world: World, model: nn.Module, *, budget_bytes: int) -> dict[str, int]:  # noqa: ARG002
        """Make these tensors; return the number of elements written by name. Collective: yes."""
        return {}

    def let_go(self, model: nn.Module) -> None:
        """Restore what the model had before a load that has failed."""


def load_words(consent: Consent, buffers: BufferRules, options: LoadOptions) -> dict[str, str]:
    """What ranks must have in common of how a load is carried out, in words, by name."""
    alone = ("device", "progress", "process_group", "patience")
    return {
        "on_missing": repr(consent.missing),
        "on_mismatched": repr(consent.mismatched),
        "on_unexpected": repr(consent.unexpected),
        "buffers": repr(sorted(buffers)),
        **{
            f"options.{item.name}": repr(getattr(options, item.name))
            for item in fields(options)
            if item.name not in alone
        },
    }


@collected_later()
def prepare(world: World, model: nn.Module, source: OpenSource, load: Load) -> None:
    """Decide how a model is filled, on this rank alone, before anything is read."""
    options, policy = load.options, source.reader.policy
    load.held = held = look_inside(model)
    refuse_subclasses(held)
    load.initialisers = Initialisers(model, held, load.additions)
    load.computed = load.initialisers.buffers(load.buffers, seed=options.seed)
    load.plan = make_plan(load, source.index)
    load.programs = foresee_initial_values(load.initialisers, load.plan, options)
    load.home, load.managers = home_of(held, options.device), managers_of(model)
    by_name = {item.fqn: item for item in held}
    load.items = destinations(load.plan, by_name, devices_of(held, load.managers, load.home))
    load.shared, mode = {}, options.shared_reads
    if world.size > 1 and (mode == "always" or (mode == "auto" and policy.is_remote)):
        from shardwise.execution.shared_reads import shared_boxes

        load.shared = shared_boxes(world, by_name, load.items)
    alone = [item for item in load.items if item.fqn not in load.shared]
    load.own = arrange(alone, source.index, policy, options.budget_bytes, world.place)
    homes = Homes.of(
        load.plan,
        policy,
        device=load.home.type,
        budget_bytes=options.budget_bytes,
        offloads_shards=load.home.type != "cpu" and offloads_shards(load.managers),
    )
    load.forecast = forecast_rank(load.plan, world.rank, homes, padded_numels(held, load.managers))
    brings_up = any(item.tensor.is_meta for item in held)
    load.available = available_memory(load.home) if brings_up else Available()
    load.settings = pretrained.settings_of(load.additions.base or model)


def make_plan(load: Load, index: CheckpointIndex) -> LoadPlan:
    """Plan a load, with conversions that compute checked against the budget."""
    initialisers, additions = load.initialisers, load.additions

    def origin_of(item: Held) -> Origin:
        return load.computed[item.fqn].origin if item.kind is TensorKind.BUFFER else initialisers.origin_of(item)

    layout = layout_of(initialisers.held, origin_of)
    rules = rules_of(additions.base or initialisers.model)
    plan = plan_load(index, layout, load.bindings, rules, load.consent, additions.known_as)
    blocks = SmallestBlocks()
    for name, read in plan.reads().items():
        for leaf in computed_leaves(read.expression):
            if (nbytes := blocks.nbytes(leaf)) > load.options.budget_bytes:
                raise CoverageError(
                    f"{name} is computed by {leaf.operation.label} from {len(leaf.sources)} tensors, which needs "
                    f"{nbytes:,} bytes at once; the budget is {load.options.budget_bytes:,}: raise budget_bytes"
                )
    return plan


def rules_of(model: nn.Module) -> ModelRules:
    """Return the keys that a model's class ignores, if they are missing or unexpected."""
    return ModelRules(*pretrained.ignore_patterns(model))


def foresee_initial_values(initialisers: Initialisers, plan: LoadPlan, options: LoadOptions) -> dict[str, Program]:
    """How the missing tensors will be initialised, and that they can be.

    Raises:
        CoverageError: naming those that no initialiser writes, or that need more than the budget.
    """
    drawn = [
        name
        for name, read in plan.reads().items()
        if rows_stored(read.expression) is not None and initialisers.additions.new_rows == "initialized"
    ]
    programs = initialisers.programs([*plan.names(Init), *drawn])
    faults = unfit_programs(programs, options.budget_bytes)
    if faults:
        raise CoverageError("tensors are missing that cannot be initialised:\n  " + "\n  ".join(faults))
    return programs


def destinations(
    plan: LoadPlan, by_name: Mapping[str, Held], devices: Mapping[str, torch.device]
) -> list[Destination]:
    """What to read into where."""
    boxes = {name: plan.layout.by_name[name].boxes for name in plan.reads()}
    return [
        Destination(name, read.expression, boxes[name], by_name[name].tensor.dtype, devices[name])
        for name, read in plan.reads().items()
    ]


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


def carry_out(
    world: World, model: nn.Module, source: OpenSource, ask: Callable[[], Load], clock: Clock
) -> LoadReport:
    """Plan, agree, materialize, read, fill and audit: the same steps for every model and every world size.

    ``ask`` makes the model ready on this rank, and says what is wanted.
    """

    def ready() -> Load:
        load = ask()
        prepare(world, model, source, load)
        return load

    with clock.phase("plan"):
        load = world.together(ready)
        plan, held, options = load.plan, load.held, load.options
        total_bytes, sharers = agree_on(
            world, plan, load.settings, load.forecast, load.available, check_memory=options.check_memory
        )
    with ProgressBar("Loading weights", world, total_bytes, enabled=options.progress) as bar:
        placer = Placer(
            source.reader,
            source.index,
            options.budget_bytes,
            bar,
            world,
            source.identities,
            processors=max(1, processor_count() // sharers),
        )
        with clock.phase("read"):
            require_equal_twins(world, plan, placer)

        def read() -> None:
            with clock.phase("materialize"), collected_later():
                local = materialize(held, load.managers, load.home)
            placer.place(load.own, [local[item.fqn] for item in load.own.destinations])

        with clock.phase("read"):
            world.together(read)
        means = average_rows(world, load)
        if load.shared:
            from shardwise.execution.shared_reads import read_shared

            with clock.phase("share"):
                read_shared(world, load.shared, {item.fqn: item for item in held}, load.items, placer)
    with clock.phase("fill"):
        completed = form_of(model).complete(world, model, budget_bytes=options.budget_bytes)
    attributes = world.together(lambda: finish(model, load, means, {**placer.written, **completed}, clock))
    with clock.phase("audit"):
        require_equal_buffers(world, held)
    report = make_report(world, model, source, load, placer, clock)
    report = replace(report, recomputed=report.recomputed + attributes)
    return report


def require_equal_twins(world: World, plan: LoadPlan, placer: Placer) -> None:
    """Tensors that share storage and are stored twice must be stored equal. Collective: yes."""
    if not plan.twins:
        return
    names = world.all_reduce(
        lambda: unequal_twins(plan, placer, world.rank, world.size),
        lambda told: sorted({name for found in told for name in found}),
    )
    if names:
        raise CoverageError(
            f"{', '.join(names)}: the model ties this tensor, but the checkpoint holds different values for its "
            "names; set tie_word_embeddings=False in the config, or untie the model before sharding it"
        )


def facts_of_plan(plan: LoadPlan) -> dict[str, Any]:
    """Fields of a report, or of a forecast, that describe how a model is filled."""
    reads = plan.reads()
    kinds = {
        name: (next(stored_leaves(read.expression)).dtype.label, plan.layout.by_name[name].dtype.label)
        for name, read in reads.items()
        if not computes(read.expression)
    }
    return {
        "tied": {name: item.source for name, item in plan.fills.items() if isinstance(item, Tie)},
        "initialized": plan.names(Init),
        "recomputed": plan.names(Recompute),
        "cast": {name: pair for name, pair in kinds.items() if pair[0] != pair[1]},
        "ignored_keys": plan.ignored_keys,
        "computed": tuple(name for name, read in reads.items() if computes(read.expression)),
    }


def make_report(
    world: World,
    model: nn.Module,
    source: OpenSource,
    load: Load,
    placer: Placer,
    clock: Clock,
) -> LoadReport:
    plan, index = load.plan, source.index
    reads = plan.reads()
    order = ("index", "plan", "materialize", "read", "share", "fill", "audit")
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    trained = [item for item in plan.layout.tensors if item.kind is TensorKind.PARAMETER and item.requires_grad]
    return LoadReport(
        checkpoint=index.root,
        rank=world.rank,
        world_size=world.size,
        parameters=sum(item.numel for item in plan.layout.tensors if item.kind is TensorKind.PARAMETER),
        checkpoint_bytes=index.nbytes,
        read_bytes=load.already_read_bytes + placer.read_bytes,
        placed_bytes=plan.layout.local_nbytes,
        files_opened=getattr(source.reader, "files_opened", 0),
        reads=getattr(source.reader, "reads", 0),
        seconds={phase: clock.seconds[phase] for phase in order if phase in clock.seconds},
        loaded=len(reads),
        forecast=load.forecast,
        read_once=tuple(load.shared),
        files=tuple(index.files),
        kept=plan.names(Keep),
        **facts_of_plan(plan),
        missing_keys=plan.missing_keys,
        unexpected_keys=plan.unexpected_keys,
        mismatched_keys=plan.mismatched_keys,
        replicated=tuple(
            item.fqn
            for item in plan.layout.tensors
            if sharded and item.kind is TensorKind.PARAMETER and item.placement == "whole"
        ),
        wrapper=index.wrapper,
        not_loaded=plan.not_loaded(index),
        notes=(*source.notes, *load.notes),
        trainable_parameters=sum(item.numel for item in trained),
        resized={
            name: (count, plan.layout.by_name[name].shape[0])
            for name, read in reads.items()
            if (count := rows_stored(read.expression)) is not None
        },
        trained={item.fqn: item.dtype.label for item in trained} if load.is_tuned else {},
    )


_NORM_BLOCK_NUMEL = 1 << 22
"""Elements of a matrix whose rows' norms are computed at a time."""


@collected_later()
def finish(
    model: nn.Module,
    load: Load,
    means: Mapping[str, torch.Tensor],
    read: Mapping[str, int],
    clock: Clock,
) -> tuple[str, ...]:
    """Fill what comes from no checkpoint, and prove that nothing is left; names of attributes computed again.

    ``read`` counts the elements that have been written, by FQN.
    """
    written = dict(read)
    with clock.phase("fill"):
        fill(load, means, written)
        attributes = load.initialisers.compute_attributes(load.home)
    with clock.phase("audit"):
        audit(load.plan, written, meta_leftovers(model))
        mark_loaded(model, (item.tensor for item in load.held))
    return attributes


def average_rows(world: World, load: Load) -> dict[str, torch.Tensor]:
    """The mean of the stored rows of each tensor whose further rows begin as that, on every rank the same.

    In float64; another number of ranks adds up in another order. Collective: yes, where there are such tensors.
    """
    if load.additions.new_rows != "mean":
        return {}
    by_name = {item.fqn: item for item in load.held}
    rows = {name: count for name, read in load.plan.reads().items() if (count := rows_stored(read.expression))}

    def sums() -> dict[tuple[str, Box], torch.Tensor]:
        return {
            (name, part.box): strided_view(by_name[name].local, part.local).double().sum(0).cpu()
            for name, count in rows.items()
            for part in first_rows(load.plan.layout.by_name[name].boxes, count)
        }

    def add_up(told: Sequence[Mapping[tuple[str, Box], torch.Tensor]]) -> dict[str, torch.Tensor]:
        found = {part: total for sums in told for part, total in sums.items()}  # replicas tell of the same boxes
        means = {
            name: torch.zeros(by_name[name].tensor.shape[1:], dtype=torch.float64, device="cpu") for name in rows
        }
        for (name, box), total in sorted(found.items(), key=lambda entry: (entry[0][0], entry[0][1].offsets)):
            columns = tuple(
                slice(start, start + size) for start, size in zip(box.offsets[1:], box.sizes[1:], strict=True)
            )
            means[name][columns] += total / rows[name]
        return means

    return world.all_reduce(sums, add_up)


def fill(load: Load, means: Mapping[str, torch.Tensor], written: dict[str, int]) -> None:
    """Values that come from no checkpoint: initialised tensors and recomputed buffers."""
    layout, additions, seed = load.plan.layout, load.additions, load.options.seed
    by_name = {name: item for item in load.held for name in item.names}
    for item in load.held:
        tensor = layout.by_name[item.fqn]
        if item.fqn in load.programs:
            from shardwise.models.initialize import fill_from_program, program_of

            program = load.programs[item.fqn]
            first = by_name[additions.copies.get(item.fqn, item.fqn)]  # a copy begins as what it is a copy of
            if not program.is_elementwise:
                whole = load.initialisers.whole(first, seed=seed)
                program = program_of(whole)
            boxes = boxes_to_fill(load.plan, item.fqn)
            fill_from_program(program, item.local, boxes, seed=seed, fqn=first.fqn)
            written[item.fqn] = written.get(item.fqn, 0) + sum(part.box.numel for part in boxes)
        elif item.fqn in means:
            for part in boxes_to_fill(load.plan, item.fqn):
                start, size = part.box.offsets[1:], part.box.sizes[1:]
                mean = means[item.fqn][tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
                strided_view(item.local, part.local).copy_(mean.expand(part.box.sizes))
                written[item.fqn] = written.get(item.fqn, 0) + part.box.numel
        elif item.fqn in additions.norms and isinstance(load.plan.fills[item.fqn], Init):
            norms = additions.norms[item.fqn]
            fill_with_norms(item, tensor, by_name[norms.matrix], layout.by_name[norms.matrix], norms)
            written[item.fqn] = tensor.local_numel
        elif item.kind is TensorKind.BUFFER and (value := load.computed[item.fqn].value) is not None:
            give_value(item, value)


def boxes_to_fill(plan: LoadPlan, name: str) -> Sequence[LocalBox]:
    """What this rank holds of a tensor that no checkpoint has: all of it, or its last rows."""
    boxes, fill = plan.layout.by_name[name].boxes, plan.fills[name]
    count = rows_stored(fill.expression) if isinstance(fill, Read) else None
    return boxes if count is None else last_rows(boxes, count)


def fill_with_norms(item: Held, tensor: TensorLayout, matrix: Held, rows: TensorLayout, norms: RowNorms) -> None:
    """The norms of the rows of a matrix, which is loaded alload. Memory: a block of rows.

    Raises:
        PlacementError: this rank does not hold whole rows where it holds the vector.
    """
    held = [(box.box.offsets[:1], box.box.sizes[:1]) for box in tensor.boxes]
    if held != [(box.box.offsets[:1], box.box.sizes[:1]) for box in rows.boxes] or any(
        box.box.sizes[1:] != rows.shape[1:] for box in rows.boxes
    ):
        raise PlacementError(
            f"{item.fqn} begins as the norms of the rows of {matrix.fqn}, which is {rows.placement}, and it is "
            f"{tensor.placement}: this rank lacks rows it needs; use another initialisation than DoRA's, or shard "
            "both on their first dimension"
        )
    step = max(1, _NORM_BLOCK_NUMEL // max(1, math.prod(rows.shape[1:])))
    for start in range(0, item.local.shape[0], step):
        block = matrix.local[start : start + step]
        item.local[start : start + step] = norms.of(block).to(item.local.dtype)


def give_value(item: Held, value: torch.Tensor) -> None:
    """Give a buffer that has memory its value."""
    if _is_dense(item.local):
        item.local.copy_(value)
    else:  # an expanded view: its elements share memory
        item.install(value.to(item.local.device))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether every element has memory of its own."""
    return all(size < 2 or stride > 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def form_of(model: nn.Module) -> BaseForm:
    """Return how the layers of a model keep their weights."""
    if any(hasattr(type(module), "kept_as") for module in model.modules()):
        form: BaseForm = found_at("shardwise.engines.nesting:FOUR_BITS")
        return form
    return BaseForm()


SharedReads: TypeAlias = Literal["auto", "always", "never"]


def load_checkpoint(
    world: World,
    model: nn.Module,
    checkpoint: Source,
    consent: Consent,
    options: LoadOptions,
    clock: Clock,
    *,
    key_mapping: Mapping[str, str] | None = None,
    buffers: BufferRules | None = None,
    hub: HubOptions = HubOptions(),  # noqa: B008 - frozen
) -> LoadReport:
    """Open a checkpoint and fill a model from it; ranks have agreed on the call. Collective: yes."""
    transforms: list[Any] = []
    base = BaseForm()
    with clock.phase("index"):
        source = open_source(world, checkpoint, hub)

    def ask() -> Load:
        nonlocal base
        base = form_of(model)
        transforms.extend(pretrained.conversion_transforms(model, key_mapping))
        held = look_inside(model)
        layout = base.in_numbers(layout_of(held, lambda item: Origin.NOWHERE), held)
        spare = spare_tensors(source.index)
        bindings = bind(model, stored_tensors(source.index), layout, transforms, spare=spare)
        tie_declared(model, held, bindings)
        bindings = base.with_room(model, base.offered(model, bindings))
        additions = Additions(nested=base.made_later(model))
        return Load(bindings, consent, dict(buffers or {}), options, additions=additions)

    try:
        with source.closing():
            report = carry_out(world, model, source, ask, clock)
    finally:
        base.let_go(model)
    pretrained.record_conversions(model, transforms)
    return report


def load(
    model: nn.Module,
    checkpoint: Source,
    *,
    key_mapping: Mapping[str, str] | None = None,
    buffers: BufferRules | None = None,
    on_missing: OnMissing = "error",
    on_mismatched: OnMissing = "error",
    on_unexpected: OnUnexpected = "error",
    hub: HubOptions = HubOptions(),  # noqa: B008
    options: LoadOptions = LoadOptions(),
) -> LoadReport:
    """Fill a model from a checkpoint (safetensors, ``.bin``, DCP), bitwise as transformers would.

    The model may be any ``nn.Module``: on meta or real, sharded by ``fully_shard`` or not, of transformers or not.
    Tensors on meta get memory for this rank's shard; real ones have their values replaced. Each tensor keeps its
    dtype and ``requires_grad``.

    Collective: yes, over ``options.process_group``.
    Memory: this rank's shards, and ``options.budget_bytes``.

    Args:
        model: the model, in the same state on every rank.
        checkpoint: a directory, a file of tensors, an index file, a hub id, a URL, or a storage reader.
        key_mapping: regex to replacement, applied to the checkpoint's keys before the model's own renames.
        buffers: glob of buffer names to a callable that computes the buffer of the module it is given, for
            non-persistent buffers that neither the model's class nor a ``reset_parameters`` computes.
        on_missing: what to do about tensors the checkpoint lacks.
        on_mismatched: what to do about tensors stored in another shape.
        on_unexpected: what to do about keys that lead to nothing in the model.
        hub: revision, cache and token, for a hub id.
        options: seed, memory budget, device, progress, process group.

    Raises:
        ConfigError: an argument is not what is meant.
        CoverageError: checkpoint and model do not cover each other; all faults at once, before any byte is read.
        FormatError: the checkpoint's files contradict their format.
        StorageError: bytes could not be read; some tensors may have been written.
        PlacementError: the model's sharding cannot be understood.
        DisagreementError: ranks ask for different things, have other files, plan differently, or hold different
            non-persistent buffers.

    Every error is the same on every rank.
    """
    consent = Consent(on_missing, on_mismatched, on_unexpected)

    def look() -> tuple[nn.Module, dict[str, str]]:
        consents = {"on_missing": on_missing, "on_mismatched": on_mismatched, "on_unexpected": on_unexpected}
        given = {"model": model, "checkpoint": checkpoint, **consents, "hub": hub, "options": options}
        require_meant(hints_of(load), given)
        kind = "a reader" if isinstance(checkpoint, StorageReader) else "a path or a hub id"
        return without_compile(model), {
            "the kind of checkpoint": "a URL" if is_url(checkpoint) else kind,
            "key_mapping": repr(key_mapping),
            **load_words(consent, buffers or {}, options),
        }

    clock = Clock()
    with world_of(options, "load") as world:
        model = agree_on_call(world, look)
        return load_checkpoint(
            world, model, checkpoint, consent, options, clock, key_mapping=key_mapping, buffers=buffers, hub=hub
        )
