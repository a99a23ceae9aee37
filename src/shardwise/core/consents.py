"""What a call may leave out, ignore or initialize, and the error that lists what it may not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from shardwise.core.errors import ConfigError
from shardwise.core.formatting import abbreviate


def describe_faults(head: str, faults: Mapping[str, Sequence[str]], remedies: Mapping[str, str]) -> str:
    """Format an error message: each kind of fault with its count, its first names (collapsed), and the remedies."""
    lines = [head]
    for kind, sentences in faults.items():
        for position, line in enumerate(abbreviate(sentences)):
            counted = f"{kind} {len(sentences)}" if position == 0 else ""
            lines.append(f"  {counted:<17}{line}")
    advice = [remedies[kind] for kind, sentences in faults.items() if sentences and kind in remedies]
    if advice:
        lines.append(f"Pass {'; '.join(advice)}.")
    return "\n".join(lines)


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
    """Consent to initialize, as the model would, the tensors whose names match one of the globs ``only``."""


@dataclass(frozen=True, slots=True)
class Ignore(_Globs):
    """Consent to ignore names that match one of the globs ``only`` (default: all).

    Ignored keys are not read, and ignored tensors keep their values.
    """

    only: tuple[str, ...] = ("*",)


OnMissing: TypeAlias = Literal["error"] | Initialize
OnUnexpected: TypeAlias = Literal["error"] | Ignore


def allows(consent: OnMissing | OnUnexpected, name: str) -> bool:
    """Return whether a tensor of this name may be missing, mismatched or unexpected."""
    return consent != "error" and consent.covers(name)


@dataclass(frozen=True, slots=True)
class Consent:
    """All consents of one load or restore, by default to nothing.

    ``missing`` applies to tensors of the model that are not in the checkpoint, ``mismatched`` to tensors that the
    checkpoint stores in another shape, or as values that cannot be cast or decoded, ``unexpected`` to keys without
    a tensor in the model, ``base`` to the "config", "shapes" and "values" of the base model that a checkpoint
    requires. A load initializes missing tensors, a restore of a state leaves them as they are.
    """

    missing: OnMissing | OnUnexpected = "error"
    mismatched: OnMissing | OnUnexpected = "error"
    unexpected: OnUnexpected = "error"
    base: OnUnexpected = "error"
