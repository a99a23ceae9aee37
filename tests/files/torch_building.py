"""Files of torch, sound ones by torch itself and unsound ones by hand; and what an index says of their tensors."""

import io
import os
import pickle
import zipfile
from collections.abc import Mapping
from typing import Any

import torch

from shardwise.core.computed import copies
from shardwise.core.expression import Stored
from shardwise.core.tensors import Box
from shardwise.files.checkpoint_index import CheckpointIndex
from shardwise.files.storage import StorageReader
from shardwise.files.stored_tensors import stored_tensors
from shardwise.fsdp.torch_private import to_torch


def saved(value: object) -> bytes:
    """What ``torch.save`` writes."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def values_of(index: CheckpointIndex, reader: StorageReader) -> dict[str, torch.Tensor]:
    """Every tensor of the index, by the byte ranges and expressions that it makes of them."""
    found: dict[str, torch.Tensor] = {}
    for key, expression in stored_tensors(index).items():
        value = torch.empty(expression.shape, dtype=to_torch(expression.dtype))
        for copy in copies(expression, Box.whole(expression.shape)):
            assert isinstance(copy.leaf, Stored)
            entry = index.entries[copy.leaf.key]
            content = bytearray(reader.read(entry.file, entry.start, entry.stop))
            stored = torch.frombuffer(content, dtype=value.dtype)
            target = value.as_strided(copy.target.sizes, copy.target.strides, copy.target.offset)
            target.copy_(stored.as_strided(copy.source.sizes, copy.source.strides, copy.source.offset))
        found[key] = value
    return found


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit, shapes and dtypes too."""

    def bits(tensor: torch.Tensor) -> list[int]:
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()

    return one.shape == other.shape and one.dtype == other.dtype and bits(one) == bits(other)


def archive(members: Mapping[str, bytes], *, method: int = zipfile.ZIP_STORED, folder: str = "archive") -> bytes:
    """A zip archive by Python's library."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as made:
        for name, content in members.items():
            made.writestr(f"{folder}/{name}", content)
    return stream.getvalue()


class Called:
    """An object whose pickle calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class Touch:
    """An object whose pickle, run, makes a file: a test sees whether it was run."""

    def __init__(self, path: os.PathLike[str]) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.content if isinstance(value, Id) else None


class Id:
    """A persistent id of one's own."""

    def __init__(self, *content: Any) -> None:
        self.content = content


def storage(name: str = "0", numel: int = 4, kind: Any = torch.FloatStorage) -> Id:
    return Id("storage", kind, name, "cpu", numel)


def tensor(
    size: Any = (2, 2), stride: Any = (2, 1), *, offset: Any = 0, of: Any = None, extra: tuple[Any, ...] = ()
) -> Called:
    """A tensor of torch, as it is pickled."""
    on = storage() if of is None else of
    return Called(torch._utils._rebuild_tensor_v2, on, offset, size, stride, False, {}, *extra)


def pickled(value: object, protocol: int = 2) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, protocol).dump(value)
    return stream.getvalue()


def torch_file(value: object, members: Mapping[str, bytes] | None = None, **more: Any) -> bytes:
    """A file like torch's, of a pickle and storages by hand; there is one storage, "0" of 16 bytes."""
    stored = {"data/0": bytes(range(16))} if members is None else members
    content = value if isinstance(value, bytes) else pickled(value)
    return archive({"data.pkl": content, "byteorder": b"little", **stored}, **more)
