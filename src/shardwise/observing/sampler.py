"""Observes this process: a thread that samples what it needs, and marks of the phases it is in.

[Note: What observing costs] A sample takes some tens of microseconds, on a thread that otherwise sleeps. A mark is
one line, appended. Dividing pages among processes (PSS) takes the kernel milliseconds, so that it is done at
borders of phases alone, and there only as often as it takes less than half a percent of the time of all ranks
together: in a training each waits for whoever is late.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from shardwise.observing.own_memory import OwnMemory
from shardwise.observing.phases import listening
from shardwise.observing.rank_file import BEGIN, END, SAMPLE, SHARED, SHARES, VERSION, RankFile

_SHARE_OF_TIME = 0.005
"""The most that dividing pages may take, on all ranks one after the other."""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Bytes of an accelerator: in tensors of this process, kept by torch for them, and taken by whomever."""

    allocated: int = 0
    reserved: int = 0
    used: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank this is, of which run, and of which machine."""

    run: str
    """The same on all ranks, and of no other run."""
    rank: int
    world_size: int
    machine: str
    device: str = ""
    """In words; "" without an accelerator."""


class RankObserver:
    """Writes down what this process needs and does, from ``__enter__`` to ``__exit__``.

    Whatever goes wrong ends the observing and nothing else; ``fault`` says what it was. A process that is forked
    meanwhile is another one, which writes nothing here. An interpreter that ends first ends the observing as well:
    afterwards its threads stand still, and none could be waited for.

    Args:
        file: is closed at the end.
        place: of this rank.
        memory: of this process; is closed at the end.
        device: asked for the accelerator's memory, on the sampling thread.
        samples_per_second: how often.
    """

    def __init__(
        self,
        file: RankFile,
        place: Place,
        memory: OwnMemory,
        device: Callable[[], DeviceUse],
        samples_per_second: float,
    ) -> None:
        self.fault = ""
        self._is_closed = False
        self._is_left = False
        self._file = file
        self._memory = memory
        self._device = device
        self._period_s = 1 / samples_per_second
        self._began = time.perf_counter()
        self._lanes = {threading.get_ident(): 0}
        self._shares_at = -1.0
        self._shares_cost_s = 0.0
        self._share_of_time = _SHARE_OF_TIME / place.world_size
        self._is_over = threading.Event()
        self._lock = threading.RLock()  # a handler of a signal may mark a phase in the middle of a line
        self._sampling = threading.Lock()
        self._thread = threading.Thread(target=self._go, name="shardwise-observer", daemon=True)
        self._listening = listening(self)
        header = {"observed": VERSION, "began": round(time.time(), 3), "samples_per_second": samples_per_second}
        who = {"run": place.run, "rank": place.rank, "world_size": place.world_size, "machine": place.machine}
        process = {"host": socket.gethostname(), "pid": os.getpid(), "device": place.device}
        self._write(lambda _: {**header, **who, **process})

    def __enter__(self) -> Self:
        self.sample()
        self._attempt(self._thread.start)
        self._listening.__enter__()
        atexit.register(self.__exit__)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_over.is_set():
            return
        self._listening.__exit__(None, None, None)
        atexit.unregister(self.__exit__)
        if self._is_left:
            return
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.sample()
        self._attempt(self._write_end)
        with self._sampling, self._lock:
            self._is_closed = True
            self._file.close()
            self._memory.close()

    def leave_to_parent(self) -> None:
        self._is_left = True
        self._file.close()
        self._memory.close()

    def begin(self, name: str) -> None:
        self._write(lambda t: [BEGIN, t, self._lane(), name])
        self._divide()

    def end(self) -> None:
        self._divide()
        self._write(lambda t: [END, t, self._lane()])

    def tell(self, what: str, facts: Mapping[str, Any]) -> None:
        self._write(lambda t: {"t": t, "tell": what, **facts})

    def sample(self) -> None:
        """Write down what is needed this moment; nothing after the end."""
        if not self._is_left:
            with self._sampling:
                self._attempt(self._sample)

    def _sample(self) -> None:
        if self._is_closed or self.fault:
            return
        host, device = self._memory.now(), self._device()
        bytes_of = (device.allocated, device.reserved, device.used, *self._memory.traffic())
        kinds = (host.anonymous_kib, host.shared_kib, host.file_kib, host.peak_kib)
        self._write(lambda t: [SAMPLE, t, *kinds, *(number >> 10 for number in bytes_of)])

    def _go(self) -> None:
        while not self._is_over.wait(self._period_s) and not self.fault:
            self.sample()

    def _attempt(self, function: Callable[[], object]) -> None:
        try:
            function()
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: an accelerator has failed, no thread
            self.fault = self.fault or f"samples have ended: {error}"

    def _write_end(self) -> None:
        peak_kib = self._memory.now().peak_kib
        self._write(lambda t: {"t": t, "end": True, "peak_kib": peak_kib})

    def _divide(self) -> None:
        """Look at how pages are shared, unless that has been done too much of late."""
        if self.fault or self._is_left or self._is_closed:
            return
        start = time.perf_counter()
        if start - self._shares_at < self._shares_cost_s / self._share_of_time:
            return
        if found := self._memory.shares():
            self._write(lambda t: [SHARES, t, *(found[kind] for kind in SHARED[1:])])
        self._shares_at = time.perf_counter()
        self._shares_cost_s = self._shares_at - start

    def _lane(self) -> int:
        """Of this thread; the one that observes has the first. With the lock."""
        return self._lanes.setdefault(threading.get_ident(), len(self._lanes))

    def _write(self, line_at: Callable[[float], list[Any] | dict[str, Any]]) -> None:
        """Append what is said of this moment: lines are in the order of their times."""
        if self._is_left:
            return
        with self._lock:  # what another thread has to say after the end goes into no file
            if self.fault or self._is_closed:
                return
            try:
                self._file.write(line_at(round(time.perf_counter() - self._began, 4)))
            except OSError as error:
                self.fault = f"{self._file.path}: it cannot be written any more ({error.strerror or error})"
            except (TypeError, ValueError, RecursionError) as error:
                self.fault = f"{self._file.path}: something was told that is no JSON ({error})"
