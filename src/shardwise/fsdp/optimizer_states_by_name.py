"""State dicts of optimizers by parameter names, and their comparison with present optimizers.

The layout is that of ``torch.distributed.checkpoint.state_dict``: ``{"state": {fqn: {entry: value}},
"param_groups": [{"params": [fqn, ...], "lr": ...}, ...]}``, the groups of several optimizers one after the other.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.core.errors import ConfigError
from shardwise.core.formatting import canonical_name
from shardwise.fsdp.named_tensors import abbreviate, are_bitwise_equal
from shardwise.fsdp.rebind import Bound, Key, Scalar, label


def keys_by_label(bounds: Sequence[Bound]) -> dict[str, Key]:
    """Return all entries of optimizers' states by label."""
    return {key.label: key for bound in bounds for key in [*bound.scalars, *bound.tensors]}


def build_state_dict(bounds: Sequence[Bound], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict of optimizers with these values by label. Settings of groups are copies."""
    state: dict[str, dict[str, Any]] = {}
    for bound in bounds:
        for key in [*bound.scalars, *bound.tensors]:
            state.setdefault(key.parameter, {})[key.entry] = values[key.label]
        state |= {name: {} for name in bound.unused}
    return {"state": state, "param_groups": build_param_groups(bounds)}


def build_param_groups(bounds: Sequence[Bound]) -> list[dict[str, Any]]:
    """Return the parameter groups of optimizers as in :func:`build_state_dict`."""
    groups: list[dict[str, Any]] = []
    for bound in bounds:
        for names, group in zip(bound.groups, bound.optimizer.param_groups, strict=True):
            settings = {name: copy_value(value) for name, value in group.items() if name != "params"}
            if "param_names" in settings:
                settings["param_names"] = [canonical_name(name) for name in settings["param_names"]]
            groups.append({"params": list(names), **settings})
    return groups


@torch.inference_mode(mode=False)  # the copy may be set again, and an optimizer changes it in place
def copy_value(value: Any) -> Any:
    """Return an independent copy, on the CPU if it is a tensor, and of Python if it is a number of numpy."""
    if isinstance(value, np.generic):
        return value.item()
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


@dataclass(slots=True)
class ParsedState:
    """The state dict of one rank, by the first names of the parameters.

    Attributes:
        groups: parameters, by group.
        settings: of each group.
        tensors: state tensors to reshard, by label.
        scalars: the rest of the state, by label.
        keys: (parameter, entry), by label.
    """

    groups: list[list[str]] = field(default_factory=list)
    settings: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, Scalar] = field(default_factory=dict)
    keys: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.groups or self.keys)


def read(
    state: Mapping[str, Any] | None, first_names: Mapping[str, str], shapes: Mapping[str, torch.Size]
) -> ParsedState:
    """Parse a state dict.

    Args:
        state: the state dict. None on a rank without one.
        first_names: the first name of a parameter for each of its names.
        shapes: of parameters, by first name.

    Raises:
        ConfigError: it has another layout, or values that cannot be set.
    """
    parsed = ParsedState()
    state_dict: Mapping[str, Any] = {} if state is None else state
    require_state_dict(state_dict)
    for group in state_dict.get("param_groups", ()):
        names = group["params"]
        if not all(isinstance(name, str) for name in names):
            raise ConfigError(
                "the state of optimizers has indices in place of parameter names, as from optimizer.state_dict(). "
                "Pass that of get_optimizer_state_dict(model, optimizer)"
            )
        parsed.groups.append([first_names.get(canonical_name(name), canonical_name(name)) for name in names])
        parsed.settings.append({key: copy_value(value) for key, value in group.items() if key not in _NAMES})
    seen: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for name, entries in state_dict.get("state", {}).items():
        plain = first_names.get(canonical_name(name), canonical_name(name))
        before, others = seen.setdefault(plain, (name, entries))
        if not all(_is_same(entries[entry], others[entry]) for entry in entries.keys() & others.keys()):
            raise ConfigError(
                f"the state of optimizers has separate values for {before} and {name}, which are one parameter. "
                "Remove one of them"
            )
        for entry, value in entries.items():
            _add(parsed, plain, str(entry), value, shapes.get(plain))
    return parsed


def names_by_index(state: Mapping[str, Any]) -> dict[str | int, str]:
    """Return the names of parameters that a state dict has indices for. Empty if it has names.

    Raises:
        ConfigError: it has another layout, or indices without names (``param_names``).
    """
    require_state_dict(state)
    names: dict[str | int, str] = {}
    for group in state["param_groups"]:
        indices, group_names = group["params"], group.get("param_names")
        if not any(isinstance(index, int) for index in indices):
            continue
        if not isinstance(group_names, list) or len(group_names) != len(indices):
            raise ConfigError(
                "the state has indices in place of parameter names, as optimizer.state_dict() makes it, so "
                "its values could be set to the wrong parameters. Create optimizers from model.named_parameters(), "
                "or save get_optimizer_state_dict(model, optimizer)"
            )
        names |= {index: canonical_name(str(name)) for index, name in zip(indices, group_names, strict=True)}
    return names


def require_state_dict(whole: object) -> None:
    """Raise ConfigError unless this has the layout of a state dict, or is an empty one."""
    values = groups = None
    if isinstance(whole, Mapping):
        values, groups = whole.get("state"), whole.get("param_groups")
    is_sound = (
        isinstance(values, Mapping)
        and all(isinstance(entries, Mapping) for entries in values.values())
        and isinstance(groups, (list, tuple))
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in groups)
    )
    if groups is None and isinstance(whole, Mapping) and any(str(key).startswith("param_groups.") for key in whole):
        raise ConfigError(
            "the state of optimizers is flattened (state.NAME.ENTRY). Pass that of get_optimizer_state_dict() "
            "without StateDictOptions(flatten_optimizer_state_dict=True)"
        )
    if not is_sound and whole != {}:
        raise ConfigError(
            "the state of optimizers is not a state dict. Pass {'state': {name: {...}}, 'param_groups': [{'params':"
            " [name, ...], ...}]} as get_optimizer_state_dict() or torch.distributed.checkpoint.state_dict make "
            "it, or None on a rank without state"
        )


_NAMES = ("params", "param_names")


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two values are known to be equal, bit by bit. Of tensors on meta this is not known."""
    if value is other:
        return True
    if not (isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)):
        return type(value) is type(other) and bool(value == other)
    return are_bitwise_equal(value, other)


def _add(parsed: ParsedState, parameter: str, entry: str, value: Any, shape: torch.Size | None) -> None:
    name = label(parameter, entry)
    parsed.keys[name] = parameter, entry
    # A scalar is the same on all ranks. All else is resharded like the parameter.
    is_tensor = isinstance(value, torch.Tensor)
    # One number may be a tensor of its parameter's shape.
    if is_tensor and (isinstance(value, DTensor) or value.numel() != 1 or (value.ndim and value.shape == shape)):
        parsed.tensors[name] = value
    elif is_tensor:
        parsed.scalars[name] = copy_value(value)
    elif value is None or isinstance(value, (int, float, str)):
        parsed.scalars[name] = value
    else:
        raise ConfigError(f"{name} in the state is a {type(value).__name__}. Only tensors and numbers can be set")


def set_group(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Set settings of a parameter group. Tensors are updated in place, because kernels may hold them."""
    for name, value in settings.items():
        present = group.get(name)
        if isinstance(present, torch.Tensor):
            present.copy_(torch.as_tensor(value))
        else:
            group[name] = copy_value(value)


_LATER = frozenset({"maximize", "decoupled_weight_decay"})
"""Switches that states of older versions of torch lack."""

_SWITCHES = _LATER | {"amsgrad", "centered", "nesterov", "momentum"}
"""Settings whose truth value decides which state exists, or how a step uses it."""

_DECIDING = _SWITCHES | {"alpha", "betas", "dampening", "etas", "lambd", "lr_decay", "momentum_decay", "rho", "t0"}
"""Settings that distinguish kinds of torch's optimizers."""


def class_name(optimizer: Optimizer) -> str:
    """Return the public name of an optimizer's class: "torch.optim.AdamW"."""
    kind = type(optimizer)
    is_torch = getattr(torch.optim, kind.__name__, None) is kind
    return f"torch.optim.{kind.__name__}" if is_torch else f"{kind.__module__}.{kind.__qualname__}"


def by_parameter(bounds: Sequence[Bound]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the class and the group's settings of each parameter's optimizer."""
    settings: dict[str, tuple[str, dict[str, Any]]] = {}
    for bound in bounds:
        for names, group in zip(bound.groups, bound.optimizer.param_groups, strict=True):
            settings.update(dict.fromkeys(names, (class_name(bound.optimizer), group)))
    return settings


def list_differences(
    present: Mapping[str, tuple[str, Mapping[str, Any]]], stored: Mapping[str, tuple[str, Mapping[str, Any]]]
) -> list[str]:
    """Return sentences on the differences between a state and the present optimizers. Empty if it fits.

    Both have, by parameter, a class ("" if unknown) and settings.
    """
    # Parameters with the same difference are one sentence. Of another class, no settings are compared.
    by_reason: dict[str, list[str]] = {}
    for name in present.keys() & stored.keys():
        (here, settings), (there, saved) = present[name], stored[name]
        if there and here != there:
            by_reason.setdefault(f"saved by {there}, and there is {here} now", []).append(name)
        else:
            for why in _differences(settings, saved):
                by_reason.setdefault(f"{why} ({here})", []).append(name)
            for setting in settings.keys() & saved.keys():
                if not _is_setting(saved[setting], settings[setting]):
                    why = f"the setting {setting} of {here} is {saved[setting]!r:.80}"
                    by_reason.setdefault(why, []).append(name)
    return [f"{why}: {abbreviate(sorted(names))}" for why, names in sorted(by_reason.items())]


def _differences(settings: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    reasons: list[str] = []
    for setting in sorted(_DECIDING & {*settings, *saved}):
        if setting not in saved and setting not in _LATER:
            reasons.append(f"saved without {setting}, which this optimizer has")
        elif setting not in settings:
            reasons.append(f"saved with {setting}, which this optimizer does not have")
        elif setting in _SWITCHES & saved.keys() and bool(settings[setting]) != bool(saved[setting]):
            reasons.append(f"saved with {setting}={saved[setting]!r}, and it is {settings[setting]!r} now")
    return reasons


def _is_setting(value: Any, present: Any) -> bool:
    """Return whether a value can take the place of a present number, or numbers. Of others nothing is known."""
    if isinstance(present, tuple) and all(map(_is_number, present)):
        is_as_long = isinstance(value, (list, tuple)) and len(value) == len(present)
        return is_as_long and all(map(_is_setting, value, present))
    return value is None or isinstance(present, bool) or not _is_number(present) or _is_number(value)


_LISTS = "base_lrs _last_lr min_lrs max_lrs base_momentums max_momentums lr_lambdas _schedulers"
_COMPARED = frozenset([*_LISTS.split(), "_scale_fn_custom"])
"""Entries of torch's schedulers whose lengths and types must match: one value per group or inner scheduler."""

_OF_VERSIONS = frozenset({"verbose", "_is_initial", "_get_lr_called_within_step"})
"""Entries that only some versions of torch have, and that do not affect learning rates."""


def scheduler_mismatch(present: Mapping[str, Any], stored: object) -> str | None:
    """Return the reason why ``stored`` is not a state of the scheduler whose state is ``present``, or None.

    torch accepts any state.
    """
    if not isinstance(stored, dict):
        return f"it is a {type(stored).__name__}, and no state"
    for lacks, names in (("lacks", present.keys() - stored.keys()), ("also has", stored.keys() - present.keys())):
        if others := sorted(map(str, names - _OF_VERSIONS)):
            return f"it {lacks} {others[:8]}"
    for name, here in present.items():
        plain = str(name).rpartition(": ")[2]
        is_compared = type(here) in (int, float) or plain in _COMPARED
        if is_compared and name in stored and not _is_like(here, stored[name]):
            return f"its {plain} does not fit the one here: {stored[name]!r:.80}"
    return None


def _is_like(here: object, there: object) -> bool:
    if isinstance(here, list):
        is_list = isinstance(there, (list, tuple)) and len(there) == len(here)
        return is_list and all(map(_is_like, here, there))  # type: ignore[call-overload]
    if isinstance(here, dict) and isinstance(there, dict):
        return scheduler_mismatch(here, there) is None
    return _is_number(there) if _is_number(here) else type(here) is type(there)


def _is_number(value: object) -> bool:
    """Return whether this is a number and not NaN."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and (value.is_meta or not bool(value.isnan()))
    return isinstance(value, (int, float)) and value == value
