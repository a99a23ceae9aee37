"""Models and optimizers under FSDP, written as accelerate writes them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, assert_never

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.engines import model_states, optimizer_states
from shardwise.engines.arguments import world_of
from shardwise.errors import ConfigError
from shardwise.execution.ranks.world import World
from shardwise.execution.states.agreed import StateOptions, require_same_call
from shardwise.execution.writing.distributed_folder import older_in, write_distributed_folder
from shardwise.execution.writing.marked_folder import Saving, marked_by_first
from shardwise.execution.writing.renames import commit_written, tidy, undo
from shardwise.execution.writing.torch_out import Levels
from shardwise.execution.writing.torch_states import write_rank_files, write_whole_file
from shardwise.formats.accelerate_names import MODEL, OPTIMIZER, SavedKind
from shardwise.models.selection import AdapterOnly, Selection
from shardwise.models.view import Held, without_compile
from shardwise.planning.loads.load_plan import OnDiffering
from shardwise.planning.saves.commit import WrittenFiles
from shardwise.planning.states.forms import DistributedFolder, FileForm, OneFile, RankFiles, require_file_form
from shardwise.report.save_report import FilesReport
from shardwise.storage.writing.folders_writer import FoldersWriter


@dataclass(frozen=True, slots=True)
class ByItself:
    """A model or an optimizer counts once it is written."""


@dataclass(frozen=True, slots=True)
class PartOf:
    """A model or an optimizer counts when the state does that it is a part of, and whose mark the folder has."""

    saving: Saving
    parts: list[WrittenFiles] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FilesPlace:
    """Where a model or an optimizer goes: the folder, its number in it, and the form; when it counts."""

    folder: Path
    number: int
    form: FileForm
    counts: ByItself | PartOf = ByItself()

    def agree(self, world: World, *modes: object, options: StateOptions) -> None:
        """Raise when it cannot be honoured, or ranks ask for different things. Collective: yes.

        Raises:
            ConfigError, DisagreementError: naming what.
        """

        def check() -> None:
            require_file_form(self.form)
            if type(self.number) is not int or self.number < 0:
                raise ConfigError(
                    f"number={self.number!r} is the place of a model or optimizer in its folder, from 0 on"
                )

        world.together(check)
        require_same_call(world, os.fspath(self.folder), self.form, self.number, modes, options=options)


@torch.no_grad()
def save_model(
    model: nn.Module, place: FilesPlace, only: Selection, on_differing_buffers: OnDiffering, options: StateOptions
) -> FilesReport:
    """Write a model as accelerate does. Collective: yes.

    Memory, errors: as of :func:`~shardwise.verbs.accelerate_save.save_accelerate_model`.
    """
    model = without_compile(model)
    with world_of(options, "save_accelerate_model") as world, torch.device("cpu"):
        place.agree(world, only, on_differing_buffers, options=options)
        return write_model(world, model, place, only, on_differing_buffers, options)


@torch.no_grad()
def save_optimizer(model: nn.Module, optimizer: Optimizer, place: FilesPlace, options: StateOptions) -> FilesReport:
    """Write an optimizer as accelerate does. Collective: yes.

    Memory, errors: as of :func:`~shardwise.verbs.accelerate_save.save_accelerate_optimizer`.
    """
    model = without_compile(model)
    with world_of(options, "save_accelerate_optimizer") as world, torch.device("cpu"):
        place.agree(world, options=options)
        return write_optimizer(world, model, optimizer, place, options)


def write_model(
    world: World,
    model: nn.Module,
    place: FilesPlace,
    only: Selection,
    on_differing_buffers: OnDiffering,
    options: StateOptions,
) -> FilesReport:
    """Look at a model, compare what several ranks hold, and write it. Collective: yes.

    Memory, errors: as of :func:`~shardwise.verbs.accelerate_save.save_accelerate_model`.
    """
    start = time.perf_counter()
    taken = model_states.take_out(world, model, only, on_differing_buffers, options)
    state = taken.by_name({name: tensor.detach() for name, tensor in taken.tensors.items()})
    if isinstance(place.form, OneFile) and isinstance(only, AdapterOnly):
        untouched = beside_trained(taken.held, only.adapter)
        state = {fqn: state[name] for name, fqn in taken.names.items() if fqn not in untouched}
    path, nbytes = _write(world, place, MODEL, state, taken.home, options)
    count = len({id(tensor) for tensor in state.values()})
    return FilesReport(str(path), count, nbytes, time.perf_counter() - start, taken.differing)


def write_optimizer(
    world: World, model: nn.Module, optimizer: Optimizer, place: FilesPlace, options: StateOptions
) -> FilesReport:
    """Look at an optimizer, compare what several ranks hold, and write it. Collective: yes.

    Memory, errors: as of :func:`~shardwise.verbs.accelerate_save.save_accelerate_optimizer`.
    """
    start = time.perf_counter()
    taken = optimizer_states.take_out(world, model, optimizer, "the optimizer", options)
    path, nbytes = _write(world, place, OPTIMIZER, taken.written(), taken.home, options)
    return FilesReport(str(path), len(taken.tensors), nbytes, time.perf_counter() - start)


def beside_trained(held: Sequence[Held], adapter: str) -> list[str]:
    """All names of tensors that are not trained, nor the adapter's own, in a model of which something is."""
    untouched = [
        name
        for item in held
        if not item.tensor.requires_grad and not any(f".{adapter}." in f".{name}." for name in item.names)
        for name in item.names
    ]
    return untouched if any(item.tensor.requires_grad for item in held) else []


def _write(
    world: World,
    place: FilesPlace,
    kind: SavedKind,
    state: dict[str, Any],
    home: torch.device,
    options: StateOptions,
) -> tuple[Path, int]:
    """Where the state is then, and its bytes. Collective: yes."""
    match place.counts:
        case PartOf(saving, parts):
            path, nbytes, written = _written(world, saving, place, kind, state, home, options)
            parts.append(written)
        case ByItself():
            with marked_by_first(world, place.folder, tidy, undo) as saving:
                path, nbytes, written = _written(world, saving, place, kind, state, home, options)
                world.from_first(lambda: commit_written(saving.marked, written, _older(place, kind, written)))
        case _:
            assert_never(place.counts)
    return path, nbytes


def _written(
    world: World,
    saving: Saving,
    place: FilesPlace,
    kind: SavedKind,
    state: dict[str, Any],
    home: torch.device,
    options: StateOptions,
) -> tuple[Path, int, WrittenFiles]:
    """Where the state will be, its bytes, and what is to be given its name. Collective: yes."""
    folder, number, budget = place.folder, place.number, options.budget_bytes
    match place.form:
        case OneFile():
            name = kind.file(number)
            tensors, objects = _apart(state)
            nbytes, written = write_whole_file(
                world, saving, name, tensors, objects, budget_bytes=budget, device=home
            )
        case DistributedFolder():
            name = kind.folder(number)
            world.together(lambda: FoldersWriter(folder, [name]).close())  # which refuses links
            written = write_distributed_folder(world, saving, name, {kind.what: state}, budget_bytes=budget)
            nbytes = sum(written.beside.values())
        case RankFiles():
            names = [kind.rank_file(number, rank) for rank in range(world.size)]
            name = names[world.rank]
            nbytes, written = write_rank_files(world, saving, names, state)
        case _:
            assert_never(place.form)
    return folder / name, nbytes, written


def _older(place: FilesPlace, kind: SavedKind, written: WrittenFiles) -> list[str]:
    """What goes when a model or an optimizer counts that is saved by itself: the older one in the same form."""
    match place.form:
        case OneFile():
            return []
        case DistributedFolder():
            name = kind.folder(place.number)
            new = {file.removeprefix(f"{name}/") for file in written.beside}
            return [f"{name}/{file}" for file in older_in(place.folder / name, new)]
        case RankFiles():
            return [
                name
                for name in os.listdir(place.folder)
                if kind.rank_of(name, place.number) is not None and name not in written.named
            ]
        case _:
            assert_never(place.form)


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
