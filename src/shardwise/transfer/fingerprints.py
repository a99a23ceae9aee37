"""The small file saved with the weights that records a fingerprint of every tensor in them.

Headers, small files and the record itself have a SHA-256 digest, so every byte of a save can be verified. Records
of earlier versions contain fingerprints of tensors only.

[Note: Fingerprints] The bytes of a tensor, padded with zeros, are little-endian words of 64 bits. The fingerprint
is the sum of word ``i`` times ``weight(i)``, modulo 2**64. Weights are odd, so any change of one word is detected,
and mixed (splitmix64), so moved words are detected too. The fingerprint of a tensor is the sum over its parts: a
rank that holds bytes ``start .. stop`` adds the sum over these. It detects damage, not forgery.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np


def fingerprint_file(stem: str) -> str:
    """Return the name of the fingerprint file for weights with this stem."""
    return f"{stem}.fingerprints.json"


MAX_BYTES = 200_000_000
"""The largest fingerprint file that is read."""

_FORMAT = "shardwise fingerprints 1"
_DIGITS = 16


@dataclass(frozen=True, slots=True)
class RecordedSave:
    """The record of one save.

    Attributes:
        files: sizes in bytes of the files of weights, by name.
        tensors: fingerprints by tensor key.
        beside: SHA-256 digests of the small files (configs, tokenizers), by name. Empty in records of earlier
            versions.
        headers: SHA-256 digests of the bytes before the tensors in each file. Empty in records of earlier versions.
    """

    files: Mapping[str, int]
    tensors: Mapping[str, int]
    beside: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


def digest(content: bytes) -> str:
    """Return the SHA-256 digest of a header or a small file."""
    return hashlib.sha256(content).hexdigest()


def to_bytes(saves: Sequence[RecordedSave]) -> bytes:
    """Serialize the records of saves: during a commit, of both the older save and the new one."""
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
    return json.dumps({**content, "sha256": embedded_digest(content)}, indent=1, sort_keys=True).encode() + b"\n"


def embedded_digest(content: object) -> str:
    """Return the digest of a JSON document that is stored together with it."""
    return digest(json.dumps(content, sort_keys=True).encode())


def from_bytes(content: bytes | None) -> list[RecordedSave]:
    """Parse the records of saves, or return an empty list if the file is missing, damaged or of another format."""
    return parsed(content or b"") or []


def parsed(content: bytes) -> list[RecordedSave] | None:
    """Parse the records of saves, or return None if the file is damaged or of another format."""
    try:
        found = json.loads(content)
        own = found.pop("sha256", None)
        is_sound = own == embedded_digest(found) if own is not None else found.keys() == {"format", "saves"}
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
BLOCK_WORDS = 1 << 14
"""Words in a block."""

MODULUS = 1 << 64
BLOCK_BYTES = _WORD * BLOCK_WORDS
"""Bytes of a block."""


def fingerprint(data: memoryview, start: int = 0) -> int:
    """Compute the fingerprint of bytes that begin at byte ``start`` of the tensor.

    It uses two blocks (256 KiB) of memory.
    """
    flat = np.frombuffer(data, dtype=np.uint8)
    total = at = 0
    while at < len(flat):
        block, head = divmod(start + at, BLOCK_BYTES)
        count = 0 if head else (len(flat) - at) // BLOCK_BYTES
        chunk = flat[at : at + (count * BLOCK_BYTES or BLOCK_BYTES - head)]
        words = chunk
        if not count:  # the beginning or the end of a block, with zeros around it
            words = np.zeros(-(-(head + len(chunk)) // _WORD) * _WORD, dtype=np.uint8)
            words[head : head + len(chunk)] = chunk
        rows = words.view("<u8").reshape(max(count, 1), -1)
        sums = np.einsum("ij,j->i", rows, word_weights()[: rows.shape[1]]).tolist()
        total += sum(block_weight(block + number) * found for number, found in enumerate(sums))
        at += len(chunk)
    return total % MODULUS


def _mixed(number: Any) -> Any:
    """Apply the finalizer of splitmix64."""
    with np.errstate(over="ignore"):
        mixed = np.asarray(number, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


@cache
def word_weights() -> Any:
    """Return the weights of the words of a block.

    ``weight(i)`` is the word weight at ``i``'s position in its block, times the block's :func:`block_weight`.
    """
    return _mixed(np.arange(BLOCK_WORDS, dtype=np.uint64)) | np.uint64(1)


@cache
def block_weight(block: int) -> int:
    """Return the weight of the block with this index."""
    return int(_mixed(BLOCK_WORDS + block)) | 1
