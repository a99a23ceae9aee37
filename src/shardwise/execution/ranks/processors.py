"""How many processors each rank has to compute with, beside the other ranks of its machine.

[Note: Processors of a rank] Threads of one process that compute in many short steps wait for each other between any
two (Python's lock), and ranks that share processors for each other's threads. So a rank computes on as many threads
as it has processors for itself. What counts is what the system allows each process to run on, and which ranks are
on the same machine, not what a launcher has put into the environment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardwise.storage import machine


@dataclass(frozen=True, slots=True)
class ProcessorSet:
    """The processors that a process may run on: the bits of ``mask``, on a machine."""

    machine: str
    mask: int

    @classmethod
    def here(cls) -> ProcessorSet:
        """Of this process."""
        return cls(machine.boot(), sum(1 << number for number in machine.processors()))

    @property
    def count(self) -> int:
        return max(1, self.mask.bit_count())


@dataclass(frozen=True, slots=True)
class ProcessorShares:
    """How many processors each rank has: ``usual``, but for the ranks in ``others``."""

    usual: int
    others: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, told: Sequence[ProcessorSet]) -> ProcessorShares:
        """Each processor is shared evenly by the ranks that may run on it. Every rank has one at least."""
        alike = Counter(told)
        sharers: Counter[tuple[str, int]] = Counter()
        for own, ranks in alike.items():
            sharers.update({(own.machine, number): ranks for number in _bits(own.mask)})
        shares = {
            own: max(1, int(sum(1 / sharers[own.machine, number] for number in _bits(own.mask)) + 1e-6))
            for own in alike
        }
        by_rank = [shares[own] for own in told]
        usual = Counter(by_rank).most_common(1)[0][0]
        return cls(usual, {rank: share for rank, share in enumerate(by_rank) if share != usual})

    def on(self, rank: int) -> int:
        """Of a rank; at least one."""
        return self.others.get(rank, self.usual)


def _bits(mask: int) -> Iterator[int]:
    return (number for number in range(mask.bit_length()) if mask >> number & 1)
