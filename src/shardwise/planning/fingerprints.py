"""The small file beside the weights that has a fingerprint of every tensor in them.

Headers and small files have a digest, and so has the record itself: every byte of a save is compared with
something. Records of earlier versions have fingerprints of tensors alone.
"""

from __future__ import annotations

import hashlib
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
