"""Kinds of optimizers and schedulers, told apart by class, settings and state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from shardwise.models.rebind import Bound
from shardwise.models.view import few

_LATER = frozenset({"maximize", "decoupled_weight_decay"})
"""Switches that states of earlier versions of torch do not have."""

_SWITCHES = _LATER | {"amsgrad", "centered", "nesterov", "momentum"}
"""Settings that decide which state there is, or what a step does with it, by whether they are set."""

_DECIDING = _SWITCHES | {"alpha", "betas", "dampening", "etas", "lambd", "lr_decay", "momentum_decay", "rho", "t0"}
"""Settings of torch's optimizers by which one kind is told from another."""


def class_name(optimizer: Optimizer) -> str:
    """The class of an optimizer, by the name that users know: "torch.optim.AdamW"."""
    kind = type(optimizer)
    is_torch = getattr(torch.optim, kind.__name__, None) is kind
    return f"torch.optim.{kind.__name__}" if is_torch else f"{kind.__module__}.{kind.__qualname__}"


def by_parameter(bounds: Sequence[Bound]) -> dict[str, tuple[str, dict[str, Any]]]:
    """The class and the settings that each parameter has in its optimizer."""
    return {
        name: (class_name(bound.optimizer), group)
        for bound in bounds
        for names, group in zip(bound.groups, bound.optimizer.param_groups, strict=True)
        for name in names
    }


def unlike(
    present: Mapping[str, tuple[str, Mapping[str, Any]]], stored: Mapping[str, tuple[str, Mapping[str, Any]]]
) -> list[str]:
    """Why a state is of other optimizers than those there are, in sentences; nothing where it is of such.

    Both are by parameter: a class ("" where it is not known), and settings.
    """
    found: dict[str, list[str]] = {}
    for name in present.keys() & stored.keys():
        (here, settings), (there, told) = present[name], stored[name]
        if there and here != there:
            found.setdefault(f"saved by {there}, and there is {here} now", []).append(name)
        else:
            for why in _differences(settings, told):
                found.setdefault(f"{why} ({here})", []).append(name)
    return [f"{why}: {few(sorted(names))}" for why, names in sorted(found.items())]


def _differences(settings: Mapping[str, Any], told: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for setting in sorted(_DECIDING & {*settings, *told}):
        if setting not in told and setting not in _LATER:
            found.append(f"saved without {setting}, which this optimizer has")
        elif setting not in settings:
            found.append(f"saved with {setting}, which this optimizer does not have")
        elif setting in _SWITCHES & told.keys() and bool(settings[setting]) != bool(told[setting]):
            found.append(f"saved with {setting}={told[setting]!r}, and it is {settings[setting]!r} now")
    return found


_LISTS = frozenset(
    ["base_lrs", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums", "lr_lambdas", "_schedulers"]
)
"""What torch's schedulers have for each group of the optimizer, or for each scheduler inside."""

_OF_VERSIONS = frozenset({"verbose", "_is_initial", "_get_lr_called_within_step"})
"""Entries that only some versions of torch have, and no rate depends on."""


def why_unlike(present: Mapping[str, Any], stored: object) -> str | None:
    """Return why ``stored`` is no state of the scheduler whose state is ``present``; None if it is one.

    torch takes any state: what does not fit shows steps later, or never.
    """
    if not isinstance(stored, dict):
        return f"it is a {type(stored).__name__}, and no state"
    for lacks, names in (("lacks", present.keys() - stored.keys()), ("also has", stored.keys() - present.keys())):
        if odd := sorted(map(str, names - _OF_VERSIONS)):
            return f"it {lacks} {odd[:8]}"
    for name, here in present.items():
        there, plain = stored.get(name, here), str(name).rpartition(": ")[2]
        if plain in _LISTS and isinstance(here, list):
            fits = isinstance(there, (list, tuple)) and len(there) == len(here)
            if not fits or (plain != "_schedulers" and not all(map(_is_like, here, there))):
                return f"its {plain} do not fit the {len(here)} here: {there!r:.80}"
            inner = [(mine, other) for mine, other in zip(here, there, strict=True) if plain == "_schedulers"]
            if why := next((why for mine, other in inner if (why := why_unlike(mine, other))), None):
                return f"of a scheduler in it, {why}"
        elif plain == "_scale_fn_custom" and not _is_like(here, there):
            return "it was made with a function of another kind"
        elif type(here) in (int, float) and not _is_number(there):
            return f"its {plain} is a {type(there).__name__}, and no number"
    return None


def _is_like(here: object, there: object) -> bool:
    if isinstance(here, dict) and isinstance(there, dict):
        return here.keys() == there.keys()
    return type(here) is type(there) or (_is_number(here) and _is_number(there))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
