"""Compares a checkpoint with the state that it is to be restored into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.checkpoints.step_folders import OpenCheckpoint
from shardwise.checkpoints.train_state import (
    REDUCED,
    CollectedState,
    Stateful,
    TrainState,
    adapter_settings,
    describe_selection,
)
from shardwise.core.consents import Consent, allows, describe_faults
from shardwise.core.errors import FormatError, KeyMismatchError
from shardwise.files.join_entries import KeyPath
from shardwise.fsdp.optimizer_states_by_name import by_parameter, list_differences, scheduler_mismatch
from shardwise.fsdp.torch_private import from_torch_or_other
from shardwise.models.selection import Selection
from shardwise.state.base_identity import ALLOW_OTHER_BASE, BaseMatch
from shardwise.transfer.matching import STATE_REMEDIES
from shardwise.transfer.memory import gc_disabled


class Comparison:
    """Tensors and components of a checkpoint that match the current training, and those that do not.

    Attributes:
        model: keys in the checkpoint of matched tensors, by FQN.
        components: names of the matched ones ("model", "optimizers", "schedulers", "scaler", "data", "rng").
        faults: names of the tensors and components that do not match, by kind.
    """

    def __init__(self, consent: Consent, current: set[str], stored: set[str]) -> None:
        self.model: dict[str, str] = {}
        self.components = current & stored
        self.faults: dict[str, list[str]] = {"mismatched": [], "missing": [], "unexpected": []}
        self._consent = consent
        self._refused: dict[str, list[str]] = {kind: [] for kind in self.faults}
        for component in sorted(current - stored):
            self.add("missing", component)
        for component in sorted(stored - current):
            self.add("unexpected", component)

    def add(self, kind: str, name: str, sentence: str = "") -> None:
        """Record that a tensor, or a component, does not match."""
        self.faults[kind].append(name)
        self.components.discard(name)
        if not allows(getattr(self._consent, kind), name):
            self._refused[kind].append(sentence or name)

    def raise_refused(self, head: str) -> None:
        """Raise KeyMismatchError with the faults that are not ignored."""
        if any(self._refused.values()):
            raise KeyMismatchError(describe_faults(head, self._refused, STATE_REMEDIES))


@gc_disabled()
def compare(
    opened: OpenCheckpoint,
    collected: CollectedState,
    state: TrainState,
    common: Mapping[KeyPath, Any],
    world_size: int,
    consent: Consent,
) -> Comparison:
    """Compare everything except optimizer state with the current training.

    Raises:
        KeyMismatchError: the checkpoint does not match. The message counts all faults.
        FormatError: the checkpoint is damaged.
    """
    present = {
        "optimizers": bool(state.all_optimizers),
        "schedulers": bool(state.all_schedulers),
        "scaler": state.scaler is not None,
        "data": state.data is not None,
        "rng": True,
    }
    current = {component for component, is_present in present.items() if is_present}
    comparison = Comparison(consent, current, opened.components)
    _compare_model(opened, collected, comparison)
    if "schedulers" in comparison.components and (
        fault := _check_schedulers(state.all_schedulers, common["schedulers",])
    ):
        comparison.add("mismatched", "schedulers", f"schedulers: {fault}")
    if "scaler" in comparison.components and state.scaler is not None:
        # The state of a disabled one is empty.
        there, here = ("enabled" if each else "disabled" for each in (common["scaler",], state.scaler.state_dict()))
        if there != here:
            comparison.add(
                "mismatched", "scaler", f"scaler: saved by a scaler that was {there}, and it is {here} now"
            )
    # Class and settings, and the layout of state that belongs to one rank. Other state is matched afterwards, entry
    # by entry, if these are equal.
    if "optimizers" in comparison.components:
        stored = _get_settings(opened, collected, common["optimizer", "param_groups"])
        if faults := list_differences(by_parameter(collected.bounds), stored):
            comparison.add("mismatched", "optimizers", f"optimizers: {'; '.join(faults)}")
        elif REDUCED in common and (fault := _check_reduced(opened, collected, common[REDUCED], world_size)):
            comparison.add(
                "mismatched", "optimizers", f"optimizer: its 8-bit, 4-bit or factored state was saved {fault}"
            )
    saved = opened.header.world_size
    if "data" in comparison.components and opened.header.data == "each" and saved != world_size:
        sentence = f"data: a position for each of {saved} ranks, and now there are {world_size}"
        comparison.add("mismatched", "data", sentence)
    # All faults are collected first, so that one error has them.
    comparison.raise_refused(f"{opened.folder} does not fit:")
    comparison.components.add("model")
    return comparison


def _check_reduced(opened: OpenCheckpoint, collected: CollectedState, layout: Any, world_size: int) -> str | None:
    """Return the reason why reduced state, which belongs to one rank each, is not for these ranks, or None."""
    saved = opened.header.world_size
    if saved != world_size:
        return (
            f"by {saved} ranks and cannot be resumed by {world_size}. Resume on {saved} ranks, or start the "
            "optimizer anew."
        )
    if layout != collected.layout:
        return (
            "of other shards or blocks. Resume with the mesh and the optimizer it was saved with, or start the "
            "optimizer anew."
        )
    return None


def require_same_tuning(
    opened: OpenCheckpoint, collected: CollectedState, only: Selection, base: BaseMatch
) -> None:
    """Raises KeyMismatchError for a checkpoint of another selection, adapter config, or base."""
    header, current = opened.header, describe_selection(only)
    if header.holds != current:
        raise KeyMismatchError(
            f"{opened.folder}: holds {header.holds}, and this run checkpoints {current}. Pass the checkpointer the "
            "`only` with which it was saved, and the same tuning"
        )
    # The config as JSON, so that it compares with the header's. Another release of PEFT may have other settings.
    # Tensors of an adapter that only one of the two has are missing or unexpected.
    settings, stored = adapter_settings(collected.model, only), header.adapter or {}
    if names := sorted(name for name in settings.keys() & stored.keys() if settings[name] != stored[name]):
        shown = "; ".join(f"{name} was {stored[name]!r}, is {settings[name]!r}" for name in names)
        raise KeyMismatchError(
            f"{opened.folder}: holds a model or an adapter of another config: {shown}. Create the model and its "
            "adapter with the same config as before"
        )
    if base.refused:
        faults = "\n  ".join(base.refused)
        raise KeyMismatchError(f"{opened.folder}: belongs to another base model:\n  {faults}\n{ALLOW_OTHER_BASE}")


def _compare_model(opened: OpenCheckpoint, collected: CollectedState, comparison: Comparison) -> None:
    """Match each stored tensor of the model with a key of the checkpoint."""
    keys = opened.model
    stored = {item.key: item for item in opened.index.tensors()}
    for fqn, item in collected.stored.items():
        # A tied tensor may have been saved under any of its names.
        names = [name for name in item.names if name in keys]
        if not names:
            comparison.add("missing", fqn)
            continue
        tensor, shape = stored[keys[names[0]]], tuple(item.tensor.shape)
        dtype = from_torch_or_other(item.tensor.dtype)
        if tensor.shape != shape or tensor.dtype is not dtype:
            sentence = f"{fqn}: stored {tensor.shape} {tensor.dtype.label}, the model has {shape} {dtype.label}"
            comparison.add("mismatched", fqn, sentence)
        elif len(names) > 1:
            sentence = f"{fqn}: one tensor in the model, and {len(names)} stored: {', '.join(names)}"
            comparison.add("mismatched", fqn, sentence)
        else:
            comparison.model[fqn] = keys[names[0]]
    expected = {name for item in collected.stored.values() for name in item.names}
    for name in keys:
        if name not in expected:
            comparison.add("unexpected", name)


def _get_settings(
    opened: OpenCheckpoint, collected: CollectedState, groups: Any
) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the class of the optimizer that each parameter had, and the parameter's settings, by FQN."""
    if not isinstance(groups, list) or not all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    ):
        raise FormatError(f"{opened.folder}: its optimizers have no param_groups. It is damaged")
    classes = [name for name, count in opened.header.optimizers for _ in range(min(count, len(groups)))]
    if len(classes) != len(groups):
        raise FormatError(
            f"{opened.folder}: has {len(groups)} param_groups, and optimizers for {len(classes)}. It is damaged"
        )
    # [["torch.optim.AdamW", 2], ["torch.optim.SGD", 1]] are the classes of the groups 0, 1 and 2.
    fqns = {name: item.fqn for item in collected.model_tensors for name in item.names}
    settings: dict[str, tuple[str, dict[str, Any]]] = {}
    for optimizer_class, group in zip(classes, groups, strict=True):
        for name in map(str, group["params"]):
            settings[fqns.get(name, name)] = optimizer_class, group
    return settings


def _check_schedulers(schedulers: Sequence[Stateful], stored: Any) -> str | None:
    """Return the reason why stored states are not of these schedulers, or None."""
    if not isinstance(stored, list) or len(stored) != len(schedulers):
        return f"{len(stored) if isinstance(stored, list) else 'no list'} stored, there are {len(schedulers)}"
    for scheduler, state in zip(schedulers, stored, strict=True):
        if fault := scheduler_mismatch(scheduler.state_dict(), state):
            return f"the stored state is not of a {type(scheduler).__name__} ({fault})"
    return None
