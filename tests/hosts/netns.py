"""Two hosts on one machine: namespaces behind a switch, each with a host name, processes and a disk of its own.

Linux, ``ip``, ``unshare`` and the rights to use them are needed. Addresses are used within the namespaces only.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.local_ranks import LIMIT_S

ROOT = Path(__file__).parents[2]

PORT = 29500

_BOOT_ID = "/proc/sys/kernel/random/boot_id"

_SETUP = (
    f'hostname "$1" && mount --bind "$2" "$3" && mount --bind "$4" /etc/hosts && mount --bind "$5" {_BOOT_ID} '
    '&& shift 5 && "$@"; exit $?'
)
"""Of a host's first process, which waits for what it runs: a process that is the first one ignores signals."""


def lacking() -> str:
    """What this machine lacks for hosts; "" for nothing."""
    for tool in ("ip", "unshare", "mount", "hostname"):
        if shutil.which(tool) is None:
            return f"no `{tool}` on this machine"
    name = f"sw-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made ({made.stderr.strip()})"
    apart = ["ip", "netns", "exec", name, *_APART, "mount", "--bind", "/dev/null", _BOOT_ID]
    tried = subprocess.run(apart, check=False, capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], check=False)
    return f"processes cannot be unshared ({tried.stderr.strip()})" if tried.returncode else ""


_APART = ("unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


@dataclass
class HostProcess:
    """A program on a host, and the file that it writes to."""

    process: subprocess.Popen[bytes]
    output: Path

    def wait(self) -> int:
        """Its exit code. Raises an AssertionError with what it has written where it hangs."""
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"it hangs:\n{self.text()}") from late

    def wait_for(self, words: str, times: int = 1) -> None:
        """Until it has written them so often."""
        deadline = time.monotonic() + LIMIT_S
        while self.text().count(words) < times:
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.text()}"
            assert time.monotonic() < deadline, f"it has not written {words!r}:\n{self.text()}"
            time.sleep(0.05)

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    @property
    def pid(self) -> int:
        """Of the program itself, as seen from here: the first process of its host runs it."""
        pid = self.process.pid
        for _ in range(2):
            (pid,) = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return pid


@dataclass
class Hosts:
    """Two hosts, ``0`` and ``1``; ``disk`` is another folder on each, ``folder`` the same one on both."""

    folder: Path
    _name: str = field(default_factory=lambda: f"sw{uuid.uuid4().hex[:6]}")
    _started: list[HostProcess] = field(default_factory=list)

    @property
    def disk(self) -> Path:
        """A path that leads to a folder of each host's own."""
        return self.folder / "disk"

    def disk_of(self, host: int) -> Path:
        """The same folder, as seen from here."""
        return self.folder / f"disk{host}"

    @staticmethod
    def address(host: int) -> str:
        return f"192.0.2.{host + 1}"

    def host_name(self, host: int) -> str:
        return f"{self._name}-{host}"

    def start(self, host: int, *command: object, **environment: str) -> HostProcess:
        """Run a program there."""
        output = self.folder / f"output{len(self._started)}"
        own = (
            self.host_name(host),
            self.disk_of(host),
            self.disk,
            self.folder / "hosts",
            self.folder / f"boot{host}",
        )
        within = ("ip", "netns", "exec", self.host_name(host), *_APART, "bash", "-c", _SETUP, "setup", *own)
        known = os.environ.get("PYTHONPATH", "")
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [known])])
        with output.open("wb") as file:
            process = subprocess.Popen(
                [str(word) for word in (*within, *command)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
            )
        self._started.append(HostProcess(process, output))
        return self._started[-1]

    def start_ranks(self, *command: object, **environment: str) -> list[HostProcess]:
        """Run a Python program as one rank on each host, as a launcher would; rank 0 holds the store."""
        return [self.start_rank(rank, 2, *command, **environment) for rank in range(2)]

    def start_rank(self, rank: int, size: int, *command: object, **environment: str) -> HostProcess:
        """One of them."""
        place = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
        place |= {"MASTER_ADDR": self.address(0), "MASTER_PORT": str(PORT)}
        return self.start(rank, sys.executable, *command, **place, **environment)

    def kill(self, host: HostProcess) -> None:
        """End all processes of a host at once."""
        host.process.send_signal(signal.SIGKILL)
        host.process.wait()

    def cut(self) -> None:
        """From now on nothing passes between the hosts, of which neither is told."""
        self._ip("-n", self._name, "link", "set", "switch", "down")

    def restore(self) -> None:
        self._ip("-n", self._name, "link", "set", "switch", "up")

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    def _begin(self) -> None:
        self._ip("netns", "add", self._name)
        self._ip("-n", self._name, "link", "add", "switch", "type", "bridge")
        self._ip("-n", self._name, "link", "set", "switch", "up")
        names = [f"127.0.0.1 localhost {self._name}"]
        for host in range(2):
            name = self.host_name(host)
            self.disk_of(host).mkdir()
            (self.folder / f"boot{host}").write_text(f"{uuid.uuid4()}\n")
            self._ip("netns", "add", name)
            self._ip("-n", self._name, "link", "add", f"port{host}", "type", "veth", "peer", "wire", "netns", name)
            self._ip("-n", self._name, "link", "set", f"port{host}", "master", "switch", "up")
            self._ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "wire")
            for link in ("lo", "wire"):
                self._ip("-n", name, "link", "set", link, "up")
            names.append(f"{self.address(host)} {name}")
        self.disk.mkdir()
        (self.folder / "hosts").write_text("\n".join(names) + "\n")

    def _end(self) -> None:
        for started in self._started:
            if started.process.poll() is None:
                self.kill(started)
        for name in (self.host_name(0), self.host_name(1), self._name):
            subprocess.run(["ip", "netns", "del", name], check=False)


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """Nothing is left of them after the block."""
    hosts = Hosts(folder)
    try:
        hosts._begin()
        yield hosts
    finally:
        hosts._end()
