"""How often something is done in a training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class EachEpoch:
    """At the end of each pass over the data."""


Every: TypeAlias = int | EachEpoch | None
"""Every so many steps, or each epoch; None: not on the way."""


def is_time(every: Every, step: int, epochs_done: float) -> bool:
    """Whether it is done after this step, of which ``epochs_done`` passes over the data are done."""
    if isinstance(every, EachEpoch):
        return step > 0 and epochs_done.is_integer()
    return every is not None and step % every == 0
