"""The small file beside the weights that has a fingerprint of every tensor in them.

Headers and small files have a digest, and so has the record itself: every byte of a save is compared with
something. Records of earlier versions have fingerprints of tensors alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np


def file_beside(stem: str) -> str:
    """The name of the file for weights whose names begin with this stem."""
    return f"{stem}.fingerprints.json"


FINGERPRINTS_FILE = file_beside("model")
MAX_BYTES = 200_000_000
"""The largest that is read."""

_FORMAT = "shardwise fingerprints 1"
_DIGITS = 16


@dataclass(frozen=True, slots=True)
class RecordedSave:
    """What one save recorded.

    Attributes:
        files: of weights, with their sizes in bytes.
        tensors: the fingerprint of each, by key.
        beside: sha256 of the small files (configs, tokenizers), by name; of earlier saves there are none.
        headers: sha256 of what precedes the tensors in each of the files; of earlier saves there are none.
    """

    files: Mapping[str, int]
    tensors: Mapping[str, int]
    beside: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


def digest(content: bytes) -> str:
    """Of a header, or of a small file."""
    return hashlib.sha256(content).hexdigest()


def to_bytes(saves: Sequence[RecordedSave]) -> bytes:
    """The content of the file. While a save is committed, it has what the older save and the new one recorded."""
    content = {
        "format": _FORMAT,
        "saves": [
            {
                "files": dict(save.files),
                "tensors": {key: f"{value:0{_DIGITS}x}" for key, value in save.tensors.items()},
                "beside": dict(save.beside),
                "headers": dict(save.headers),
            }
            for save in saves
        ],
    }
    return json.dumps({**content, "sha256": own_digest(content)}, indent=1, sort_keys=True).encode() + b"\n"


def own_digest(content: object) -> str:
    """Of JSON, to be written beside it."""
    return digest(json.dumps(content, sort_keys=True).encode())


def from_bytes(content: bytes | None) -> list[RecordedSave]:
    """What saves recorded; nothing where the file is not there, or is not one of these, or is damaged."""
    return parsed(content or b"") or []


def parsed(content: bytes) -> list[RecordedSave] | None:
    """What saves recorded; None where the file is not one of these, or is damaged."""
    try:
        found = json.loads(content)
        own = found.pop("sha256", None)
        is_sound = own == own_digest(found) if own is not None else found.keys() == {"format", "saves"}
        if found["format"] != _FORMAT or not is_sound:
            return None
        return [
            RecordedSave(
                {str(name): int(nbytes) for name, nbytes in save["files"].items()},
                {str(key): int(value, _DIGITS) for key, value in save["tensors"].items()},
                {str(name): str(value) for name, value in save.get("beside", {}).items()},
                {str(name): str(value) for name, value in save.get("headers", {}).items()},
            )
            for save in found["saves"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


_WORD = 8
LANES = 1 << 14
"""Words in a block."""

MODULUS = 1 << 64


def fingerprint(data: memoryview, start: int = 0) -> int:
    """Of these bytes, which lie at byte ``start`` of the tensor. Memory: two blocks of 128 KiB."""
    total = 0
    for block, first, words in _words(data, start):
        if words.ndim == 2:
            weights = [block_weight(block + number) for number in range(len(words))]
            sums = np.einsum("ij,j->i", words, lane_weights()).tolist()
            total += sum(weight * found for weight, found in zip(weights, sums, strict=True))
        else:
            lanes = lane_weights()[first : first + len(words)]
            total += block_weight(block) * int(np.einsum("i,i->", words, lanes))
    return total % MODULUS


def _words(data: memoryview, start: int) -> Iterator[tuple[int, int, Any]]:
    """(block, place in it, words) that cover the bytes, from word to word; whole blocks are rows of words."""
    span = _WORD * LANES
    flat = np.frombuffer(data, dtype=np.uint8)
    place, stop = start, start + len(flat)
    while place < stop:
        block = place // span
        whole = (stop - place) // span if place % span == 0 else 0
        edge = place + whole * span if whole else min(stop, (block + 1) * span)
        part = flat[place - start : edge - start]
        if whole and part.ctypes.data % _WORD == 0:
            yield block, 0, part.view("<u8").reshape(whole, LANES)
            place = edge
            continue
        edge = min(edge, (block + 1) * span)
        part = part[: edge - place]
        head = place % _WORD
        if head or len(part) % _WORD or (part.ctypes.data % _WORD):
            padded = np.zeros(-(-(head + len(part)) // _WORD) * _WORD, dtype=np.uint8)
            padded[head : head + len(part)] = part
            part = padded
        yield block, place % span // _WORD, part.view("<u8")
        place = edge


def _mixed(number: Any) -> Any:
    """splitmix64's finaliser."""
    with np.errstate(over="ignore"):
        mixed = np.asarray(number, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


@cache
def lane_weights() -> Any:
    """Of the words of a block: ``weight(i)`` is that of its place in its block times :func:`block_weight`."""
    return _mixed(np.arange(LANES, dtype=np.uint64)) | np.uint64(1)


@cache
def block_weight(block: int) -> int:
    """Of a block, by its number."""
    return int(_mixed(LANES + block)) | 1
