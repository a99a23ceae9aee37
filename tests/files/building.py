"""Safetensors files and checkpoints, sound and unsound, written by hand."""

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from tests.support.memory_storage import MemoryReader

from shardwise.core.errors import FormatError
from shardwise.files.open_checkpoint import open_checkpoint
from shardwise.files.storage import StorageReader


def refusal_of(
    reader: StorageReader, *others: Any, read: Callable[..., object] = open_checkpoint, **options: object
) -> str:
    """The message of a FormatError."""
    with pytest.raises(FormatError) as caught:
        read(reader, *others, **options)
    return str(caught.value)


def one_line_of(content: bytes, file: str, read: Callable[..., object]) -> str:
    """What a refusal of a file tells, which is one line that names it, and not too long."""
    message = refusal_of(MemoryReader({file: content}), file, read=read)
    assert message.startswith(f"{file}: ")
    assert "\n" not in message
    assert len(message) < 800
    return message


def tensor(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def file_of(header: object, data: bytes = b"") -> bytes:
    """A safetensors file with this header: JSON bytes as they are, or anything that JSON can say."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def file_with(*keys: str, nbytes: int = 4) -> bytes:
    """A sound file with one U8 tensor of ``nbytes`` bytes per key; the bytes are the tensor's number."""
    header = {key: tensor("U8", [nbytes], i * nbytes, (i + 1) * nbytes) for i, key in enumerate(keys)}
    return file_of(header, b"".join(bytes([i]) * nbytes for i in range(len(keys))))


def index_of(weight_map: Mapping[str, object], **more: object) -> bytes:
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map, **more}).encode()
