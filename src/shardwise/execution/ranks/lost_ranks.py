"""Waits for what other ranks say over the store, and finds out which is gone or in another call."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from shardwise.errors import CheckpointError, DisagreementError, RankLostError
from shardwise.execution.ranks.messages import KeyStore
from shardwise.execution.ranks.whereabouts import ProcessPlace, Pulse, Pulses
from shardwise.report.names import shown_ranks

if TYPE_CHECKING:
    from shardwise.execution.ranks.line import Line

_log = logging.getLogger(__name__)

_FIRST_POLL_S = 0.0001
_LAST_POLL_S = 0.05
_LATENESS = 0.05
"""By what part of its wait a rank may notice its end too late."""

_SPOKE = 1 << 32
"""What a rank that has said something adds to the number of those that have come to a meeting."""

_PART_BYTES = 1 << 22
"""An answer that is larger is put into the store in several values: torch's takes 8 MiB at most."""

_GRACE = 0.25
"""For what part of the silence the first rank stays when a rank is lost, so that busy ones can read it, too."""

_MISSED_BEATS = 4
"""A process that beats rarely between calls is lost after so many of them at the earliest."""

TELL_S, TELL_AGAIN_S = 5.0, 30.0
"""After so long a wait for a rank that has made no call yet, it is told of, and again."""

_LOST, _OTHER_CALL = "lost", "other call"
"""Kinds of verdicts; each is written before its text."""


class Talk:
    """What the line's thread does with the store, from this rank's first meeting on."""

    def __init__(self, keys: KeyStore, pulses: Pulses, line: Line) -> None:
        self._line = line
        self._pulses = pulses
        self.number, self._keys = self._next_line(keys)
        self._step = 0
        self._litter: list[str] = []
        self._last_keys: list[str] = []
        self._step_left: int | None = None
        self._beats = 0
        self._last_beat = -math.inf
        now = time.monotonic()
        others = range(1, line.size) if line.rank == 0 else (0,)
        self._watched = {rank: _Sign(since=now) for rank in others}
        self._tell_at = now + TELL_S
        self._keys.set(f"joined/{line.rank}", ProcessPlace.here().encode())
        self._keys.set(f"call/{line.rank}", line.call.encode())
        if self._keys.set_first("call", line.call.encode()).decode() != line.call:
            self._tell_calls()
        self._keys.set(f"beat/{line.rank}", b"0 0")

    def _next_line(self, keys: KeyStore) -> tuple[int, KeyStore]:
        """A rank's n-th line meets the n-th of every other rank; but not one that is over, and was of another call.

        Whoever waited there for a rank that makes another call now is at the next line. Where the calls have the
        same name, this rank comes too late, and is told so.
        """
        while True:
            number = keys.count(f"lines/{self._line.rank}", 1)
            found = keys.below(f"line{number}")
            verdict = found.find("lost")
            is_over = verdict is not None and not verdict.decode().startswith(_OTHER_CALL)
            if not is_over or found.get_all(["call"])[0].decode() == self._line.call:
                return number, found

    def _tell_calls(self) -> None:
        """Let all know that not all are in one call. Who finds out first asks who is where; the others wait."""
        if self._keys.count("finders", 1) > 1:
            deadline = time.monotonic() + self._line.patience.silence_s
            while time.monotonic() < deadline:
                if self._keys.has("lost"):
                    return
                time.sleep(_LAST_POLL_S / 10)
        self._publish(_OTHER_CALL, self._calls())

    def _calls(self) -> str:
        """Who is in which call, of those that have come."""
        came = [rank for rank in range(self._line.size) if self._keys.has(f"call/{rank}")]
        calls: dict[str, list[int]] = {}
        for rank, call in zip(came, self._keys.get_all([f"call/{rank}" for rank in came]), strict=True):
            calls.setdefault(call.decode(), []).append(self._line.numbers[rank])
        (usual, most), *others = sorted(calls.items(), key=lambda item: (-len(item[1]), item[1]))
        told = ", ".join(f"{_ranks(ranks)} in {call}" for call, ranks in others)
        return (
            f"{told}, where {_ranks(most)} in {usual}: a call was skipped, or made by some ranks "
            "alone; every rank has to make the same calls in the same order. The next call of all ranks is in step"
        )

    def meet(self, message: bytes) -> bytes:
        """On all ranks but the first: hand in a message, which may be empty; the first rank's answer."""
        step = self._step
        if message:
            self._keys.set(f"{step}/{self._line.rank}", message)
            self._litter.append(f"{step}/{self._line.rank}")
        self._keys.count(f"{step}/in", 1 + _SPOKE * bool(message))
        self._wait(lambda: self._keys.has(f"{step}/all"))
        found = self._keys.get_all([f"{step}/all"])[0]
        more, answer = int.from_bytes(found[:4]), found[4:]
        if more:
            answer += b"".join(self._keys.get_all([f"{step}/all/{part}" for part in range(1, more + 1)]))
        self._step_left = step
        self._step += 1
        self._line.note_meeting()
        return answer

    def hear(self) -> dict[int, bytes]:
        """On the first rank: what the others say, of those that say something, once all have come."""
        line, step = self._line, self._step
        came = 0

        def have_come() -> bool:
            nonlocal came
            came = self._keys.count(f"{step}/in", 0)
            return came % _SPOKE == line.size - 1

        self._wait(have_come)
        self.heed_verdict()  # all came, but they may have given this rank up since
        speakers = list(range(1, line.size)) if came >= _SPOKE else []
        if came // _SPOKE < len(speakers):
            speakers = [rank for rank in speakers if self._keys.has(f"{step}/{rank}")]
        messages = self._keys.get_all([f"{step}/{rank}" for rank in speakers]) if speakers else []
        self._step += 1
        line.note_meeting()
        return dict(zip(speakers, messages, strict=True))

    def answer(self, answer: bytes) -> None:
        """On the first rank: what all read, when it has heard them."""
        step = self._step - 1
        parts = [answer[at : at + _PART_BYTES] for at in range(0, len(answer), _PART_BYTES)] or [b""]
        names = [f"{step}/all", *(f"{step}/all/{part}" for part in range(1, len(parts)))]
        for name, part in zip(names[1:], parts[1:], strict=True):
            self._keys.set(name, part)
        self._keys.set(names[0], (len(parts) - 1).to_bytes(4) + parts[0])
        self._litter += self._last_keys  # who has come to this meeting has left the one before
        self._last_keys = [*names, *(f"{step}/{name}" for name in ("in", "out", "cut"))]

    @property
    def untidy(self) -> int:
        """How many things there are to :meth:`tidy`."""
        return len(self._litter) + (self._step_left is not None)

    def tidy(self) -> None:
        """When nobody waits for this rank: tell that it has left the last meeting, and remove what nobody needs."""
        step, self._step_left = self._step_left, None
        if step is not None:
            self._keys.count(f"{step}/out", 1)
        keys, self._litter = self._litter, []
        self._keys.forget(keys)

    def part(self) -> None:
        """Leave after the last meeting, the first rank after the others: the store may end with its process.

        Who comes to another meeting has left this one, too, and will miss the first rank there.
        """
        line, last = self._line, self._step - 1

        def have_left() -> bool:
            left = self._keys.count(f"{last}/out", 0)
            if left < line.size - 1:
                left += self._keys.count(f"{self._step}/in", 0) % _SPOKE
            return left >= line.size - 1

        self.tidy()
        if line.rank == 0 and last >= 0:
            self._wait(have_left)

    def cut(self) -> None:
        """Of the work before the next meeting."""
        self._line.note_cut()
        self._keys.set(f"{self._step}/cut", b"1")

    def leave(self, cause: str) -> None:
        line = self._line
        name = f"rank {line.numbers[line.rank]} ({ProcessPlace.here()})"
        self._publish(_LOST, f"{name} has left the call: {cause}")

    def find_lost(self, limit_s: float) -> None:
        """Wait for a verdict, but not longer. Raises it; returns when there is none."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and not self._line.is_closing:
            self.beat()
            time.sleep(_LAST_POLL_S)

    def beat(self, is_done: Callable[[], bool] = lambda: False) -> None:
        """A sign of life, and a look at the others'; of those that have ended nobody is missed if all is done."""
        line, now = self._line, time.monotonic()
        if now - self._last_beat >= line.patience.beat_s / 2:
            self._last_beat = now
            self._beats += 1
            self._keys.set(f"beat/{line.rank}", f"{self._beats} {line.progress}".encode())
            if self._keys.has(f"{self._step}/cut"):
                line.note_cut()
            line.heard()
            self._watch(now, is_done)

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Poll, the less often the longer it takes, and beat meanwhile."""
        start = time.monotonic()
        while not is_done():
            if self._line.is_closing:
                raise RankLostError(f"rank {self._line.numbers[self._line.rank]} has left the call")
            self._line.heard()
            waited = time.monotonic() - start
            time.sleep(min(max(_FIRST_POLL_S, waited * _LATENESS), _LAST_POLL_S))
            self.beat(is_done)

    def _watch(self, now: float, is_done: Callable[[], bool]) -> None:
        """Raise when a rank is lost, or in another call.

        Raises:
            RankLostError, DisagreementError: the first verdict is everybody's.
        """
        line = self._line
        verdict = self._keys.find("lost")
        if verdict is not None:
            if is_done():  # whoever has left has met this rank before
                return
            self._follow(verdict)
        absent = [rank for rank, sign in self._watched.items() if not (sign.beat or self._keys.has(f"beat/{rank}"))]
        joined = [rank for rank in self._watched if rank not in absent]
        beats = dict(zip(joined, self._keys.get_all([f"beat/{rank}" for rank in joined]), strict=True))
        for rank, beat in beats.items():
            sign = self._watched[rank]
            if beat != sign.beat:
                sign.beat, sign.since = beat, now
                sign.place = sign.place or ProcessPlace.of(self._keys.get_all([f"joined/{rank}"])[0])
            assert sign.place is not None
            if self._is_gone(sign.place, now - sign.since, line.patience.silence_s) and not is_done():
                self._raise_lost(rank, sign.place, now - sign.since)
        line.note_silence(min((self._watched[rank].since for rank in joined), default=math.inf))
        self._watch_absent(absent, now)
        line.total_progress = line.progress + sum(int(beat.split()[1]) for beat in beats.values())

    def _watch_absent(self, ranks: list[int], now: float) -> None:
        """Of ranks that have not come to this call there is a pulse at most, from an earlier one."""
        patience = self._line.patience
        pulses = self._pulses.find([self._line.numbers[rank] for rank in ranks])
        unknown = [number for rank in ranks if (number := self._line.numbers[rank]) not in pulses]
        if unknown and now > self._tell_at:
            self._tell_at = now + TELL_AGAIN_S
            _log.warning("%s", waiting_for(unknown, self._line.size, self._pulses.address))
        for rank in ranks:
            sign, number = self._watched[rank], self._line.numbers[rank]
            pulse = pulses.get(number)
            if pulse is not None:
                if pulse != sign.pulse:
                    sign.pulse, sign.pulse_since = pulse, now
                place = sign.place = sign.place or self._pulses.place(number)
                # A pulse may pause, where a library does not let other threads run: that is seen on this machine.
                silence = 0.0 if place.is_running() else now - sign.pulse_since
                patience_s = max(patience.silence_s, _MISSED_BEATS * pulse.beat_s)
                if pulse.has_ended or self._is_gone(place, silence, patience_s):
                    self._raise_lost(rank, place, silence, has_ended=pulse.has_ended)
            if now - sign.since > patience.join_s:
                self._raise(
                    _LOST,
                    f"rank {number} has not come to this call within {now - sign.since:.0f} s; every rank has to "
                    "make it",
                )

    @staticmethod
    def _is_gone(place: ProcessPlace, silence: float, patience_s: float) -> bool:
        return silence > patience_s or place.has_ended()

    def _raise_lost(self, rank: int, place: ProcessPlace, silence: float, *, has_ended: bool = False) -> NoReturn:
        if has_ended or place.has_ended():
            cause = "its process has ended"
        else:
            cause = f"no sign of life for {silence:.0f} s; it was killed, has ended, or is stopped"
        self._raise(
            _LOST,
            f"rank {self._line.numbers[rank]} ({place}) is lost: {cause}; look at its own output, and at the "
            "system's log for a process killed for want of memory",
        )

    def heed_verdict(self) -> None:
        """Raise what some rank has found out.

        Raises:
            RankLostError, DisagreementError: it.
        """
        verdict = self._keys.find("lost")
        if verdict is not None:
            self._follow(verdict)

    def _publish(self, kind: str, text: str) -> bytes:
        """The first verdict, this one or another's."""
        return self._keys.set_first("lost", f"{kind}\n{text}".encode())

    def _raise(self, kind: str, text: str) -> NoReturn:
        self._follow(self._publish(kind, text))

    def _follow(self, verdict: bytes) -> NoReturn:
        """Not before the others have read it, too: the store may end with the first rank's process."""
        line = self._line
        heard = self._keys.count("heard", 1)
        deadline = time.monotonic() + max(2 * line.patience.beat_s, _GRACE * line.patience.silence_s)
        while line.rank == 0 and heard < line.size - 1 and time.monotonic() < deadline:
            time.sleep(_LAST_POLL_S)
            heard = self._keys.count("heard", 0)
        kind, _, text = verdict.decode().partition("\n")
        error: type[CheckpointError] = DisagreementError if kind == _OTHER_CALL else RankLostError
        raise error(text)


@dataclass(slots=True)
class _Sign:
    """A rank's last beat and pulse, and since when they are those."""

    since: float
    beat: bytes | None = None
    pulse: Pulse | None = None
    pulse_since: float = 0.0
    place: ProcessPlace | None = None


def waiting_for(ranks: Sequence[int], size: int, address: str) -> str:
    """In words: ranks that have not come to where all meet."""
    return f"waiting for rank{'s' * (len(ranks) > 1)} {shown_ranks(ranks)} of {size} at {address}"


def _ranks(ranks: Sequence[int]) -> str:
    told = shown_ranks(ranks)
    return f"rank {told} is" if len(ranks) == 1 else f"ranks {told} are"
