"""What reading a checkpoint of the Hugging Face Trainer did, on one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.report.load_report import LoadReport
from shardwise.report.state_report import StateReport


@dataclass(frozen=True, slots=True)
class TrainerReport:
    """Where the training was, what was restored of it, and what was not.

    Attributes:
        checkpoint: the folder.
        step: optimizer steps done.
        epoch: done so far, in fractions.
        model: what was set of the model.
        optimizer: what was set of the optimizer; None where it was not.
        restored: what was restored: "model", "optimizer", "scheduler", "random numbers".
        not_restored: all else that the folder holds or a run needs, with the reason.
        told: the numbers and texts of ``trainer_state.json`` (best_metric, num_input_tokens_seen, max_steps, ...).
    """

    checkpoint: str
    step: int
    epoch: float
    model: StateReport | LoadReport
    optimizer: StateReport | None
    restored: tuple[str, ...]
    not_restored: Mapping[str, str]
    told: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.checkpoint}: step {self.step}, epoch {self.epoch:g}",
            f"  restored: {', '.join(self.restored)}",
            *(f"  not restored: {what}: {why}" for what, why in self.not_restored.items()),
        ]
        return "\n".join(lines)
