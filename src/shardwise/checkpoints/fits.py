"""Fits all of a checkpoint but optimizer states to what is there; every fault is told at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.checkpoints.base_identity import ALLOW_OTHER_BASE, BaseMatch
from shardwise.checkpoints.opened import Opened
from shardwise.checkpoints.state import REDUCED, KeyPath, Looked, Stateful, TrainState, adapter_settings, in_words
from shardwise.errors import CoverageError, FormatError
from shardwise.execution.memory import collected_later
from shardwise.models.optimizer_state import by_parameter, unlike, why_unlike
from shardwise.models.selection import Selection
from shardwise.models.torch_words import in_memory
from shardwise.planning.load_plan import allows, faults_in_words
from shardwise.planning.matching import STATE_REMEDIES, Tolerance


@dataclass(frozen=True, slots=True)
class Fits:
    """What of a checkpoint goes where. ``model`` has keys by FQN; ``parts`` are those to restore."""

    model: Mapping[str, str]
    parts: frozenset[str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]


@collected_later()
def compare(
    opened: Opened,
    looked: Looked,
    state: TrainState,
    only: Selection,
    common: Mapping[KeyPath, Any],
    world_size: int,
    tolerance: Tolerance,
    base: BaseMatch,
) -> Fits:
    """Compare all but the optimizers' state with what there is; ``base`` is what came of comparing bases.

    Raises:
        CoverageError: the checkpoint is of another kind of tuning, or does not fit; all faults at once.
    """
    _require_same_tuning(opened, looked, only, base)
    faults = _Misfits(tolerance)
    model = _compare_model(opened, looked, faults)
    wanted = {"rng"}
    wanted |= {"optimizers"} if state.all_optimizers else set()
    wanted |= {"schedulers"} if state.all_schedulers else set()
    wanted |= {"scaler"} if state.scaler is not None else set()
    wanted |= {"data"} if state.data is not None else set()
    for part in sorted(wanted - opened.parts):
        faults.add("missing", part)
    for part in sorted(opened.parts - wanted):
        faults.add("unexpected", part)
    kept = wanted & opened.parts
    if "schedulers" in kept and (why := _unlike(state.all_schedulers, common["schedulers",])):
        faults.add("mismatched", "schedulers", f"schedulers: {why}")
        kept.discard("schedulers")
    if "optimizers" in kept:
        stored = _settings(opened, looked, common["optimizer", "param_groups"])
        if others := unlike(by_parameter(looked.bounds), stored):
            faults.add("mismatched", "optimizers", f"optimizers: {'; '.join(others)}")
            kept.discard("optimizers")
    if "optimizers" in kept and (why := _why_elsewhere(opened, looked, common, world_size)):
        faults.add("mismatched", "optimizers", f"optimizer: {why}")
        kept.discard("optimizers")
    if "data" in kept and opened.facts.data == "each" and opened.facts.world_size != world_size:
        saved = opened.facts.world_size
        faults.add(
            "mismatched", "data", f"data: a position for each of {saved} ranks, and now there are {world_size}"
        )
        kept.discard("data")
    faults.check(f"{opened.folder} does not fit:")
    return Fits(
        model,
        frozenset({"model", *kept}),
        tuple(faults.told["missing"]),
        tuple(faults.told["unexpected"]),
        tuple(faults.told["mismatched"]),
    )


def _why_elsewhere(opened: Opened, looked: Looked, common: Mapping[KeyPath, Any], world_size: int) -> str | None:
    """Why reduced state, which is each rank's alone, is not for these ranks."""
    if REDUCED not in common:
        return None
    saved = opened.facts.world_size
    if saved != world_size:
        return (
            f"its 8-bit, 4-bit or factored state was saved by {saved} ranks and cannot be resumed by {world_size}. "
            f"Resume on {saved} ranks, or start the optimizer anew."
        )
    if common[REDUCED] != looked.layout:
        return (
            "its 8-bit, 4-bit or factored state was saved of other shards or blocks. Resume with the mesh and the "
            "optimizer it was saved with, or start the optimizer anew."
        )
    return None


class _Misfits:
    """Faults by kind, with those that are not tolerated."""

    def __init__(self, tolerance: Tolerance) -> None:
        self._consents = {
            "mismatched": tolerance.mismatched,
            "missing": tolerance.missing,
            "unexpected": tolerance.unexpected,
        }
        self.told: dict[str, list[str]] = {kind: [] for kind in self._consents}
        self._refused: dict[str, list[str]] = {kind: [] for kind in self._consents}

    def add(self, kind: str, name: str, sentence: str = "") -> None:
        self.told[kind].append(name)
        if not allows(self._consents[kind], name):
            self._refused[kind].append(sentence or name)

    def check(self, head: str) -> None:
        if any(self._refused.values()):
            raise CoverageError(faults_in_words(head, self._refused, STATE_REMEDIES))


def _require_same_tuning(opened: Opened, looked: Looked, only: Selection, base: BaseMatch) -> None:
    facts, here = opened.facts, in_words(only)
    if facts.holds != here:
        raise CoverageError(
            f"{opened.folder}: holds {facts.holds}, and this run checkpoints {here}; give the checkpointer the "
            "`only` with which it was saved, and tune the model alike"
        )
    settings = adapter_settings(looked.model, only)
    if settings is not None and facts.adapter is not None and settings != facts.adapter:
        names = sorted(
            name for name in {*settings, *facts.adapter} if settings.get(name) != facts.adapter.get(name)
        )
        shown = "; ".join(f"{name} was {facts.adapter.get(name)!r}, is {settings.get(name)!r}" for name in names)
        raise CoverageError(
            f"{opened.folder}: holds an adapter of another config: {shown}; make the adapter as it was made before"
        )
    if base.refused:
        faults = "\n  ".join(base.refused)
        raise CoverageError(f"{opened.folder}: belongs to another base model:\n  {faults}\n{ALLOW_OTHER_BASE}")


def _compare_model(opened: Opened, looked: Looked, faults: _Misfits) -> dict[str, str]:
    """The key of every tensor that gets values, by FQN."""
    keys = opened.model
    stored = {item.key: item for item in opened.index.tensors()}
    found: dict[str, str] = {}
    known: set[str] = set()
    for fqn, item in looked.stored.items():
        known.update(item.names)
        name = next((name for name in item.names if name in keys), None)
        if name is None:
            faults.add("missing", fqn)
            continue
        tensor = stored[keys[name]]
        if tensor.shape != tuple(item.tensor.shape) or tensor.dtype is not in_memory(item.tensor.dtype):
            here = f"{tuple(item.tensor.shape)} {in_memory(item.tensor.dtype).label}"
            faults.add(
                "mismatched", fqn, f"{fqn}: stored {tensor.shape} {tensor.dtype.label}, the model has {here}"
            )
            continue
        found[fqn] = keys[name]
    for name in keys:
        if name not in known:
            faults.add("unexpected", name)
    several = {fqn: [name for name in item.names if name in keys] for fqn, item in looked.stored.items()}
    for fqn, names in several.items():
        if len(names) > 1:
            faults.add(
                "mismatched", fqn, f"{fqn}: one tensor in the model, and {len(names)} stored: {', '.join(names)}"
            )
            found.pop(fqn, None)
    return found


def _settings(opened: Opened, looked: Looked, groups: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """The class of the optimizer that each parameter had, and its settings there."""
    if not isinstance(groups, list) or not all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    ):
        raise FormatError(f"{opened.folder}: its optimizers have no groups of parameters; it is damaged")
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
        if why := why_unlike(scheduler.state_dict(), told):
            return f"what is stored is not of a {type(scheduler).__name__} ({why})"
    return None
