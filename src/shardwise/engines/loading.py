"""Loads a model that is there already: what is asked for, plan, agree, read, fill, audit, report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.conversion import computes, rows_stored, stored_leaves
from shardwise.engines.load_fill import BaseForms, average_rows, finish, forms_of
from shardwise.engines.load_options import LoadOptions, load_words
from shardwise.engines.load_plan import LoadRequest, PreparedLoad, prepare, tie_declared
from shardwise.engines.opening import OpenSource, Source, open_source
from shardwise.errors import CoverageError
from shardwise.execution.memory.garbage import collected_later
from shardwise.execution.memory.materialize import materialize
from shardwise.execution.ranks.agreement import agree_on
from shardwise.execution.ranks.progress import Clock, ProgressBar
from shardwise.execution.ranks.world import World
from shardwise.execution.reading.audit import require_equal_buffers, unequal_twins
from shardwise.execution.reading.place import Placer
from shardwise.execution.reading.shared_reads import SharePlan, plan_sharing, read_shared
from shardwise.layout import Origin, TensorKind
from shardwise.models import pretrained
from shardwise.models.additions import Additions
from shardwise.models.conversions.key_conversions import bind
from shardwise.models.initialize import BufferRules
from shardwise.models.view import layout_of, look_inside
from shardwise.observing import phases
from shardwise.planning.loads.load_plan import Consent, Init, Keep, LoadPlan, Recompute, Tie
from shardwise.planning.loads.stored import spare_tensors, stored_tensors
from shardwise.report.load_report import LoadReport, TouchedPages
from shardwise.storage.contract import StorageReader
from shardwise.storage.names import HubOptions, is_url


def carry_out(
    world: World, model: nn.Module, source: OpenSource, ask: Callable[[], LoadRequest], clock: Clock
) -> LoadReport:
    """Plan, agree, materialize, read, fill and audit: the same steps for every model and every world size.

    ``ask`` makes the model ready on this rank, and says what is wanted.
    """
    with clock.phase("plan"):
        ready = world.together(lambda: prepare(world, model, source, ask))
        plan, held, options = ready.plan, ready.held, ready.request.options
        agreed = agree_on(world, plan, ready.settings, ready.forecast, ready.available, options.memory_check)
    by_name = {item.fqn: item for item in held}
    with ProgressBar("Loading weights", world, agreed.total_bytes, enabled=options.progress) as bar:
        processors = agreed.processors.on(world.rank)
        placer = Placer(
            source.reader, source.index, options.budget_bytes, bar, world, source.identities, processors=processors
        )
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
    with clock.phase("fill"):
        completed = forms_of(model).complete(world, model, budget_bytes=options.budget_bytes)
    attributes = world.together(lambda: finish(model, ready, means, {**placer.written, **completed}, clock))
    with clock.phase("audit"):
        require_equal_buffers(world, held)
    report = make_report(world, model, source, ready, placer, sharing, clock)
    report = replace(report, recomputed=report.recomputed + attributes, pages=pages)
    phases.tell("load", _told(report))
    return report


def _told(report: LoadReport) -> dict[str, Any]:
    """What was foreseen and what was done, for whoever observes this rank."""
    names = ("checkpoint", "parameters", "checkpoint_bytes", "read_bytes", "placed_bytes", "seconds")
    forecast = report.forecast
    foreseen = ("shard_bytes", "device_bytes", "host_bytes", "read_bytes")
    return {
        **{name: getattr(report, name) for name in names},
        "forecast": {name: getattr(forecast, name) for name in foreseen},
    }


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
        if not computes(read.expression)
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
        not_loaded=plan.not_loaded(index),
        notes=(*source.copies.notes, *ready.request.notes),
        trainable_parameters=sum(item.numel for item in trained),
        resized={
            name: (count, plan.layout.by_name[name].shape[0])
            for name, read in reads.items()
            if (count := rows_stored(read.expression)) is not None
        },
        trained={item.fqn: item.dtype.label for item in trained} if ready.request.is_tuned else {},
    )


@dataclass(frozen=True, slots=True)
class LoadCall:
    """What :func:`~shardwise.verbs.load.load` is asked for, beside the model."""

    checkpoint: Source
    consent: Consent
    key_mapping: Mapping[str, str] | None = None
    buffers: BufferRules = field(default_factory=dict)
    hub: HubOptions = field(default_factory=HubOptions)
    options: LoadOptions = field(default_factory=LoadOptions)

    def words(self) -> dict[str, str]:
        """What of it ranks must have in common, in words."""
        kind = "a reader" if isinstance(self.checkpoint, StorageReader) else "a path or a hub id"
        return {
            "the kind of checkpoint": "a URL" if is_url(self.checkpoint) else kind,
            "key_mapping": repr(self.key_mapping),
            **load_words(self.consent, self.buffers, self.options),
        }


def load_checkpoint(world: World, model: nn.Module, call: LoadCall, clock: Clock) -> LoadReport:
    """Open a checkpoint and fill a model from it; ranks have agreed on the call. Collective: yes."""
    options = call.options
    transforms: list[Any] = []
    base = BaseForms(())
    with clock.phase("index"):
        source = open_source(world, call.checkpoint, call.hub, options.copies, options.budget_bytes)

    def ask() -> LoadRequest:
        nonlocal base
        base = forms_of(model)
        transforms.extend(pretrained.conversion_transforms(model, call.key_mapping))
        held = look_inside(model)
        layout = base.in_numbers(layout_of(held, lambda item: Origin.NOWHERE), held)
        spare = spare_tensors(source.index)
        bindings = bind(model, stored_tensors(source.index), layout, transforms, spare=spare)
        tie_declared(model, held, bindings)
        bindings = base.with_room(model, base.offered(model, bindings))
        additions = Additions(nested=base.made_later(model))
        return LoadRequest(bindings, call.consent, dict(call.buffers), options, additions=additions)

    try:
        with source.closing():
            report = carry_out(world, model, source, ask, clock)
    finally:
        base.let_go(model)
    pretrained.record_conversions(model, transforms)
    return report
