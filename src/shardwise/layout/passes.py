"""The forward and the backward pass of a step, cut into stretches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto


class PassPart(Enum):
    """Where in a step a stretch is."""

    FORWARD = auto()
    LOSS = auto()
    """After the last block: norm, head, and what losses make of logits."""
    LOSS_BACKWARD = auto()
    BACKWARD = auto()


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of the passes in which no group begins or ends. Bytes are of what operations have made.

    ``opens`` are the groups that begin with it, ``closes`` those that end with it. ``rise`` is the most over what
    was there at its beginning, ``kept`` what is left of that at its end; gradients of parameters are in both, until
    ``released`` of them are taken away when their groups close. ``block`` is -1 outside of blocks.
    """

    way: PassPart
    block: int
    opens: tuple[int, ...]
    closes: tuple[int, ...]
    rise: int
    kept: int
    released: int = 0
    flops: float = 0.0

    def extended(self, other: Stretch, times: float) -> Stretch:
        """On the line from this one to another, so many times as far as that is."""

        def along(here: float, there: float) -> float:
            return here + (there - here) * times

        return replace(
            self,
            rise=round(along(self.rise, other.rise)),
            kept=round(along(self.kept, other.kept)),
            released=round(along(self.released, other.released)),
            flops=along(self.flops, other.flops),
        )
