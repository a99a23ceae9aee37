"""The outcome of a training run, which the process that started the ranks reads without importing libraries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TrlOutcome:
    """Outcome of a training run on one rank.

    Attributes:
        output_dir: folder of the model, or of the checkpoints of a training run that was stopped.
        steps: optimizer steps.
        has_stopped: whether a signal ended it before its last step.
        metrics: metrics returned by TRL's ``train``.
        history: entries logged by the trainer.
        summary: lines to print.
    """

    output_dir: str
    steps: int
    has_stopped: bool
    metrics: Mapping[str, Any]
    history: tuple[Mapping[str, Any], ...]
    summary: tuple[str, ...]
