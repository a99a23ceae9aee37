"""A rank's file of a ``torch.distributed.checkpoint``, written from its beginning to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from shardwise.execution.archive import envelope
from shardwise.execution.chunks import Chunk
from shardwise.storage import StorageWriter


class Source(Protocol):
    """Where the bytes of chunks come from.

    Attributes:
        block_bytes: the most that is asked for before what came is let go.
    """

    @property
    def block_bytes(self) -> int: ...

    def blocks(self, chunk: Chunk) -> Iterator[memoryview]: ...


class ChunkStream:
    """A file written from its beginning to its end, in requests as large as the storage likes them."""

    def __init__(self, writer: StorageWriter, file: str, check: Callable[[], None]) -> None:
        self._writer = writer
        self._file = file
        self._check = check
        self._position = 0
        self._pending: list[memoryview] = []
        self._pending_nbytes = 0

    def write(self, chunks: Sequence[Chunk], source: Source, values: Sequence[bytes]) -> None:
        most = min(source.block_bytes, self._writer.policy.request_bytes)
        for chunk in chunks:
            around = envelope(chunk.box.sizes, chunk.dtype)
            self._add(bytes(chunk.start - self._position - self._pending_nbytes) + around.before)
            for block in source.blocks(chunk):
                self._add(block)
                if self._pending_nbytes >= most:
                    self._flush()
            self._add(around.after)
        for content in values:
            self._add(content)
        self._flush()

    def _add(self, content: bytes | memoryview) -> None:
        self._pending.append(memoryview(content))
        self._pending_nbytes += len(content)

    def _flush(self) -> None:
        self._check()
        self._writer.write(self._file, self._position, self._pending)
        self._position += self._pending_nbytes
        self._pending, self._pending_nbytes = [], 0
