"""Restores a checkpoint: opens it, compares it with the current training, then loads its values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoints.comparison import Comparison, compare, require_same_tuning
from shardwise.checkpoints.header import CheckedReader
from shardwise.checkpoints.step_folders import OpenCheckpoint, open_checkpoint, resolve
from shardwise.checkpoints.train_state import (
    REDUCED,
    CollectedState,
    TrainState,
    collect_state,
    restore_generators,
    seed_generators,
)
from shardwise.core.consents import Consent
from shardwise.core.errors import FormatError, ShardingError
from shardwise.core.expression import Bindings
from shardwise.core.save_reports import RestoreReport
from shardwise.core.tensors import Box
from shardwise.files.join_entries import KeyPath
from shardwise.files.storage import StorageReader
from shardwise.fsdp.named_tensors import collect_tensors
from shardwise.fsdp.optimizer_states_by_name import ParsedState, read
from shardwise.fsdp.rebind import Key, rebuild_state_tensor
from shardwise.fsdp.torch_private import from_torch_or_other
from shardwise.loading.load import execute_load
from shardwise.loading.prepare import LoadOptions, LoadRequest, prepare_load
from shardwise.loading.source import OpenSource
from shardwise.models.selection import Selection
from shardwise.ranks.world import Clock, World
from shardwise.saving.torch_saves import load_value
from shardwise.state.base_identity import BaseMatch, compare_bases
from shardwise.state.optimizer_fit import OptimizerMatch, OptimizerTargets, match_optimizer_state
from shardwise.state.state_values import StateOptions, read_numbers, read_tensors
from shardwise.transfer.distributed_chunks import flat_key
from shardwise.transfer.matching import SourceTensor, SourceTensors
from shardwise.transfer.memory import gc_disabled
from shardwise.transfer.read import ReadExecutor
from shardwise.transfer.replicas import require_alike_models


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """All that is decided before a restore changes anything.

    Attributes:
        collected: the current model and optimizers.
        common: values that are not tensors: state that is equal on all ranks, and the first rank's random
            generators.
        local: this rank's position in the data ("data"), its generators ("rng"), and its reduced optimizer state
            ("optimizers"), if the checkpoint has them for this rank.
        base: comparison of the checkpoint's base with the current one.
        matched: comparison of everything except optimizer state.
        fitting: matched optimizer state. None if no optimizer is restored.
    """

    collected: CollectedState
    common: Mapping[KeyPath, Any]
    local: Mapping[str, Any]
    base: BaseMatch
    matched: Comparison
    fitting: OptimizerMatch | None


@torch.inference_mode(mode=False)  # before no_grad(), because it turns gradients on
@torch.no_grad()
def restore(
    world: World,
    root: Path,
    state: TrainState,
    requested: int | None,
    only: Selection,
    consent: Consent,
    options: StateOptions,
) -> RestoreReport:
    """Restore a checkpoint. Collective: yes."""
    clock = Clock()
    # The first rank reads the small files for all. Each rank opens the data files, and reads its own part.
    with clock.phase("open"):
        with world.broadcast("find the checkpoint") as exchange:
            if world.rank == 0:
                exchange.local = resolve(root, requested)
        step, skipped = exchange.result
        with world.broadcast("open the checkpoint") as exchange:
            if world.rank == 0:
                exchange.local = open_checkpoint(root, step)
        opened = exchange.result
        with world.collective("open the folder"):
            reader = opened.reader()
    with reader, torch.device("cpu"):
        executor = ReadExecutor(reader, opened.index, options.budget_bytes, world)
        # All that may not fit is found here, before anything is changed.
        with clock.phase("plan"):
            plan = _plan(world, opened, executor, reader, state, only, consent)
        with clock.phase("read"):
            optimizers, targets = _read_tensors(world, opened, executor, plan, options)
        with clock.phase("finish"):
            # Tensors have been read in place. Settings, new state and all other components are set at the end.
            without_state = _restore_optimizers(world, plan, optimizers, targets)
            with world.collective("restore components"):
                notes = _restore_components(opened, state, plan, world)
    collected, matched, fitting = plan.collected, plan.matched, plan.fitting
    fqns = [item.fqn for item in collected.model_tensors if item.kind.is_saved]
    return RestoreReport(
        rank=world.rank,
        world_size=world.size,
        directory=str(opened.folder),
        step=step,
        skipped_steps=skipped,
        saved_by=opened.header.world_size,
        user=opened.header.user,
        restored=tuple(component for component in _COMPONENTS if component in matched.components),
        model=tuple(matched.model),
        optimizers=tuple(key.label for key in targets),
        not_stored=tuple(fqn for fqn in fqns if fqn not in collected.stored),
        missing=(*matched.faults["missing"], *(fitting.missing if fitting else ())),
        unexpected=(*matched.faults["unexpected"], *(fitting.unexpected if fitting else ())),
        mismatched=(*matched.faults["mismatched"], *(fitting.matched.mismatched if fitting else ())),
        without_state=tuple(without_state),
        base=plan.base.summary,
        cast=fitting.matched.cast if fitting else {},
        **notes,
        read_bytes=executor.read_bytes,
        checked_bytes=reader.checked_bytes,
        seconds=clock.seconds,
    )


def _plan(
    world: World,
    opened: OpenCheckpoint,
    executor: ReadExecutor,
    reader: CheckedReader,
    state: TrainState,
    only: Selection,
    consent: Consent,
) -> RestorePlan:
    """Compare the checkpoint with the current training. Collective: yes."""
    with world.collective("collect the state"):
        collected = collect_state(state, only)
    require_alike_models(world, collected.model_tensors, collected.bounds)
    with world.broadcast("read the common values") as exchange:
        if world.rank == 0:
            exchange.local = _common_values(reader, opened)
    common: dict[KeyPath, Any] = exchange.result
    with world.collective("read this rank's values"):
        local = _local_values(reader, opened, world)
    base = _match_bases(world, opened, collected, consent)
    # The tuning first: with another one, all tensors of the model would be missing and unexpected.
    with world.collective("compare with the checkpoint"):
        require_same_tuning(opened, collected, only, base)
        matched = compare(opened, collected, state, common, world.size, consent)
    fitting = None
    if "optimizers" in matched.components:
        optimizers = OptimizerTargets.from_optimizers(collected.model_tensors, collected.bounds)
        with world.collective("read the optimizer state"):
            parsed = _optimizer_state(opened, executor, optimizers, common)
        # Every rank can read all of it, which is described as if one rank had it.
        described: dict[str, SourceTensors] = {}
        for name, tensor in parsed.tensors.items():
            shape = tuple(tensor.shape)
            described[name] = (SourceTensor(shape, from_torch_or_other(tensor.dtype), (Box.whole(shape),)),)
        fitting = match_optimizer_state(world, optimizers, parsed, described, consent)
    return RestorePlan(collected, common, local, base, matched, fitting)


def _read_tensors(
    world: World, opened: OpenCheckpoint, executor: ReadExecutor, plan: RestorePlan, options: StateOptions
) -> tuple[OptimizerTargets, dict[Key, torch.Tensor]]:
    """Read all tensors. Return the optimizers, rebound if the model was on meta, and their state.

    Collective: yes.
    """
    collected = plan.collected
    tensors = {key: collected.stored[fqn].tensor for fqn, key in plan.matched.model.items()}
    optimizers = OptimizerTargets.from_optimizers(collected.model_tensors, collected.bounds)
    # A load may give a model on meta new parameters, of which optimizers must have the state: they are bound anew
    # before state is allocated.
    if any(item.tensor.is_meta for item in collected.model_tensors):
        executor.read_bytes += _materialize(world, opened, executor.reader, collected, plan.matched, options)
        optimizers = _rebind(collected)
        tensors = {}  # the load has filled them
    targets: dict[Key, torch.Tensor] = {}
    if plan.fitting is not None:
        with world.collective("find the tensors to restore"):
            targets = plan.fitting.allocate_targets(optimizers)
    # One plan for the model and the optimizers, so that files are read once, in order.
    states = {flat_key(("optimizer", "state", key.parameter, key.entry)): target for key, target in targets.items()}
    with world.collective("read values"):
        read_tensors(executor, opened.expressions, {**tensors, **states})
    return optimizers, targets


_COMPONENTS = ("model", "optimizers", "schedulers", "scaler", "data", "rng")


def _match_bases(world: World, opened: OpenCheckpoint, collected: CollectedState, consent: Consent) -> BaseMatch:
    """Compare the base of a checkpoint with the current one. Collective: yes, if the checkpoint has a base."""
    if opened.header.base is None:
        return BaseMatch()
    with world.all_reduce("compute fingerprints", collected.base.identity) as exchange:
        exchange.local = collected.base.fingerprints()
    current = exchange.result
    are_shapes_same = opened.header.others in collected.others
    return compare_bases(opened.header.base, current, consent.base, are_shapes_same=are_shapes_same)


# Values that are not tensors

_GROUPS = ("optimizer", "param_groups")


def _common_values(reader: CheckedReader, opened: OpenCheckpoint) -> dict[KeyPath, Any]:
    paths = [REDUCED, ("rng", "rank_0"), ("schedulers",), ("scaler",)]
    values: dict[KeyPath, Any] = {}
    for path in opened.objects:
        if path in paths or (path[0] == "optimizer" and path[1] != "reduced"):
            values[path] = _read_value(reader, opened, path)
    # By number of the group. Earlier checkpoints have one value with all groups in it.
    groups: dict[int, dict[str, Any]] = {}
    for path in [path for path in values if path[:2] == _GROUPS and len(path) == 4]:
        groups.setdefault(int(path[2]), {})[path[3]] = values.pop(path)
    if groups:
        values[_GROUPS] = [groups[number] for number in sorted(groups)]
    return values


def _local_values(reader: CheckedReader, opened: OpenCheckpoint, world: World) -> dict[str, Any]:
    # Bytes of tensors are compared as they are read. All others are compared here, each by one rank.
    opened.require_gaps(reader, world.rank, world.size)
    rank = f"rank_{world.rank}"
    paths: dict[str, KeyPath] = {}
    if opened.header.world_size == world.size:
        paths["rng"] = "rng", rank
        if REDUCED in opened.objects:
            paths["optimizers"] = *REDUCED[:2], rank
        if opened.header.data == "each":
            paths["data"] = "data", rank
    if opened.header.data == "one":
        paths["data"] = "data", "rank_0"
    return {component: _read_value(reader, opened, path) for component, path in paths.items()}


def _restore_components(
    opened: OpenCheckpoint, state: TrainState, plan: RestorePlan, world: World
) -> dict[str, str]:
    """Restore schedulers, scaler, data position and generators. Return notes on the last two."""
    # Generators come last: load_state_dict() of another component may draw from them.
    notes = {"rng": "", "data": ""}
    components = plan.matched.components
    if "schedulers" in components:
        for scheduler, stored in zip(state.all_schedulers, plan.common["schedulers",], strict=True):
            scheduler.load_state_dict(stored)
    if "scaler" in components and state.scaler is not None:
        state.scaler.load_state_dict(plan.common["scaler",])
    if "data" in components and state.data is not None:
        state.data.load_state_dict(plan.local["data"])
        is_common = opened.header.data == "one"
        notes["data"] = "one position for all ranks" if is_common else "each rank's own position"
    if "rng" in components:
        notes["rng"] = _restore_generators(opened, plan, world)
    return notes


def _restore_generators(opened: OpenCheckpoint, plan: RestorePlan, world: World) -> str:
    header, what = opened.header, f"{opened.folder}: rng"
    if "rng" in plan.local:
        missing = restore_generators(plan.local["rng"], what)
        note = "every rank continues with its own random state"
    else:
        equal = header.equal_generators
        missing = seed_generators(plan.common["rng", "rank_0"], equal, world.rank, world.size, what)
        note = f"{', '.join(equal)}: as saved, equal on all ranks; others: " if equal else ""
        note += f"seeded anew, as there were {header.world_size} ranks, and are {world.size}"
    return note + (f"; not on this machine: {', '.join(missing)}" if missing else "")


# The optimizers


@gc_disabled()
def _optimizer_state(
    opened: OpenCheckpoint, executor: ReadExecutor, optimizers: OptimizerTargets, common: Mapping[KeyPath, Any]
) -> ParsedState:
    """Return the state of the optimizers: one-element tensors with their values, others on meta."""
    state = {path: value for path, value in common.items() if path[:2] == ("optimizer", "state")}
    tensors = {path: opened.expressions[flat_key(path)] for path in opened.shapes if path[0] == "optimizer"}
    values: dict[str, dict[str, Any]] = {}  # by FQN and entry
    # Step counts decide how the state matches, so their values are needed now.
    for path, value in {**state, **read_numbers(executor, tensors)}.items():
        values.setdefault(path[2], {})[path[3]] = value
    return read({"state": values, "param_groups": common[_GROUPS]}, optimizers.first_names, optimizers.shapes)


def _restore_optimizers(
    world: World, plan: RestorePlan, optimizers: OptimizerTargets, targets: Mapping[Key, torch.Tensor]
) -> list[str]:
    """Set the state of the optimizers. Return the trained parameters that have none. Collective: yes."""
    if plan.fitting is None:
        return []
    with world.collective("bind the optimizer"):
        without_state = plan.fitting.bind(optimizers, targets)
        # State that belongs to this rank alone.
        for fqn, entries in plan.local.get("optimizers", {}).items():
            if fqn in optimizers.optimizer_indices:
                optimizer = optimizers.bounds[optimizers.optimizer_indices[fqn]].optimizer
                parameter = optimizers.parameters[fqn]
                for entry, inner in entries.items():
                    optimizer.state[parameter][entry] = rebuild_state_tensor(optimizer, parameter, entry, inner)
    return without_state


def _materialize(
    world: World,
    opened: OpenCheckpoint,
    reader: StorageReader,
    collected: CollectedState,
    matched: Comparison,
    options: StateOptions,
) -> int:
    """Materialize and fill a model on meta, like a load. Return the bytes read. Collective: yes."""
    model = collected.model
    source = OpenSource(opened.index, reader, {})
    with world.collective("plan the load"):
        on_meta = [item.fqn for item in collected.model_tensors if item.tensor.is_meta and item.kind.is_saved]
        absent = [fqn for fqn in on_meta if fqn not in matched.model]
        if absent:
            raise ShardingError(
                f"{len(absent)} tensors of the model, such as {absent[0]}, are on meta, and the checkpoint does "
                "not have them. Load the model with its weights first"
            )
        # The keys are matched already, so no conversion of transformers is traced.
        expressions = {fqn: (opened.expressions[key],) for fqn, key in matched.model.items()}
        as_load = LoadOptions(
            budget_bytes=options.budget_bytes,
            progress=False,
            process_group=options.process_group,
            timeouts=options.timeouts,
        )
        prepared = prepare_load(world, model, source, LoadRequest(Bindings(expressions), options=as_load))
    return execute_load(world, model, source, prepared, Clock()).read_bytes


def _rebind(collected: CollectedState) -> OptimizerTargets:
    """Give the optimizers the parameters that took the place of those on meta."""
    model_tensors = collect_tensors(collected.model)
    parameters = {item.fqn: item.tensor for item in model_tensors if isinstance(item.tensor, nn.Parameter)}
    for bound in collected.bounds:
        # Copies: unbind() releases the state, which rebind() sets for the new parameters.
        tensors, scalars = dict(bound.tensors), dict(bound.scalars)
        bound.unbind()
        bound.rebind(parameters, tensors, scalars)
        bound.tensors = tensors
    return OptimizerTargets.from_optimizers(model_tensors, collected.bounds)


def _read_value(reader: StorageReader, opened: OpenCheckpoint, path: KeyPath) -> Any:
    """Read a value that is not a tensor.

    Raises:
        FormatError: the value is missing, or is not plain data.
    """
    what = f"{'.'.join(path)} in {opened.folder}"
    place = opened.objects.get(path)
    if place is None:
        raise FormatError(f"{what}: is missing. Restore another checkpoint")
    content = reader.read(place.file, place.bytes.start, place.bytes.stop)
    return load_value(content, what)
