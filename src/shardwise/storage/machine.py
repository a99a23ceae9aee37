"""Identity of this machine and of its processes, and resource limits of control groups (containers).

Containers may share a host name.
"""

import os
import socket
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROCESS_NAMESPACE = "/proc/self/ns/pid"
_FILE_NAMESPACE = "/proc/self/ns/mnt"
_GROUP_NAMESPACE = "/proc/self/ns/cgroup"
OWN_GROUP = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


@cache
def boot() -> str:
    """This run of this machine's kernel: equal for all containers on it, another after it has started again.

    The host's name if the kernel does not provide it.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return f"host {socket.gethostname()}"


def processors() -> frozenset[int]:
    """The numbers of the processors that this process may run on."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return frozenset(range(os.cpu_count() or 1))


def processor_count() -> int:
    """Return the number of processors that this process may use, limited by its control groups. At least 1."""
    return max(1, int(min([len(processors()), *processor_quotas().values()])))


def control_groups(own_group: Path = OWN_GROUP, groups: Path = GROUPS) -> Iterator[Path]:
    """Folders of the control groups (version 2) that may limit this process, the innermost first."""
    for line in text_of(own_group).splitlines():
        _, controllers, path = line.split(":", 2)
        folder = groups / path.lstrip("/")
        for place in () if controllers else (folder, *folder.parents):
            yield place
            if place == groups:
                break


def number_in(file: Path) -> int | None:
    """Return the number in a kernel file, or None if it does not exist or states no limit."""
    text = text_of(file).strip()
    return int(text) if text.isdigit() else None


def processor_quotas(own_group: Path = OWN_GROUP, groups: Path = GROUPS) -> dict[str, float]:
    """Return the processor quota of each control group that has one, by its folder.

    ``docker run --cpus`` and Kubernetes' limits are such quotas: all processors are seen, and whoever uses more
    than the quota is stopped for the rest of each tenth of a second.
    """
    found: dict[str, float] = {}
    for group in control_groups(own_group, groups):
        numbers = [int(word) if word.isdigit() else 0 for word in text_of(group / "cpu.max").split()]
        if len(numbers) == 2 and all(numbers):
            found[str(group)] = numbers[0] / numbers[1]
    return found


def text_of(file: Path) -> str:
    """Return the text of a kernel file, or "" if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""


def process_space() -> str:
    """The processes whose numbers mean the same here: one kernel, one namespace (containers have their own)."""
    return _space(_PROCESS_NAMESPACE)


def file_space() -> str:
    """The processes for which a path means the same as here: one kernel, one namespace of mounts."""
    return _space(_FILE_NAMESPACE)


def group_space() -> str:
    """The processes for which the name of a control group means the same as here."""
    return _space(_GROUP_NAMESPACE)


def _space(namespace: str) -> str:
    try:
        return f"{boot()}/{os.stat(namespace).st_ino}"
    except OSError:
        return f"{boot()}/{socket.gethostname()}"


def born(process: int) -> str:
    """Return the start time of a process of this PID namespace in ticks since boot, or "" if there is none.

    A process that has ended does not exist, even if its parent has not waited for it yet.
    """
    try:
        state, *numbers = _status(process)
        return "" if state in "ZX" else numbers[18]
    except (OSError, IndexError, ValueError):
        pass
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return ""
    except OSError:
        return "alive"
    return "alive"


def is_stopped(process: int) -> bool:
    """Return whether a process of this process space is stopped (SIGSTOP, a debugger)."""
    try:
        return _status(process)[0] in "Tt"
    except (OSError, IndexError):
        return False


def _status(process: int) -> list[str]:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
