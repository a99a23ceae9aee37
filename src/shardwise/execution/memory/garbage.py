"""Puts off Python's cyclic garbage collection while thousands of lasting objects are made."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress


@contextmanager
def collected_later() -> Iterator[None]:
    """For the time of the block, no search for unreachable cycles begins by itself.

    The objects of a plan set searches off by their number, and each of these walks over all that torch and
    transformers have made: a quarter of a second, to find nothing. Nothing that waits or reads belongs in here.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def import_all(modules: Sequence[str]) -> None:
    """Import what is needed anyway, in one go. A module that cannot be imported is left to whoever needs it."""
    with collected_later():
        for module in modules:
            with suppress(ImportError):
                importlib.import_module(module)
