"""Which kind of optimizer a state is of: its class, its settings, and what it keeps of a parameter."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.models.optimizers.rebind import Bound

_HOW: frozenset[str] = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings that decide how a step is computed, not what."""

_FORMS: frozenset[str] = frozenset({"amsgrad", "centered", "decoupled_weight_decay", "maximize", "nesterov"})
"""Switches, some of which decide which state there is, and all what a step does with it."""

_LATER: frozenset[str] = frozenset({"maximize", "decoupled_weight_decay"})
"""Settings that states of earlier versions of torch do not have."""

_SHOWN = 3


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
    return [f"{why}: {_few(sorted(names))}" for why, names in sorted(found.items())]


def _differences(settings: Mapping[str, Any], told: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    known = _torch_settings()
    for setting in sorted({*settings, *told} & (known - _HOW)):
        if setting not in told and setting not in _LATER:
            found.append(f"saved without {setting}, which this optimizer has")
        elif setting not in settings:
            found.append(f"saved with {setting}, which this optimizer does not have")
        elif setting in told and _is_other_form(setting, settings[setting], told[setting]):
            found.append(f"saved with {setting}={told[setting]!r}, and it is {settings[setting]!r} now")
    return found


def entries_of(optimizer: Optimizer, settings: Mapping[str, Any], ndim: int) -> frozenset[str] | None:
    """What an optimizer of torch's keeps of a parameter with so many dimensions; None of any other.

    One of its class is made for a single number, and steps.
    """
    kind = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) is not kind:
        return None
    forms = {name: bool(settings[name]) for name in ("amsgrad", "centered", "momentum") if name in settings}
    return _entries_of(kind, tuple(forms.items()), ndim)


@cache
def _entries_of(kind: type[Optimizer], forms: tuple[tuple[str, bool], ...], ndim: int) -> frozenset[str] | None:
    given: dict[str, Any] = {name: 0.5 * value if name == "momentum" else value for name, value in forms}
    parameter = nn.Parameter(torch.zeros((1,) * ndim, device="cpu"))
    parameter.grad = torch.zeros_like(parameter)
    try:
        single = kind([parameter], lr=0.1, **given)  # type: ignore[call-arg]
        single.step()
    except Exception:  # of one that wants a closure, or sparse gradients
        return None
    return frozenset(map(str, single.state[parameter]))


def _is_other_form(setting: str, here: Any, there: Any) -> bool:
    if setting == "momentum":  # without it there is no such state
        return bool(here) != bool(there)
    return setting in _FORMS and bool(here) != bool(there)


@cache
def _torch_settings() -> frozenset[str]:
    """What torch's own optimizers can be given, but for what nearly all have."""
    kinds = [item for item in vars(torch.optim).values() if inspect.isclass(item) and issubclass(item, Optimizer)]
    names = {name for kind in kinds for name in inspect.signature(kind).parameters}
    return frozenset(names - {"params", "lr", "weight_decay", "eps", "args", "kwargs"})


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
