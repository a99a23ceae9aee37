"""Models and optimizers that accelerate saved under FSDP, found and read, in any of its forms."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, assert_never

from torch import nn
from torch.optim import Optimizer

from shardwise.engines import optimizer_states
from shardwise.engines.model_files import set_from_files, stored_values, with_read
from shardwise.engines.optimizer_fitting import Ours
from shardwise.execution.ranks.progress import Clock
from shardwise.execution.ranks.world import World
from shardwise.execution.reading.renamed_folder import as_renamed, home_of, lists_in
from shardwise.execution.states.agreed import (
    BroughtValues,
    StateOptions,
    Values,
    by_canonical_names,
    require_same_call,
)
from shardwise.execution.states.stored_values import StoredValues
from shardwise.execution.writing.saved_tree import SavedTree, read_distributed_tree, read_file_tree
from shardwise.execution.writing.torch_out import Levels
from shardwise.execution.writing.torch_states import read_rank_file
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
from shardwise.formats.distributed import METADATA
from shardwise.interchange.accelerate_writing import beside_trained
from shardwise.models.optimizers.optimizer_state import Given, ParameterOrder, read, with_names
from shardwise.models.optimizers.rebind import label
from shardwise.models.selection import AdapterOnly, Selection
from shardwise.models.view import canonical, look_inside
from shardwise.planning.loads.load_plan import Ignore
from shardwise.planning.loads.stored import stored_tensors
from shardwise.planning.states.matching import OnFault, Tolerance
from shardwise.report.state_report import StateReport
from shardwise.storage.reading.local import LocalReader

_MOST_DIGITS = 10
"""Of the number of a parameter; what is longer is a name."""


@dataclass(frozen=True, slots=True)
class FilesSource:
    """Where a model or an optimizer is, its number there, and what of it need not fit."""

    path: Path
    number: int
    tolerance: Tolerance
    options: StateOptions

    def agree(self, world: World, mode: object) -> None:
        """Raise when ranks ask for different things. Collective: yes.

        Raises:
            DisagreementError: naming the ranks.
        """
        require_same_call(world, os.fspath(self.path), self.number, mode, self.tolerance, options=self.options)


def read_model(world: World, model: nn.Module, source: FilesSource, only: Selection, clock: Clock) -> StateReport:
    """Find a model's files and give a model their values. Collective: yes.

    Memory, errors: as of :func:`~shardwise.verbs.accelerate_load.load_accelerate_model`.
    """
    tolerance = source.tolerance
    with ExitStack() as stack:
        with clock.phase("agree"):
            values = _values_of_model(world, source, stack)
            if isinstance(only, AdapterOnly):
                # What PEFT saves of the base (embeddings), accelerate leaves out of one file, in which it has
                # what torch does not know as frozen: buffers, and the second names of tied parameters.
                untouched = world.together(lambda: beside_trained(look_inside(model), only.adapter))
                missing, unexpected = tolerance.missing, tolerance.unexpected
                tolerance = replace(
                    tolerance, missing=_also(missing, untouched), unexpected=_also(unexpected, untouched)
                )
        return set_from_files(world, model, values, only, tolerance, source.options, clock)


def read_optimizer(
    world: World,
    model: nn.Module,
    optimizer: Optimizer,
    source: FilesSource,
    order: ParameterOrder,
    clock: Clock,
) -> StateReport:
    """Find an optimizer's files and give an optimizer their state. Collective: yes.

    Memory, errors: as of :func:`~shardwise.verbs.accelerate_load.load_accelerate_optimizer`.
    """
    options = source.options
    brought: list[Values] = []
    with ExitStack() as stack:
        with clock.phase("agree"):
            found = _found(world, source, OPTIMIZER, stack)

        def take_apart(ours: Ours) -> tuple[Given, Values]:
            given, values = _state_of_optimizer(world, found, ours, order, options, stack)
            brought.append(values)
            return given, values

        report = optimizer_states.set_values(
            world, model, optimizer, take_apart, tolerance=source.tolerance, options=options, clock=clock
        )
        return with_read(report, brought[0])


def _also(consent: OnFault, names: Sequence[str]) -> Ignore:
    return Ignore((*(consent.only if isinstance(consent, Ignore) else ()), *names))


def _values_of_model(world: World, source: FilesSource, stack: ExitStack) -> Values:
    """What accelerate saved of a model, wherever and however. Collective: yes."""
    found = _found(world, source, MODEL, stack)
    match found:
        case OfRanks(folder, files):
            state = read_rank_file(world, Path(folder), files)
            return BroughtValues(world.together(lambda: by_canonical_names(state, f"what {folder} has")))
        case WholeFile(folder, file):
            return stored_values(world, folder, file, source.options, stack)
        case Distributed(folder):
            return stored_values(world, folder, METADATA, source.options, stack)
        case _:
            assert_never(found)


def _state_of_optimizer(
    world: World,
    found: AccelerateSave,
    ours: Ours,
    order: ParameterOrder,
    options: StateOptions,
    stack: ExitStack,
) -> tuple[Given, Values]:
    """This rank's part of what was saved, and the values of its tensors. Collective: yes."""
    if isinstance(found, OfRanks):
        state = read_rank_file(world, Path(found.folder), found.files)
        given = world.together(lambda: _read(state, ours, order)[0])
        return given, BroughtValues(given.tensors)
    reader = stack.enter_context(world.together(lambda: LocalReader(found.folder)))
    file = found.file if isinstance(found, WholeFile) else None

    def look() -> tuple[SavedTree, Given, dict[str, Levels]]:
        tree = read_distributed_tree(reader, options.budget_bytes) if file is None else read_file_tree(reader, file)
        saved = tree.inside("optimizer")
        return saved, *_read(saved.tree, ours, order)

    saved, given, ways = world.from_first(look)
    expressions = stored_tensors(saved.index)
    by_label = {name: expressions[saved.keys[ways[name]]] for name in given.tensors}
    values = StoredValues(reader, saved.index, by_label, options.budget_bytes)
    return (given if world.rank == 0 else Given()), values


def _found(world: World, source: FilesSource, kind: SavedKind, stack: ExitStack) -> AccelerateSave:
    """What there is; of a save whose renames are not carried out yet, in links until ``stack`` is closed.

    Collective: yes.
    """
    path, number = source.path, source.number

    def linked() -> AccelerateSave:
        home = home_of(path)
        return find(stack.enter_context(as_renamed(home)) / path.relative_to(home), kind, number)

    if world.from_first(lambda: bool(lists_in(home_of(path)))):
        return world.together(linked)
    return world.from_first(lambda: find(path, kind, number))


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
