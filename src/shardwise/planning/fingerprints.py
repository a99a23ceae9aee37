"""The small file of the fingerprints of all tensors of a save.

Headers and small files have a digest, and so has the record itself: every byte of a save is compared with
something. Records of earlier versions have fingerprints of tensors alone.

[Note: Fingerprints] The bytes of a tensor, padded with zeros, are little-endian words of 64 bits. The fingerprint
is the sum of word ``i`` times ``weight(i)``, modulo 2**64. Weights are odd, so a change of one word never goes
unseen, and mixed (splitmix64), so moved words do not either. The sum of the parts is the fingerprint of the whole:
a rank that holds bytes ``start .. stop`` adds these, with zeros around them. It is for finding damage, not against
forgery.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np


def file_beside(stem: str) -> str:
    """The name of the file for weights whose names begin with this stem."""
    return f"{stem}.fingerprints.json"


MAX_BYTES = 200_000_000
"""The largest that is read."""

_FORMAT = "shardwise fingerprints 1"
_DIGITS = 16


@dataclass(frozen=True, slots=True)
class RecordedSave:
    """Record of one save.

    Attributes:
        files: of weights, with their sizes in bytes.
        tensors: the fingerprint of each, by key.
        beside: sha256 of the small files (configs, tokenizers), by name. Empty for saves of older versions.
        headers: sha256 of the bytes before the tensors in each file. Empty for saves of older versions.
    """

    files: Mapping[str, int]
    tensors: Mapping[str, int]
    beside: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


def digest(content: bytes) -> str:
    """Return the digest of a header or of a small file."""
    return hashlib.sha256(content).hexdigest()


def to_bytes(saves: Sequence[RecordedSave]) -> bytes:
    """The content of the file. During a commit, it has the records of the older and the new save."""
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
    """Return the digest that is stored in a JSON file about its own content."""
    return digest(json.dumps(content, sort_keys=True).encode())


def from_bytes(content: bytes | None) -> list[RecordedSave]:
    """Return the records of saves, or an empty list if the file is missing, invalid or damaged."""
    return parsed(content or b"") or []


def parsed(content: bytes) -> list[RecordedSave] | None:
    """Return the records of saves, or None if the file is invalid or damaged."""
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
SPAN_BYTES = _WORD * LANES
"""Bytes of a block."""


def fingerprint(data: memoryview, start: int = 0) -> int:
    """Fingerprint of bytes that lie at byte ``start`` of the tensor. Memory: two blocks of 128 KiB."""
    flat = np.frombuffer(data, dtype=np.uint8)
    total = at = 0
    while at < len(flat):
        block, head = divmod(start + at, SPAN_BYTES)
        count = 0 if head else (len(flat) - at) // SPAN_BYTES
        part = flat[at : at + (count * SPAN_BYTES or SPAN_BYTES - head)]
        words = part
        if not count:  # the beginning or the end of a block, with zeros around it
            words = np.zeros(-(-(head + len(part)) // _WORD) * _WORD, dtype=np.uint8)
            words[head : head + len(part)] = part
        rows = words.view("<u8").reshape(max(count, 1), -1)
        sums = np.einsum("ij,j->i", rows, lane_weights()[: rows.shape[1]]).tolist()
        total += sum(block_weight(block + number) * found for number, found in enumerate(sums))
        at += len(part)
    return total % MODULUS


def _mixed(number: Any) -> Any:
    """splitmix64's finalizer."""
    with np.errstate(over="ignore"):
        mixed = np.asarray(number, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


@cache
def lane_weights() -> Any:
    """Return weights of the words of a block.

    ``weight(i)`` is this, at position ``i``, times :func:`block_weight`.
    """
    return _mixed(np.arange(LANES, dtype=np.uint64)) | np.uint64(1)


@cache
def block_weight(block: int) -> int:
    """Weight of a block, by its number."""
    return int(_mixed(LANES + block)) | 1
