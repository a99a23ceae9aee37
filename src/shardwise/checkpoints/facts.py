"""Records what a checkpoint says of itself beside its tensors, as plain data: whoever reads it runs nothing."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import torch

from shardwise.checkpoints.base_identity import BaseIdentity
from shardwise.checkpoints.checksums import content_nbytes, with_checksums
from shardwise.errors import ConfigError, FormatError

FACTS: Final = "shardwise.checkpoint.json"
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
        checksums: digests of the checksums in these files; empty for checkpoints of earlier versions.
        optimizers: the class of each optimizer and the number of its parameter groups; None where it is not known.
        base: what the model's tensors that are not stored are known by; None where all are, or it is not known.
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
    checksums: dict[str, str] = field(default_factory=dict)
    optimizers: list[list[Any]] | None = None
    base: BaseIdentity | None = None

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
        is_sealed = _SEAL in found or "checksums" in found  # those of earlier versions are not
        if is_sealed and found.pop(_SEAL, None) != _seal(found):
            raise FormatError(f"{what}: is not what was written; it is damaged, or was changed by hand")
        values: dict[str, Any] = {name: found.get(name, _LATER.get(name)) for name in _KINDS}
        wrong = [name for name, kinds in _KINDS.items() if type(values[name]) not in kinds]
        if (
            wrong
            or not _are_classes(values["optimizers"])
            or not _are_sizes(values["files"])
            or not all(isinstance(name, str) for name in found["alike"])
            or not _are_digests(values["checksums"], values["files"])
        ):
            raise FormatError(f"{what}: {', '.join(wrong) or 'files'} is not what belongs there; it is damaged")
        base = values.pop("base")
        return cls(**values, base=None if base is None else BaseIdentity.from_dict(base, what))


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
    "checksums": (dict,),
    "optimizers": (list, type(None)),
    "base": (dict, type(None)),
}
_LATER: Final[Mapping[str, Any]] = {"checksums": {}, "optimizers": None, "base": None}
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


def _are_digests(checksums: Any, files: Any) -> bool:
    if not checksums:
        return True
    sizes = [(nbytes, content_nbytes(nbytes)) for nbytes in files.values()]
    return (
        checksums.keys() == files.keys()
        and all(type(value) is str for value in checksums.values())
        and all(content >= 0 and with_checksums(content) == nbytes for nbytes, content in sizes)
    )


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


_PLAIN = (str, int, float, bool, bytes, type(None))


def packed(value: object, what: str) -> bytes:
    """Return a value as ``torch.save`` writes it and ``torch.load(weights_only=True)`` reads it.

    Raises:
        ConfigError: it is no plain data.
    """
    buffer = io.BytesIO()
    try:
        torch.save(_at_home(value), buffer)
        if type(value) not in _PLAIN:
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:  # pickle raises errors of many kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{what}: holds what is no plain data ({reason}); a checkpoint holds dicts, lists, tuples, texts, "
            "numbers, bytes and tensors: let its state_dict give these"
        ) from error
    return buffer.getvalue()


def digest_of(value: object) -> str:
    """Return a digest that is equal for equal values. Objects that are no plain data count by their class."""
    found = hashlib.sha256()
    _digest(value, found)
    return found.hexdigest()[:32]


def _at_home(value: Any) -> Any:
    """Tensors on the CPU, and without what else their storages hold."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return type(value)({key: _at_home(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(_at_home(item) for item in value)
    return value


def _digest(value: Any, into: Any) -> None:
    into.update(f"{type(value).__name__}(".encode())
    if isinstance(value, torch.Tensor):
        into.update(f"{value.dtype} {tuple(value.shape)} ".encode())
        into.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key, item in value.items():
            _digest(key, into)
            _digest(item, into)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _digest(item, into)
    elif isinstance(value, _PLAIN):
        into.update(repr(value).encode())
    into.update(b")")
