"""Takes down and restores a rank's random generators, or seeds new ones for other ranks.

[Note: Random numbers on other ranks] With as many ranks as before, every rank's generators go on where they were.
On another number of ranks there is nothing to go on with: states cannot be divided, and two ranks with one state
would draw the same. A generator that was in the same state on all ranks (all ranks meant to draw alike) is set to
it on all. Any other is seeded on each rank from the state that rank 0's had, the rank, and the number of ranks: the
same when it is done again, and different on every rank.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from shardwise.checkpoints.facts import digest_of
from shardwise.errors import FormatError


def take_down() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators, as plain data, by name."""
    legacy: Any = np.random.get_state(legacy=True)
    name, words, position, has_gauss, gauss = legacy
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(words.astype(np.int64)), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
    }
    if torch.accelerator.is_available():
        module = _accelerator()
        states[torch.accelerator.current_accelerator().type] = module.get_rng_state().cpu()  # type: ignore[union-attr]
    return states


def digests(states: Mapping[str, Any]) -> dict[str, str]:
    """Of each generator's state."""
    return {name: digest_of(state) for name, state in states.items()}


def put_back(states: Mapping[str, Any], what: str) -> list[str]:
    """Set generators to their states; the names of those that this machine has not.

    Raises:
        FormatError: a state is none.
    """
    return _set(states, what)


def draw_anew(first: Mapping[str, Any], alike: Collection[str], rank: int, world_size: int, what: str) -> list[str]:
    """See [Note: Random numbers on other ranks]. ``first`` are rank 0's; the names of those not there here."""
    lacking = _set({name: state for name, state in first.items() if name in alike}, what)
    for name, state in first.items():
        if name in alike:
            continue
        text = f"{digest_of(state)} {rank} of {world_size}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
        if name == "python":
            random.seed(seed)
        elif name == "numpy":
            np.random.seed(seed % 2**32)
        elif name == "torch":
            torch.default_generator.manual_seed(seed)
        elif _has(name):
            _accelerator().manual_seed(seed)
        else:
            lacking.append(name)
    return lacking


def _set(states: Mapping[str, Any], what: str) -> list[str]:
    lacking: list[str] = []
    for name, state in states.items():
        try:
            if name == "python":
                random.setstate(state)
            elif name == "numpy":
                kind, words, *rest = state
                np.random.set_state((kind, words.numpy().astype(np.uint32), *rest))
            elif name == "torch":
                torch.set_rng_state(state)
            elif _has(name):
                _accelerator().set_rng_state(state)
            else:
                lacking.append(name)
        except (ValueError, TypeError, RuntimeError, AttributeError) as error:
            raise FormatError(f"{what}: the state of the generator {name} is none: {error}") from error
    return lacking


def _has(kind: str) -> bool:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found is not None and found.type == kind


def _accelerator() -> Any:
    return torch.get_device_module(torch.accelerator.current_accelerator())
