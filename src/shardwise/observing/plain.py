"""What may be taken from files of others: numbers that are some, and words that no terminal obeys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MOST_NUMBER = 1e18
_MOST_WORDS = 80


def number_in(facts: Mapping[str, Any], name: str) -> float | None:
    """A number under this name; None where there is none, or one that nothing can be done with."""
    value = facts.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if -_MOST_NUMBER < value < _MOST_NUMBER else None


def words_of(text: str, most: int = _MOST_WORDS) -> str:
    """The beginning of a text on one line, without what a terminal obeys, and what no encoding has."""
    kept = text[:most]
    return kept if kept.isprintable() else "".join(sign if sign.isprintable() else "\ufffd" for sign in kept)
