"""Writes a rank's file of a ``torch.distributed.checkpoint`` from beginning to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from shardwise.execution.writing.archive import envelope
from shardwise.execution.writing.chunk_plan import ArchivedChunk
from shardwise.execution.writing.sink import Sink
from shardwise.storage.contract import StorageWriter


class ChunkSource(Protocol):
    """Where the bytes of chunks come from.

    Attributes:
        block_bytes: the most that is asked for before what came is let go.
    """

    @property
    def block_bytes(self) -> int: ...

    def blocks(self, chunk: ArchivedChunk) -> Iterator[memoryview]: ...


class Onlooker(Protocol):
    """Is shown what is written, in the order of the file; the elements of chunks while they are written."""

    def begin(self) -> int:
        """The number of the next chunk."""
        ...

    def add(self, chunk: int, start: int, block: memoryview) -> None:
        """A block of a chunk, from its byte ``start`` on. May be called on another thread."""
        ...

    def add_around(self, content: bytes) -> None:
        """What lies around chunks."""
        ...

    def add_value(self, content: bytes) -> None:
        """A value that is no tensor."""
        ...


class Nobody:
    """Looks on at nothing."""

    def begin(self) -> int:
        return 0

    def add(self, chunk: int, start: int, block: memoryview) -> None:
        pass

    def add_around(self, content: bytes) -> None:
        pass

    def add_value(self, content: bytes) -> None:
        pass


class ChunkStream:
    """A file written from its beginning to its end, in requests as large as the storage likes them."""

    def __init__(
        self, writer: StorageWriter, file: str, check: Callable[[], None], onlooker: Onlooker | None = None
    ) -> None:
        self._onlooker: Onlooker = onlooker or Nobody()
        self._sink = Sink(writer, self._onlooker.add, check=check)
        self._request_bytes = writer.policy.request_bytes
        self._file = file
        self._position = 0
        self._pending: list[tuple[int | None, int, memoryview]] = []
        self._pending_nbytes = 0

    def write(self, chunks: Sequence[ArchivedChunk], source: ChunkSource, values: Sequence[bytes]) -> None:
        most = min(source.block_bytes, self._request_bytes)
        for chunk in chunks:
            around = envelope(chunk.box.sizes, chunk.dtype)
            self._add_around(bytes(chunk.start - self._position - self._pending_nbytes) + around.before)
            number, start = self._onlooker.begin(), 0
            for block in source.blocks(chunk):
                self._add(number, start, block)
                start += block.nbytes
                if self._pending_nbytes >= most:
                    self._flush()
            self._add_around(around.after)
        for content in values:
            self._add(None, 0, memoryview(content))
            self._onlooker.add_value(content)
        self._flush()

    def _add_around(self, content: bytes) -> None:
        self._add(None, 0, memoryview(content))
        self._onlooker.add_around(content)

    def _add(self, chunk: int | None, start: int, content: memoryview) -> None:
        self._pending.append((chunk, start, content))
        self._pending_nbytes += len(content)

    def _flush(self) -> None:
        self._sink.write(self._file, self._position, self._pending)
        self._position += self._pending_nbytes
        self._pending, self._pending_nbytes = [], 0
