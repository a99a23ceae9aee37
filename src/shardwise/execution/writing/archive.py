"""Makes what ``torch.save`` puts around the bytes of one tensor."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from shardwise.formats.torch_file import read_torch_tensor
from shardwise.models.torch_files import save_without_data
from shardwise.storage.reading.local import LocalReader
from shardwise.tensors import ByteRange


@dataclass(frozen=True, slots=True)
class Envelope:
    """The bytes before a tensor's own, and those after."""

    before: bytes
    after: bytes


@lru_cache(maxsize=4096)
def envelope(shape: tuple[int, ...], dtype: torch.dtype) -> Envelope:
    """What is around a contiguous tensor of this shape, in an archive of its own.

    torch writes it, into a file with a hole for the bytes of the tensor. So the checksum in it is that of nothing;
    torch looks at it no more than when it loads what it wrote itself with ``skip_data``.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        place = Path(folder, "archive")
        save_without_data(lambda: torch.empty(shape, dtype=dtype), place)
        with LocalReader(folder) as reader:
            nbytes = reader.size(place.name)
            hole = read_torch_tensor(reader, place.name, ByteRange(0, nbytes), {}, what=str(place)).range
            before, after = reader.read(place.name, 0, hole.start), reader.read(place.name, hole.stop, nbytes)
        return Envelope(before, after)
