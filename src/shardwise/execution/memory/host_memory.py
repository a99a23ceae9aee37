"""Host memory: allocated in few large blocks, in the cheaper page size, and shared between ranks of one machine.

[Note: First touch] Most of the time of a load from a warm page cache goes into the first touch of fresh memory,
page by page. A huge page is one fault instead of 512, and many small ones are cheaper when the system is asked for
them at once. But shards are small, many of them smaller than a huge page, so they are laid side by side in blocks.
Every tensor still has a storage of its own, of its own size, at its place in the block: saving one, or asking for
its bytes, sees nothing of its neighbours. A block is given back when the last of its tensors is gone. Which pages
is decided portion by portion ([Note: Looking at pages] in ``planning/loads/pages.py``).

[Note: Windows] On one machine, what goes from rank to rank through a collective on the CPU is copied into a socket
and out of it. A window is memory that a rank packs once and that others read where it lies. It has no name that
could be left behind: others open it through ``/proc`` while they agree on it, and it is gone with the last process
that has it. Whether ranks see one memory is not guessed from the names of hosts: a word of the owner's is looked
for in it. Where one rank cannot look into another's (several machines, containers, no Linux), none uses windows.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from shardwise.execution.memory.first_touch import PORTION_BYTES, begin_small, can_populate, populate
from shardwise.execution.ranks.world import World
from shardwise.planning.loads.pages import HugePages, MeasuredPages, Pages, Way, Weighing
from shardwise.report.load_report import TouchedPages

_BLOCK_BYTES = 64 << 20
"""A block ends with the tensor that brings it to this size: small enough that memory is given back in parts."""

_ALIGNMENT = 64
"""Where tensors begin, as in torch's own allocator."""

_MOST_PORTIONS = 1 << 14
"""Each change from huge to small pages is an entry in the kernel's list of a process's memory; it takes 65,530."""


class HostMemory:
    """Memory for tensors of known sizes, handed out in their order.

    Memory: the sum of the sizes; little of it is touched before it is asked for by :meth:`touch`, or written to.

    Args:
        sizes: bytes of each tensor.
        pages: in which pages it is touched.
    """

    def __init__(self, sizes: Sequence[int], pages: Pages = MeasuredPages()) -> None:  # noqa: B008 - frozen
        self._lock = threading.Lock()
        self._cannot_look = pages == MeasuredPages() and not can_populate()
        self._weighing = Weighing(HugePages() if self._cannot_look else pages)
        self._blocks: list[_Slab] = []
        self._portion_bytes = _portion_bytes(sum(sizes))
        self._places = self._laid_out(sizes)

    def take(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The next tensor, uninitialised."""
        block, start, nbytes = next(self._places)
        if block is None:
            return torch.empty(tuple(size), dtype=dtype, device="cpu")
        return block.tensor(start, nbytes, dtype).view(tuple(size))

    def touch(self, address: int, nbytes: int) -> None:
        """Have pages behind these bytes, where they are of this memory. For any thread, right before it writes."""
        index = bisect.bisect_right(self._blocks, address, key=lambda block: block.address) - 1
        if index >= 0:
            block = self._blocks[index]
            block.touch(address - block.address, min(address + nbytes, block.stop) - block.address, self._populate)

    def touch_rest(self) -> None:
        """Have pages behind all that has been taken."""
        for block in self._blocks:
            block.touch(0, block.nbytes, self._populate)

    def report(self) -> TouchedPages:
        """In which pages this memory has been touched."""
        with self._lock:
            found = self._weighing.report()
        return replace(found, reason="since this kernel cannot tell what they cost") if self._cannot_look else found

    def _populate(self, address: int, nbytes: int) -> None:
        with self._lock:
            way = self._weighing.next() if nbytes == self._portion_bytes else Way.SMALL
        seconds = populate(address, nbytes, way)
        if nbytes == self._portion_bytes:  # the end of a block, which is no huge page, says nothing
            with self._lock:
                self._weighing.took(way, nbytes, seconds)

    def _laid_out(self, sizes: Sequence[int]) -> Iterator[tuple[_Slab | None, int, int]]:
        """(block, where in it, bytes) of each size; no block for what is empty."""
        group: list[int] = []
        total = 0
        for index, nbytes in enumerate(sizes):
            group.append(nbytes)
            total += _aligned(nbytes)
            if total < _BLOCK_BYTES and index + 1 < len(sizes):
                continue
            block = None
            if total:
                block = _Slab(total, self._portion_bytes)
                bisect.insort(self._blocks, block, key=lambda item: item.address)
            start = 0
            for item in group:
                yield (block if item else None), start, item
                start += _aligned(item)
            group, total = [], 0


class _Slab:
    """Anonymous memory that begins with a portion."""

    def __init__(self, nbytes: int, portion_bytes: int) -> None:
        self.nbytes = nbytes
        self._portion_bytes = portion_bytes
        self._memory = mmap.mmap(-1, nbytes + portion_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()
        self.address = -(-start // portion_bytes) * portion_bytes
        self._offset = self.address - start
        begin_small(self.address, nbytes)
        self._touched = bytearray(-(-nbytes // portion_bytes))
        self._lock = threading.Lock()

    @property
    def stop(self) -> int:
        return self.address + self.nbytes

    def tensor(self, start: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Flat, of these bytes of the block."""
        return torch.frombuffer(
            self._memory, dtype=dtype, count=nbytes // dtype.itemsize, offset=self._offset + start
        )

    def touch(self, start: int, stop: int, populate: Callable[[int, int], None]) -> None:
        """Have the portions that hold these bytes populated, each by one thread."""
        size = self._portion_bytes
        for number in range(start // size, -(-stop // size)):
            with self._lock:
                is_touched, self._touched[number] = self._touched[number], 1
            if not is_touched:
                first = number * size
                populate(self.address + first, min(size, self.nbytes - first))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _portion_bytes(nbytes: int) -> int:
    huge_pages = -(-nbytes // (PORTION_BYTES * _MOST_PORTIONS))
    return PORTION_BYTES * max(1, huge_pages)


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
