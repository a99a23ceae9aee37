"""Loads a checkpoint into a model: plan, agree, materialize, read, fill, audit, report."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.core.consents import Consent, OnMissing, OnUnexpected
from shardwise.core.errors import KeyMismatchError, ShardingError, answer_keywords
from shardwise.core.expression import rows_stored
from shardwise.core.layout import LocalBox, TensorKind, TensorLayout, first_rows, last_rows
from shardwise.core.lazy_exports import found_at
from shardwise.core.machine import processor_count
from shardwise.core.reports import LoadReport
from shardwise.core.tensors import Box
from shardwise.files.checkpoint_index import wrapper_notes
from shardwise.files.storage import StorageReader
from shardwise.files.stored_tensors import extra_tensors, stored_tensors
from shardwise.files.urls import HubOptions, is_url
from shardwise.fsdp import named_tensors
from shardwise.fsdp.named_tensors import TensorRef
from shardwise.loading import prepare
from shardwise.loading.agreement import agree_on
from shardwise.loading.audit import audit, find_unequal_tied, require_equal_buffers
from shardwise.loading.plan import FromCheckpoint, Init, Keep, LoadPlan
from shardwise.loading.prepare import BaseForm, Load, LoadRequest
from shardwise.loading.source import OpenSource, Source, open_source
from shardwise.models import pretrained
from shardwise.models.initialize import Additions, BufferRules, RowNorms
from shardwise.models.pretrained import bind, mark_loaded
from shardwise.ranks import call_arguments
from shardwise.ranks.world import Clock, World
from shardwise.transfer.memory import gc_disabled, materialize
from shardwise.transfer.read import ReadExecutor
from shardwise.transfer.staging import StagingBuffer, upload_buffer


def execute_load(world: World, model: nn.Module, source: OpenSource, load: Load, clock: Clock) -> LoadReport:
    """Agree on the plan, materialize, read, fill and audit: one order for every model and every world size.

    Collective: yes.
    """
    plan, options = load.plan, load.request.options
    with clock.phase("plan"):
        # Before any tensor gets memory. The ranks of a container share its CPUs.
        ranks_per_container = agree_on(
            world, plan, load.settings, load.estimate, load.available, check_memory=options.check_memory
        )
    shows_progress = options.progress and world.rank == 0
    with pretrained.progress_bar("Loading weights", plan.layout.local_nbytes, enabled=shows_progress) as bar:
        executor = executor_class(load.device)(
            source.reader,
            source.index,
            options.budget_bytes,
            world,
            source.identities,
            processors=max(1, processor_count() // ranks_per_container),
            progress=bar,
        )
        with clock.phase("read"):
            # Before tensors get memory: if this raises, none of them has been changed.
            require_equal_tied(world, plan, executor)
            with world.collective("read weights"):
                materialize_and_read(load, executor, clock)
        # Sums the rows that this rank has just read. finish() fills new rows with their mean.
        means = average_rows(world, load)
        # After the read: each rank has its share, and the replicas exchange them.
        if load.shared:
            from shardwise.loading.shared_reads import exchange_shared

            with clock.phase("share"):
                exchange_shared(world, load.shared, {item.fqn: item for item in load.held}, load.items, executor)
    with clock.phase("fill"):
        # Needs all scales (loading/double_quantization.py), and counts what it writes for the audit in finish().
        completed = get_base_form(model).complete(world, model, budget_bytes=options.budget_bytes)
    with world.collective("set up the loaded model"):
        attributes = finish(model, load, means, {**executor.written, **completed}, clock)
    with clock.phase("audit"):
        # After finish(), which fills the buffers.
        require_equal_buffers(world, load.held)
    return make_report(world, model, source, load, executor, attributes, clock)


def executor_class(device: torch.device) -> type[ReadExecutor]:
    """Return the executor of reads into tensors of a device."""
    if device.type == "cpu":
        return ReadExecutor
    from shardwise.loading.device_computing import DeviceReadExecutor

    return DeviceReadExecutor


def materialize_and_read(load: Load, executor: ReadExecutor, clock: Clock) -> None:
    """Give this rank's tensors memory, and read their values."""
    with clock.phase("materialize"), gc_disabled():
        local = materialize(load.held, load.fsdp_params, load.device)
    executor.place(load.read_plan, [local[item.fqn] for item in load.read_plan.items])


def require_equal_tied(world: World, plan: LoadPlan, executor: ReadExecutor) -> None:
    """Require equal values of tensors that share storage and are stored twice. Collective: yes."""
    if not plan.duplicates:
        return
    with world.all_reduce("compare tied tensors", sorted_union) as exchange:
        exchange.local = find_unequal_tied(plan, executor, world.rank, world.size)
    names = exchange.result
    if names:
        raise KeyMismatchError(
            f"{', '.join(names)}: the model ties this tensor, but the checkpoint holds different values for its "
            "names. Set tie_word_embeddings=False in the config, or untie the model before sharding it"
        )


def sorted_union(names: Sequence[Sequence[str]]) -> list[str]:
    return sorted(set().union(*names))


def make_report(
    world: World,
    model: nn.Module,
    source: OpenSource,
    load: Load,
    executor: ReadExecutor,
    attributes: tuple[str, ...],
    clock: Clock,
) -> LoadReport:
    plan, index, request = load.plan, source.index, load.request
    facts = prepare.plan_fields(plan)
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
        read_bytes=request.already_read_bytes + executor.read_bytes,
        placed_bytes=plan.layout.local_nbytes,
        files_opened=getattr(source.reader, "files_opened", 0),
        reads=getattr(source.reader, "reads", 0),
        seconds={phase: clock.seconds[phase] for phase in order if phase in clock.seconds},
        loaded=len(reads),
        estimate=load.estimate,
        read_once=tuple(load.shared),
        files=tuple(index.files),
        kept=plan.names(Keep),
        **{**facts, "recomputed": facts["recomputed"] + attributes},
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
        notes=(*source.notes, *wrapper_notes(request.bindings.wrapped), *request.notes),
        trainable_parameters=sum(item.numel for item in trained),
        resized={
            name: (count, plan.layout.by_name[name].shape[0])
            for name, read in reads.items()
            if (count := rows_stored(read.expression)) is not None
        },
        trained={item.fqn: item.dtype.label for item in trained} if request.is_tuned else {},
    )


_NORM_BLOCK_NUMEL = 1 << 22


@gc_disabled()
def finish(
    model: nn.Module, load: Load, means: Mapping[str, torch.Tensor], read: Mapping[str, int], clock: Clock
) -> tuple[str, ...]:
    """Fill tensors that no checkpoint has, and check that all are complete. Return names of recomputed attributes.

    ``read`` has the number of elements that have been written, by FQN.
    """
    written = dict(read)
    with clock.phase("fill"):
        fill(load, means, written, upload_buffer(load.device, load.request.options.budget_bytes))
        attributes = load.initializers.compute_attributes(load.device)
    with clock.phase("audit"):
        audit(load.plan, written, named_tensors.meta_leftovers(model))
        mark_loaded(model, (item.tensor for item in load.held))
    return attributes


def average_rows(world: World, load: Load) -> dict[str, torch.Tensor]:
    """Return the mean of the stored rows, in float64, of tensors whose new rows start as that. Equal on every rank.

    The order of additions depends on the number of ranks. Collective: yes, if new rows start as the mean.
    """
    if load.request.additions.new_rows != "mean":
        return {}
    by_name = {item.fqn: item for item in load.held}
    rows = {name: count for name, read in load.plan.reads().items() if (count := rows_stored(read.expression))}

    def add_up(sums_by_rank: Sequence[Mapping[tuple[str, Box], torch.Tensor]]) -> dict[str, torch.Tensor]:
        found = {box: total for sums in sums_by_rank for box, total in sums.items()}  # replicas have equal boxes
        means = {
            name: torch.zeros(by_name[name].tensor.shape[1:], dtype=torch.float64, device="cpu") for name in rows
        }
        # In one order, whichever rank has which box.
        for (name, box), total in sorted(found.items(), key=_get_offsets):
            means[name][column_slices(box)] += total / rows[name]
        return means

    with world.all_reduce("add up rows", add_up) as exchange:
        exchange.local = {
            (name, piece.box): named_tensors.strided_view(by_name[name].local, piece.local).double().sum(0).cpu()
            for name, count in rows.items()
            for piece in first_rows(load.plan.layout.by_name[name].boxes, count)
        }
    means: dict[str, torch.Tensor] = exchange.result
    return means


def _get_offsets(entry: tuple[tuple[str, Box], torch.Tensor]) -> tuple[int, ...]:
    return entry[0][1].offsets


def column_slices(box: Box) -> tuple[slice, ...]:
    """Return the slices of a box in all dimensions but the first."""
    return tuple(slice(start, start + size) for start, size in zip(box.offsets[1:], box.sizes[1:], strict=True))


def fill(load: Load, means: Mapping[str, torch.Tensor], written: dict[str, int], staging: StagingBuffer) -> None:
    """Fill tensors that come from no checkpoint: initialized ones and recomputed buffers."""
    layout, additions, seed = load.plan.layout, load.request.additions, load.request.options.seed
    by_name = {name: item for item in load.held for name in item.names}
    for item in load.held:
        tensor = layout.by_name[item.fqn]
        if item.fqn in load.programs:
            from shardwise.models.initial_programs import copy_program, values_from_program

            program = load.programs[item.fqn]
            first = by_name[additions.copies.get(item.fqn, item.fqn)]  # a copy gets the values of its original
            if not program.is_elementwise:
                whole = load.initializers.initialize_whole(first, seed=seed)
                program = copy_program(whole)
            boxes = boxes_to_fill(load.plan, item.fqn)
            for target, values in values_from_program(program, item.local, boxes, seed=seed, fqn=first.fqn):
                staging.copy(values, target)
            written[item.fqn] = written.get(item.fqn, 0) + sum(piece.box.numel for piece in boxes)
        elif item.fqn in means:
            for piece in boxes_to_fill(load.plan, item.fqn):
                mean = means[item.fqn][column_slices(piece.box)]
                staging.copy(mean.expand(piece.box.sizes), named_tensors.strided_view(item.local, piece.local))
                written[item.fqn] = written.get(item.fqn, 0) + piece.box.numel
        elif item.fqn in additions.norms and isinstance(load.plan.fills[item.fqn], Init):
            norms = additions.norms[item.fqn]
            fill_with_norms(item, tensor, by_name[norms.matrix], layout.by_name[norms.matrix], norms)
            written[item.fqn] = tensor.local_numel
        elif item.kind is TensorKind.BUFFER and (value := load.computed[item.fqn].value) is not None:
            set_value(item, value, staging)


def boxes_to_fill(plan: LoadPlan, name: str) -> Sequence[LocalBox]:
    """Return the boxes of a missing tensor on this rank: all of it, or its last rows."""
    boxes, fill = plan.layout.by_name[name].boxes, plan.fills[name]
    count = rows_stored(fill.expression) if isinstance(fill, FromCheckpoint) else None
    return boxes if count is None else last_rows(boxes, count)


def fill_with_norms(
    item: TensorRef,
    tensor: TensorLayout,
    matrix: TensorRef,
    rows: TensorLayout,
    norms: RowNorms,
) -> None:
    """Fill a vector with the norms of the rows of a matrix that has been loaded. Memory: 4 Mi elements.

    Raises:
        ShardingError: this rank holds the vector, but not full rows.
    """
    held = [(box.box.offsets[:1], box.box.sizes[:1]) for box in tensor.boxes]
    if held != [(box.box.offsets[:1], box.box.sizes[:1]) for box in rows.boxes] or any(
        box.box.sizes[1:] != rows.shape[1:] for box in rows.boxes
    ):
        raise ShardingError(
            f"{item.fqn} ({tensor.placement}) is initialized with the norms of the rows of {matrix.fqn} "
            f"({rows.placement}), which this rank does not hold whole. Shard both on their first dimension"
        )
    step = max(1, _NORM_BLOCK_NUMEL // max(1, math.prod(rows.shape[1:])))
    for start in range(0, item.local.shape[0], step):
        block = matrix.local[start : start + step]
        item.local[start : start + step] = norms.of(block).to(item.local.dtype)


def set_value(item: TensorRef, value: torch.Tensor, staging: StagingBuffer) -> None:
    """Give a buffer that has memory its value."""
    is_expanded = any(
        size > 1 and not stride for size, stride in zip(item.local.shape, item.local.stride(), strict=True)
    )
    if is_expanded and item.local.device.type == "cpu":  # its elements share memory
        item.install(value)
        return
    if is_expanded:
        item.install(torch.empty(value.shape, dtype=value.dtype, device=item.local.device))
    staging.copy(value, item.local)


def get_base_form(model: nn.Module) -> BaseForm:
    """Return how the layers of a model keep their weights."""
    # Found by name, so that a load of other models does not import the four-bit code.
    if any(hasattr(type(module), "kept_as") for module in model.modules()):
        form: BaseForm = found_at("shardwise.loading.double_quantization:FOUR_BITS")
        return form
    return BaseForm()


def prepare_checkpoint(
    world: World,
    model: nn.Module,
    source: OpenSource,
    consent: Consent,
    buffers: BufferRules,
    options: prepare.LoadOptions,
    key_mapping: Mapping[str, str] | None,
) -> Load:
    """Bind a checkpoint's keys to a model by its own conversions, and plan its load on this rank."""
    form, transforms = get_base_form(model), pretrained.get_conversion_transforms(model, key_mapping)
    held = named_tensors.collect_tensors(model)
    layout = form.logical_layout(named_tensors.build_layout(held), held)
    bindings = bind(model, stored_tensors(source.index), layout, transforms, extra=extra_tensors(source.index))
    prepare.tie_declared(model, held, bindings)
    bindings = form.allocate_staging(model, form.update_bindings(model, bindings))
    additions = Additions(nested=form.deferred_names(model))
    request = LoadRequest(bindings, consent, buffers, options, transforms, additions=additions)
    return prepare.prepare_load(world, model, source, request)


def load_checkpoint(
    world: World,
    model: nn.Module,
    checkpoint: Source,
    consent: Consent,
    options: prepare.LoadOptions,
    clock: Clock,
    *,
    key_mapping: Mapping[str, str] | None = None,
    buffers: BufferRules | None = None,
    hub: HubOptions = HubOptions(),  # noqa: B008 - frozen
) -> LoadReport:
    """Open a checkpoint and fill a model from it. Ranks have already compared their arguments. Collective: yes."""
    with clock.phase("index"):
        source = open_source(world, checkpoint, hub)
    with source.closing():
        try:
            with clock.phase("plan"), world.collective("plan the load"):
                load = prepare_checkpoint(world, model, source, consent, buffers or {}, options, key_mapping)
            report = execute_load(world, model, source, load, clock)
        finally:
            get_base_form(model).rollback(model)
    pretrained.record_conversions(model, load.request.transforms)
    return report


_ON_DEVICE = (
    "Tensors are loaded on the device of the model's mesh. For an unsharded one, pass LoadOptions(device=...)"
)


@answer_keywords(
    strict="Pass on_missing=Initialize(only=...) and on_unexpected=Ignore(only=...), with the names",
    map_location=_ON_DEVICE,
    device=_ON_DEVICE,
    assign="Leave it out: tensors on meta get memory, and real ones keep theirs",
    weights_only="Leave it out: no code of a file is run",
    dtype="Values are cast to the dtype of the model's tensors. Build the model in this dtype",
)
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
    options: prepare.LoadOptions = prepare.LoadOptions(),  # noqa: B008
) -> LoadReport:
    """Fill a model from a checkpoint (safetensors, ``.bin``, DCP), bitwise as transformers would.

    The model may be any ``nn.Module``: on meta or real, sharded by ``fully_shard`` or not, of transformers or not.
    Tensors on meta get memory for this rank's shard. Values of real ones are replaced. Each tensor keeps its dtype
    and ``requires_grad``.

    Collective: yes, over ``options.process_group``.
    Memory: this rank's shards, and ``options.budget_bytes``.

    Args:
        model: the model, in the same state on every rank.
        checkpoint: a directory, a file of tensors, an index file, a hub id, a URL, or a storage reader.
        key_mapping: regex to replacement, applied to the checkpoint's keys before the model's own renames.
        buffers: glob of buffer names to a callable that computes the buffer of the module it is given, for
            non-persistent buffers that neither the model's class nor a ``reset_parameters`` computes.
        on_missing: treatment of tensors that the checkpoint does not have.
        on_mismatched: treatment of tensors stored in another shape.
        on_unexpected: treatment of keys that match no tensor of the model.
        hub: revision, cache and token, for a hub id.
        options: seed, memory budget, device, progress, process group.

    Raises:
        ConfigError: an argument has the wrong type or value.
        KeyMismatchError: checkpoint and model do not match. The message has all faults of keys and shapes, and no
            tensor has been changed. Tied tensors that are stored twice are compared after that.
        FormatError: the checkpoint's files contradict their format.
        StorageError: bytes could not be read. Some tensors may have been written.
        ShardingError: the model's sharding cannot be understood.
        RankMismatchError: ranks pass different arguments, have different files or plans, or hold different
            non-persistent buffers.
        RankLostError: a rank ended, or does not answer.

    Every error is the same on every rank, except after the loss of one.
    """
    consent, clock = Consent(on_missing, on_mismatched, on_unexpected), Clock()
    with call_arguments.get_world(options, "load") as world:
        with call_arguments.comparing_arguments(world) as exchange:
            exchange.local = _check_load(model, checkpoint, key_mapping, buffers or {}, consent, hub, options)
        return load_checkpoint(
            world,
            named_tensors.without_compile(model),
            checkpoint,
            consent,
            options,
            clock,
            key_mapping=key_mapping,
            buffers=buffers,
            hub=hub,
        )


def _check_load(
    model: nn.Module,
    checkpoint: Source,
    key_mapping: Mapping[str, str] | None,
    buffers: BufferRules,
    consent: Consent,
    hub: HubOptions,
    options: prepare.LoadOptions,
) -> dict[str, str]:
    """Check the arguments of :func:`load` on this rank. Return those that ranks must have in common."""
    given = {"model": model, "checkpoint": checkpoint, "hub": hub, "options": options}
    given |= {f"on_{fault}": getattr(consent, fault) for fault in ("missing", "mismatched", "unexpected")}
    call_arguments.check_options(call_arguments.get_hints(load), given)
    kind = "a reader" if isinstance(checkpoint, StorageReader) else "a path or a hub id"
    return {
        "the kind of checkpoint": "a URL" if is_url(checkpoint) else kind,
        "key_mapping": repr(key_mapping),
        **prepare.comparable_load_settings(consent, buffers, options),
    }
