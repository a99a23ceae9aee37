"""Loads a checkpoint into a model: plan, agree, materialize, read, fill, audit, report."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.core.consents import Consent, OnMissing, OnUnexpected
from shardwise.core.errors import KeyMismatchError, ShardingError
from shardwise.core.expression import count_stored_rows
from shardwise.core.layout import LocalBox, TensorKind, TensorLayout, last_rows
from shardwise.core.machine import processor_count
from shardwise.core.reports import LoadReport
from shardwise.files.checkpoint_index import wrapper_notes
from shardwise.files.storage import StorageReader
from shardwise.files.stored_tensors import extra_tensors, stored_tensors
from shardwise.files.urls import HubOptions, is_url
from shardwise.fsdp import named_tensors
from shardwise.fsdp.named_tensors import TensorRef
from shardwise.loading import double_quantization, prepare
from shardwise.loading.agreement import compare_plans
from shardwise.loading.audit import audit, find_unequal_tied, require_equal_buffers
from shardwise.loading.plan import FromCheckpoint, Init, Keep, LoadPlan
from shardwise.loading.prepare import LoadRequest, PreparedLoad
from shardwise.loading.source import OpenSource, Source, open_source
from shardwise.models import pretrained
from shardwise.models.four_bit.base import quantize_bindings
from shardwise.models.four_bit.files import dequantize_layout
from shardwise.models.initialize import Additions, BufferRules
from shardwise.models.pretrained import bind, mark_loaded
from shardwise.ranks import call_arguments
from shardwise.ranks.world import Clock, World
from shardwise.transfer.memory import gc_disabled, materialize
from shardwise.transfer.progress import progress_bar
from shardwise.transfer.read import ReadExecutor
from shardwise.transfer.staging import StagingBuffer, upload_buffer


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
    clock = Clock()
    consent = Consent(on_missing, on_mismatched, on_unexpected)
    request = LoadRequest(consent=consent, buffers=buffers or {}, options=options)
    with call_arguments.get_world(options, "load") as world, torch.inference_mode(False):
        with call_arguments.comparing_arguments(world) as exchange:
            exchange.local = _check_load(model, checkpoint, request, key_mapping, hub)
        model = named_tensors.unwrap(model)
        return load_checkpoint(world, model, checkpoint, request, clock, key_mapping=key_mapping, hub=hub)


def _check_load(
    model: nn.Module,
    checkpoint: Source,
    request: LoadRequest,
    key_mapping: Mapping[str, str] | None,
    hub: HubOptions,
) -> dict[str, str]:
    """Check the arguments of :func:`load` on this rank. Return the ones that must be equal on all ranks."""
    consent = request.consent
    arguments = {"model": model, "checkpoint": checkpoint, "hub": hub, "options": request.options}
    arguments |= {f"on_{fault}": getattr(consent, fault) for fault in ("missing", "mismatched", "unexpected")}
    call_arguments.check_options(call_arguments.get_hints(load), arguments)
    kind = "a reader" if isinstance(checkpoint, StorageReader) else "a path or a hub id"
    return {
        "the kind of checkpoint": "a URL" if is_url(checkpoint) else kind,
        "key_mapping": repr(key_mapping),
        **prepare.get_comparable_settings(consent, request.buffers, request.options),
    }


def load_checkpoint(
    world: World,
    model: nn.Module,
    checkpoint: Source,
    request: LoadRequest,
    clock: Clock,
    *,
    key_mapping: Mapping[str, str] | None = None,
    hub: HubOptions = HubOptions(),  # noqa: B008 - frozen
) -> LoadReport:
    """Open a checkpoint and fill a model from it. Ranks have already compared their arguments. Collective: yes.

    The ``request`` has no bindings yet.
    """
    # Some classes load further files, which their config names.
    extra = getattr(type(getattr(model, "config", None)), "extra_files", ())
    with ExitStack() as stack:
        with clock.phase("index"):
            source = open_source(world, checkpoint, hub, extra, stack)
        try:
            with clock.phase("plan"), world.collective("plan the load"):
                prepared = prepare_checkpoint(world, model, source, request, key_mapping)
            report = execute_load(world, model, source, prepared, clock)
        finally:
            # Even after a failure: parameters for staging must not stay on the caller's model.
            double_quantization.remove_scale_parameters(model)
    is_distributed = source.index.is_distributed
    pretrained.record_conversions(model, prepared.request.transforms, is_distributed=is_distributed)
    return report


def prepare_checkpoint(
    world: World, model: nn.Module, source: OpenSource, request: LoadRequest, key_mapping: Mapping[str, str] | None
) -> PreparedLoad:
    """Bind a checkpoint's keys to a model by its own conversions, and plan its load on this rank.

    The ``request`` has no bindings yet.
    """
    transforms = pretrained.get_conversion_transforms(model, key_mapping)
    tensors = named_tensors.collect_tensors(model)
    layout = dequantize_layout(named_tensors.build_layout(tensors), tensors)
    bindings = bind(model, stored_tensors(source.index), layout, transforms, extra=extra_tensors(source.index))
    # Ties depend on the stored keys. They are made before the tensors are collected again for the plan.
    prepare.tie_declared(model, tensors, bindings)
    bindings = quantize_bindings(model, bindings, source.index.quant_type)
    bindings = double_quantization.add_scale_parameters(model, bindings)
    # After quantize_bindings(), which decides the layers whose scales are computed after the read.
    additions = Additions(nested=double_quantization.deferred_names(model))
    request = replace(request, bindings=bindings, transforms=transforms, additions=additions)
    return prepare.prepare_load(world, model, source, request)


def execute_load(
    world: World, model: nn.Module, source: OpenSource, prepared: PreparedLoad, clock: Clock
) -> LoadReport:
    """Agree on the plan, materialize, read, fill and audit: the same steps for every model and every world size.

    Collective: yes.
    """
    plan, options = prepared.plan, prepared.request.options
    with clock.phase("plan"):
        # Before any tensor gets memory. The ranks of a container share its CPUs.
        ranks_per_container = compare_plans(
            world,
            plan,
            prepared.config_fields,
            prepared.estimate,
            prepared.available,
            check_memory=options.check_memory,
        )
    shows_progress = options.progress and world.rank == 0
    with progress_bar("Loading weights", plan.layout.local_nbytes, enabled=shows_progress) as bar:
        executor = ReadExecutor(
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
                with clock.phase("materialize"), gc_disabled():
                    local = materialize(prepared.tensors, prepared.fsdp_params, prepared.device)
                executor.read_into(prepared.read_plan, [local[item.fqn] for item in prepared.read_plan.items])
        # After the read: each rank has its share, and the replicas exchange them.
        if prepared.shared:
            from shardwise.loading.shared_reads import exchange_shared

            with clock.phase("share"):
                tensors = {item.fqn: item for item in prepared.tensors}
                exchange_shared(world, prepared.shared, tensors, prepared.items, executor)
    with clock.phase("fill"):
        # Needs all scales, and counts what it writes for the audit below.
        completed = double_quantization.quantize_scales(world, model, budget_bytes=options.budget_bytes)
    with world.collective("set up the loaded model"):
        attributes = fill_and_audit(model, prepared, {**executor.written, **completed}, clock)
    with clock.phase("audit"):
        # After fill_and_audit(), which fills the buffers.
        require_equal_buffers(world, prepared.tensors)
    return make_report(world, model, source, prepared, executor, attributes, clock)


def require_equal_tied(world: World, plan: LoadPlan, executor: ReadExecutor) -> None:
    """Require equal values of tensors that share storage and are stored twice. Collective: yes."""
    if not plan.duplicates:
        return
    with world.all_reduce("compare tied tensors", unite_sorted) as exchange:
        exchange.local = find_unequal_tied(plan, executor)
    names = exchange.result
    if names:
        raise KeyMismatchError(
            f"{', '.join(names)}: the model ties this tensor, but the checkpoint holds different values for its "
            "names. Set tie_word_embeddings=False in the config, or untie the model before sharding it"
        )


def unite_sorted(names: Sequence[Sequence[str]]) -> list[str]:
    return sorted(set().union(*names))


def make_report(
    world: World,
    model: nn.Module,
    source: OpenSource,
    prepared: PreparedLoad,
    executor: ReadExecutor,
    attributes: tuple[str, ...],
    clock: Clock,
) -> LoadReport:
    """Return the report of a load that has ended. ``attributes`` are the names of recomputed attributes."""
    plan, index, request = prepared.plan, source.index, prepared.request
    fields = prepare.describe_plan(plan)
    fields["recomputed"] += attributes
    reads = plan.reads()
    phases = ("index", "plan", "materialize", "read", "share", "fill", "audit")
    parameters = [item for item in plan.layout.tensors if item.kind is TensorKind.PARAMETER]
    trained = [item for item in parameters if item.requires_grad]
    # Without sharding every parameter is whole, which is not worth a line of the report.
    replicated: list[str] = []
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        replicated = [item.fqn for item in parameters if item.placement == "whole"]
    resized: dict[str, tuple[int, int]] = {}
    for name, read in reads.items():
        stored_rows = count_stored_rows(read.expression)
        if stored_rows is not None:
            resized[name] = (stored_rows, plan.layout.by_name[name].shape[0])
    return LoadReport(
        checkpoint=index.root,
        rank=world.rank,
        world_size=world.size,
        parameters=sum(item.numel for item in parameters),
        checkpoint_bytes=index.nbytes,
        read_bytes=request.already_read_bytes + executor.read_bytes,
        placed_bytes=plan.layout.local_nbytes,
        files_opened=getattr(source.reader, "files_opened", 0),
        reads=getattr(source.reader, "reads", 0),
        seconds={phase: clock.seconds[phase] for phase in phases if phase in clock.seconds},
        loaded=len(reads),
        estimate=prepared.estimate,
        read_once=tuple(prepared.shared),
        files=tuple(index.files),
        kept=plan.names(Keep),
        **fields,
        missing_keys=plan.missing_keys,
        unexpected_keys=plan.unexpected_keys,
        mismatched_keys=plan.mismatched_keys,
        replicated=tuple(replicated),
        wrapper=index.wrapper,
        not_loaded=plan.not_loaded(index),
        notes=(*source.notes, *wrapper_notes(request.bindings.wrapped), *request.notes),
        trainable_parameters=sum(item.numel for item in trained),
        resized=resized,
        trained={item.fqn: item.dtype.label for item in trained} if request.is_tuned else {},
    )


_NORM_BLOCK_NUMEL = 1 << 22
"""Elements of a matrix whose row norms are computed at once."""


@gc_disabled()
def fill_and_audit(
    model: nn.Module, prepared: PreparedLoad, read: Mapping[str, int], clock: Clock
) -> tuple[str, ...]:
    """Fill tensors that no checkpoint has, and check that all are complete. Return names of recomputed attributes.

    ``read`` has the number of elements that have been written, by FQN.
    """
    written = dict(read)  # fill_unread() adds its own elements, so that audit() sees both
    with clock.phase("fill"):
        fill_unread(prepared, written, upload_buffer(prepared.device, prepared.request.options.budget_bytes))
        attributes = prepared.initializers.compute_attributes(prepared.device)
    with clock.phase("audit"):
        audit(prepared.plan, written, named_tensors.meta_leftovers(model))
        mark_loaded(model, (item.tensor for item in prepared.tensors))
    return attributes


def fill_unread(prepared: PreparedLoad, written: dict[str, int], staging: StagingBuffer) -> None:
    """Fill tensors that come from no checkpoint: initialized ones and recomputed buffers.

    ``written`` counts elements by FQN. The elements that are filled here are added to it.
    """
    layout, additions, seed = prepared.plan.layout, prepared.request.additions, prepared.request.options.seed
    # Tensors that were read need nothing here, except for new rows of a resized one.
    by_name = {name: item for item in prepared.tensors for name in item.names}
    for item in prepared.tensors:
        tensor = layout.by_name[item.fqn]
        if item.fqn in prepared.programs:
            from shardwise.models.initial_programs import copy_program, values_from_program

            program = prepared.programs[item.fqn]
            first = by_name[additions.copies.get(item.fqn, item.fqn)]  # a copy gets the values of its original
            if not program.is_elementwise:
                # An orthogonal matrix, for example: its shards cannot be initialized one by one. Every rank
                # initializes the full tensor, one at a time, and copies its own part.
                whole = prepared.initializers.initialize_whole(first, seed=seed)
                program = copy_program(whole)
            boxes = boxes_to_fill(prepared.plan, item.fqn)
            for target, values in values_from_program(program, item.local, boxes, seed=seed, fqn=first.fqn):
                staging.copy(values, target)
            written[item.fqn] = written.get(item.fqn, 0) + sum(piece.box.numel for piece in boxes)
        elif item.fqn in additions.norms and isinstance(prepared.plan.fills[item.fqn], Init):
            # Computed from the matrix, which has been read before.
            matrix = additions.norms[item.fqn]
            fill_with_norms(item, tensor, by_name[matrix], layout.by_name[matrix])
            written[item.fqn] = tensor.local_numel
        elif (
            item.kind is TensorKind.NON_PERSISTENT_BUFFER
            and (value := prepared.computed[item.fqn].value) is not None
        ):
            set_value(item, value, staging)


def boxes_to_fill(plan: LoadPlan, name: str) -> Sequence[LocalBox]:
    """Return the boxes of a missing tensor on this rank: all of it, or its last rows."""
    boxes, fill = plan.layout.by_name[name].boxes, plan.fills[name]
    count = count_stored_rows(fill.expression) if isinstance(fill, FromCheckpoint) else None
    return boxes if count is None else last_rows(boxes, count)


def fill_with_norms(item: TensorRef, tensor: TensorLayout, matrix: TensorRef, rows: TensorLayout) -> None:
    """Fill a vector with the norms of the rows of a matrix that has been loaded. Memory: 4 Mi elements.

    Raises:
        ShardingError: this rank holds the vector, but not full rows.
    """
    vector_rows = [(piece.box.offsets[:1], piece.box.sizes[:1]) for piece in tensor.boxes]
    matrix_rows = [(piece.box.offsets[:1], piece.box.sizes[:1]) for piece in rows.boxes]
    are_full = all(piece.box.sizes[1:] == rows.shape[1:] for piece in rows.boxes)
    if vector_rows != matrix_rows or not are_full:
        raise ShardingError(
            f"{item.fqn} ({tensor.placement}): is initialized with the row norms of {matrix.fqn} "
            f"({rows.placement}), of which this rank does not have the same rows in full. Shard both on dim 0"
        )
    # With this rank's 2,048 rows of a (4096, 8192) matrix: blocks of (512, 8192), each giving 512 norms.
    step = max(1, _NORM_BLOCK_NUMEL // max(1, math.prod(rows.shape[1:])))
    for start in range(0, item.local.shape[0], step):
        block = matrix.local[start : start + step]
        # In the matrix's dtype first, as PEFT's DoraLinearLayer.get_weight_norm has it while lora_B is zero.
        item.local[start : start + step] = torch.linalg.norm(block, dim=1).to(block.dtype).to(item.local.dtype)


def set_value(item: TensorRef, value: torch.Tensor, staging: StagingBuffer) -> None:
    """Give a buffer that has memory its value."""
    dims = zip(item.local.shape, item.local.stride(), strict=True)
    is_expanded = any(size > 1 and not stride for size, stride in dims)
    # Elements of an expanded tensor share memory, so that writing into it is an error: it is replaced.
    if is_expanded and item.local.device.type == "cpu":
        item.install(value)
        return
    # It gets memory of its own on the device before its value is copied there.
    if is_expanded:
        item.install(torch.empty(value.shape, dtype=value.dtype, device=item.local.device))
    staging.copy(value, item.local)
