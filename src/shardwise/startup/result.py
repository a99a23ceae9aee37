"""What a comparison has found: the runs of all arms, as plain data. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.startup.figures import ArmRun, GrowthLimit
from shardwise.startup.kinds import KINDS
from shardwise.startup.values import compared


@dataclass(frozen=True)
class StartupResult:
    """All runs of all arms, and why those that are not among them did not run."""

    model: str
    ranks: int
    dtype: str
    runs: Sequence[ArmRun]
    not_run: Mapping[str, str]
    limit: GrowthLimit | None
    """Of our run that grew most; None where ours is not among the arms."""
    files: Sequence[str] = ()

    def of(self, arm: str) -> list[ArmRun]:
        return [run for run in self.runs if run.arm == arm]

    def verdict(self, arm: str) -> str:
        """Whether it made the model that ours made, or the first arm that ran."""
        first = self.runs[0].values
        found = [compared(run.values, first) for run in self.of(arm)]
        return next((words for words in found if words != "same"), "same")

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        arms = {
            arm: {"does": KINDS[arm].does, "values": self.verdict(arm), "runs": [run.to_dict() for run in runs]}
            for arm in KINDS
            if (runs := self.of(arm))
        }
        limit = None if self.limit is None else {**asdict(self.limit), "holds": self.limit.holds}
        place = {"model": self.model, "ranks": self.ranks, "dtype": self.dtype}
        return {**place, "arms": arms, "not_run": dict(self.not_run), "limit": limit, "files": [*self.files]}
