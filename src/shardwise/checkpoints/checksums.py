"""Checksums of a checkpoint's data files: one of each block, at the end of the file they belong to.

A data file is its content, cut into blocks of 128 KiB, followed by 8 bytes for each block. The digest of these
checksums is among the facts of the checkpoint, so every byte of every file is covered.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from shardwise.errors import FormatError
from shardwise.planning.fingerprints import MODULUS, fingerprint
from shardwise.storage.reading import LocalReader

BLOCK_BYTES = 1 << 17
_PIECE_BLOCKS = 8  # read at once: they are in a cache of the processor's when they are compared
_SUM_BYTES = 8


def with_checksums(content_nbytes: int) -> int:
    """Return the size in bytes of a file with so much content."""
    return content_nbytes + _SUM_BYTES * -(-content_nbytes // BLOCK_BYTES)


def content_nbytes(file_nbytes: int) -> int:
    """Return the size in bytes of the content of a file; the inverse of :func:`with_checksums`."""
    return file_nbytes - _SUM_BYTES * -(-file_nbytes // (BLOCK_BYTES + _SUM_BYTES))


def digest(content: bytes) -> str:
    """Return the SHA-256 of small content."""
    return hashlib.sha256(content).hexdigest()


class BlockSums:
    """Adds up the checksums of a file while it is written."""

    def __init__(self, nbytes: int) -> None:
        self._sums = [0] * -(-nbytes // BLOCK_BYTES)

    def add(self, start: int, content: memoryview) -> None:
        """Add bytes that are written at byte ``start`` of the file."""
        for block, first, part in _cut(start, [content]):
            found = fingerprint(part[0], first - block * BLOCK_BYTES)
            self._sums[block] = (self._sums[block] + found) % MODULUS

    def to_bytes(self) -> bytes:
        return b"".join(value.to_bytes(_SUM_BYTES, "little") for value in self._sums)


class CheckedReader(LocalReader):
    """A reader of data files that compares every block it touches with its checksum.

    Args:
        root: the folder of the checkpoint.
        digests: of the checksums of each file; other files are not compared.
        sizes: of the files, in bytes.
        describe: returns the names of the tensors in a range of a file, for errors.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        digests: Mapping[str, str],
        sizes: Mapping[str, int],
        describe: Callable[[str, int, int], str],
    ) -> None:
        super().__init__(root)
        self._digests = digests
        self._content = {file: content_nbytes(sizes[file]) for file in digests}
        self._describe = describe
        self._sums: dict[str, bytes] = {}
        self._sound: set[tuple[str, int]] = set()

    @property
    def checked_bytes(self) -> int:
        """The bytes of all blocks that were compared."""
        return sum(stop - start for start, stop in (self._span(*block) for block in list(self._sound)))

    @property
    def blocks(self) -> list[tuple[str, int]]:
        """All blocks, as file and number."""
        return [(file, n) for file, nbytes in self._content.items() for n in range(-(-nbytes // BLOCK_BYTES))]

    def read_vectored(self, file: str, start: int, buffers: Sequence[memoryview]) -> None:
        if file not in self._digests:
            return super().read_vectored(file, start, buffers)
        for _, at, piece in _cut(start, buffers, _PIECE_BLOCKS * BLOCK_BYTES):
            super().read_vectored(file, at, piece)
            for block, first, parts in _cut(at, piece):
                if (first, first + sum(part.nbytes for part in parts)) == self._span(file, block):
                    self._compare(file, block, parts)
                elif (file, block) not in self._sound:
                    self._read_block(file, block)
        return None

    def require(self, file: str, start: int, stop: int) -> None:
        """Compare the blocks that have bytes in a range.

        Raises:
            FormatError: a block is not what was written.
        """
        for block in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            if (file, block) not in self._sound:
                self._read_block(file, block)

    def is_sound(self, file: str, block: int) -> bool:
        """Read a block; return whether it is what was written."""
        try:
            self._read_block(file, block)
        except FormatError:
            return False
        return True

    def told(self, file: str, block: int) -> str:
        """Name the tensors in a block, and its bytes."""
        start, stop = self._span(file, block)
        return f"{self._describe(file, start, stop)} (bytes {start}..{stop} of {file})"

    def _span(self, file: str, block: int) -> tuple[int, int]:
        return block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self._content[file])

    def _read_block(self, file: str, block: int) -> None:
        start, stop = self._span(file, block)
        content = memoryview(bytearray(stop - start))
        super().read_vectored(file, start, [content])
        self._compare(file, block, [content])

    def _compare(self, file: str, block: int, parts: Sequence[memoryview]) -> None:
        total = at = 0
        for part in parts:
            total += fingerprint(part, at)
            at += part.nbytes
        sums = self._sums_of(file)
        found = (total % MODULUS).to_bytes(_SUM_BYTES, "little")
        if found != sums[block * _SUM_BYTES : (block + 1) * _SUM_BYTES]:
            raise FormatError(
                f"{self.root}: {self.told(file, block)} is not what was written, and what has been restored of it "
                "must not be used. The disk, or what copied the files, has damaged it: restore another checkpoint"
            )
        self._sound.add((file, block))

    def _sums_of(self, file: str) -> bytes:
        if file not in self._sums:
            content = memoryview(bytearray(with_checksums(self._content[file]) - self._content[file]))
            super().read_vectored(file, self._content[file], [content])
            if digest(bytes(content)) != self._digests[file]:
                raise FormatError(
                    f"{self.root}/{file}: its checksums are not what was written; the file is damaged: restore "
                    "another checkpoint"
                )
            self._sums[file] = bytes(content)
        return self._sums[file]


def gaps(runs: Iterable[tuple[int, int]], nbytes: int) -> list[tuple[int, int]]:
    """Return the ranges of ``nbytes`` bytes that no run covers."""
    found: list[tuple[int, int]] = []
    position = 0
    for start, stop in [*sorted(runs), (nbytes, nbytes)]:
        if start > position:
            found.append((position, start))
        position = max(position, stop)
    return found


def _cut(start: int, buffers: Sequence[memoryview], size: int = 0) -> Iterator[tuple[int, int, list[memoryview]]]:
    """Cut buffers for the range that begins at ``start`` at multiples of ``size`` bytes, by default of a block.

    Return the number of each part, its first byte, and its memory.
    """
    size = size or BLOCK_BYTES
    parts: list[memoryview] = []
    first = position = start
    for buffer in buffers:
        content = buffer.cast("B")
        while content.nbytes:
            room = size - position % size
            parts.append(content[:room])
            position += parts[-1].nbytes
            content = content[room:]
            if position % size == 0:
                yield first // size, first, parts
                parts, first = [], position
    if parts:
        yield first // size, first, parts
