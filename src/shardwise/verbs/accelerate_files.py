"""accelerate's files: models and optimizers under FSDP, written as accelerate writes them, and read back."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, assert_never

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.engines import model_states as models
from shardwise.engines import optimizer_states as optimizers
from shardwise.engines.clock import Clock
from shardwise.engines.optimizer_fitting import Ours
from shardwise.errors import ConfigError, FormatError
from shardwise.execution.memory.materialize import home_of
from shardwise.execution.ranks.world import World
from shardwise.execution.states.agreed import (
    BroughtValues,
    StateOptions,
    Values,
    by_canonical_names,
    refuse_meta,
    require_same_call,
)
from shardwise.execution.states.replicas import equal_on_all
from shardwise.execution.states.stored_values import StoredValues
from shardwise.execution.states.supply import require_alike_models
from shardwise.execution.writing.distributed_folder import write_distributed_folder
from shardwise.execution.writing.rank_files import finish_renames, read_rank_file, write_rank_files
from shardwise.execution.writing.saved_tree import SavedTree, read_distributed_tree, read_file_tree
from shardwise.execution.writing.torch_out import Levels
from shardwise.execution.writing.whole_file import write_whole_file
from shardwise.formats.accelerate_names import (
    MODEL,
    OPTIMIZER,
    AccelerateSave,
    Distributed,
    OfRanks,
    SavedKind,
    WholeFile,
    find,
)
from shardwise.formats.checkpoint_index import open_checkpoint
from shardwise.formats.distributed import METADATA
from shardwise.models.optimizer_state import ByName, Given, ParameterOrder, read, with_names, written_out
from shardwise.models.rebind import label
from shardwise.models.selection import AdapterOnly, Everything, Selection, names_outside
from shardwise.models.view import Held, canonical, local_tensor, look_inside, without_compile
from shardwise.planning.loads.consent import Ignore, OnDiffering, Refuse, TakeFirst
from shardwise.planning.loads.stored import stored_tensors
from shardwise.planning.states.forms import DistributedFolder, FileForm, OneFile, RankFiles, require_file_form
from shardwise.planning.states.matching import OnFault, Tolerance
from shardwise.report.files_report import FilesReport
from shardwise.report.state_report import StateReport
from shardwise.storage.reading.local import LocalReader

Place = str | os.PathLike[str]

_MOST_DIGITS = 10
"""Of the number of a parameter; what is longer is a name."""


@torch.no_grad()
def save_accelerate_model(
    model: nn.Module,
    directory: Place,
    form: FileForm = DistributedFolder(),  # noqa: B008 - frozen
    *,
    number: int = 0,
    only: Selection = Everything(),  # noqa: B008
    on_differing_buffers: OnDiffering = TakeFirst(),  # noqa: B008
    options: StateOptions = StateOptions(),  # noqa: B008
) -> FilesReport:
    """Write a model as accelerate does under FSDP2, which ``accelerator.load_state`` reads.

    ``OneFile()`` is ``pytorch_model_fsdp.bin`` (``_1.bin`` for number 1), ``DistributedFolder()``
    ``pytorch_model_fsdp_0/``, ``RankFiles()`` ``pytorch_model_fsdp_0_rank0.bin`` and so on. Names are those of the
    plain model. Of an adapter they are PEFT's; in one file, as accelerate has it, those of the model, and of what
    is trained alone.

    Collective: yes, over ``options.process_group`` (default: all ranks).
    Memory: ``options.budget_bytes``; no rank holds the whole.

    Args:
        model: any module, sharded or not.
        directory: the folder that holds models and optimizers; made where it is not there, seen by every rank.
        form: in which form.
        number: of the model among those in the folder.
        only: ``Everything()``, or ``AdapterOnly()`` for an adapter of PEFT's.
        on_differing_buffers: buffers that have other values on some ranks than on others are the first rank's,
            ``TakeFirst()``, or an error, ``Refuse()``.
        options: budget, process group, patience.

    Raises:
        ConfigError: an argument cannot be honoured.
        PlacementError: tensors are on meta, or are placed neither as shards nor as replicas.
        DisagreementError: ranks have different models or arguments, or different values of what several hold.
        StorageError: files could not be written; the older ones are as they were.
        RankLostError: a rank has been lost.

    Every error is the same on every rank.
    """
    start = time.perf_counter()
    model = without_compile(model)
    with (
        World.current(options.process_group, options.patience, call="save_accelerate_model") as world,
        torch.device("cpu"),
    ):
        folder = _asked(world, directory, form, number, only, on_differing_buffers, options=options)
        held = world.together(lambda: look_inside(model))
        require_alike_models(world, held, [])
        names_of = world.from_first(lambda: names_outside(model, held, only))
        chosen = {item.fqn: item.tensor for item in held if not set(names_of.values()).isdisjoint(item.names)}
        world.together(lambda: refuse_meta(chosen, "the model"))
        home = _home(held)
        equal, differing = equal_on_all(
            world,
            chosen,
            models.buffers_among(held),
            on_differing_buffers,
            budget_bytes=options.budget_bytes,
            device=home,
        )
        # One object for all names of a tied tensor, so that it is written once.
        tensors = [(item.names, equal[item.fqn].detach()) for item in held if item.fqn in equal]
        of = {name: tensor for names, tensor in tensors for name in names}
        state = {name: of[fqn] for name, fqn in names_of.items()}
        if isinstance(form, OneFile) and isinstance(only, AdapterOnly):
            untouched = _beside_trained(held, only.adapter)
            state = {fqn: of[fqn] for fqn in names_of.values() if fqn not in untouched}
        path, nbytes = _write(world, folder, MODEL, number, form, state, home, options)
        count = len({id(tensor) for tensor in state.values()})
        return FilesReport(str(path), count, nbytes, time.perf_counter() - start, differing)


@torch.no_grad()
def save_accelerate_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    directory: Place,
    form: FileForm = DistributedFolder(),  # noqa: B008
    *,
    number: int = 0,
    options: StateOptions = StateOptions(),  # noqa: B008
) -> FilesReport:
    """Write an optimizer as accelerate does under FSDP2, by the names of the model's parameters.

    ``OneFile()`` is ``optimizer.bin`` (``optimizer_1.bin``), ``DistributedFolder()`` is ``optimizer_0/``, and
    ``RankFiles()`` are ``optimizer_0_rank0.bin`` and so on. The layout inside is that of
    :func:`~shardwise.verbs.optimizer_state.optimizer_state`.

    Collective, Memory, Raises: as of :func:`save_accelerate_model`; state that nobody knows how to deal is a
    PlacementError.

    Args:
        model: whose parameters the optimizer holds.
        optimizer: with state or without. (accelerate loads only what has all state: after a step.)
        directory: the folder that holds models and optimizers.
        form: in which form.
        number: of the optimizer among those in the folder.
        options: budget, process group, patience.
    """
    start = time.perf_counter()
    model = without_compile(model)
    with (
        World.current(options.process_group, options.patience, call="save_accelerate_optimizer") as world,
        torch.device("cpu"),
    ):
        folder = _asked(world, directory, form, number, options=options)
        held, bounds = optimizers.looked_at(world, model, optimizer)
        tensors, scalars = optimizers.held_by(world, bounds)
        world.together(lambda: refuse_meta(tensors, "the optimizer"))
        optimizers.require_equal_state(world, tensors, scalars, options, _home(held))
        state = written_out(bounds, {name: tensor.detach() for name, tensor in tensors.items()} | scalars)
        path, nbytes = _write(world, folder, OPTIMIZER, number, form, state, _home(held), options)
        return FilesReport(str(path), len(tensors), nbytes, time.perf_counter() - start)


@torch.no_grad()
def load_accelerate_model(
    model: nn.Module,
    path: Place,
    *,
    number: int = 0,
    only: Selection = Everything(),  # noqa: B008
    on_missing: OnFault = Refuse(),  # noqa: B008
    on_unexpected: OnFault = Refuse(),  # noqa: B008
    on_mismatched: OnFault = Refuse(),  # noqa: B008
    options: StateOptions = StateOptions(),  # noqa: B008
) -> StateReport:
    """Give a model the values that accelerate saved under FSDP, of version 1 or 2, in any of its forms.

    Every rank reads its own bytes, on as many ranks as there are, whoever saved; but files of ranks are read by as
    many ranks as wrote them. Values are cast as :func:`~shardwise.verbs.state.set_model_state` does. Nothing that a
    file says is run.

    Collective: yes, over ``options.process_group`` (default: all ranks).
    Memory: ``options.budget_bytes``.

    Args:
        model: any module, sharded or not; what is on meta gets memory.
        path: the folder that holds models and optimizers, or the model's own file or folder in it.
        number: of the model among those in the folder.
        only: ``AdapterOnly()`` for an adapter of PEFT's, by PEFT's names or the model's.
        on_missing: ``Ignore(only=...)`` for tensors that may keep their values.
        on_unexpected: ``Ignore(only=...)`` for names that the model does not know.
        on_mismatched: ``Ignore(only=...)`` for tensors that may keep their values where the shape differs.
        options: budget, process group, patience.

    Raises:
        ConfigError: an argument cannot be honoured; the model is there in several forms.
        CoverageError: missing, unexpected or mismatched tensors, all at once.
        DisagreementError: ranks have different models, or files of ranks that do not fit together.
        FormatError: what is there is not accelerate's, was not completed, holds more than data, or is of a form
            that cannot be read (LOCAL_STATE_DICT of FSDP1).
        PlacementError: files of ranks are of another number of ranks.
        StorageError: bytes could not be read.
        RankLostError: a rank has been lost.

    Every error is the same on every rank.
    """
    model = without_compile(model)
    clock = Clock()
    tolerance = Tolerance(on_missing, on_unexpected, on_mismatched)
    with (
        World.current(options.process_group, options.patience, call="load_accelerate_model") as world,
        torch.device("cpu"),
        ExitStack() as stack,
    ):
        with clock.phase("agree"):
            require_same_call(world, os.fspath(path), number, only, tolerance, options=options)
            values = _values_of_model(world, Path(path), number, options, stack)
            if isinstance(only, AdapterOnly):
                # What PEFT saves of the base (embeddings), accelerate leaves out of one file.
                untouched = world.together(lambda: _beside_trained(look_inside(model), only.adapter))
                consents = on_missing.only if isinstance(on_missing, Ignore) else ()
                tolerance = replace(tolerance, missing=Ignore((*consents, *untouched)))
        report, _ = models.set_values(
            world, model, values, only=only, tolerance=tolerance, options=options, clock=clock
        )
        return with_read(report, values)


@torch.no_grad()
def load_accelerate_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    path: Place,
    *,
    number: int = 0,
    order: ParameterOrder = ByName(),  # noqa: B008
    on_missing: OnFault = Refuse(),  # noqa: B008
    on_unexpected: OnFault = Refuse(),  # noqa: B008
    on_mismatched: OnFault = Refuse(),  # noqa: B008
    options: StateOptions = StateOptions(),  # noqa: B008
) -> StateReport:
    """Give an optimizer what accelerate saved of one, in any of its forms, or a file of ``optimizer.state_dict()``.

    As :func:`~shardwise.verbs.optimizer_state.set_optimizer_state`, with the reading of
    :func:`load_accelerate_model`, whose errors it has, too.

    Args:
        model: whose parameters the optimizer holds.
        optimizer: needs no state, and takes no step.
        path: the folder that holds models and optimizers, or the optimizer's own file or folder in it.
        number: of the optimizer among those in the folder.
        order: ``ByName()``; or ``ByPosition()`` for a state that has numbers for parameters and does not name them.
        on_missing: as of :func:`~shardwise.verbs.optimizer_state.set_optimizer_state`.
        on_unexpected: likewise.
        on_mismatched: likewise.
        options: budget, process group, patience.

    Raises:
        ConfigError: the state has numbers in place of names, and ``order`` does not say what they are.
    """
    model = without_compile(model)
    clock = Clock()
    tolerance = Tolerance(on_missing, on_unexpected, on_mismatched)
    with (
        World.current(options.process_group, options.patience, call="load_accelerate_optimizer") as world,
        torch.device("cpu"),
        ExitStack() as stack,
    ):
        with clock.phase("agree"):
            require_same_call(world, os.fspath(path), number, order, tolerance, options=options)
            found = world.from_first(lambda: _found(path, OPTIMIZER, number))
        values: list[Values] = []

        def take_apart(ours: Ours) -> tuple[Given, Values]:
            if isinstance(found, OfRanks):
                state = read_rank_file(world, Path(found.folder), found.files)
                given = world.together(lambda: _read(state, ours, order)[0])
                values.append(BroughtValues(given.tensors))
                return given, values[0]
            reader = stack.enter_context(world.together(lambda: LocalReader(found.folder)))
            file = found.file if isinstance(found, WholeFile) else None

            def look() -> tuple[SavedTree, Given, dict[str, Levels]]:
                saved = (
                    read_distributed_tree(reader, options.budget_bytes)
                    if file is None
                    else read_file_tree(reader, file)
                ).inside("optimizer")
                return saved, *_read(saved.tree, ours, order)

            saved, given, ways = world.from_first(look)
            expressions = stored_tensors(saved.index)
            by_label = {name: expressions[saved.keys[ways[name]]] for name in given.tensors}
            values.append(StoredValues(reader, saved.index, by_label, options.budget_bytes))
            return (given if world.rank == 0 else Given()), values[0]

        report = optimizers.set_values(
            world, model, optimizer, take_apart, tolerance=tolerance, options=options, clock=clock
        )
        return with_read(report, values[0])


def _asked(
    world: World, directory: Place, form: FileForm, number: int, *modes: object, options: StateOptions
) -> Path:
    """The folder, when all ranks ask for the same, and it can be done. Collective: yes."""

    def check() -> None:
        require_file_form(form)
        if type(number) is not int or number < 0:
            raise ConfigError(f"number={number!r} is the place of a model or optimizer in its folder, from 0 on")

    world.together(check)
    require_same_call(world, os.fspath(directory), form, number, modes, options=options)
    return Path(directory)


def _write(
    world: World,
    folder: Path,
    kind: SavedKind,
    number: int,
    form: FileForm,
    state: dict[str, Any],
    home: torch.device,
    options: StateOptions,
) -> tuple[Path, int]:
    """Where the state is then, and its bytes. Collective: yes."""
    match form:
        case OneFile():
            path = folder / kind.file(number)
            tensors, objects = _apart(state)
            budget = options.budget_bytes
            nbytes = write_whole_file(world, path, tensors, objects, budget_bytes=budget, device=home)
        case DistributedFolder():
            path = folder / kind.folder(number)
            nbytes = write_distributed_folder(world, path, {kind.what: state}, budget_bytes=options.budget_bytes)
        case RankFiles():
            names = [kind.rank_file(number, rank) for rank in range(world.size)]
            path = folder / names[world.rank]
            nbytes = write_rank_files(
                world, folder, names, state, lambda name: kind.rank_of(name, number) is not None
            )
        case _:
            assert_never(form)
    return path, nbytes


def _apart(state: dict[str, Any]) -> tuple[dict[Levels, torch.Tensor], dict[Levels, object]]:
    """The tensors of a nest of dicts and lists, and all else, by the way there."""
    tensors: dict[Levels, torch.Tensor] = {}
    objects: dict[Levels, object] = {}
    for way, value in _leaves(state, ()):
        if isinstance(value, torch.Tensor):
            tensors[way] = value
        else:
            objects[way] = value
    return tensors, objects


def _leaves(value: Any, way: Levels) -> Iterator[tuple[Levels, Any]]:
    inner: list[tuple[str | int, Any]] = []
    if isinstance(value, Mapping):
        inner = list(value.items())
    elif isinstance(value, list) and any(isinstance(item, (Mapping, torch.Tensor)) for item in value):
        inner = list(enumerate(value))
    if not inner:
        yield way, value
    for key, item in inner:
        yield from _leaves(item, (*way, key))


def _values_of_model(world: World, path: Path, number: int, options: StateOptions, stack: ExitStack) -> Values:
    """What accelerate saved of a model, wherever and however. Collective: yes."""
    found = world.from_first(lambda: _found(path, MODEL, number))
    match found:
        case OfRanks(folder, files):
            state = read_rank_file(world, Path(folder), files)
            return BroughtValues(world.together(lambda: by_canonical_names(state, f"what {folder} has")))
        case WholeFile() | Distributed():
            name = found.file if isinstance(found, WholeFile) else METADATA
            reader = stack.enter_context(world.together(lambda: LocalReader(found.folder)))
            index = world.from_first(lambda: open_checkpoint(reader, weights_name=name))
            stored = stored_tensors(index)
            named = world.together(lambda: _by_canonical_keys(stored, index.root))
            return StoredValues(reader, index, named, options.budget_bytes)
        case _:
            assert_never(found)


def _found(path: Place, kind: SavedKind, number: int) -> AccelerateSave:
    """What there is, once what a killed save left to be renamed has been. On one rank."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    finish_renames(folder, [kind.rank_file(number, 0)], lambda name: kind.rank_of(name, number) is not None)
    return find(path, kind, number)


def _by_canonical_keys(stored: Mapping[str, Any], root: str) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for key, expression in stored.items():
        plain = canonical(key)
        if plain in named:
            raise FormatError(f"{root}: has {plain} twice, with and without the names of wrappers")
        named[plain] = expression
    return named


def _read(state: Any, ours: Ours, order: ParameterOrder) -> tuple[Given, dict[str, Levels]]:
    """A state taken apart, and the way to each of its values, by label.

    Raises:
        ConfigError, CoverageError: it has another layout; its parameters are not known.
    """
    if isinstance(state, Mapping) and "param_groups" in state:
        state = {"state": {}, **state}  # a folder has no room for an empty dict
        named = with_names(state, ours.groups, ours.shapes, order)
        groups = [
            {**group, "params": [named.get(name, name) for name in group["params"]]}
            for group in state["param_groups"]
        ]
    else:
        return read(state, ours.first_names, ours.shapes), {}
    values: dict[str, Any] = {}
    ways: dict[str, Levels] = {}
    for name, entries in state["state"].items():
        number = int(name) if isinstance(name, str) and name.isdecimal() and len(name) < _MOST_DIGITS else name
        full = str(named.get(number, name))
        values[full] = entries
        plain = ours.first_names.get(canonical(full), canonical(full))
        ways |= {label(plain, str(entry)): ("state", name, entry) for entry in entries}
    return read({"state": values, "param_groups": groups}, ours.first_names, ours.shapes), ways


def with_read(report: StateReport, values: Values) -> StateReport:
    """A report that also tells from where the values came."""
    if isinstance(values, StoredValues):
        return replace(report, read_bytes=values.read_bytes, brought_by=())
    return replace(report, brought_by=tuple(range(report.world_size)))


def _beside_trained(held: list[Held], adapter: str) -> list[str]:
    """All names of tensors that are not trained, nor the adapter's own, in a model of which something is."""
    untouched = [
        name
        for item in held
        if not item.tensor.requires_grad and not any(f".{adapter}." in f".{name}." for name in item.names)
        for name in item.names
    ]
    return untouched if any(item.tensor.requires_grad for item in held) else []


def _home(held: list[Held]) -> torch.device:
    """Where staging lies: on the mesh's device, else where the model is."""
    return home_of(held, local_tensor(held[0].tensor).device if held else None)
