"""Several ranks on one machine, for tests."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.support.local_ranks import LocalRanks


def run_world(world_size: int, function: Callable[..., Any], *args: Any, is_forked: bool = False) -> list[Any]:
    """Call an importable function on ``world_size`` gloo ranks; its values by rank.

    The ranks are fresh processes that meet through a file, never a port. To use one world for many calls, and for
    ``is_forked``, see :class:`~tests.support.local_ranks.LocalRanks`.

    Raises:
        RankError: with the traceback of every rank that failed.
    """
    with LocalRanks(world_size, is_forked=is_forked) as ranks:
        return ranks.run(function, *args)


def run_forked(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """The same on ranks that are forked from a process which has imported TRL."""
    return run_world(world_size, function, *args, is_forked=True)


def attempt(function: Callable[..., Any], *args: Any) -> tuple[str, str]:
    """(kind, text) of the error a call raises; ("", "") when it raises none."""
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def said(function: Callable[..., Any], *args: Any) -> str:
    """The error of a call, with its kind in front; "" when it raises none."""
    kind, text = attempt(function, *args)
    return f"{kind}: {text}" if kind else ""


def agreed(ranks: LocalRanks, function: Callable[..., Any], *args: Any) -> Any:
    """What all ranks return alike."""
    first, *others = ranks.run(function, *args)
    assert others == [first] * len(others)
    return first


def require_words(found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Each text has the words that are expected of it, and there is no other."""
    assert found.keys() == expected.keys()
    for name, words in expected.items():
        assert words in found[name], (name, found[name])


def require_same_error(ends: Sequence[tuple[str, str]], kind: str, *words: str) -> None:
    """All ranks have raised the same error, of this kind, with these words."""
    ((found, text),) = {tuple(end) for end in ends}
    assert found == kind, text
    assert all(word in text for word in words), text
