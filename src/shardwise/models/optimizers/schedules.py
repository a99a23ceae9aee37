"""Whether the state of a schedule of learning rates is one of a schedule that is there.

torch takes any state: it puts what is in there into the object, and what does not fit shows steps later, or never.
What a name of torch's stands for is held against what is there only where that is as torch has it: a schedule of
somebody's own may keep anything under the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_OF_EACH_GROUP = ("base_lrs", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums")
"""Lists of torch's schedulers with a number for each group of the optimizer."""

_CALLED = "lr_lambdas"
"""For each group what is kept of a callable: its attributes; None of a plain function."""

_CALLED_FOR_ALL = "_scale_fn_custom"
"""The same, of one callable for all groups."""

_INNER = "_schedulers"

_OF_VERSIONS = frozenset({"verbose", "_is_initial", "_get_lr_called_within_step"})
"""What some versions of torch keep and others do not, and no rate depends on."""

_SHOWN = 8


def why_unlike(present: Mapping[str, Any], stored: object) -> str | None:
    """Why ``stored`` is no state of the scheduler whose state is ``present``; None where it is one."""
    if not isinstance(stored, dict):
        return f"it is a {type(stored).__name__}, and no state"
    for lacks, names in (("lacks", present.keys() - stored.keys()), ("also has", stored.keys() - present.keys())):
        if odd := sorted(map(str, names - _OF_VERSIONS)):
            return f"it {lacks} {odd[:_SHOWN]}"
    return _why_unlike_values(_plain(present), _plain(stored))


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """By names of torch's: of one of several parts the part's name comes before each."""
    return {str(name).rpartition(": ")[2]: value for name, value in state.items()}


def _why_unlike_values(present: Mapping[str, Any], stored: Mapping[str, Any]) -> str | None:
    for name in _OF_EACH_GROUP:
        here = present.get(name)
        if not isinstance(here, list) or not all(map(_is_number, here)):
            continue
        if why := _why_unlike_lists(name, here, stored[name]):
            return why
        if not all(map(_is_number, stored[name])):
            return f"its {name} are not numbers"
    if why := _why_unlike_calls(present, stored):
        return why
    for name, value in present.items():
        if type(value) in (int, float) and not _is_number(stored.get(name, value)):
            return f"its {name} is a {type(stored[name]).__name__}, and no number"
    inner = present.get(_INNER)
    if not isinstance(inner, list) or not all(isinstance(each, dict) for each in inner):
        return None
    if why := _why_unlike_lists(_INNER, inner, stored[_INNER], of="schedulers"):
        return why
    found = [why_unlike(here, there) for here, there in zip(inner, stored[_INNER], strict=True)]
    return next((f"of scheduler {number} in it, {why}" for number, why in enumerate(found) if why), None)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _why_unlike_lists(name: str, here: list[Any], there: object, of: str = "groups of parameters") -> str | None:
    if not isinstance(there, (list, tuple)):
        return f"its {name} is a {type(there).__name__}, and no list"
    if len(there) != len(here):
        return f"its {name} are of {len(there)} {of}, and there are {len(here)}"
    return None


def _why_unlike_calls(present: Mapping[str, Any], stored: Mapping[str, Any]) -> str | None:
    """What is kept of callables has to have somewhere to go."""
    pairs: list[tuple[Any, Any]] = []
    called = present.get(_CALLED)
    if isinstance(called, list) and all(map(_is_kept_of_call, called)):
        if why := _why_unlike_lists(_CALLED, called, stored[_CALLED]):
            return why
        pairs += zip(called, stored[_CALLED], strict=True)
    if _CALLED_FOR_ALL in present and _is_kept_of_call(present[_CALLED_FOR_ALL]):
        pairs.append((present[_CALLED_FOR_ALL], stored[_CALLED_FOR_ALL]))
    for here, there in pairs:
        if not _is_kept_of_call(there) or (there or {}).keys() != (here or {}).keys():
            return "it was made with a function of another kind"
    return None


def _is_kept_of_call(value: object) -> bool:
    return isinstance(value, (dict, type(None)))
