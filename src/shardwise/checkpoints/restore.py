"""Restoring a checkpoint: open it, compare it with the current training, then set its values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoints.base_identity import BaseMatch, compare_bases
from shardwise.checkpoints.comparison import Comparison, compare, require_same_tuning
from shardwise.checkpoints.facts import CheckedReader
from shardwise.checkpoints.folder import Opened, open_checkpoint, resolve, value_of
from shardwise.checkpoints.state import (
    REDUCED,
    CheckpointerOptions,
    CollectedState,
    KeyPath,
    TrainState,
    describe_selection,
    look,
    restore_generators,
    seed_generators,
)
from shardwise.conversion.computed import Bindings
from shardwise.conversion.expression import Expression
from shardwise.engines.arguments import OpenSource
from shardwise.engines.load_plan import Load, LoadOptions, LoadRequest, prepare_load
from shardwise.engines.loading import execute_load
from shardwise.engines.optimizer_fit import Fitting, OptimizerTargets, fit
from shardwise.errors import KeyMismatchError, ShardingError
from shardwise.execution.memory import collected_later
from shardwise.execution.reading import ReadExecutor, ReadTarget, plan_reads
from shardwise.execution.replicas import require_alike_models
from shardwise.execution.world import Clock, World
from shardwise.models.gradients import average_replicated_gradients
from shardwise.models.optimizer_parsing import ParsedState, read
from shardwise.models.rebind import Key, made_again
from shardwise.models.selection import Selection
from shardwise.models.torch_api import in_memory, to_torch
from shardwise.models.view import collect_tensors, local_boxes, local_tensor
from shardwise.planning.matching import Brought, Tolerance
from shardwise.report.save_reports import RestoreReport
from shardwise.storage.contract import StorageReader
from shardwise.tensors import Box


@torch.no_grad()
def restore(
    world: World,
    root: Path,
    state: TrainState,
    asked: int | None,
    only: Selection,
    tolerance: Tolerance,
    options: CheckpointerOptions,
) -> RestoreReport:
    """Restore a checkpoint. Collective: yes."""
    clock = Clock()
    with clock.phase("open"):
        step, passed_over = world.broadcast(resolve, root, asked)
        opened = world.broadcast(open_checkpoint, root, step)
    with world.run_all(opened.reader) as reader, torch.device("cpu"):
        placer = ReadExecutor(reader, opened.index, options.budget_bytes, world)
        with clock.phase("plan"):  # nothing is changed yet
            looked, beside, base, fits = _compare_all(world, opened, reader, state, only, tolerance)
            ours = OptimizerTargets.of(looked.held, looked.bounds)
            fitting = _fit_optimizers(world, opened, placer, ours, beside.common, fits, tolerance)
        with clock.phase("read"):
            ours, targets = _read(world, opened, placer, looked, fits, ours, fitting, options)
        with clock.phase("finish"):
            afresh = world.run_all(lambda: [] if fitting is None else fitting.bind(ours, targets))
            if fitting is not None:
                world.run_all(lambda: _put_back_reduced(ours, beside.own.get("optimizers", {})))
            told = world.run_all(beside.put_back, opened, state, fits.parts, world)
    return RestoreReport(
        rank=world.rank,
        world_size=world.size,
        directory=str(opened.folder),
        step=step,
        passed_over=passed_over,
        saved_by=opened.facts.world_size,
        user=opened.facts.user,
        restored=tuple(part for part in _PARTS if part in fits.parts),
        model=tuple(fits.model),
        optimizers=tuple(key.label for key in targets),
        not_stored=tuple(item.fqn for item in looked.held if item.kind.is_saved and item.fqn not in looked.stored),
        missing=(*fits.faults["missing"], *(fitting.missing if fitting else ())),
        unexpected=(*fits.faults["unexpected"], *(fitting.unexpected if fitting else ())),
        mismatched=(*fits.faults["mismatched"], *(fitting.matched.mismatched if fitting else ())),
        afresh=tuple(afresh),
        base=base.told,
        cast=fitting.matched.cast if fitting else {},
        **told,
        read_bytes=placer.read_bytes,
        checked_bytes=reader.checked_bytes,
        seconds=clock.seconds,
    )


def _compare_all(
    world: World,
    opened: Opened,
    reader: CheckedReader,
    state: TrainState,
    only: Selection,
    tolerance: Tolerance,
) -> tuple[CollectedState, NonTensorState, BaseMatch, Comparison]:
    """Compare everything except optimizer state with the current training. Collective: yes."""
    looked = world.run_all(look, state, only)
    require_alike_models(world, looked.held, looked.bounds)
    beside = NonTensorState.read(world, reader, opened)
    base = _match_bases(world, opened, looked, tolerance)
    world.run_all(require_same_tuning, opened, looked, only, base)
    fits = world.run_all(compare, opened, looked, state, beside.common, world.size, tolerance)
    return looked, beside, base, fits


def _read(
    world: World,
    opened: Opened,
    placer: ReadExecutor,
    looked: CollectedState,
    fits: Comparison,
    ours: OptimizerTargets,
    fitting: Fitting | None,
    options: CheckpointerOptions,
) -> tuple[OptimizerTargets, dict[Key, torch.Tensor]]:
    """Read all tensors. Return the optimizers, perhaps with new parameters, and their state. Collective: yes."""
    model = {key: looked.stored[fqn].tensor for fqn, key in fits.model.items()}
    if any(item.tensor.is_meta for item in looked.held):
        placer.read_bytes += _bring_up(world, opened, placer.reader, looked, fits, options)
        ours = _bound_again(looked)
        model = {}
    targets = world.run_all(lambda: {} if fitting is None else fitting.targets(ours))
    states = {f"optimizer.state.{key.parameter}.{key.entry}": target for key, target in targets.items()}
    world.run_all(_place, placer, opened, {**model, **states})
    return ours, targets


def _match_bases(world: World, opened: Opened, looked: CollectedState, tolerance: Tolerance) -> BaseMatch:
    """Compare the base of a checkpoint with the current one. Collective: yes, if it compares values."""
    facts = opened.facts
    if facts.holds == describe_selection(None):
        return BaseMatch()

    def conclude(taken: list[dict[tuple[str, Box], int]]) -> BaseMatch:
        here = looked.base.identity(looked.model, taken)
        return compare_bases(facts.base, here, tolerance.base, are_shapes_same=facts.others == looked.others)

    return world.map_reduce(looked.base.taken, conclude)


_PARTS = ("model", "optimizers", "schedulers", "scaler", "data", "rng")


# Values that are no tensors


@dataclass(frozen=True, slots=True)
class NonTensorState:
    """Plain data of a checkpoint, as one rank needs it.

    Attributes:
        common: state that is equal on all ranks, and the first rank's random generators.
        own: this rank's position in the data ("data"), its generators ("rng"), and its reduced optimizer state
            ("optimizers"), if the checkpoint has them for this rank.
    """

    common: Mapping[KeyPath, Any]
    own: Mapping[str, Any]

    @classmethod
    def read(cls, world: World, reader: CheckedReader, opened: Opened) -> Self:
        """Collective: yes.

        Raises:
            FormatError: one of these, or the data between tensors in a rank's part of the files, is damaged.
        """

        def own() -> dict[str, Any]:
            opened.require_frames(reader, world.rank, world.size)
            paths = _own_paths(opened, world.rank, world.size)
            return {part: value_of(reader, opened, path) for part, path in paths.items()}

        common = world.broadcast(lambda: {path: value_of(reader, opened, path) for path in _common_paths(opened)})
        return cls(common, world.run_all(own))

    def put_back(self, opened: Opened, state: TrainState, parts: Collection[str], world: World) -> dict[str, str]:
        """Restore it into the parts. Return notes on the generators and the data position."""
        if "schedulers" in parts:
            for scheduler, told in zip(state.all_schedulers, self.common["schedulers",], strict=True):
                scheduler.load_state_dict(told)
        if "scaler" in parts and state.scaler is not None:
            state.scaler.load_state_dict(self.common["scaler",])
        data = ""
        if "data" in parts and state.data is not None:
            state.data.load_state_dict(self.own["data"])
            data = "one position for all ranks" if opened.facts.data == "one" else "each rank's own position"
        return {"rng": self._put_back_generators(opened, world) if "rng" in parts else "", "data": data}

    def _put_back_generators(self, opened: Opened, world: World) -> str:
        facts, what = opened.facts, f"{opened.folder}: rng"
        if "rng" in self.own:
            lacking = restore_generators(self.own["rng"], what)
            rng = "every rank continues with its own random state"
        else:
            lacking = seed_generators(self.common["rng", "rank_0"], facts.alike, world.rank, world.size, what)
            alike = f"{', '.join(facts.alike)}: as saved, alike on all ranks; others: " if facts.alike else ""
            rng = f"{alike}seeded anew, as there were {facts.world_size} ranks, and are {world.size}"
        return rng + (f"; not on this machine: {', '.join(lacking)}" if lacking else "")


def _common_paths(opened: Opened) -> list[KeyPath]:
    """Return the paths of state that is equal on all ranks, and of the first rank's generators."""
    is_wanted = {"optimizer", "schedulers", "scaler"}
    return [
        path
        for path in opened.objects
        if (path[0] in is_wanted and (path[:2] != REDUCED[:2] or path == REDUCED)) or path == ("rng", "rank_0")
    ]


def _own_paths(opened: Opened, rank: int, world_size: int) -> dict[str, KeyPath]:
    """Return the paths of a rank's data position and generators, if the checkpoint has them for it."""
    found: dict[str, KeyPath] = {}
    is_same_size = opened.facts.world_size == world_size
    if is_same_size:
        found["rng"] = "rng", f"rank_{rank}"
        if REDUCED in opened.objects:
            found["optimizers"] = *REDUCED[:2], f"rank_{rank}"
    if opened.facts.data == "one" or (opened.facts.data == "each" and is_same_size):
        found["data"] = "data", f"rank_{0 if opened.facts.data == 'one' else rank}"
    return found


# The optimizers


def _fit_optimizers(
    world: World,
    opened: Opened,
    placer: ReadExecutor,
    ours: OptimizerTargets,
    common: Mapping[KeyPath, Any],
    fits: Comparison,
    tolerance: Tolerance,
) -> Fitting | None:
    """Find the targets of the state in the optimizers. None if no optimizer is restored. Collective: yes."""
    if "optimizers" not in fits.parts:
        return None
    given = world.run_all(_given, opened, placer, ours, common)
    told = {
        name: Brought(tuple(tensor.shape), in_memory(tensor.dtype), (Box.whole(tuple(tensor.shape)),))
        for name, tensor in given.tensors.items()
    }
    return fit(world, ours, given, [told] + [{}] * (world.size - 1), tolerance)


@collected_later()
def _given(
    opened: Opened, placer: ReadExecutor, ours: OptimizerTargets, common: Mapping[KeyPath, Any]
) -> ParsedState:
    """The state of the optimizers: numbers as they are, tensors without values."""
    values: dict[str, dict[str, Any]] = {}
    for path, value in common.items():
        if path[:2] == ("optimizer", "state"):
            values.setdefault(path[2], {})[path[3]] = value
    expressions = opened.expressions
    numbers: list[tuple[KeyPath, Expression]] = []
    for path, shape in opened.shapes.items():
        if path[0] == "model":
            continue
        expression = expressions[".".join(path)]
        if Box.whole(shape).numel == 1:
            numbers.append((path, expression))
        else:
            dtype = _dtype_of(opened, path)
            values.setdefault(path[2], {})[path[3]] = torch.empty(shape, dtype=dtype, device="meta")
    wanted = [(item, Box.whole(item.shape), _dtype_of(opened, path)) for path, item in numbers]
    for (path, _), value in zip(numbers, placer.values_of(wanted), strict=True):
        values.setdefault(path[2], {})[path[3]] = value
    groups = common["optimizer", "param_groups"]
    return read({"state": values, "param_groups": groups}, ours.first_names, ours.shapes)


def _dtype_of(opened: Opened, path: KeyPath) -> torch.dtype:
    key = ".".join(path)
    index = opened.index
    return to_torch(index.composed[key].dtype if key in index.composed else index.entries[key].dtype)


def _put_back_reduced(
    ours: OptimizerTargets, values: Mapping[str, Mapping[str, Mapping[str, torch.Tensor]]]
) -> None:
    """Set the state that belongs to this rank alone."""
    for fqn, entries in values.items():
        if fqn in ours.optimizer_of:
            optimizer, parameter = ours.bounds[ours.optimizer_of[fqn]].optimizer, ours.parameters[fqn]
            for entry, inner in entries.items():
                optimizer.state[parameter][entry] = made_again(optimizer, parameter, entry, inner)


# Into the model and the optimizers


def _place(placer: ReadExecutor, opened: Opened, wanted: Mapping[str, torch.Tensor]) -> None:
    """Read tensors, by key, into this rank's memory, and see that nothing of them is left out."""
    expressions = opened.expressions
    items = [
        ReadTarget(key, expressions[key], local_boxes(tensor, key), tensor.dtype, local_tensor(tensor).device)
        for key, tensor in wanted.items()
    ]
    arrangement = plan_reads(
        items, opened.index, placer.reader.policy, placer.budget_bytes, placer.world.rank / placer.world.size
    )
    before = dict(placer.written)
    placer.place(arrangement, [local_tensor(wanted[item.fqn]) for item in arrangement.destinations])
    for item in items:
        held = sum(part.box.numel for part in item.boxes)
        count = placer.written.get(item.fqn, 0) - before.get(item.fqn, 0)
        if count != held:
            raise KeyMismatchError(f"{item.fqn}: {count} of {held} elements were read; the model is not whole now")


def _bring_up(
    world: World,
    opened: Opened,
    reader: StorageReader,
    looked: CollectedState,
    fits: Comparison,
    options: CheckpointerOptions,
) -> int:
    """Materialize and fill a model on meta, like a load. Return the bytes read. Collective: yes."""
    model = looked.model
    expressions = opened.expressions

    source = OpenSource(opened.index, reader, {}, is_own=False)

    def prepare() -> Load:
        hollow = [item.fqn for item in looked.held if item.tensor.is_meta and item.kind.is_saved]
        absent = [fqn for fqn in hollow if fqn not in fits.model]
        if absent:
            raise ShardingError(
                f"{len(absent)} tensors of the model, such as {absent[0]}, are on meta, and the checkpoint does "
                "not hold them. Bring the model up with its weights first"
            )
        offers = {fqn: (expressions[key],) for fqn, key in fits.model.items()}
        as_load = LoadOptions(
            budget_bytes=options.budget_bytes,
            progress=False,
            process_group=options.process_group,
            timeouts=options.timeouts,
        )
        return prepare_load(world, model, source, LoadRequest(Bindings(offers), options=as_load))

    report = execute_load(world, model, source, world.run_all(prepare), Clock())
    mesh = next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)
    if mesh is not None:
        average_replicated_gradients(model, mesh)
    return report.read_bytes


def _bound_again(looked: CollectedState) -> OptimizerTargets:
    """The optimizers hold the parameters that took the place of those on meta."""
    held = collect_tensors(looked.model)
    parameters = {item.fqn: item.tensor for item in held if isinstance(item.tensor, nn.Parameter)}
    for bound in looked.bounds:
        tensors, scalars = dict(bound.tensors), dict(bound.scalars)
        bound.unbind()
        bound.rebind(parameters, tensors, scalars)
        bound.tensors = tensors
    return OptimizerTargets.of(held, looked.bounds)
