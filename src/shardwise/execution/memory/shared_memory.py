"""Shares host memory between the ranks of one machine.

[Note: Windows] On one machine, what goes from rank to rank through a collective on the CPU is copied into a socket
and out of it. A window is memory that a rank packs once and that others read where it lies. It has no name that
could be left behind: others open it through ``/proc`` while they agree on it, and it is gone with the last process
that has it. Whether ranks see one memory is not guessed from the names of hosts: a word of the owner's is looked
for in it. Where one rank cannot look into another's (several machines, containers, no Linux), none uses windows.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from shardwise.execution.ranks.world import World

_HEAD_BYTES = 4096
"""Before the contents: the word by which memory is known."""

_WORD_BYTES = 32

_NAME = "shardwise"
"""By which the system lists such memory; any number of them may have it."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where other processes of this machine find common memory of ``nbytes``."""

    path: str
    word: bytes
    nbytes: int


class CommonMemory:
    """Memory that this rank has made, and others find until it is closed. Those who have found it keep it.

    Memory: no page before it is first written to.

    Raises:
        OSError, AttributeError: the system has no such memory, or no more of it.
    """

    def __init__(self, nbytes: int) -> None:
        self._file = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._file, _HEAD_BYTES + nbytes)
            word = secrets.token_bytes(_WORD_BYTES)
            os.pwrite(self._file, word, 0)
        except BaseException:
            os.close(self._file)
            raise
        self.address = Address(f"/proc/{os.getpid()}/fd/{self._file}", word, nbytes)

    def close(self) -> None:
        os.close(self._file)


@dataclass(frozen=True, slots=True)
class Entered:
    """Common memory that this process has found. ``shared``: its bytes; what is written is seen by all."""

    address: Address
    shared: torch.Tensor

    def lend(self) -> tuple[torch.Tensor, Callable[[], bool]]:
        """The bytes as this process's own, and whether anything still is in them.

        What is written to them is seen by nobody else. What others write is seen, until this process writes there.

        Raises:
            OSError: the memory is not at its address any more.
        """
        with _opened(self.address) as file:
            memory = _mapped(file, mmap.MAP_PRIVATE, self.address.nbytes)
        is_there = weakref.ref(memory)
        return _contents(memory, self.address.nbytes), lambda: is_there() is not None


def enter(address: Address) -> Entered:
    """The memory at an address.

    Raises:
        OSError: it is not there, or is another.
    """
    with _opened(address) as file:
        return Entered(address, _contents(_mapped(file, mmap.MAP_SHARED, address.nbytes), address.nbytes))


@contextlib.contextmanager
def _opened(address: Address) -> Iterator[int]:
    if not os.readlink(address.path).startswith(f"/memfd:{_NAME}"):  # another machine's number of a process
        raise FileNotFoundError(f"{address.path} is no common memory")
    file = os.open(address.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        size, word = os.fstat(file).st_size, os.pread(file, _WORD_BYTES, 0)
        if size != _HEAD_BYTES + address.nbytes or word != address.word:
            raise FileNotFoundError(f"{address.path} is other memory")
        yield file
    finally:
        os.close(file)


def _mapped(file: int, flags: int, nbytes: int) -> mmap.mmap:
    return mmap.mmap(file, _HEAD_BYTES + nbytes, flags=flags)


def _contents(memory: mmap.mmap, nbytes: int) -> torch.Tensor:
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=_HEAD_BYTES)


def is_common(world: World) -> bool:
    """Whether all ranks see one memory. Collective: yes."""
    return open_windows(world, 0) is not None


def open_windows(world: World, nbytes: int) -> tuple[torch.Tensor, ...] | None:
    """A window of ``nbytes`` on this rank and those of all others, as bytes, by rank.

    None where not every rank can look into all of them.

    Collective: yes.
    Memory: ``nbytes`` on this rank. The system counts what it reads of other windows among its shared memory,
    though that is there once.
    """
    with contextlib.ExitStack() as stack:

        def make() -> Address | None:
            with contextlib.suppress(OSError, AttributeError):
                made = CommonMemory(nbytes)
                stack.callback(made.close)  # when all have found it, or none uses it
                return made.address
            return None

        addresses = [address for address in world.each(make) if address is not None]
        seen: list[torch.Tensor] = []

        def look() -> bool:
            with contextlib.suppress(OSError):
                seen.extend(enter(address).shared for address in addresses)
            return len(seen) == world.size

        return tuple(seen) if all(world.each(look)) else None
