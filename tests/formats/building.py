"""Safetensors files and checkpoints, sound and unsound, written by hand."""

import json
import struct
from collections.abc import Mapping


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
