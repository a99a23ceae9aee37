"""What the user agrees to when checkpoint and model do not cover each other, or ranks not agree."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TypeAlias

from shardwise.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Refuse:
    """An error that names every tensor concerned."""

    def covers(self, name: str) -> bool:  # noqa: ARG002 - the same face as its siblings
        return False


@dataclass(frozen=True, slots=True)
class _Globs:
    only: tuple[str, ...]

    def __post_init__(self) -> None:
        only: object = self.only
        if isinstance(only, str):  # its letters would be globs, and a "*" among them consent to everything
            raise ConfigError(f"only={only!r} must be a tuple of globs: only=({only!r},)")

    def covers(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.only)


@dataclass(frozen=True, slots=True)
class Initialize(_Globs):
    """Initialise as the model would, the tensors whose names match one of the globs ``only``."""


@dataclass(frozen=True, slots=True)
class Ignore(_Globs):
    """Leave what matches one of the globs ``only`` (default: all): keys unread, tensors with their values."""

    only: tuple[str, ...] = ("*",)


@dataclass(frozen=True, slots=True)
class TakeFirst:
    """The values of the first rank, of all that is concerned; where there is a report, it names them."""


OnMissing: TypeAlias = Refuse | Initialize
OnUnexpected: TypeAlias = Refuse | Ignore
OnDiffering: TypeAlias = Refuse | TakeFirst


@dataclass(frozen=True, slots=True)
class Consent:
    """All consents of one load; by default everything is refused.

    ``missing`` is for tensors of the model that the checkpoint lacks, ``mismatched`` for those it holds in another
    shape, ``unexpected`` for keys that lead to nothing in the model.
    """

    missing: OnMissing = field(default_factory=Refuse)
    mismatched: OnMissing = field(default_factory=Refuse)
    unexpected: OnUnexpected = field(default_factory=Refuse)
