"""Compares a checkpoint with the state that it is to be restored into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.checkpoints.base_identity import ALLOW_OTHER_BASE, BaseMatch
from shardwise.checkpoints.folder import Opened
from shardwise.checkpoints.state import (
    REDUCED,
    CollectedState,
    KeyPath,
    Stateful,
    TrainState,
    adapter_settings,
    describe_selection,
)
from shardwise.errors import FormatError, KeyMismatchError
from shardwise.execution.memory import collected_later
from shardwise.models.optimizer_parsing import by_parameter, scheduler_mismatch, unlike
from shardwise.models.selection import Selection
from shardwise.models.torch_api import in_memory
from shardwise.planning.load_plan import allows, describe_faults
from shardwise.planning.matching import STATE_REMEDIES, Tolerance


class Comparison:
    """Matched tensors and parts of a checkpoint. ``faults`` has the names of the others, by kind.

    Attributes:
        model: keys of the checkpoint by FQN.
        parts: to be restored.
    """

    def __init__(self, tolerance: Tolerance, wanted: set[str], there: set[str]) -> None:
        self.model: dict[str, str] = {}
        self.parts = wanted & there
        self.faults: dict[str, list[str]] = {"mismatched": [], "missing": [], "unexpected": []}
        self._tolerance = tolerance
        self._refused: dict[str, list[str]] = {kind: [] for kind in self.faults}
        for part in sorted(wanted - there):
            self.add("missing", part)
        for part in sorted(there - wanted):
            self.add("unexpected", part)

    def add(self, kind: str, name: str, sentence: str = "") -> None:
        """Record that a tensor, or a part, does not fit."""
        self.faults[kind].append(name)
        self.parts.discard(name)
        if not allows(getattr(self._tolerance, kind), name):
            self._refused[kind].append(sentence or name)

    def check(self, head: str) -> None:
        """Raises KeyMismatchError for all that is not tolerated."""
        if any(self._refused.values()):
            raise KeyMismatchError(describe_faults(head, self._refused, STATE_REMEDIES))


@collected_later()
def compare(
    opened: Opened,
    looked: CollectedState,
    state: TrainState,
    common: Mapping[KeyPath, Any],
    world_size: int,
    tolerance: Tolerance,
) -> Comparison:
    """Compare everything except optimizer state with the current training.

    Raises:
        KeyMismatchError: the checkpoint does not match. The message has all faults.
    """
    given = {"optimizers": state.all_optimizers, "schedulers": state.all_schedulers}
    wanted = {"rng", *(part for part, items in given.items() if items)}
    wanted |= {part for part in ("scaler", "data") if getattr(state, part) is not None}
    fits = Comparison(tolerance, wanted, opened.parts)
    _compare_model(opened, looked, fits)
    if "schedulers" in fits.parts and (why := _unlike(state.all_schedulers, common["schedulers",])):
        fits.add("mismatched", "schedulers", f"schedulers: {why}")
    if "optimizers" in fits.parts:
        stored = _settings(opened, looked, common["optimizer", "param_groups"])
        if others := unlike(by_parameter(looked.bounds), stored):
            fits.add("mismatched", "optimizers", f"optimizers: {'; '.join(others)}")
        elif why := _why_elsewhere(opened, looked, common, world_size):
            fits.add("mismatched", "optimizers", f"optimizer: {why}")
    saved = opened.facts.world_size
    if "data" in fits.parts and opened.facts.data == "each" and saved != world_size:
        why = f"data: a position for each of {saved} ranks, and now there are {world_size}"
        fits.add("mismatched", "data", why)
    fits.check(f"{opened.folder} does not fit:")
    fits.parts.add("model")
    return fits


def _why_elsewhere(
    opened: Opened, looked: CollectedState, common: Mapping[KeyPath, Any], world_size: int
) -> str | None:
    """Why reduced state, which is each rank's alone, is not for these ranks."""
    saved = opened.facts.world_size
    if REDUCED in common and saved != world_size:
        return (
            f"its 8-bit, 4-bit or factored state was saved by {saved} ranks and cannot be resumed by {world_size}. "
            f"Resume on {saved} ranks, or start the optimizer anew."
        )
    if REDUCED in common and common[REDUCED] != looked.layout:
        return (
            "its 8-bit, 4-bit or factored state was saved of other shards or blocks. Resume with the mesh and the "
            "optimizer it was saved with, or start the optimizer anew."
        )
    return None


def require_same_tuning(opened: Opened, looked: CollectedState, only: Selection, base: BaseMatch) -> None:
    facts, here = opened.facts, describe_selection(only)
    if facts.holds != here:
        raise KeyMismatchError(
            f"{opened.folder}: holds {facts.holds}, and this run checkpoints {here}. Give the checkpointer the "
            "`only` with which it was saved, and tune the model alike"
        )
    settings = adapter_settings(looked.model, only)
    if settings is not None and facts.adapter is not None and settings != facts.adapter:
        names = sorted(
            name for name in {*settings, *facts.adapter} if settings.get(name) != facts.adapter.get(name)
        )
        shown = "; ".join(f"{name} was {facts.adapter.get(name)!r}, is {settings.get(name)!r}" for name in names)
        raise KeyMismatchError(
            f"{opened.folder}: holds an adapter of another config: {shown}. Create the adapter with the same "
            "config as before"
        )
    if base.refused:
        faults = "\n  ".join(base.refused)
        raise KeyMismatchError(f"{opened.folder}: belongs to another base model:\n  {faults}\n{ALLOW_OTHER_BASE}")


def _compare_model(opened: Opened, looked: CollectedState, fits: Comparison) -> None:
    """Find the key of every tensor that gets values."""
    keys = opened.model
    stored = {item.key: item for item in opened.index.tensors()}
    for fqn, item in looked.stored.items():
        names = [name for name in item.names if name in keys]
        if not names:
            fits.add("missing", fqn)
            continue
        tensor, shape, dtype = stored[keys[names[0]]], tuple(item.tensor.shape), in_memory(item.tensor.dtype)
        if tensor.shape != shape or tensor.dtype is not dtype:
            why = f"{fqn}: stored {tensor.shape} {tensor.dtype.label}, the model has {shape} {dtype.label}"
            fits.add("mismatched", fqn, why)
        elif len(names) > 1:
            why = f"{fqn}: one tensor in the model, and {len(names)} stored: {', '.join(names)}"
            fits.add("mismatched", fqn, why)
        else:
            fits.model[fqn] = keys[names[0]]
    known = {name for item in looked.stored.values() for name in item.names}
    for name in keys:
        if name not in known:
            fits.add("unexpected", name)


def _settings(opened: Opened, looked: CollectedState, groups: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """The class of the optimizer that each parameter had, and its settings there."""
    if not isinstance(groups, list) or not all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    ):
        raise FormatError(f"{opened.folder}: its optimizers have no groups of parameters. It is damaged")
    classes = [name for name, count in opened.facts.optimizers or () for _ in range(min(count, len(groups)))]
    if len(classes) != len(groups):
        classes = [""] * len(groups)
    first = {name: item.fqn for item in looked.held for name in item.names}
    return {
        first.get(name, name): (kind, group)
        for kind, group in zip(classes, groups, strict=True)
        for name in map(str, group["params"])
    }


def _unlike(schedulers: Sequence[Stateful], stored: Any) -> str | None:
    """Why states are not those of such schedulers."""
    if not isinstance(stored, list) or len(stored) != len(schedulers):
        return f"{len(stored) if isinstance(stored, list) else 'no list'} stored, there are {len(schedulers)}"
    for scheduler, told in zip(schedulers, stored, strict=True):
        if why := scheduler_mismatch(scheduler.state_dict(), told):
            return f"what is stored is not of a {type(scheduler).__name__} ({why})"
    return None
