"""Trains tenants together; where that fails, finds out whose fault it is, and trains the others as if it were not.

[Note: Whose fault] What is raised in the middle of a pass of many tenants says nothing of whose rows, or whose
matrices, it came of. So each tenant of the call is run alone. Who fails again is a culprit; then all others are run
again together, in the layout they had: in place of a culprit's rows are as many, as long, of which nothing is
learned, with matrices of 0. So the products of the others have the sizes that they would have had, and come out the
same to the bit. Rows for which there is no memory cannot stay, and are left out.

Gradients are put back to what they were before each of these runs, so windows of several micro-batches survive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwise.bank.calls import RowCall, added_up
from shardwise.errors import DisagreementError, RankLostError, ShardwiseError, TrainingError
from shardwise.execution.ranks.causes import is_out_of_memory


@dataclass(frozen=True, slots=True)
class TrainedTogether:
    """What became of a call."""

    call: RowCall
    """As it was carried out."""
    sums: Mapping[int, float]
    """Of the losses, by entry."""
    passes: int
    failures: Mapping[int, TrainingError]
    """By entry."""


@dataclass(frozen=True, slots=True)
class _FailedAlone:
    error: TrainingError
    is_want_of_memory: bool


def train_together(call: RowCall) -> TrainedTogether:
    """Add to the gradients of the tenants of a call, but for those whose own fault it is that it breaks off.

    Collective: yes.

    Raises:
        ShardwiseError: it breaks off, and nobody fails alone, or all do; gradients are as before.
    """
    before = _Gradients(call)
    try:
        try:
            sums, passes = call.together(call.train, added_up)
            return TrainedTogether(call, sums, passes, {})
        except (DisagreementError, RankLostError):
            raise
        except ShardwiseError as error:
            before.put_back()
            culprits = _culprits(call, before, error)
        large = [number for number, fault in culprits.items() if fault.is_want_of_memory]
        again = call.with_stand_ins(culprits, large)
        sums, passes = again.together(again.train, added_up)
        before.put_back(culprits)
        return TrainedTogether(again, sums, passes, {number: fault.error for number, fault in culprits.items()})
    except BaseException:
        before.put_back()
        raise


def _culprits(call: RowCall, before: _Gradients, error: ShardwiseError) -> dict[int, _FailedAlone]:
    """Who fails alone, by entry; some do, and some do not. Collective: yes.

    Raises:
        ShardwiseError: ``error``, as nobody does, or all do.
    """
    with_rows = [number for number, entry in enumerate(call.agreed) if sum(entry.rows)]
    found = {}
    for number in with_rows if len(with_rows) > 1 else ():
        own = call.alone(number)
        try:
            own.together(own.train, added_up)
        except (DisagreementError, RankLostError):
            raise
        except ShardwiseError as why:
            what = TrainingError(f"{call.agreed[number].name!r}, whose rows fail alone, too: {why}")
            what.__cause__ = why
            found[number] = _FailedAlone(what, _is_want_of_memory(own))
        finally:
            before.put_back([number])
    if not found and len(with_rows) > 1 and _is_want_of_memory(call):
        raise TrainingError(
            f"{error}. There is memory for each of these tenants alone, and not for all at once: give the rows of "
            "fewer of them a call, or fewer rows of each"
        ) from error
    if len(found) in (0, len(with_rows)):
        raise error
    return found


def _is_want_of_memory(call: RowCall) -> bool:
    """Whether that broke it off, on any rank. Collective: yes."""
    failure = call.failure
    return call.base.world.all_reduce(lambda: failure is not None and is_out_of_memory(failure), any)


class _Gradients:
    """What the gradients of a call's tenants are before it. Memory: a copy of those whose window has begun."""

    def __init__(self, call: RowCall) -> None:
        self._tenants = call.tenants
        self._before = [
            tenant.gradient.clone() if tenant is not None and tenant.window.micro_batches else None
            for tenant in call.tenants
        ]

    def put_back(self, numbers: Iterable[int] | None = None) -> None:
        """Those of some entries, or of all."""
        for number in range(len(self._tenants)) if numbers is None else numbers:
            tenant, gradient = self._tenants[number], self._before[number]
            if tenant is not None:
                tenant.gradient.zero_() if gradient is None else tenant.gradient.copy_(gradient)
