"""Where this process is, told to the one listener of it, if there is one.

Whoever knows a phase marks it by :func:`phase`; whoever has facts hands them to :func:`tell`. Both cost next to
nothing while nobody listens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol


class Listener(Protocol):
    """Told from any thread."""

    def begin(self, name: str) -> None:
        """This thread enters a phase, within the one that it is in."""

    def end(self) -> None:
        """This thread leaves the phase that it entered last."""

    def tell(self, what: str, facts: Mapping[str, Any]) -> None:
        """Something is known now; plain JSON values."""

    def leave_to_parent(self) -> None:
        """This process has been forked from the one that is observed: let go of what is that one's."""


class _Ear:
    """Who listens in this process."""

    listener: Listener | None = None


_EAR = _Ear()


def _forget() -> None:
    listener, _EAR.listener = _EAR.listener, None
    if listener is not None:
        listener.leave_to_parent()


os.register_at_fork(after_in_child=_forget)  # a child is another process than the one that is observed


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell this listener within the block, in place of the one before."""
    before, _EAR.listener = _EAR.listener, listener
    try:
        yield
    finally:
        _EAR.listener = before


def is_listened_to() -> bool:
    """Whether there is a listener."""
    return _EAR.listener is not None


@contextmanager
def phase(name: str) -> Iterator[None]:
    """The block is a phase of what this thread does."""
    listener = _EAR.listener
    if listener is None:
        yield
        return
    listener.begin(name)
    try:
        yield
    finally:
        listener.end()


def tell(what: str, facts: Mapping[str, Any]) -> None:
    """Hand over what is known: ``load``, with what was foreseen and what was done, say."""
    listener = _EAR.listener
    if listener is not None:
        listener.tell(what, facts)
