"""Memory of each rank that the other ranks of its machine can look into.

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
from dataclasses import dataclass

import torch

from shardwise.execution.world import World

_HEAD_BYTES = 4096
"""Before what is packed: the word by which a window is known."""

_WORD_BYTES = 32


def open_windows(world: World, nbytes: int) -> tuple[torch.Tensor, ...] | None:
    """A window of ``nbytes`` on this rank and those of all others, as bytes, by rank.

    None where not every rank can look into all of them.

    Collective: yes.
    Memory: ``nbytes`` on this rank. The system counts what it reads of other windows among its shared memory,
    though that is there once.
    """
    made: list[_Window] = []
    seen: list[torch.Tensor | None] = []

    def make() -> _Address | None:
        with contextlib.suppress(OSError, AttributeError):  # no memfd_create; no more files
            made.append(_Window.made(nbytes))
            return made[0].address
        return None

    def sees_all() -> bool:
        seen.extend(made[0].view if rank == world.rank else _look(item) for rank, item in enumerate(addresses))
        return all(view is not None for view in seen)

    try:
        addresses = [item for item in world.each(make) if item is not None]
        if len(addresses) < world.size or not all(world.each(sees_all)):
            return None
    finally:
        for window in made:  # all have opened it by now, or none uses it
            window.close()
    return tuple(view for view in seen if view is not None)


@dataclass(frozen=True, slots=True)
class _Address:
    path: str
    word: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Window:
    """A window of this rank, and the file by which others find it: to be closed once they have."""

    file: int
    address: _Address
    view: torch.Tensor

    @classmethod
    def made(cls, nbytes: int) -> _Window:
        file = os.memfd_create("shardwise-window", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, _HEAD_BYTES + nbytes)
            memory = _mapped(file, nbytes)
            word = secrets.token_bytes(_WORD_BYTES)
            memory[:_WORD_BYTES] = word
        except BaseException:
            os.close(file)
            raise
        return cls(file, _Address(f"/proc/{os.getpid()}/fd/{file}", word, nbytes), _contents(memory, nbytes))

    def close(self) -> None:
        os.close(self.file)


def _look(address: _Address) -> torch.Tensor | None:
    """Another rank's window, if it is what the path leads to."""
    try:
        file = os.open(address.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(file).st_size != _HEAD_BYTES + address.nbytes:
            return None
        memory = _mapped(file, address.nbytes)
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)
    return _contents(memory, address.nbytes) if memory[:_WORD_BYTES] == address.word else None


def _mapped(file: int, nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(file, _HEAD_BYTES + nbytes, flags=mmap.MAP_SHARED)
    with contextlib.suppress(OSError):  # a kernel without huge pages for it
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _contents(memory: mmap.mmap, nbytes: int) -> torch.Tensor:
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=_HEAD_BYTES)
