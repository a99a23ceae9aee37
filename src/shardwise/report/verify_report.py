"""What a verification found."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from shardwise.report.names import collapse


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The outcome on all ranks together.

    ``elements`` counts what was compared over all ranks, replicas counted on each. ``unequal`` has a sentence for
    each tensor and rank that differs. ``initialized`` are tensors that no checkpoint holds, so that there is
    nothing to compare them with.
    """

    checkpoint: str
    model_class: str
    dtype: str
    world_size: int
    tensors: int
    buffers: int
    elements: int
    unequal: tuple[str, ...] = ()
    initialized: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def is_equal(self) -> bool:
        return not self.unequal

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {**dataclasses.asdict(self), "is_equal": self.is_equal}

    def __str__(self) -> str:
        verdict = "bitwise equal" if self.is_equal else f"{len(self.unequal)} DIFFER"
        lines = [
            f"{self.model_class} {self.dtype} on {self.world_size} ranks: {verdict}",
            f"  {self.tensors} tensors and {self.buffers} buffers, {self.elements:,} elements, compared",
            f"  with whole tensors converted by transformers, in {self.seconds:.1f} s",
        ]
        lines += [f"  differs      {pattern}" for pattern, _ in collapse(self.unequal)[:20]]
        lines += [f"  not compared {pattern} (initialized)" for pattern, _ in collapse(self.initialized)[:20]]
        return "\n".join(lines)
