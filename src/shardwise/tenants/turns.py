"""Decides whose rows go through the base next; see [Note: Turns]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiting:
    """A tenant in the queue, and its next portion; the same value on every rank.

    ``rows`` are those of the rank with the most, ``tokens`` what each is padded to; 0 of a portion without rows.
    """

    name: str
    rows: int
    tokens: int

    @property
    def cost(self) -> int:
        """Tokens that a rank takes through the base for it, padding included."""
        return self.rows * self.tokens


def next_pass(queue: Sequence[Waiting], tokens_per_pass: int) -> list[str]:
    """Who goes through the base together: the first in the queue, and whoever behind it fits.

    They have rows of one padded length, and cost no more than the budget together; the first goes in any case.
    Portions without rows cost nothing, and go along.
    """
    leader = next((each for each in queue if each.cost), None)
    taken, left = [], tokens_per_pass
    for each in queue:
        if not each.cost:
            taken.append(each.name)
        elif leader is not None and each.tokens == leader.tokens and (each is leader or each.cost <= left):
            taken.append(each.name)
            left -= each.cost
    return taken


def queue_after(queue: Sequence[str], taken: Sequence[str]) -> list[str]:
    """The queue once some have had their turn: they go to its end, in their order."""
    gone = set(taken)
    return [name for name in queue if name not in gone] + [name for name in queue if name in gone]
