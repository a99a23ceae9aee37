"""The small file saved with the weights that records a fingerprint of every tensor in them.

Headers, small files and the record itself have a SHA-256 digest, so every byte of a save can be verified. Records
of earlier versions contain fingerprints of tensors only.

[Note: Fingerprints] The bytes of a tensor, padded with zeros, are little-endian words of 64 bits. The fingerprint
is the sum of word ``i`` times ``weight(i)``, modulo 2**64. Weights are odd, so any change of one word is detected,
and mixed (splitmix64), so moved words are detected too. The fingerprint of a tensor is the sum over its parts: a
rank that holds bytes ``start .. stop`` adds the sum over these. It detects damage, not forgery.

Example: the 12 bytes 01 00 .. 00 02 00 00 00 are the words 1 and 2 (padded), so their fingerprint is
``weight(0) + 2 * weight(1)``. A rank that has the last 4 bytes only computes ``fingerprint(data, start=8)``, which
is ``2 * weight(1)``.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
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
    records: list[dict[str, object]] = []
    for save in saves:
        tensors = {key: f"{value:0{_DIGITS}x}" for key, value in save.tensors.items()}
        beside, headers = dict(save.beside), dict(save.headers)
        records.append({"files": dict(save.files), "tensors": tensors, "beside": beside, "headers": headers})
    content = {"format": _FORMAT, "saves": records}
    return json.dumps({**content, "sha256": digest_json(content)}, indent=1, sort_keys=True).encode() + b"\n"


def digest_json(content: object) -> str:
    """Return the digest of a JSON document that is stored together with it."""
    return digest(json.dumps(content, sort_keys=True).encode())


def parse(content: bytes) -> list[RecordedSave] | None:
    """Parse the records of saves, or return None if the file is damaged or of another format."""
    try:
        document = json.loads(content)
        # The digest is of the document without the digest.
        recorded = document.pop("sha256", None)
        if recorded is None:  # of an earlier version
            is_sound = document.keys() == {"format", "saves"}
        else:
            is_sound = recorded == digest_json(document)
        if document["format"] != _FORMAT or not is_sound:
            return None
        saves: list[RecordedSave] = []
        for save in document["saves"]:
            files = {str(name): int(nbytes) for name, nbytes in save["files"].items()}
            tensors = {str(key): int(value, _DIGITS) for key, value in save["tensors"].items()}
            beside = {str(name): str(value) for name, value in save.get("beside", {}).items()}
            headers = {str(name): str(value) for name, value in save.get("headers", {}).items()}
            saves.append(RecordedSave(files, tensors, beside, headers))
        return saves
    # Any type may be at any place of a damaged file.
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
        # All whole blocks at once, or a part of one block: up to its end, or to the end of the data.
        count = 0 if head else (len(flat) - at) // BLOCK_BYTES
        chunk = flat[at : at + (count * BLOCK_BYTES or BLOCK_BYTES - head)]
        padded = chunk
        if not count:
            padded = np.zeros(-(-(head + len(chunk)) // _WORD) * _WORD, dtype=np.uint8)
            padded[head : head + len(chunk)] = chunk
        words = padded.view("<u8").reshape(max(count, 1), -1)  # (blocks, words of a block)
        # uint64 wraps around, which is arithmetic modulo 2**64.
        sums = np.einsum("ij,j->i", words, word_weights()[: words.shape[1]]).tolist()
        total += sum(block_weight(block + number) * value for number, value in enumerate(sums))
        at += len(chunk)
    return total % MODULUS


def _mix(number: Any) -> Any:
    """Apply the finalizer of splitmix64."""
    with np.errstate(over="ignore"):
        # Overflow is intended: arithmetic modulo 2**64.
        mixed = np.asarray(number, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


@cache
def word_weights() -> Any:
    """Return the weights of the words of a block.

    ``weight(i)`` is the word weight at ``i``'s position in its block, times the block's :func:`block_weight`.
    """
    return _mix(np.arange(BLOCK_WORDS, dtype=np.uint64)) | np.uint64(1)


@lru_cache(maxsize=1 << 16)
def block_weight(block: int) -> int:
    """Return the weight of the block with this index."""
    return int(_mix(BLOCK_WORDS + block)) | 1
