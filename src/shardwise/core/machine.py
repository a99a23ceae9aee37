"""Identifies this machine and visible processes, and reads the limits of control groups (containers).

Host names are only a fallback because containers may share one.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = Path("/proc/self/ns")
OWN_GROUP = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")
_STATUS = Path("/proc/self/status")
_OWN_PAGES = (b"RssAnon:", b"RssShmem:")
_AWAKE_S, _STOP_S = 0.25, 1.0
"""How often a thread wakes up, and the seconds after which it would have if the process had not been stopped."""


@cache
def boot_id() -> str:
    """Return an identifier of this boot of the kernel, equal in all its containers and different after a restart.

    It is the host name if the kernel provides no boot ID.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return f"host {socket.gethostname()}"


def processor_count() -> int:
    """Return the number of processors that this process may use at once within its control groups, at least 1."""
    return max(1, int(min([len(os.sched_getaffinity(0)), *processor_quotas().values()])))


def control_groups(own_group: Path = OWN_GROUP, groups: Path = GROUPS) -> Iterator[Path]:
    """Yield the folders of the control groups (version 2) that may limit this process, the innermost first."""
    for line in read_text(own_group).splitlines():
        _, controllers, path = line.split(":", 2)
        folder = groups / path.lstrip("/")
        for place in () if controllers else (folder, *folder.parents):
            yield place
            if place == groups:
                break


def number_in(file: Path) -> int | None:
    """Return the number in a kernel file, or None if the file is missing or states no limit."""
    text = read_text(file).strip()
    return int(text) if text.isdigit() else None


def processor_quotas(own_group: Path = OWN_GROUP, groups: Path = GROUPS) -> dict[str, float]:
    """Return the CPU quotas, in processors, by the folder of each control group that has one.

    ``docker run --cpus`` and Kubernetes' limits are such quotas: all processors are visible, but processes that use
    more than the quota are throttled for the rest of each 100 ms period.
    """
    quotas: dict[str, float] = {}
    for group in control_groups(own_group, groups):
        numbers = [int(word) if word.isdigit() else 0 for word in read_text(group / "cpu.max").split()]
        if len(numbers) == 2 and all(numbers):
            quotas[str(group)] = numbers[0] / numbers[1]
    return quotas


def read_text(file: Path) -> str:
    """Return the text of a kernel file, or "" if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""


def process_memory() -> int:
    """Return the bytes of this process's anonymous and shared pages, 0 if the kernel does not report them.

    Pages of mapped files do not count: the kernel can reclaim them.
    """
    try:
        lines = _STATUS.read_bytes().splitlines()  # the name of a process may be any bytes
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(_OWN_PAGES))


def namespace_id(kind: str) -> str:
    """Return an identifier of the kernel and of a namespace: "pid", "cgroup", or "mnt" (where paths are valid)."""
    try:
        return f"{boot_id()}/{os.stat(_NAMESPACES / kind).st_ino}"
    except OSError:
        return f"{boot_id()}/{socket.gethostname()}"


def process_start_time(process: int) -> str:
    """Return the start time, in ticks since boot, of a process in this PID namespace, or "" if there is none.

    A process that has ended counts as absent even if its parent has not waited for it yet. The result is "alive"
    if the process exists, but its start time cannot be read.
    """
    try:
        # proc(5): the state is field 3, and the start time field 22. Z is a zombie, X is dead.
        state, *numbers = _status(process)
        # numbers[0] is field 4, so field 22 is numbers[18].
        return "" if state in "ZX" else numbers[18]
    except (OSError, IndexError, ValueError):
        pass
    # /proc has no entry that can be read. Signal 0 finds out whether the process exists, also that of another user.
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return ""
    except OSError:
        return "alive"
    return "alive"


def is_stopped(process: int) -> bool:
    """Check if a process in this PID namespace is stopped (SIGSTOP, a debugger)."""
    try:
        return _status(process)[0] in "Tt"
    except (OSError, IndexError):
        return False


class _StopWatch:
    """Measures for how long this process has been stopped, by a thread that does nothing but sleep.

    A library that holds the GIL for more than a second counts as a stop, too.
    """

    def __init__(self) -> None:
        # Seconds of earlier stops, and when the thread was awake: one value, which other threads read at once.
        self._stops = 0.0, time.monotonic()
        threading.Thread(target=self._run, name="shardwise-stops", daemon=True).start()

    def read(self) -> tuple[float, float]:
        """Return the time and the seconds of stops until then."""
        # The clock last: stops noted after it was read would be subtracted from a time before them. Stops since
        # the thread was awake are part of the difference.
        stopped_s, awake_s = self._stops
        now_s = time.monotonic()
        return now_s, stopped_s + max(0.0, now_s - awake_s - _STOP_S)

    def _run(self) -> None:
        while True:
            time.sleep(_AWAKE_S)
            now_s, stopped_s = self.read()
            self._stops = stopped_s, now_s


_stop_watch = cache(_StopWatch)
os.register_at_fork(after_in_child=_stop_watch.cache_clear)


def running_s() -> float:
    """Return a time in seconds that does not pass while this process is stopped (Ctrl-Z, docker pause).

    Stops of less than a second do not count.
    """
    now_s, stopped_s = _stop_watch().read()
    return now_s - stopped_s


def _status(process: int) -> list[str]:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


@dataclass(frozen=True, slots=True)
class ProcessId:
    """Identity of a process. Host names are for messages, because containers may share one.

    Attributes:
        host: name of the machine or container.
        pid: of the process.
        start_time: of the process, from :func:`process_start_time`.
        pid_namespace: where the id is valid, from :func:`namespace_id`.
    """

    host: str
    pid: int
    start_time: str
    pid_namespace: str

    @classmethod
    def here(cls) -> Self:
        process = os.getpid()
        return cls(socket.gethostname(), process, process_start_time(process), namespace_id("pid"))

    @property
    def is_visible(self) -> bool:
        """Return True if the process id has the same meaning here."""
        return self.pid_namespace == namespace_id("pid")

    def has_ended(self) -> bool:
        """Return True if the process has certainly ended: it would be visible, and does not exist."""
        return self.is_visible and process_start_time(self.pid) not in (self.start_time, "alive")

    def is_running(self) -> bool:
        """Return True if the process certainly exists and is not stopped."""
        return self.is_visible and process_start_time(self.pid) == self.start_time and not is_stopped(self.pid)

    def __str__(self) -> str:
        return f"host {self.host}, process {self.pid}"
