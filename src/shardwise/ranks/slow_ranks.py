"""Names the rank that others wait for, though it lives.

[Note: Slow ranks] A rank that is lost is an error within seconds. One that lives but takes long is not: it may be
at the end of a long save. But a wait should be explained. So each heartbeat has what its rank does. The first rank
sees all heartbeats and finds out which ranks are missing. The others see the first rank's, which also has the
result.

A rank waits in a meeting, whose key its heartbeat has, or in a collective of torch, which says nothing of who is
missing. There, the ranks waited for are those that are busy with work of their own
(:func:`~shardwise.core.phases.busy_with`: the next batch, callbacks). A rank that is stuck in the
model is not told from those that wait for it: ``sys._current_frames`` would tell, and can deadlock with other
threads.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from shardwise.core.formatting import format_ranks
from shardwise.core.phases import main_thread_work

WARN_S: Final = 10.0
"""Seconds of waiting for a rank that lives after which it is named."""

WARN_AGAIN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class RankStatus:
    """State of a rank when its heartbeat is sent.

    Attributes:
        meetings: seconds since it came to the meetings in which it waits, by their keys.
        phase: the phases of its main thread, outermost first, "" for none.
        phase_s: seconds since the main thread entered or left a phase, or work below.
        busy: work of the main thread on which others may wait, "" for none.
        waits_for: description of the ranks that it waits for, "" for none.
        calls: number of calls that it has begun, by the name under which ranks meet.
    """

    meetings: Mapping[str, float] = field(default_factory=dict)
    phase: str = ""
    phase_s: float = 0.0
    busy: str = ""
    waits_for: str = ""
    calls: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def here(cls, meetings: Mapping[str, Meeting], waits_for: str, calls: Mapping[str, int]) -> RankStatus:
        """Return the status of this process."""
        now = time.monotonic()
        phase, busy, changed_s = main_thread_work()
        seconds = {key: round(now - meeting.since_s, 1) for key, meeting in meetings.items()}
        return cls(seconds, phase, round(now - changed_s, 1), busy, waits_for, calls)

    @classmethod
    def from_json(cls, text: str) -> RankStatus:
        content: Any = json.loads(text)
        return cls(**content)

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    def describe(self, rank: int) -> str:
        """Describe what a rank of this status does."""
        if self.busy:
            doing = f"has been busy with {self.busy}"
        elif self.phase:
            doing = f"has been in the phase {self.phase!r}"
        else:
            doing = "has been in no call of shardwise"
        return f"rank {rank}, which {doing} for {self.phase_s:.0f} s"


@dataclass(frozen=True, slots=True)
class Meeting:
    """A meeting in which this rank waits.

    Attributes:
        since_s: when it came, by the monotonic clock.
        ranks: all ranks of the meeting in the default group, first the one that all others report to.
    """

    since_s: float
    ranks: Sequence[int]


def find_wait(
    rank: int, local: RankStatus, meetings: Mapping[str, Meeting], others: Mapping[int, RankStatus]
) -> tuple[float, str]:
    """Find out which rank this one has been waiting for for ten seconds or more.

    Args:
        rank: this rank.
        local: its status.
        meetings: those of its status.
        others: the statuses that it knows, by rank: the first rank's, or on the first rank those of all.

    Returns:
        The seconds of the wait, and a description of the ranks and what they do. 0 and "" if there is no wait.
    """
    # In a meeting: those that have not come to it.
    for key, waited_s in local.meetings.items():
        if waited_s < WARN_S:
            continue
        first, *members = meetings[key].ranks
        if rank == first:
            absent = [member for member in members if member in others and key not in others[member].meetings]
        elif first in others and key in others[first].meetings:
            # It knows which ranks are missing, and may not know yet that this rank has come.
            wait = others[first].waits_for
            return waited_s, "" if _names(rank, wait) else wait
        else:
            absent = [first] if first in others else []
        if absent:
            return waited_s, _describe(absent, others)
    if local.meetings or local.busy or not local.phase or local.phase_s < WARN_S:
        return 0.0, ""
    # The main thread may be in a collective of torch. If others are busy, it is, or soon will be.
    slow = [other for other, status in others.items() if status.busy and status.phase_s >= WARN_S]
    if slow:
        return local.phase_s, _describe(slow, others)
    # What the first rank waits for, unless it is this rank: maybe in a meeting that this one has not reached yet.
    relayed = [status.waits_for for status in others.values() if rank and not status.meetings]
    return local.phase_s, next((wait for wait in relayed if not _names(rank, wait)), "")


def _names(rank: int, wait: str) -> bool:
    return wait.startswith(f"rank {rank},")


def _describe(ranks: Sequence[int], others: Mapping[int, RankStatus]) -> str:
    """Describe what the first of these ranks does, and name the others."""
    description = others[ranks[0]].describe(ranks[0])
    return description if len(ranks) == 1 else f"{description}, and for ranks {format_ranks(ranks[1:])}"
