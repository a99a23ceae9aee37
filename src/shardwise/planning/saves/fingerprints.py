"""The small file beside the weights that has a fingerprint of every tensor in them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


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
    """

    files: Mapping[str, int]
    tensors: Mapping[str, int]
    beside: Mapping[str, str] = field(default_factory=dict)


def to_bytes(saves: Sequence[RecordedSave]) -> bytes:
    """The content of the file. While a save is committed, it has what the older save and the new one recorded."""
    content = {
        "format": _FORMAT,
        "saves": [
            {
                "files": dict(save.files),
                "tensors": {key: f"{value:0{_DIGITS}x}" for key, value in save.tensors.items()},
                "beside": dict(save.beside),
            }
            for save in saves
        ],
    }
    return json.dumps(content, indent=1, sort_keys=True).encode() + b"\n"


def from_bytes(content: bytes | None) -> list[RecordedSave]:
    """What saves recorded; nothing where the file is not there, or is not one of these."""
    try:
        parsed = json.loads(content or b"{}")
        if parsed["format"] != _FORMAT:
            return []
        return [
            RecordedSave(
                {str(name): int(nbytes) for name, nbytes in save["files"].items()},
                {str(key): int(value, _DIGITS) for key, value in save["tensors"].items()},
                {str(name): str(value) for name, value in save.get("beside", {}).items()},
            )
            for save in parsed["saves"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return []
