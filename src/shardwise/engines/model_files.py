"""Gives a model the values that are in files."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import nn

from shardwise.engines import model_states
from shardwise.errors import FormatError
from shardwise.execution.ranks.progress import Clock
from shardwise.execution.ranks.world import World
from shardwise.execution.states.agreed import (
    StateOptions,
    Values,
)
from shardwise.execution.states.stored_values import StoredValues
from shardwise.formats.opening import open_checkpoint
from shardwise.models.selection import Selection
from shardwise.models.view import canonical
from shardwise.planning.loads.stored import stored_tensors
from shardwise.planning.states.matching import Tolerance
from shardwise.report.state_report import StateReport
from shardwise.storage.reading.local import LocalReader


def set_from_files(
    world: World,
    model: nn.Module,
    values: Values,
    only: Selection,
    tolerance: Tolerance,
    options: StateOptions,
    clock: Clock,
) -> StateReport:
    """Give a model the values that files have. Collective: yes."""
    report, _ = model_states.set_values(
        world, model, values, only=only, tolerance=tolerance, options=options, clock=clock
    )
    return with_read(report, values)


def stored_values(world: World, folder: str, file: str, options: StateOptions, stack: ExitStack) -> StoredValues:
    """The tensors in files of a folder, by names without wrappers; closed with ``stack``. Collective: yes.

    Raises:
        FormatError, StorageError: as of :func:`~shardwise.formats.open_checkpoint`; two names are one.
    """
    reader = stack.enter_context(world.together(lambda: LocalReader(folder)))
    index = world.from_first(lambda: open_checkpoint(reader, weights_name=file))
    named = world.together(lambda: by_canonical_keys(stored_tensors(index), index.root))
    return StoredValues(reader, index, named, options.budget_bytes)


def by_canonical_keys(stored: Mapping[str, Any], root: str) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for key, expression in stored.items():
        plain = canonical(key)
        if plain in named:
            raise FormatError(f"{root}: has {plain} twice, with and without the names of wrappers")
        named[plain] = expression
    return named


def with_read(report: StateReport, values: Values) -> StateReport:
    """A report that also tells from where the values came."""
    if isinstance(values, StoredValues):
        return replace(report, read_bytes=values.read_bytes, brought_by=())
    return replace(report, brought_by=tuple(range(report.world_size)))
