"""Restores a checkpoint: opens it, compares it with what is there, then puts its values in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoints.base_identity import BaseMatch, compare_bases
from shardwise.checkpoints.beside_tensors import BesideTensors, common_paths, own_paths
from shardwise.checkpoints.fingerprint_check import Witness
from shardwise.checkpoints.fits import Fits, compare
from shardwise.checkpoints.modes import CheckpointerOptions, Which
from shardwise.checkpoints.opened import Opened, open_checkpoint, resolve
from shardwise.checkpoints.state import KeyPath, Looked, TrainState, in_words, look
from shardwise.conversion import Bindings, Expression
from shardwise.engines.load_options import LoadOptions
from shardwise.engines.load_plan import LoadRequest
from shardwise.engines.loading import carry_out
from shardwise.engines.opening import OpenSource
from shardwise.engines.optimizer_fitting import Fitting, Ours, fit
from shardwise.errors import CoverageError, PlacementError
from shardwise.execution.memory.garbage import collected_later
from shardwise.execution.ranks.progress import Clock, ProgressBar
from shardwise.execution.ranks.world import World
from shardwise.execution.reading.checkpoint_copies import require_one_checkpoint
from shardwise.execution.reading.place import Destination, Placer, arrange
from shardwise.execution.states.supply import require_alike_models
from shardwise.models.optimizers.optimizer_state import Given, read
from shardwise.models.optimizers.rebind import Key
from shardwise.models.optimizers.reduced import made_again
from shardwise.models.replicated import average_replicated_gradients
from shardwise.models.selection import Everything, Selection
from shardwise.models.torch_words import in_memory, to_torch
from shardwise.models.view import Held, local_boxes, local_tensor, look_inside
from shardwise.planning.loads.comparing import SampledBlocks
from shardwise.planning.loads.load_plan import Consent
from shardwise.planning.states.matching import Brought, Tolerance
from shardwise.report.checkpoint_report import RestoreReport
from shardwise.storage.contract import StorageReader
from shardwise.storage.reading.local import LocalReader
from shardwise.tensors import Box


@torch.no_grad()
def restore(
    world: World,
    root: Path,
    state: TrainState,
    which: Which,
    only: Selection,
    tolerance: Tolerance,
    options: CheckpointerOptions,
) -> RestoreReport:
    """Put a checkpoint where it belongs. Collective: yes."""
    clock = Clock()
    with clock.phase("open"):
        step, passed_over = world.from_first(lambda: resolve(root, which))
        opened = world.from_first(lambda: open_checkpoint(root, step))
        reader = world.together(lambda: _reader_of(opened))
    with reader, ProgressBar("Restoring", world, 0, enabled=False) as bar, torch.device("cpu"):
        placer = Placer(reader, opened.index, options.budget_bytes, bar, world)
        with clock.phase("open"):
            if opened.marks is None:  # nothing else would tell that a rank has another copy
                require_one_checkpoint(world, reader, opened.index, SampledBlocks(), options.budget_bytes)
        with clock.phase("plan"):
            found = _decide(world, opened, placer, state, only, tolerance)
        done = _carry_out(world, opened, placer, found, state, options, clock)
        return _report(world, opened, passed_over, found, done, placer.read_bytes, clock)


@dataclass(frozen=True, slots=True)
class _Decided:
    """What there is, and what of the checkpoint goes where in it."""

    looked: Looked
    base: BaseMatch
    beside: BesideTensors
    fits: Fits
    ours: Ours
    fitting: Fitting | None
    """Of the optimizers; None where none are restored."""


def _decide(
    world: World, opened: Opened, placer: Placer, state: TrainState, only: Selection, tolerance: Tolerance
) -> _Decided:
    """Compare the checkpoint with what there is; nothing is changed yet. Collective: yes."""
    looked = world.together(lambda: look(state, only))
    require_alike_models(world, looked.held, looked.bounds)
    beside = BesideTensors.read(world, placer.reader, opened)
    base = _match_bases(world, opened, looked, tolerance)
    fits = world.together(lambda: compare(opened, looked, state, only, beside.common, world.size, tolerance, base))
    ours = Ours.of(looked.held, looked.bounds)
    fitting = None
    if "optimizers" in fits.parts:
        fitting = _fit_optimizers(world, opened, placer, ours, beside.common, tolerance)
    return _Decided(looked, base, beside, fits, ours, fitting)


def _match_bases(world: World, opened: Opened, looked: Looked, tolerance: Tolerance) -> BaseMatch:
    """Compare what a checkpoint takes for granted with what there is. Collective: yes, where it does so."""
    facts = opened.facts
    if facts.holds == in_words(Everything()):
        return BaseMatch()

    def conclude(taken: list[bytes]) -> BaseMatch:
        here = looked.base.identity(looked.model, looked.base.sums(taken))
        return compare_bases(facts.base, here, tolerance.base, are_shapes_same=facts.others == looked.others)

    return world.all_reduce(lambda: looked.base.taken(), conclude)


@dataclass(frozen=True, slots=True)
class _RestoredValues:
    """What has become of a restore.

    Attributes:
        targets: the optimizers' tensors.
        unchecked: names of what has not been compared with fingerprints.
        checked_bytes: of the tensors that have.
        afresh: trained parameters without state.
        told: of the generators and of the position in the data, in words.
    """

    targets: Mapping[Key, torch.Tensor]
    unchecked: tuple[str, ...]
    checked_bytes: int
    afresh: Sequence[str]
    told: Mapping[str, str]


def _carry_out(
    world: World,
    opened: Opened,
    placer: Placer,
    found: _Decided,
    state: TrainState,
    options: CheckpointerOptions,
    clock: Clock,
) -> _RestoredValues:
    """Give everything its values. Collective: yes."""
    looked, ours, fitting = found.looked, found.ours, found.fitting
    with clock.phase("read"):
        model = {key: looked.stored[fqn].tensor for fqn, key in found.fits.model.items()}
        if any(item.tensor.is_meta for item in looked.held):
            placer.read_bytes += _bring_up(world, opened, placer.reader, looked, found.fits, options)
            ours = _bound_again(looked)
            model = {}
        targets = world.together(lambda: {} if fitting is None else fitting.targets(ours))
        state_keys = {_key_of_state(key): target for key, target in targets.items()}
        unchecked, checked_bytes = _read(world, opened, placer, {**model, **state_keys})
    with clock.phase("finish"):
        afresh = world.together(lambda: [] if fitting is None else fitting.bind(ours, targets))
        if fitting is not None:
            world.together(lambda: _put_back_reduced(ours, found.beside.own.get("optimizers", {})))
        told = world.together(lambda: found.beside.put_back(opened, state, found.fits.parts, world))
    return _RestoredValues(targets, unchecked, checked_bytes, afresh, told)


def _report(
    world: World,
    opened: Opened,
    passed_over: tuple[int, ...],
    found: _Decided,
    done: _RestoredValues,
    read_bytes: int,
    clock: Clock,
) -> RestoreReport:
    fits, fitting = found.fits, found.fitting
    return RestoreReport(
        rank=world.rank,
        world_size=world.size,
        directory=str(opened.folder),
        step=opened.facts.step,
        passed_over=passed_over,
        saved_by=opened.facts.world_size,
        user=opened.facts.user,
        restored=tuple(part for part in _PARTS if part in fits.parts),
        model=tuple(fits.model),
        optimizers=tuple(key.label for key in done.targets),
        not_stored=tuple(item.fqn for item in found.looked.held if _is_left_out(item, found.looked)),
        missing=(*fits.missing, *(fitting.missing if fitting else ())),
        unexpected=(*fits.unexpected, *(fitting.unexpected if fitting else ())),
        mismatched=(*fits.mismatched, *(fitting.matched.mismatched if fitting else ())),
        afresh=tuple(done.afresh),
        base=found.base.told,
        cast=fitting.matched.cast if fitting else {},
        rng=done.told["rng"],
        data=done.told["data"],
        read_bytes=read_bytes,
        checked_bytes=done.checked_bytes,
        unchecked=done.unchecked,
        seconds=clock.seconds,
    )


def _reader_of(opened: Opened) -> LocalReader:
    return LocalReader(opened.folder) if opened.marks is None else Witness(opened.folder, opened.marks)


def _read(
    world: World, opened: Opened, placer: Placer, wanted: Mapping[str, torch.Tensor]
) -> tuple[tuple[str, ...], int]:
    """Read tensors, by key; the names of what has not been compared by now, and the bytes of tensors that have.

    Collective: yes.

    Raises:
        FormatError: naming what is not what was written.
    """
    reader = placer.reader
    if not isinstance(reader, Witness):
        world.together(lambda: _place(placer, opened, wanted))
        return ("all of it: it was saved before fingerprints were taken",), 0
    settled = reader.settle(world, opened.names, lambda: _place(placer, opened, wanted))
    tensors = [opened.names[file, run.start] for file, run in settled.passed]
    own = [path for rank in range(world.size) for path in own_paths(opened, rank, world.size).values()]
    read = {*common_paths(opened), *own}
    return (*tensors, *(".".join(path) for path in opened.objects if path not in read)), settled.nbytes


_PARTS = ("model", "optimizers", "schedulers", "scaler", "data", "rng")


def _is_left_out(item: Held, looked: Looked) -> bool:
    return item.kind.is_saved and item.fqn not in looked.stored


def _key_of_state(key: Key) -> str:
    return f"optimizer.state.{key.parameter}.{key.entry}"


# The optimizers


def _fit_optimizers(
    world: World,
    opened: Opened,
    placer: Placer,
    ours: Ours,
    common: Mapping[KeyPath, Any],
    tolerance: Tolerance,
) -> Fitting:
    """Which state of the checkpoint goes where in the optimizers. Collective: yes."""
    given = world.together(lambda: _given(opened, placer, ours, common))
    told = {
        name: Brought(tuple(tensor.shape), in_memory(tensor.dtype), (Box.whole(tuple(tensor.shape)),))
        for name, tensor in given.tensors.items()
    }
    return fit(world, ours, given, [told] + [{}] * (world.size - 1), tolerance)


@collected_later()
def _given(opened: Opened, placer: Placer, ours: Ours, common: Mapping[KeyPath, Any]) -> Given:
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
    if isinstance(placer.reader, Witness):
        placer.reader.require_sound(opened.names)
    groups = common["optimizer", "param_groups"]
    return read({"state": values, "param_groups": groups}, ours.first_names, ours.shapes)


def _dtype_of(opened: Opened, path: KeyPath) -> torch.dtype:
    key = ".".join(path)
    index = opened.index
    return to_torch(index.composed[key].dtype if key in index.composed else index.entries[key].dtype)


def _put_back_reduced(ours: Ours, values: Mapping[str, Mapping[str, Mapping[str, torch.Tensor]]]) -> None:
    """Set what is this rank's alone."""
    for fqn, entries in values.items():
        if fqn in ours.optimizer_of:
            optimizer, parameter = ours.bounds[ours.optimizer_of[fqn]].optimizer, ours.parameters[fqn]
            for entry, inner in entries.items():
                optimizer.state[parameter][entry] = made_again(optimizer, parameter, entry, inner)


# Into the model and the optimizers


def _place(placer: Placer, opened: Opened, wanted: Mapping[str, torch.Tensor]) -> None:
    """Read tensors, by key, into this rank's memory, and see that nothing of them is left out."""
    expressions = opened.expressions
    items = [
        Destination(key, expressions[key], local_boxes(tensor, key), tensor.dtype, local_tensor(tensor).device)
        for key, tensor in wanted.items()
    ]
    arrangement = arrange(items, opened.index, placer.reader.policy, placer.budget_bytes, placer.world.place)
    before = dict(placer.written)
    placer.place(arrangement, [local_tensor(wanted[item.fqn]) for item in arrangement.destinations])
    for item in items:
        held = sum(part.box.numel for part in item.boxes)
        count = placer.written.get(item.fqn, 0) - before.get(item.fqn, 0)
        if count != held:
            raise CoverageError(f"{item.fqn}: {count} of {held} elements were read; the model is not whole now")


def _bring_up(
    world: World, opened: Opened, reader: StorageReader, looked: Looked, fits: Fits, options: CheckpointerOptions
) -> int:
    """Give a model on meta memory and values, as a load does; the bytes read. Collective: yes."""
    model = looked.model
    expressions = opened.expressions

    def ask() -> LoadRequest:
        hollow = [item.fqn for item in looked.held if item.tensor.is_meta and item.kind.is_saved]
        absent = [fqn for fqn in hollow if fqn not in fits.model]
        if absent:
            raise PlacementError(
                f"{len(absent)} tensors of the model, such as {absent[0]}, are on meta, and the checkpoint does "
                "not hold them; bring the model up with its weights first"
            )
        offers = {fqn: (expressions[key],) for fqn, key in fits.model.items()}
        load = LoadOptions(
            budget_bytes=options.budget_bytes,
            progress=False,
            process_group=options.process_group,
            patience=options.patience,
        )
        return LoadRequest(Bindings(offers), Consent(), {}, load)

    source = OpenSource(opened.index, reader, {}, is_own=False)
    report = carry_out(world, model, source, ask, Clock())
    mesh = next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)
    if mesh is not None:
        average_replicated_gradients(model, mesh)
    return report.read_bytes


def _bound_again(looked: Looked) -> Ours:
    """The optimizers hold the parameters that took the place of those on meta."""
    held = look_inside(looked.model)
    parameters = {item.fqn: item.tensor for item in held if isinstance(item.tensor, nn.Parameter)}
    for bound in looked.bounds:
        tensors, scalars = dict(bound.tensors), dict(bound.scalars)
        bound.unbind()
        bound.rebind(parameters, tensors, scalars)
        bound.tensors = tensors
    return Ours.of(held, looked.bounds)
