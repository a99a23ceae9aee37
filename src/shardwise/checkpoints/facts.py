"""Records what a checkpoint says of itself beside its tensors, in a small JSON file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from shardwise.errors import ConfigError, FormatError

FACTS: Final = "shardwise.checkpoint.json"
FINGERPRINTS: Final = "shardwise.fingerprints.json"
_KIND: Final = "shardwise training checkpoint"
_VERSION: Final = 1
MAX_FACTS_BYTES: Final = 64 << 20
"""What is longer is none."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is told of a checkpoint.

    Attributes:
        step: optimizer steps done.
        world_size: ranks that wrote it.
        holds: "everything", or "adapter NAME": that adapter and all else that is trained, not the base.
        adapter: the settings of the adapter's config that change what it computes; None without adapter.
        others: a digest of names and shapes of the model's tensors that are not stored.
        alike: generators of random numbers whose state was the same on all ranks.
        data: "none", "one" position for all ranks, or "each" rank its own.
        user: the user's own.
        files: names and sizes in bytes of the files with tensors.
        metadata_sha256: of the file ``.metadata`` that belongs to this one.
        fingerprints_sha256: of the file of fingerprints; "" where there is none (before there were any).
        optimizers: the class of each optimizer and the number of its parameter groups; None where it is not known.
    """

    step: int
    world_size: int
    holds: str
    adapter: dict[str, Any] | None
    others: str
    alike: list[str]
    data: str
    user: dict[str, Any]
    files: dict[str, int] = field(default_factory=dict)
    metadata_sha256: str = ""
    fingerprints_sha256: str = ""
    optimizers: list[list[Any]] | None = None

    def to_bytes(self) -> bytes:
        content = {"kind": _KIND, "version": _VERSION, **asdict(self)}
        return json.dumps({**content, _SEAL: _seal(content)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, content: bytes, what: str) -> Facts:
        """Raises :class:`FormatError` for what is not the facts of a checkpoint; ``what`` names the file."""
        try:
            found = json.loads(content) if len(content) <= MAX_FACTS_BYTES else None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or found.get("kind") != _KIND:
            raise FormatError(f"{what}: does not tell of a checkpoint of shardwise; it is damaged, or another's")
        if found.get("version") != _VERSION:
            raise FormatError(
                f"{what}: is of version {found.get('version')!r}, and this shardwise reads {_VERSION}; take the "
                "version of shardwise that wrote it"
            )
        is_sealed = bool(_SEAL in found or found.get("fingerprints_sha256"))  # those of earlier versions are not
        if is_sealed and found.pop(_SEAL, None) != _seal(found):
            raise FormatError(f"{what}: is not what was written; it is damaged, or was changed by hand")
        values: dict[str, Any] = {name: found.get(name, _LATER.get(name)) for name in _KINDS}
        wrong = [name for name, kinds in _KINDS.items() if type(values[name]) not in kinds]
        if (
            wrong
            or not _are_classes(values["optimizers"])
            or not _are_sizes(values["files"])
            or not all(isinstance(name, str) for name in found["alike"])
        ):
            raise FormatError(f"{what}: {', '.join(wrong) or 'files'} is not what belongs there; it is damaged")
        return cls(**values)


_KINDS: Final[Mapping[str, tuple[type, ...]]] = {
    "step": (int,),
    "world_size": (int,),
    "holds": (str,),
    "adapter": (dict, type(None)),
    "others": (str,),
    "alike": (list,),
    "data": (str,),
    "files": (dict,),
    "metadata_sha256": (str,),
    "user": (dict,),
    "fingerprints_sha256": (str,),
    "optimizers": (list, type(None)),
}
_LATER: Final[Mapping[str, Any]] = {"fingerprints_sha256": "", "optimizers": None}
"""What facts of earlier versions do not tell."""

_SEAL: Final = "sha256"


def _seal(content: Mapping[str, Any]) -> str:
    """A digest of the facts, however they are laid out."""
    try:
        plain = json.dumps(content, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        return ""
    return hashlib.sha256(plain.encode()).hexdigest()


def _are_classes(optimizers: Any) -> bool:
    return optimizers is None or all(
        type(item) is list and [type(part) for part in item] == [str, int] for item in optimizers
    )


def _are_sizes(files: Any) -> bool:
    return all(type(nbytes) is int and nbytes >= 0 for nbytes in files.values())


def as_json(user: Mapping[str, Any] | None) -> dict[str, Any]:
    """The user's state as it comes back from a file.

    Raises:
        ConfigError: it is no JSON.
    """
    given: object = {} if user is None else user
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ConfigError(f"user is a mapping from texts to JSON values; got {type(given).__name__}")
    try:
        plain = json.loads(json.dumps(dict(given)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"user holds what is no JSON: {error}; give texts, numbers, lists and dicts") from error
    assert isinstance(plain, dict)
    return plain
