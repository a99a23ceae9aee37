"""How many processors each rank has to compute with, beside the other ranks of its machine.

[Note: Processors of a rank] Threads of one process that compute in many short steps wait for each other between any
two (Python's lock), and ranks that share processors for each other's threads. So a rank computes on as many threads
as it has processors for itself. What counts is what the system allows each process to run on, for how much of the
time (the quota of a container), and which ranks are on the same machine, not what a launcher has put into the
environment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardwise.storage import machine


@dataclass(frozen=True, slots=True)
class ProcessorSet:
    """The processors that a process may run on: the bits of ``mask``, on a machine.

    ``quotas`` are its control groups that have a limit, each with how many processors all in it may use.
    """

    machine: str
    mask: int
    quotas: tuple[tuple[str, float], ...] = ()

    @classmethod
    def here(cls) -> ProcessorSet:
        """Of this process."""
        space = machine.group_space()
        quotas = ((f"{space}{folder}", most) for folder, most in machine.processor_quotas().items())
        return cls(machine.boot(), sum(1 << number for number in machine.processors()), tuple(quotas))

    @property
    def count(self) -> int:
        return max(1, int(min([self.mask.bit_count(), *(most for _, most in self.quotas)])))


@dataclass(frozen=True, slots=True)
class ProcessorShares:
    """How many processors each rank has: ``usual``, but for the ranks in ``others``."""

    usual: int
    others: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, told: Sequence[ProcessorSet]) -> ProcessorShares:
        """Each processor, and quota, is shared evenly by the ranks that may use it. Every rank has one at least."""
        alike = Counter(told)
        sharers: Counter[tuple[str, int]] = Counter()
        members: Counter[str] = Counter()
        for own, ranks in alike.items():
            sharers.update({(own.machine, number): ranks for number in _bits(own.mask)})
            members.update({group: ranks for group, _ in own.quotas})
        shares = {
            own: min(
                [
                    sum(1 / sharers[own.machine, number] for number in _bits(own.mask)),
                    *(most / members[group] for group, most in own.quotas),
                ]
            )
            for own in alike
        }
        by_rank = [max(1, int(shares[own] + 1e-6)) for own in told]
        usual = Counter(by_rank).most_common(1)[0][0]
        return cls(usual, {rank: share for rank, share in enumerate(by_rank) if share != usual})

    def on(self, rank: int) -> int:
        """Of a rank; at least one."""
        return self.others.get(rank, self.usual)


def _bits(mask: int) -> Iterator[int]:
    return (number for number in range(mask.bit_length()) if mask >> number & 1)
