"""Plans a load on one rank, before anything is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shardwise.core.computed import SmallestBlocks, computes, iter_computed_leaves
from shardwise.core.consents import Consent
from shardwise.core.errors import ConfigError, KeyMismatchError, ShardingError
from shardwise.core.expression import Bindings, count_stored_rows, iter_stored_leaves
from shardwise.core.layout import Origin, TensorKind
from shardwise.core.reports import Available, RankEstimate
from shardwise.fsdp import torch_private
from shardwise.fsdp.named_tensors import (
    TensorRef,
    build_layout,
    collect_tensors,
    padded_numels,
    require_plain_tensors,
)
from shardwise.loading.memory_estimate import MemoryPlacement, estimate_rank
from shardwise.loading.plan import Init, LoadPlan, ModelRules, Recompute, Tie, plan_load
from shardwise.loading.source import OpenSource
from shardwise.models import initialize, pretrained
from shardwise.ranks.timeouts import Timeouts
from shardwise.ranks.world import World
from shardwise.transfer import memory
from shardwise.transfer.read import ReadItem, ReadPlan, plan_reads

if TYPE_CHECKING:
    from shardwise.models.initial_programs import Program
    from shardwise.transfer.move_plan import Boxes

SharedReads: TypeAlias = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Settings of a load. None of them changes the loaded values, except ``seed``.

    Attributes:
        seed: for tensors that are initialized, together with their FQN.
        budget_bytes: host memory, beyond the shards, that one rank may use for staging and for conversions that
            compute.
        device: of an unsharded model on meta. Sharded ones use the device of their mesh.
        progress: show a bar on the first rank (if there is a terminal, and transformers' bars are not off).
        process_group: the ranks that load together. None is the default group, or this process alone.
        timeouts: how long ranks wait for each other. None for the timeout of the process group, if it was given
            one.
        shared_reads: whether ranks that hold the same (replicas) read a share each and send it to the others:
            "auto" does so if the storage is remote, "always" and "never" are the other choices.
        check_memory: refuse a load whose estimate exceeds free memory before anything is read.
    """

    seed: int = 0
    budget_bytes: int = 256 << 20
    device: torch.device | None = None
    progress: bool = True
    process_group: dist.ProcessGroup | None = None
    timeouts: Timeouts | None = None
    shared_reads: SharedReads = "auto"
    check_memory: bool = True

    def __post_init__(self) -> None:
        memory.require_budget(self.budget_bytes)


@dataclass(frozen=True)
class LoadRequest:
    """A model's bindings to a checkpoint, and the settings of its load.

    Attributes:
        bindings: the checkpoint's expressions for the model's tensors, added once its headers have been read.
        transforms: conversions of transformers that the bindings were traced from.
        already_read_bytes: read before the load, to decide ties.
        is_tuned: whether the caller chose the trained parameters.
    """

    bindings: Bindings = field(default_factory=lambda: Bindings({}))
    consent: Consent = field(default_factory=Consent)
    buffers: initialize.BufferRules = field(default_factory=dict)
    options: LoadOptions = field(default_factory=LoadOptions)
    transforms: Sequence[Any] = ()
    already_read_bytes: int = 0
    additions: initialize.Additions = initialize.NOTHING_ADDED
    is_tuned: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PreparedLoad:
    """Decisions of this rank about a load, before anything is read.

    Attributes:
        tensors: the model's tensors.
        computed: values of non-persistent buffers, by FQN.
        programs: initializers of missing tensors, by FQN.
        device: device on which the model computes.
        fsdp_params: FSDP2's ``FSDPParam`` of each parameter that it shards.
        items: what this rank's tensors need from the checkpoint, and where it goes.
        shared: boxes by rank of tensors of which each replica reads a share, and sends it to the others.
        read_plan: how this rank reads ``items``, and of shared ones its share only.
        config_fields: fields of the model's config, as text by name, which ranks compare.
    """

    request: LoadRequest
    tensors: list[TensorRef]
    initializers: initialize.Initializers
    computed: Mapping[str, initialize.ComputedBuffer]
    plan: LoadPlan
    programs: Mapping[str, Program]
    device: torch.device
    fsdp_params: memory.FsdpParams
    items: Sequence[ReadItem]
    shared: Mapping[str, tuple[Boxes, ...]]
    read_plan: ReadPlan
    estimate: RankEstimate
    available: Available
    config_fields: Mapping[str, str]


def get_comparable_settings(
    consent: Consent, buffers: initialize.BufferRules, options: LoadOptions
) -> dict[str, str]:
    """Return the settings of a load that must be equal on all ranks, as text, by name."""
    settings = {
        "on_missing": repr(consent.missing),
        "on_mismatched": repr(consent.mismatched),
        "on_unexpected": repr(consent.unexpected),
        "buffers": repr(sorted(buffers)),
    }
    for item in fields(options):
        # These four may differ between ranks without changing values or plans.
        if item.name not in ("device", "progress", "process_group", "timeouts"):
            settings[f"options.{item.name}"] = repr(getattr(options, item.name))
    return settings


@memory.gc_disabled()
def prepare_load(world: World, model: nn.Module, source: OpenSource, request: LoadRequest) -> PreparedLoad:
    """Decide how a model is filled, on this rank alone, before anything is read."""
    options, additions, policy = request.options, request.additions, source.reader.policy
    # Again, after the keys were bound: ties and staging parameters may have changed the model's tensors.
    tensors = collect_tensors(model)
    require_plain_tensors(tensors)
    initializers = initialize.Initializers(model, tensors, additions)
    # Buffers before the layout: build_layout calls find_origin for each tensor, which looks them up.
    computed = initializers.buffers(request.buffers, seed=options.seed)
    layout = build_layout(tensors, partial(find_origin, initializers, computed))
    rules = get_rules(additions.base or model)
    plan = plan_load(source.index, layout, request.bindings, rules, request.consent, additions.base_names)
    # Conversions and initializers that exceed the budget are refused here, before anything is read.
    require_within_budget(plan, options.budget_bytes)
    programs = plan_initial_values(initializers, plan, options)
    device, fsdp_params = memory.get_model_device(tensors, options.device), torch_private.fsdp_params(model)
    by_name = {item.fqn: item for item in tensors}
    # An item for each tensor that is read from the checkpoint.
    items: list[ReadItem] = []
    for name, read in plan.reads().items():
        target_device = memory.target_device(by_name[name], fsdp_params, device)
        boxes, dtype = plan.layout.by_name[name].boxes, by_name[name].tensor.dtype
        items.append(ReadItem(name, read.expression, boxes, dtype, target_device))
    # Replicas read a share each, and exchange them in execute_load.
    shared: Mapping[str, tuple[Boxes, ...]] = {}
    items_to_read, mode = items, options.shared_reads
    if world.size > 1 and (mode == "always" or (mode == "auto" and policy.is_remote)):
        from shardwise.loading.shared_reads import keep_local_shares, select_shared

        shared = select_shared(world, by_name, items)
        items_to_read = keep_local_shares(world, shared, items)
    placement = MemoryPlacement.from_plan(
        plan,
        policy,
        device=device.type,
        budget_bytes=options.budget_bytes,
        offloads_shards=device.type != "cpu" and memory.offloads_shards(fsdp_params),
    )
    # A load into live tensors allocates nothing, so free memory is not compared.
    needs_memory = any(item.tensor.is_meta for item in tensors)
    return PreparedLoad(
        request=request,
        tensors=tensors,
        initializers=initializers,
        computed=computed,
        plan=plan,
        programs=programs,
        device=device,
        fsdp_params=fsdp_params,
        items=items,
        shared=shared,
        read_plan=plan_reads(items_to_read, source.index, policy, options.budget_bytes, world.rank / world.size),
        estimate=estimate_rank(plan, world.rank, placement, padded_numels(tensors, fsdp_params)),
        available=memory.available_memory(device) if needs_memory else Available(),
        config_fields=pretrained.get_settings(additions.base or model),
    )


def find_origin(
    initializers: initialize.Initializers, computed: Mapping[str, initialize.ComputedBuffer], item: TensorRef
) -> Origin:
    """Return what gives a tensor its value if no checkpoint does."""
    return (
        computed[item.fqn].origin
        if item.kind is TensorKind.NON_PERSISTENT_BUFFER
        else initializers.find_origin(item)
    )


def require_within_budget(plan: LoadPlan, budget_bytes: int) -> None:
    """Reject conversions that compute, if one of their smallest blocks needs more than the budget.

    Raises:
        ConfigError: naming the tensor and the bytes.
    """
    blocks = SmallestBlocks()
    for name, read in plan.reads().items():
        for leaf in iter_computed_leaves(read.expression):
            if (nbytes := blocks.nbytes(leaf)) > budget_bytes:
                raise ConfigError(
                    f"{name}: {leaf.operation.label} of {len(leaf.sources)} tensors needs {nbytes:,} bytes at "
                    f"once, and the budget is {budget_bytes:,}. Raise budget_bytes"
                )


def get_rules(model: nn.Module) -> ModelRules:
    """Return the keys that a model's class ignores, if they are missing or unexpected."""
    return ModelRules(*pretrained.ignore_patterns(model))


def plan_initial_values(
    initializers: initialize.Initializers, plan: LoadPlan, options: LoadOptions
) -> dict[str, Program]:
    """Return the programs that initialize missing tensors.

    Raises:
        KeyMismatchError: naming tensors that no initializer writes, or that need more than the budget.
    """
    grown = [name for name, read in plan.reads().items() if count_stored_rows(read.expression) is not None]
    programs = initializers.programs([*plan.names(Init), *grown])
    faults = initialize.list_unfit_programs(programs, options.budget_bytes)
    if faults:
        raise KeyMismatchError("tensors are missing that cannot be initialized:\n  " + "\n  ".join(faults))
    return programs


def tie_declared(model: nn.Module, refs: Sequence[TensorRef], bindings: Bindings) -> None:
    """Tie declared ties that the checkpoint has once and the model does not share yet.

    Raises:
        ShardingError: when the model is already sharded, so that it is too late.
    """
    by_name = {name: item for item in refs for name in item.names}
    untied: list[tuple[str, str]] = []
    for target, source in pretrained.get_declared_ties(model).items():
        # Both names exist, are two tensors, and the checkpoint does not store both.
        is_shared = target in by_name and by_name[target] is by_name.get(source)
        are_both_stored = bindings.matched.get(target) and bindings.matched.get(source)
        if target in by_name and source in by_name and not is_shared and not are_both_stored:
            untied.append((target, source))
    if not untied:
        return
    target, source = untied[0]
    if any(isinstance(item.tensor, DTensor) for item in refs):
        raise ShardingError(
            f"{target}: is declared tied to {source}, but they are two parameters of the sharded model. Call "
            "model.tie_weights() before fully_shard"
        )
    assert isinstance(model, PreTrainedModel)
    pretrained.tie(model, set(by_name) - set(bindings.matched), set())


def describe_plan(plan: LoadPlan) -> dict[str, Any]:
    """Return fields of a report, or of an estimate, that describe how a model is filled."""
    reads = plan.reads()
    computed: list[str] = []
    cast: dict[str, tuple[str, str]] = {}
    for name, read in reads.items():
        # Computed tensors are listed on their own. Of the others, the first leaf has the stored dtype.
        if computes(read.expression):
            computed.append(name)
            continue
        stored, target = next(iter_stored_leaves(read.expression)), plan.layout.by_name[name]
        if stored.dtype.label != target.dtype.label:
            cast[name] = (stored.dtype.label, target.dtype.label)
    return {
        "tied": {name: item.source for name, item in plan.fills.items() if isinstance(item, Tie)},
        "initialized": plan.names(Init),
        "recomputed": plan.names(Recompute),
        "cast": cast,
        "ignored_keys": plan.ignored_keys,
        "computed": tuple(computed),
    }
