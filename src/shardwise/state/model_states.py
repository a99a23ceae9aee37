"""Gets and sets the state of a model."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.core.consents import Consent
from shardwise.core.errors import ConfigError, FormatError
from shardwise.core.expert_factors import CURRENT_LAYOUT_VERSION
from shardwise.core.expression import Expression, Stored
from shardwise.core.layout import TensorKind
from shardwise.core.reports import StateReport
from shardwise.files.checkpoint_index import without_wrappers
from shardwise.files.local_reader import LocalReader
from shardwise.files.open_checkpoint import open_checkpoint
from shardwise.files.peft_adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_peft_version
from shardwise.files.stored_tensors import stored_tensors
from shardwise.fsdp.named_tensors import TensorRef, collect_tensors, require_plain_tensors, unwrap
from shardwise.fsdp.torch_private import from_torch, from_torch_or_other, fsdp_params
from shardwise.loading.load import set_value
from shardwise.models.initialize import Initializers
from shardwise.models.lora.inject import swap_experts
from shardwise.models.selection import Selection, names_outside
from shardwise.ranks.call_arguments import get_world
from shardwise.ranks.world import Clock, World
from shardwise.state import state_values
from shardwise.transfer.matching import OnFault, StateSlot, find_providers, match
from shardwise.transfer.memory import materialize, staging_device
from shardwise.transfer.move import Traffic, gather
from shardwise.transfer.move_plan import StateForm
from shardwise.transfer.replicas import equal_on_all, require_alike_models
from shardwise.transfer.staging import upload_buffer


def make_state_report(
    world: World,
    values: state_values.Values,
    traffic: Traffic,
    clock: Clock,
    *,
    provided_by: tuple[int, ...],
    **fields: Any,
) -> StateReport:
    """Return the report of a state that has been set, with ``fields`` that depend on what the state is for."""
    return StateReport(
        rank=world.rank,
        world_size=world.size,
        provided_by=() if isinstance(values, state_values.StoredValues) else provided_by,
        read_bytes=getattr(values, "read_bytes", 0),
        sent_bytes=traffic.sent_bytes,
        received_bytes=traffic.received_bytes,
        kept_bytes=traffic.kept_bytes,
        seconds=clock.seconds,
        **fields,
    )


@dataclass(frozen=True)
class CollectedModel:
    """Tensors of a model that are returned as its state dict, checked on all ranks.

    Attributes:
        refs: all tensors of the model.
        names: canonical FQNs, by the names of the state dict.
        tensors: the collected tensors by canonical FQN, tied tensors once. A buffer that differs has the first
            rank's values.
        differing: FQNs of buffers whose values differ between ranks.
        device: device of staging buffers.
    """

    refs: list[TensorRef]
    names: Mapping[str, str]
    tensors: Mapping[str, torch.Tensor]
    differing: tuple[str, ...]
    device: torch.device

    def by_name(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return values, given by FQN, under the names of the state: one object for all names of a tied tensor."""
        first_names = {name: item.fqn for item in self.refs for name in item.names}
        return {name: values[first_names[fqn]] for name, fqn in self.names.items() if first_names[fqn] in values}


def collect_model(
    world: World,
    model: nn.Module,
    only: Selection,
    options: state_values.StateOptions,
) -> CollectedModel:
    """Collect the tensors of a state, and compare replicas between ranks. Collective: yes.

    Raises:
        ConfigError, ShardingError, RankMismatchError: as in
            :func:`~shardwise.state.model_states.get_model_state_dict`.
    """
    with world.collective("collect the tensors"):
        refs = collect_tensors(model)
    require_alike_models(world, refs, [])
    names = broadcast_names_outside(world, model, refs, only)
    # Tied tensors once, whichever of their names were selected.
    fqns = set(names.values())
    tensors = {item.fqn: item.tensor for item in refs if not fqns.isdisjoint(item.names)}
    with world.collective("check for values"):
        state_values.require_values(tensors, "the model")
    device = staging_device(refs, tensors.values())
    buffers = {item.fqn for item in refs if item.kind is not TensorKind.PARAMETER}
    budget = options.budget_bytes
    # A gather takes parts of each from several ranks, which would mix replicas that differ.
    equal, differing = equal_on_all(world, tensors, buffers, budget_bytes=budget, device=device)
    return CollectedModel(refs, names, equal, differing, device)


def set_model_values(
    world: World,
    model: nn.Module,
    values: state_values.Values,
    *,
    only: Selection,
    consent: Consent,
    options: state_values.StateOptions,
    clock: Clock,
) -> StateReport:
    """Set the values of a model.

    Collective: yes.
    Memory, errors: as in :func:`set_model_state_dict`.
    """
    with clock.phase("agree"):
        with world.collective("collect the tensors"):
            refs = collect_tensors(model)
        require_alike_models(world, refs, [])
        names = broadcast_names_outside(world, model, refs, only)
        # What the ranks provide, and what the model needs, compared by name, shape and dtype.
        provided = values.describe(world)
        slots = _target_slots(refs, names)
        refs_by_slot = {slot.names[0]: item for slot, item in slots}
        with world.collective("match tensors"):
            matched = match([slot for slot, _ in slots], provided, consent, world.global_ranks)
        matched_refs = {item.slot.names[0]: refs_by_slot[item.slot.names[0]] for item in matched.tensors}
        with world.collective("check the tensors"):
            require_plain_tensors(list(matched_refs.values()))
        # Computed while all is on meta, so that a model is filled as by a load.
        initializers = Initializers(model, refs)
        with world.collective("plan computed tensors"):
            computed = _compute_buffers(initializers, only)
        # The last check: nothing has been changed so far.
        values.require_ties(world, [item.slot.names for item in matched.tensors])
    with clock.phase("exchange"):
        # Memory is allocated only now, after all checks of the model and the state.
        device = staging_device(refs, [item.tensor for item in refs])
        awaiting = [*matched_refs.values(), *(item for item, _ in computed)]
        with world.collective("allocate shards"):
            materialize(awaiting, fsdp_params(model), device)
        targets = {name: item.tensor for name, item in matched_refs.items()}
        traffic = values.copy_into(world, matched, targets, budget_bytes=options.budget_bytes, device=device)
        with world.collective("initialize tensors"):
            staging = upload_buffer(device, options.budget_bytes)
            for item, value in computed:
                set_value(item, value, staging)
            # Tensors that modules have as plain attributes, next to buffers that were on meta.
            attributes = initializers.compute_attributes(device) if computed else ()
    return make_state_report(
        world,
        values,
        traffic,
        clock,
        set_names=tuple(targets),
        missing=matched.missing,
        unexpected=matched.unexpected,
        mismatched=matched.mismatched,
        cast=matched.cast,
        on_meta=tuple(item.fqn for item in refs if item.tensor.is_meta),
        provided_by=tuple(find_providers(provided)),
        recomputed=(*(item.fqn for item, _ in computed), *attributes),
    )


def broadcast_names_outside(
    world: World, model: nn.Module, tensors: Sequence[TensorRef], selection: Selection
) -> dict[str, str]:
    """Return :func:`names_outside` of the first rank on all ranks. Collective: yes."""
    with world.broadcast("find tensors outside of the model") as exchange:
        if world.rank == 0:  # PEFT may query the hub, which may answer other ranks otherwise, or not at all
            exchange.local = names_outside(model, tensors, selection)
    names: dict[str, str] = exchange.result
    return names


def _compute_buffers(initializers: Initializers, only: Selection) -> list[tuple[TensorRef, torch.Tensor]]:
    """Return buffers on meta that no state has, with the values that the model's initializers compute."""
    not_saved = [item for item in initializers.tensors if item.kind is TensorKind.NON_PERSISTENT_BUFFER]
    on_meta = [item for item in not_saved if item.tensor.is_meta]
    if not on_meta or only is not None:
        return []
    buffers = initializers.buffers({}, seed=0)
    # Without a value, none of the initializers computes the buffer: it stays on meta.
    return [(item, value) for item in on_meta if (value := buffers[item.fqn].value) is not None]


def _target_slots(refs: list[TensorRef], names: Mapping[str, str]) -> list[tuple[StateSlot, TensorRef]]:
    """Return the tensors that get values, tied tensors once, with all their names in states.

    ``names`` are canonical FQNs by the names of the state dict.
    """
    state_names: dict[str, list[str]] = {}  # by FQN
    for name, fqn in names.items():
        state_names.setdefault(fqn, []).append(name)
    slots: list[tuple[StateSlot, TensorRef]] = []
    for item in refs:
        names_in_state = [name for fqn in item.names for name in state_names.get(fqn, ())]
        if names_in_state:
            # Tensors of an adapter may also have their names in the model.
            slot_names = tuple(dict.fromkeys([*names_in_state, *item.names]))
            dtype = from_torch_or_other(item.tensor.dtype)
            slots.append((StateSlot(slot_names, tuple(item.tensor.shape), dtype), item))
    return slots


@torch.no_grad()
def get_model_state_dict(
    model: nn.Module,
    form: StateForm = "full",
    *,
    only: Selection = None,
    options: state_values.StateOptions = state_values.StateOptions(),  # noqa: B008
) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of a model, by the names of the plain model.

    They equal ``model.state_dict()`` before the model was compiled, checkpoint-wrapped or sharded, also in their
    order. Tied parameters are there under each of their names, as one tensor.

    Collective: yes, over ``options.process_group`` (default: all ranks).
    Memory: for whole tensors, ``options.budget_bytes``, and on the ranks that get the tensors these, on the
    CPU. For ``"sharded"`` none: the tensors share the memory of the model, except for buffers that differ
    between ranks (running statistics), which are copies of the first rank's in every form.

    Args:
        model: any module, sharded or not. FSDP2 groups that are gathered are resharded.
        form: ``"full"``, ``"full_on_all_ranks"``, or ``"sharded"``.
        only: ``None``, or ``AdapterOnly()`` for an adapter of PEFT's, under the names of PEFT's files.
        options: budget, process group, timeouts.

    Returns:
        The tensors, without autograd. Empty on a rank that ``form`` excludes.

    Raises:
        ConfigError: an argument cannot be honored.
        ShardingError: tensors are on meta, or are placed neither as shards nor as replicas.
        RankMismatchError: ranks have different models, or different values of parameters that several hold.
        RankLostError: a rank has been lost.

    Every error is the same on every rank.
    """
    model = unwrap(model)
    with get_world(options, "get_model_state_dict") as world, torch.device("cpu"):
        arguments = {"form": form, "only": only}
        state_values.agree_on_arguments(world, get_model_state_dict, arguments, options)
        collected = collect_model(world, model, only, options)
        # Shards share the memory of the model, so they need no exchange.
        if form == "sharded":
            return collected.by_name({name: tensor.detach() for name, tensor in collected.tensors.items()})
        budget = options.budget_bytes
        return collected.by_name(
            gather(world, collected.tensors, form, budget_bytes=budget, device=collected.device)
        )


@torch.no_grad()
def set_model_state_dict(
    model: nn.Module,
    state: Mapping[str, torch.Tensor] | None,
    *,
    only: Selection = None,
    on_missing: OnFault = "error",
    on_unexpected: OnFault = "error",
    on_mismatched: OnFault = "error",
    options: state_values.StateOptions = state_values.StateOptions(),  # noqa: B008
) -> StateReport:
    """Give the parameters and persistent buffers of a model the values of a state, in place.

    A state is whole tensors or DTensors of any sharding, on every rank, or on some and ``None`` (or nothing) on the
    others. Ranks with full tensors use their own slices of them without comparing. The others receive their shards
    only. Values are cast to the dtype of the model's tensor (``report.cast``), except for integers and 8-bit
    numbers. Of tied parameters one name is enough. Tensors on meta get memory. Buffers without a value in the state
    are then computed by the model's initializers, as in :func:`~shardwise.loading.load.load`
    (``report.recomputed``). Those that nothing computes stay on meta (``report.on_meta``).

    Collective: yes, over ``options.process_group`` (default: all ranks).
    Memory: ``options.budget_bytes``.

    Args:
        model: any module, sharded or not.
        state: by names with or without wrapper prefixes. With ``AdapterOnly``, the names of PEFT's files, or those
            of the model.
        only: the part of the model that the state has.
        on_missing: ``"error"``, or ``Ignore(only=...)`` for tensors that may keep their values.
        on_unexpected: ``Ignore(only=...)`` for names in the state that the model does not have.
        on_mismatched: ``Ignore(only=...)`` for tensors that may keep their values where the shape differs.
        options: budget, process group, timeouts.

    Raises:
        ConfigError: an argument cannot be honored.
        KeyMismatchError: missing, unexpected or mismatched tensors, or tied tensors with two values. The message
            has all of them.
        RankMismatchError: ranks have different models, or provide different states.
        ShardingError: the state has tensors on meta.
        RankLostError: a rank has been lost.

    Every error is the same on every rank. All but the last come before anything is changed.
    """
    model = unwrap(model)
    clock = Clock()
    consent = Consent(on_missing, on_mismatched, on_unexpected)
    with get_world(options, "set_model_state_dict") as world, torch.device("cpu"):
        with clock.phase("agree"):
            arguments: dict[str, object] = {"only": only, "on_missing": on_missing}
            arguments |= {"on_unexpected": on_unexpected, "on_mismatched": on_mismatched}
            state_values.agree_on_arguments(world, set_model_state_dict, arguments, options)
            with world.collective("map the names"):
                tensors = state_values.by_canonical_names(state, "state")
        values = state_values.ProvidedValues(tensors)
        return set_model_values(world, model, values, only=only, consent=consent, options=options, clock=clock)


def swap_stored_experts(
    world: World, model: Any, values: state_values.Values, adapter: str | None, folder: str
) -> state_values.Values:
    """Return the values of a state with the LoRA matrices of stacked experts in the layout of today's PEFT.

    ``adapter`` is the only adapter that the state has, or None for all adapters of the model. ``folder`` may have
    the config of the adapter. Collective: yes.

    Raises:
        ConfigError: the layout is not known, or ranks hold whole tensors or shards, which are not rearranged.
    """
    with world.collective("match experts"):
        config = Path(folder, ADAPTER_CONFIG)
        version = read_peft_version(config) if config.is_file() else CURRENT_LAYOUT_VERSION
        expressions: dict[str, Expression] = {}
        if isinstance(values, state_values.StoredValues):
            expressions.update(values.expressions)
        else:
            for name, value in values.tensors.items():
                if ".lora_" in name and isinstance(value, torch.Tensor):
                    expressions[name] = Stored(name, tuple(value.shape), from_torch(value.dtype, name))
        refs, swapped = collect_tensors(model), expressions
        adapters = list(model.peft_config) if adapter is None else [adapter]
        for name in adapters:
            swapped = swap_experts(model, refs, name, swapped, version, folder)
        # Expressions are rearranged while they are read. Tensors that ranks pass would have to be resharded.
        changed = [name for name, item in swapped.items() if item != expressions[name]]
        if not changed:
            return values
        if not isinstance(values, state_values.StoredValues):
            raise ConfigError(
                f"{folder}: {changed[0]} was saved by PEFT before 0.19.1, which swapped the input and the output "
                "of stacked experts. Save the adapter with save_pretrained, and read that folder"
            )
        return replace(values, expressions=swapped)


def open_stored_values(
    world: World, folder: str, file: str, options: state_values.StateOptions, stack: ExitStack
) -> state_values.StoredValues:
    """Return the tensors in files of a folder, by names without wrapper prefixes.

    Readers are closed with ``stack``. Collective: yes.

    Raises:
        FormatError, StorageError: as in ``open_checkpoint``, or two names are equal.
    """
    with world.collective("open the folder"):
        reader = stack.enter_context(LocalReader(folder))
    # Every rank has a reader of its own. The headers are read once, for all.
    with world.broadcast("open the checkpoint") as exchange:
        if world.rank == 0:
            exchange.local = open_checkpoint(reader, weights_name=file)
    index = exchange.result
    if file in ADAPTER_WEIGHTS:
        index, _ = without_wrappers(index)
    with world.collective("map the keys"):
        named = state_values.by_canonical_names(stored_tensors(index), index.root, FormatError)
    return state_values.StoredValues(reader, index, named, options.budget_bytes)
