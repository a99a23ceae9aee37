"""Makes tenants of a grid of values, and names of the values."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

_SHORT = {"learning_rate": "lr", "lora_alpha": "alpha", "lora_dropout": "dropout", "weight_decay": "wd"}
"""What keys are called in names; others by the last of their words."""


def grid(sweep: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """All combinations of values, by name: the last key changes quickest. Each has a value for every key.

    Combinations of one name are one: the caller compares their number with :func:`points`.
    """
    keys = list(sweep)
    named = [[(_word(key, value, number), value) for number, value in enumerate(sweep[key], 1)] for key in keys]
    return {
        "-".join(word for word, _ in point): {key: value for key, (_, value) in zip(keys, point, strict=True)}
        for point in itertools.product(*named)
    }


def points(sweep: Mapping[str, Sequence[Any]]) -> int:
    """How many combinations there are."""
    count = 1
    for values in sweep.values():
        count *= len(values)
    return count


def dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested keys as ``tuning.r``, with what is not nested any more."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse."""
    whole: dict[str, Any] = {}
    for path, value in values.items():
        *sections, last = path.split(".")
        place = whole
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return whole


def _word(key: str, value: object, number: int) -> str:
    """A value in a name: ``r8``, ``lr1e-4``, ``linear``; what is no short word by its place in the list."""
    last = key.rpartition(".")[2]
    short = _SHORT.get(last, last)
    match value:
        case bool():
            return f"{short}-{str(value).lower()}"
        case int() | float():
            return f"{short}{_shortest(value)}"
        case str() if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}", value):
            return value
        case _:
            return f"{short}{number}"


def _shortest(value: float) -> str:
    """The shorter of two ways to write a number."""
    exact = Decimal(repr(value)).normalize()
    if not exact.is_finite():
        return str(value)
    plain = f"{exact:f}"
    _, digits, exponent = exact.as_tuple()
    first, rest = str(digits[0]), "".join(map(str, digits[1:]))
    power = int(exponent) + len(rest)
    scientific = f"{'-' if exact < 0 else ''}{first}{'.' if rest else ''}{rest}e{power}"
    return scientific if len(scientific) < len(plain) else plain
