"""The environment by which accelerate and transformers are told to load under FSDP without whole copies.

shardwise itself needs none of it: these are for scripts that hand models to accelerate.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

USE = "ACCELERATE_USE_FSDP"
EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"
_set_here: set[str] = set()


def enable_fsdp_ram_efficient_loading() -> None:
    """Have transformers and accelerate load for FSDP; an ``ACCELERATE_USE_FSDP`` of the user's own is kept."""
    if USE not in os.environ:
        os.environ[USE] = "True"
        _set_here.add(USE)
    os.environ[EFFICIENT] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """The opposite; an ``ACCELERATE_USE_FSDP`` that was set by :func:`enable_fsdp_ram_efficient_loading` goes."""
    if USE in _set_here:
        _set_here.discard(USE)
        os.environ.pop(USE, None)
    os.environ[EFFICIENT] = "False"


@contextmanager
def fsdp_ram_efficient_loading() -> Iterator[None]:
    """For the time of the block both are on; afterwards both are as they were, also when it raises or is nested."""
    was_set_here = set(_set_here)
    with _set_to({USE: "True", EFFICIENT: "True"}):
        try:
            yield
        finally:
            _set_here.clear()
            _set_here.update(was_set_here)


def without_ram_efficient_loading() -> AbstractContextManager[None]:
    """For the time of a block it is off."""
    return _set_to({EFFICIENT: "False"})


@contextmanager
def _set_to(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def launched_ranks() -> int:
    """How many ranks a launcher has started, of which this process is one; 0 where it was started by none."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 0
