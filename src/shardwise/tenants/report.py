"""What became of each tenant, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from shardwise.report.save_report import SaveReport
from shardwise.training.report import TrainReport


class Ended(Enum):
    """How a tenant's training ended."""

    TRAINED = "trained"
    STOPPED = "stopped"
    """It was asked to stop, and has kept its state."""
    REFUSED = "refused"
    """Before its first step."""
    FAILED = "failed"
    """In training; what it kept before is whole."""


@dataclass(frozen=True, slots=True)
class TenantReport:
    """One tenant, as seen by one rank."""

    name: str
    ended: Ended
    cause: str = ""
    """Why it was refused, or has failed."""
    trained: TrainReport | None = None
    """None where it was refused."""
    saved: SaveReport | None = None
    """Of ``last/``."""

    @property
    def is_well(self) -> bool:
        return self.ended in (Ended.TRAINED, Ended.STOPPED)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {
            "name": self.name,
            "ended": self.ended.value,
            "cause": self.cause,
            "train": self.trained.to_dict() if self.trained else None,
            "save": self.saved.to_dict() if self.saved else None,
        }
