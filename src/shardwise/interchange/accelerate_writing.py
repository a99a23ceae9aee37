"""Models and optimizers under FSDP, written as accelerate writes them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.engines import model_states, optimizer_states
from shardwise.errors import ConfigError
from shardwise.execution.ranks.world import World
from shardwise.execution.states.agreed import StateOptions, require_same_call
from shardwise.execution.writing.distributed_folder import write_distributed_folder
from shardwise.execution.writing.rank_files import write_rank_files
from shardwise.execution.writing.torch_out import Levels
from shardwise.execution.writing.whole_file import write_whole_file
from shardwise.formats.accelerate_names import MODEL, OPTIMIZER, SavedKind
from shardwise.models.rebind import ShapedAlike
from shardwise.models.selection import AdapterOnly, Selection
from shardwise.models.view import Held
from shardwise.planning.loads.consent import OnDiffering
from shardwise.planning.states.forms import DistributedFolder, FileForm, OneFile, RankFiles, require_file_form
from shardwise.report.files_report import FilesReport

_NO_BLOCKS = ShapedAlike("a Checkpointer keeps moments in blocks, and factors, which these files have no form for")


@dataclass(frozen=True, slots=True)
class FilesPlace:
    """Where a model or an optimizer goes: the folder, its number in it, and the form."""

    folder: Path
    number: int
    form: FileForm

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
    taken = optimizer_states.take_out(world, model, optimizer, "the optimizer", options, _NO_BLOCKS)
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
    folder, number = place.folder, place.number
    match place.form:
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
            assert_never(place.form)
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
