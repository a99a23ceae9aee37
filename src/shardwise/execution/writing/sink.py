"""Writes the bytes of tensors into files, whoever they come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from shardwise.execution.memory.copy_in import memory_of
from shardwise.execution.reading.workers import Ahead
from shardwise.planning.saves.save_plan import Extent
from shardwise.storage.contract import StorageWriter
from shardwise.tensors.fingerprint import MODULUS, fingerprint

Name = TypeVar("Name")

_SMALL_BYTES = 1 << 20
"""What is not larger is looked at sooner than a thread has begun to."""


@dataclass
class WrittenTensors:
    """What has been written: fingerprints of tensors by key ([Note: Fingerprints]), and their bytes by file."""

    fingerprints: dict[str, int] = field(default_factory=dict)
    bytes_by_file: dict[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(self.bytes_by_file.values())

    def add(self, key: str, start: int, data: memoryview) -> None:
        """Bytes of a tensor, from its byte ``start`` on."""
        self.fingerprints[key] = (self.fingerprints.get(key, 0) + fingerprint(data, start)) % MODULUS


class Sink(Generic[Name]):
    """Writes runs of bytes into files of a folder; what is in a run is looked at while it is written.

    One thread writes at a time.

    Args:
        writer: to the folder.
        seen: is shown the bytes of tensors in the order of a run: a tensor's name, the byte of it at which they
            begin, and they themselves. Perhaps on a thread of its own.
        check: called before a run and after; what it raises ends the writing.
        bytes_by_file: in which bytes of tensors are counted.
    """

    def __init__(
        self,
        writer: StorageWriter,
        seen: Callable[[Name, int, memoryview], object] = lambda name, first, data: None,
        *,
        check: Callable[[], None] = lambda: None,
        bytes_by_file: dict[str, int] | None = None,
    ) -> None:
        self.writer = writer
        self._seen = seen
        self._check = check
        self._bytes_by_file = {} if bytes_by_file is None else bytes_by_file

    def write(self, file: str, start: int, run: Sequence[tuple[Name | None, int, memoryview]]) -> None:
        """Put these bytes at byte ``start`` of a file, one after the other; those without a name are no tensor's.

        Raises:
            StorageError: they could not be written.
        """
        self._check()
        buffers = [data for _, _, data in run]
        named = [(name, first, data) for name, first, data in run if name is not None]
        nbytes = sum(len(data) for _, _, data in named)

        def show() -> None:
            for item in named:
                self._seen(*item)

        if nbytes < _SMALL_BYTES:
            self.writer.write(file, start, buffers)
            show()
        else:
            showing = Ahead(show)
            self.writer.write(file, start, buffers)
            showing.value(self._check)
        self._bytes_by_file[file] = self._bytes_by_file.get(file, 0) + nbytes


def write_extents(sink: Sink[str], file: str, extents: Sequence[Extent], tensors: Sequence[torch.Tensor]) -> None:
    """Put boxes of tensors, which are on the CPU and contiguous, where they belong in a file.

    What lies side by side is one run.
    """
    run: list[tuple[str | None, int, memoryview]] = []
    start = stop = 0
    for extent, tensor in zip(extents, tensors, strict=True):
        if run and extent.start != stop:
            sink.write(file, start, run)
            run = []
        start = start if run else extent.start
        run.append((extent.key, extent.inside, memory_of(tensor.contiguous().view(-1).view(torch.uint8))))
        stop = extent.stop
    if run:
        sink.write(file, start, run)
