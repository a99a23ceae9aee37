"""``load``: a checkpoint into a model, each rank reading only its own bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shardwise.conversion import (
    Bindings,
    computed_leaves,
    computes,
    rows_stored,
    smallest_block_bytes,
    stored_leaves,
)
from shardwise.engines.asked import agree_on_call, hints_of, require_meant, world_of
from shardwise.engines.clock import Clock
from shardwise.engines.opening import OpenSource, Source, open_source
from shardwise.errors import ConfigError, CoverageError, PlacementError
from shardwise.execution.agreement import agree_on
from shardwise.execution.audit import audit, require_equal_buffers
from shardwise.execution.garbage import collected_later
from shardwise.execution.line import Patience
from shardwise.execution.materialize import Managers, devices_of, home_of, managers_of, materialize, offloads_shards
from shardwise.execution.memory import available_memory
from shardwise.execution.place import Arrangement, Destination, Placer, arrange
from shardwise.execution.progress import ProgressBar
from shardwise.execution.sharing import SharePlan, SharingPeers, peers_in, plan_sharing, read_shared
from shardwise.execution.twins import unequal_twins
from shardwise.execution.world import World
from shardwise.formats import CheckpointIndex
from shardwise.layout import LocalBox, Origin, TensorKind, TensorLayout
from shardwise.layout.model_layout import first_rows, last_rows
from shardwise.models import initialize
from shardwise.models import transformers_compat as compat
from shardwise.models.additions import NOTHING_ADDED, Additions, RowNorms
from shardwise.models.foresee import padded_numels
from shardwise.models.initialize import BufferRules, ComputedBuffer
from shardwise.models.programs import Program, fill_from_program, program_of
from shardwise.models.rules import bind
from shardwise.models.standing import refuse_subclasses
from shardwise.models.view import Held, layout_of, look_inside, strided_view, without_compile
from shardwise.models.vocabulary import Drawn, MeanOfRows
from shardwise.planning import (
    Consent,
    Init,
    Keep,
    LoadPlan,
    ModelRules,
    OnMissing,
    OnUnexpected,
    Read,
    Recompute,
    Refuse,
    Tie,
    plan_load,
    stored_tensors,
)
from shardwise.planning.comparing import CompareCopies, SampledBlocks
from shardwise.planning.forecast import (
    Available,
    Homes,
    MemoryCheck,
    RequireMemory,
    forecast_rank,
)
from shardwise.planning.pages import MeasuredPages, Pages
from shardwise.planning.sharing import SharedReads, Weighed
from shardwise.report import LoadReport
from shardwise.report.forecast import RankForecast
from shardwise.report.load_report import TouchedPages
from shardwise.storage import HubOptions, StorageReader, is_url
from shardwise.tensors import Box

_NORM_BLOCK_NUMEL = 1 << 22
"""Elements of a matrix whose rows' norms are computed at a time."""


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
        shared_reads: what several ranks need (replicas; columns of the same rows) is read once and shared:
            ``Weighed()`` when that is quicker, ``OncePerGroup()``, or ``Alone()``. ``InIntervals()``: every rank
            reads one interval of the checkpoint, and hands it to those that hold it, so that few files are opened.
        copies: how the files of ranks that do not open the same ones, on several machines say, are found to be
            equal: ``SampledBlocks()`` compares sizes, headers and blocks of every tensor, ``WholeFiles()`` every
            byte. Where all ranks open the same files, nothing is read for it.
        memory_check: what to do when the forecast is more than the memory that is free: ``RequireMemory()`` refuses
            before anything is read, ``TryAnyway()`` goes on.
        pages: in which pages fresh host memory is taken: ``MeasuredPages()``, whichever cost less of late,
            ``HugePages()``, or ``SmallPages()``.
    """

    seed: int = 0
    budget_bytes: int = 256 << 20
    device: torch.device | None = None
    progress: bool = True
    process_group: dist.ProcessGroup | None = None
    patience: Patience = field(default_factory=Patience)
    shared_reads: SharedReads = field(default_factory=Weighed)
    copies: CompareCopies = field(default_factory=SampledBlocks)
    memory_check: MemoryCheck = field(default_factory=RequireMemory)
    pages: Pages = field(default_factory=MeasuredPages)

    def __post_init__(self) -> None:
        if self.budget_bytes < 4096:
            raise ConfigError(f"budget_bytes={self.budget_bytes} is less than a page (4096)")


def load(
    model: nn.Module,
    checkpoint: Source,
    *,
    key_mapping: Mapping[str, str] | None = None,
    buffers: BufferRules | None = None,
    on_missing: OnMissing = Refuse(),  # noqa: B008 - frozen
    on_mismatched: OnMissing = Refuse(),  # noqa: B008
    on_unexpected: OnUnexpected = Refuse(),  # noqa: B008
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
    clock = Clock()
    consent = Consent(on_missing, on_mismatched, on_unexpected)
    transforms: list[Any] = []

    def look() -> tuple[nn.Module, dict[str, str]]:
        consents = {"on_missing": on_missing, "on_mismatched": on_mismatched, "on_unexpected": on_unexpected}
        given = {"model": model, "checkpoint": checkpoint, **consents, "hub": hub, "options": options}
        require_meant(hints_of(load), given)
        kind = "a reader" if isinstance(checkpoint, StorageReader) else "a path or a hub id"
        words = {
            "the kind of checkpoint": "a URL" if is_url(checkpoint) else kind,
            "key_mapping": repr(key_mapping),
            **load_words(consent, buffers or {}, options),
        }
        return without_compile(model), words

    with world_of(options, "load") as world:
        model = agree_on_call(world, look)
        with clock.phase("index"):
            source = open_source(world, checkpoint, hub, options.copies, options.budget_bytes)

        def ask() -> LoadRequest:
            transforms.extend(compat.conversion_transforms(model, key_mapping))
            held = look_inside(model)
            layout = layout_of(held, lambda item: Origin.NOWHERE)
            bindings = bind(model, stored_tensors(source.index), layout, transforms)
            tie_declared(model, held, bindings)
            return LoadRequest(bindings, consent, dict(buffers or {}), options)

        with source.closing():
            report = carry_out(world, model, source, ask, clock)
    compat.record_conversions(model, transforms)
    return report


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


def load_words(consent: Consent, buffers: BufferRules, options: LoadOptions) -> dict[str, str]:
    """What ranks must have in common of how a load is carried out, in words, by name."""
    alone = ("device", "pages", "progress", "process_group", "patience")
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


def tie_declared(model: nn.Module, held: Sequence[Held], bindings: Bindings) -> None:
    """Tie what the model's class declares tied, where the checkpoint holds it once and the model not yet shares it.

    Raises:
        PlacementError: when the model is already sharded, so that it is too late.
    """
    by_name = {name: item for item in held for name in item.names}
    loose = {
        target: source
        for target, source in compat.declared_ties(model).items()
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
    compat.tie(model, set(by_name) - set(bindings.offers), set())


def carry_out(
    world: World, model: nn.Module, source: OpenSource, ask: Callable[[], LoadRequest], clock: Clock
) -> LoadReport:
    """Plan, agree, materialize, read, fill and audit: the same steps for every model and every world size.

    ``ask`` makes the model ready on this rank, and says what is wanted.
    """
    with clock.phase("plan"):
        ready = world.together(lambda: prepare(world, model, source, ask))
        plan, held, options = ready.plan, ready.held, ready.request.options
        total_bytes = agree_on(world, plan, ready.settings, ready.forecast, ready.available, options.memory_check)
    by_name = {item.fqn: item for item in held}
    with ProgressBar("Loading weights", world, total_bytes, enabled=options.progress) as bar:
        placer = Placer(source.reader, source.index, options.budget_bytes, bar, world, source.identities)
        with clock.phase("read"):
            require_equal_twins(world, plan, placer)
        with clock.phase("plan"):
            sharing = plan_sharing(world, by_name, ready.items, ready.peers, placer, options.shared_reads)

        def read() -> TouchedPages:
            with clock.phase("materialize"), collected_later():
                local, fresh = materialize(held, ready.managers, ready.home, options.pages)
            for arrangement in (ready.own, ready.arrange(ready.peers.keys() - sharing.shared.keys(), source)):
                placer.place(arrangement, [local[item.fqn] for item in arrangement.destinations], fresh)
            fresh.touch_rest()
            return fresh.report()

        with clock.phase("read"):
            pages = world.together(read)
        means = average_rows(world, ready)
        if sharing.shared:
            with clock.phase("share"):
                read_shared(world, sharing, by_name, ready.items, placer, options.patience)
    attributes = world.together(lambda: finish(model, ready, means, placer, clock))
    with clock.phase("audit"):
        require_equal_buffers(world, held)
    report = make_report(world, model, source, ready, placer, sharing, clock)
    return replace(report, recomputed=report.recomputed + attributes, pages=pages)


@dataclass(frozen=True)
class PreparedLoad:
    """All that one rank has decided before anything is read.

    Attributes:
        home: where the model computes.
        managers: what FSDP2 manages of it.
        items: what is read into which tensors.
        peers: with whom a tensor's bytes could be shared, for those that have somebody.
        own: how the others are read.
        start_at: see :func:`~shardwise.execution.place.arrange`.
        settings: what the model's config says.
    """

    request: LoadRequest
    held: list[Held]
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
    computed = initialize.recompute_buffers(model, held, request.buffers, seed=options.seed)
    plan = make_plan(model, held, computed, source.index, request)
    programs = foresee_initial_values(model, held, plan, options, request.additions)
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
        compat.settings_of(request.additions.base or model),
    )


@collected_later()
def finish(
    model: nn.Module, ready: PreparedLoad, means: Mapping[str, torch.Tensor], placer: Placer, clock: Clock
) -> tuple[str, ...]:
    """Fill what comes from no checkpoint, and prove that nothing is left; names of attributes computed again."""
    written = dict(placer.written)
    with clock.phase("fill"):
        fill(model, ready, means, written)
        attributes = initialize.recompute_attributes(model, ready.home)
    with clock.phase("audit"):
        audit(model, ready.plan, written)
        mark_loaded(model, ready.held)
    return attributes


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


def foresee_initial_values(
    model: nn.Module,
    held: Sequence[Held],
    plan: LoadPlan,
    options: LoadOptions,
    additions: Additions = NOTHING_ADDED,
) -> dict[str, Program]:
    """How the missing tensors will be initialised, and that they can be.

    Raises:
        CoverageError: naming those that no initialiser writes, or that need more than the budget.
    """
    drawn = [
        name
        for name, read in plan.reads().items()
        if rows_stored(read.expression) is not None and isinstance(additions.new_rows, Drawn)
    ]
    programs = initialize.programs_for(model, held, [*plan.names(Init), *drawn], additions)
    faults = initialize.unfit_programs(programs, options.budget_bytes)
    if faults:
        raise CoverageError("tensors are missing that cannot be initialised:\n  " + "\n  ".join(faults))
    return programs


def make_plan(
    model: nn.Module,
    held: Sequence[Held],
    computed: Mapping[str, ComputedBuffer],
    index: CheckpointIndex,
    request: LoadRequest,
) -> LoadPlan:
    """The plan, with what is computed checked against the budget."""
    additions = request.additions
    initial = initialize.initial_origin(model, additions)

    def origin_of(item: Held) -> Origin:
        return computed[item.fqn].origin if item.kind is TensorKind.BUFFER else initial(item)

    layout = layout_of(held, origin_of)
    rules = ModelRules(*compat.ignore_patterns(additions.base or model))
    plan = plan_load(index, layout, request.bindings, rules, request.consent, additions.known_as)
    for name, read in plan.reads().items():
        for leaf in computed_leaves(read.expression):
            if (nbytes := smallest_block_bytes(leaf)) > request.options.budget_bytes:
                raise CoverageError(
                    f"{name} is computed by {leaf.operation.label} from {len(leaf.sources)} tensors, which needs "
                    f"{nbytes:,} bytes at once; the budget is {request.options.budget_bytes:,}: raise budget_bytes"
                )
    return plan


def destinations(
    plan: LoadPlan, by_name: Mapping[str, Held], devices: Mapping[str, torch.device]
) -> list[Destination]:
    """What to read into where."""
    boxes = {name: plan.layout.by_name[name].boxes for name in plan.reads()}
    return [
        Destination(name, read.expression, boxes[name], by_name[name].tensor.dtype, devices[name])
        for name, read in plan.reads().items()
    ]


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


def average_rows(world: World, ready: PreparedLoad) -> dict[str, torch.Tensor]:
    """The mean of the stored rows of each tensor whose further rows begin as that, on every rank the same.

    In float64; another number of ranks adds up in another order. Collective: yes, where there are such tensors.
    """
    if not isinstance(ready.request.additions.new_rows, MeanOfRows):
        return {}
    by_name = {item.fqn: item for item in ready.held}
    rows = {name: count for name, read in ready.plan.reads().items() if (count := rows_stored(read.expression))}

    def sums() -> dict[tuple[str, Box], torch.Tensor]:
        return {
            (name, part.box): strided_view(by_name[name].local, part.local).double().sum(0).cpu()
            for name, count in rows.items()
            for part in first_rows(ready.plan.layout.by_name[name].boxes, count)
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


def fill(model: nn.Module, ready: PreparedLoad, means: Mapping[str, torch.Tensor], written: dict[str, int]) -> None:
    """Values that come from no checkpoint: initialised tensors and recomputed buffers."""
    layout, additions, seed = ready.plan.layout, ready.request.additions, ready.request.options.seed
    by_name = {name: item for item in ready.held for name in item.names}
    for item in ready.held:
        tensor = layout.by_name[item.fqn]
        if item.fqn in ready.programs:
            program = ready.programs[item.fqn]
            first = by_name[additions.copies.get(item.fqn, item.fqn)]  # a copy begins as what it is a copy of
            if not program.is_elementwise:
                whole = initialize.initialize_whole(model, ready.held, first, additions, seed=seed)
                program = program_of(whole)
            boxes = boxes_to_fill(ready.plan, item.fqn)
            fill_from_program(program, item.local, boxes, seed=seed, fqn=first.fqn)
            written[item.fqn] = written.get(item.fqn, 0) + sum(part.box.numel for part in boxes)
        elif item.fqn in means:
            for part in boxes_to_fill(ready.plan, item.fqn):
                start, size = part.box.offsets[1:], part.box.sizes[1:]
                mean = means[item.fqn][tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
                strided_view(item.local, part.local).copy_(mean.expand(part.box.sizes))
                written[item.fqn] = written.get(item.fqn, 0) + part.box.numel
        elif item.fqn in additions.norms and isinstance(ready.plan.fills[item.fqn], Init):
            norms = additions.norms[item.fqn]
            fill_with_norms(item, tensor, by_name[norms.matrix], layout.by_name[norms.matrix], norms)
            written[item.fqn] = tensor.local_numel
        elif item.kind is TensorKind.BUFFER:
            value = ready.computed[item.fqn].value
            if value is not None and is_dense(item.local):
                item.local.copy_(value)
            elif value is not None:  # an expanded view: its elements share memory
                item.install(value.to(item.local.device))


def boxes_to_fill(plan: LoadPlan, name: str) -> Sequence[LocalBox]:
    """What this rank holds of a tensor that no checkpoint has: all of it, or its last rows."""
    boxes, fill = plan.layout.by_name[name].boxes, plan.fills[name]
    count = rows_stored(fill.expression) if isinstance(fill, Read) else None
    return boxes if count is None else last_rows(boxes, count)


def fill_with_norms(item: Held, tensor: TensorLayout, matrix: Held, rows: TensorLayout, norms: RowNorms) -> None:
    """The norms of the rows of a matrix, which is loaded already. Memory: a block of rows.

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


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether every element has memory of its own."""
    return all(size < 2 or stride > 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def mark_loaded(model: nn.Module, held: Sequence[Held]) -> None:
    """Leave the marks by which a later ``initialize_weights`` passes over what is loaded."""
    if compat.outermost_pretrained(model):
        for item in held:
            compat.mark_initialized(item.tensor)


def make_report(
    world: World,
    model: nn.Module,
    source: OpenSource,
    ready: PreparedLoad,
    placer: Placer,
    sharing: SharePlan,
    clock: Clock,
) -> LoadReport:
    plan, index = ready.plan, source.index
    reads = plan.reads()
    kinds = {
        name: (next(stored_leaves(read.expression)).dtype.label, plan.layout.by_name[name].dtype.label)
        for name, read in reads.items()
    }
    order = ("index", "plan", "materialize", "read", "share", "fill", "audit")
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    trained = [item for item in plan.layout.tensors if item.kind is TensorKind.PARAMETER and item.requires_grad]
    return LoadReport(
        checkpoint=index.root,
        rank=world.rank,
        world_size=world.size,
        parameters=sum(item.numel for item in plan.layout.tensors if item.kind is TensorKind.PARAMETER),
        checkpoint_bytes=index.nbytes,
        read_bytes=ready.request.already_read_bytes + placer.read_bytes,
        placed_bytes=plan.layout.local_nbytes,
        files_opened=getattr(source.reader, "files_opened", 0),
        reads=getattr(source.reader, "reads", 0),
        seconds={phase: clock.seconds[phase] for phase in order if phase in clock.seconds},
        loaded=len(reads),
        forecast=ready.forecast,
        read_once={name: choice.reason for name, choice in sharing.choices.items() if choice.is_shared},
        read_alone={name: choice.reason for name, choice in sharing.choices.items() if not choice.is_shared},
        files=tuple(index.files),
        tied={name: item.source for name, item in plan.fills.items() if isinstance(item, Tie)},
        initialized=plan.names(Init),
        recomputed=plan.names(Recompute),
        kept=plan.names(Keep),
        cast={name: pair for name, pair in kinds.items() if pair[0] != pair[1]},
        ignored_keys=plan.ignored_keys,
        missing_keys=plan.missing_keys,
        unexpected_keys=plan.unexpected_keys,
        mismatched_keys=plan.mismatched_keys,
        computed=tuple(name for name, read in reads.items() if computes(read.expression)),
        replicated=tuple(
            item.fqn
            for item in plan.layout.tensors
            if sharded and item.kind is TensorKind.PARAMETER and item.placement == "whole"
        ),
        wrapper=index.wrapper,
        not_loaded=index.ignored,
        notes=(*source.copies.notes, *ready.request.notes),
        trainable_parameters=sum(item.numel for item in trained),
        resized={
            name: (count, plan.layout.by_name[name].shape[0])
            for name, read in reads.items()
            if (count := rows_stored(read.expression)) is not None
        },
        trained={item.fqn: item.dtype.label for item in trained} if ready.request.is_tuned else {},
    )
