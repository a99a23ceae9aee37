"""Callbacks of a training by TRL: signals, trackers that fail, metrics of the closing summary."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from shardwise.training.stopping import StopRequest

_log = logging.getLogger(__name__)


class StopOnSignal(TrainerCallback):
    """Saves a checkpoint and ends the training after the step in which a signal came.

    The trainer makes the ranks agree on ``control`` after each step, so a signal to one rank stops all.
    """

    def __init__(self, request: StopRequest) -> None:
        self._request = request
        self.has_stopped = False
        """Whether the training ended before its last step."""

    def on_step_end(self, *positional: Any, **_: Any) -> TrainerControl:
        """Ask for a checkpoint and the end."""
        control: TrainerControl = positional[2]
        if self._request.is_made:
            control.should_save = True
            control.should_training_stop = True
        return control

    def on_train_end(self, *positional: Any, **_: Any) -> None:
        """Note whether steps are left."""
        state: TrainerState = positional[1]
        self.has_stopped = state.global_step < state.max_steps


class TolerantTracker(TrainerCallback):
    """Wraps a tracker's callback, so that an experiment tracker that fails ends nothing.

    Args:
        tracker: the callback of a tracker (``WandbCallback``, ``TensorBoardCallback``, ...).
    """

    def __init__(self, tracker: TrainerCallback) -> None:
        self._tracker = tracker
        self._has_failed = False

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        call: Callable[..., Any] = getattr(self._tracker, name)

        def guarded(*positional: Any, **keywords: Any) -> Any:
            if self._has_failed:
                return None
            try:
                return call(*positional, **keywords)
            except Exception as error:
                self._has_failed = True
                _log.warning(
                    "%s: failed, %s. The training continues without it.", type(self._tracker).__name__, error
                )
                return None

        return guarded


def guard_trackers(trainer: Any) -> None:
    """Wrap the callbacks of experiment trackers that a trainer has."""
    handler = trainer.callback_handler
    module = "transformers.integrations"
    handler.callbacks = [
        TolerantTracker(one) if type(one).__module__.startswith(module) else one for one in handler.callbacks
    ]


@dataclass
class LoggedProgress:
    """Facts of a training for its summary."""

    losses: list[float] = field(default_factory=list)
    best: float | None = None
    begun: float = field(default_factory=time.monotonic)


class RecordProgress(TrainerCallback):
    """Records losses that are logged, and the best loss of evaluations."""

    def __init__(self) -> None:
        self.progress = LoggedProgress()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self.progress.begun = time.monotonic()

    def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
        """Record ``loss`` and ``eval_loss``."""
        if logs and "loss" in logs:
            self.progress.losses.append(float(logs["loss"]))
        if logs and "eval_loss" in logs:
            best = self.progress.best
            self.progress.best = min(float(logs["eval_loss"]), best if best is not None else float("inf"))


def summary_lines(progress: LoggedProgress, *, steps: int, tokens: int | None, peak_bytes: int) -> Sequence[str]:
    """Format the closing summary of a training."""
    seconds = time.monotonic() - progress.begun
    lines = [f"trained {steps} steps in {seconds:.1f} s"]
    if progress.losses:
        lines.append(f"loss: {progress.losses[0]:.4f} -> {progress.losses[-1]:.4f}")
    if progress.best is not None:
        lines.append(f"best evaluation loss: {progress.best:.4f}")
    if tokens:
        lines.append(f"{tokens:,} tokens, {tokens / max(seconds, 1e-9):,.0f} tokens/s")
    lines.append(f"peak memory of a rank: {peak_bytes / 2**30:.2f} GiB")
    return lines
