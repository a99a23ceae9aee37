"""Scaling a loss so that gradients in float16 are not lost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from shardwise.errors import ConfigError, TrainingError


@dataclass(frozen=True, slots=True)
class Unscaled:
    """The loss is taken as it is: for float32 and bfloat16, which have the same range."""

    scale: float = 1.0

    def judge(self, grad_norm: float) -> bool:  # noqa: ARG002
        """Whether the optimizer is to take the step. What is not finite is the caller's affair here."""
        return True


class GradientScaler:
    """What a loss is multiplied by: as much as float16 bears, which is found out by trying.

    A step whose gradient is not finite is left out and the scale lowered; after ``patience`` good ones in a row it
    is raised. The verdict is taken from the global norm, which is finite exactly when every element on every rank
    is, and is the same number on every rank: so is the verdict, and no rank has to ask another. On any device.

    Attributes:
        scale: now.
        good_steps: in a row, up to now.
        factor: by which the scale is raised and lowered.
        patience: good steps before it is raised.
    """

    def __init__(self, scale: float = 65536.0, *, factor: float = 2.0, patience: int = 2000) -> None:
        if not (0 < scale < math.inf and 1 < factor < math.inf and patience >= 1):
            raise ConfigError(
                f"scale={scale}, factor={factor}, patience={patience}: the scale must be greater than 0, the "
                "factor than 1, and the patience 1 step or more"
            )
        self.scale = scale
        self.factor = factor
        self.patience = patience
        self.good_steps = 0

    def judge(self, grad_norm: float) -> bool:
        """Whether the optimizer is to take a step with a gradient of this norm; the scale is set for the next.

        Raises:
            TrainingError: no scale is small enough.
        """
        if math.isfinite(grad_norm):
            self.good_steps += 1
            if self.good_steps == self.patience:
                self.scale, self.good_steps = min(self.scale * self.factor, 2.0**126), 0
            return True
        if self.scale < _SMALLEST:
            raise TrainingError(
                f"the gradient is {grad_norm} even where the loss is scaled by {self.scale:g}; train in bfloat16, "
                "lower the learning rate, or look for rows unlike the others"
            )
        self.scale, self.good_steps = self.scale / self.factor, 0
        return False

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint is to keep."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on as it was.

        Raises:
            ConfigError: that is not the state of a scaler.
        """
        scale, good_steps = state.get("scale", 0.0), state.get("good_steps", -1)
        if not (0 < scale < math.inf and good_steps >= 0):
            raise ConfigError(f"{state} is not the state of a gradient scaler: a scale, and good steps up to now")
        self.scale, self.good_steps = float(scale), int(good_steps)


_SMALLEST = 2.0**-14
"""The smallest normal number of float16: a gradient that overflows below it does so by itself."""

Scaling: TypeAlias = Unscaled | GradientScaler
