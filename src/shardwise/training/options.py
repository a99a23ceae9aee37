"""How a model is trained, and how often something is done in it, as values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, get_args

from shardwise.errors import ConfigError

Schedule: TypeAlias = Literal[
    "constant",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]
"""What the learning rate does after its warm-up; the names are transformers'."""

Precision: TypeAlias = Literal["float32", "bfloat16", "float16"]
"""What the forward and backward passes compute in."""


@dataclass(frozen=True, slots=True)
class Steps:
    """A number of optimizer steps."""

    count: int


@dataclass(frozen=True, slots=True)
class Epochs:
    """A number of passes over the data."""

    count: int


@dataclass(frozen=True, slots=True)
class Ratio:
    """A share of all optimizer steps, rounded up."""

    share: float


@dataclass(frozen=True, slots=True)
class NamedOptimizer:
    """Which optimizer, and what is beside the rate, decay, betas and eps.

    Attributes:
        name: a short name (``adamw``), or the path of a class (``torch.optim.Adagrad``).
        options: further arguments of the class.
        lora_plus_ratio: the rate of a LoRA's B matrices over that of the others (LoRA+); None: the same.
        may_import: whether a path outside of ``torch.optim`` is imported, which runs code.
    """

    name: str = "adamw"
    options: Mapping[str, Any] = field(default_factory=dict)
    lora_plus_ratio: float | None = None
    may_import: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """How a model is trained.

    A step takes ``batch_size * gradient_accumulation_steps`` rows on every rank. What it computes depends on the
    rows it takes and on nothing else: two ranks with one micro-batch are one rank with two, up to rounding.

    Attributes:
        learning_rate: at the end of the warm-up.
        duration: how long to train.
        batch_size: rows of a micro-batch, on each rank.
        gradient_accumulation_steps: micro-batches of a step.
        warmup: how long the learning rate rises from zero.
        schedule: what it does then.
        schedule_options: further arguments of transformers' schedule of that name.
        weight_decay: the optimizer's, for parameters of two and more dimensions (so not for norms and biases).
        betas, eps: the optimizer's, None for those that its class has by default.
        optimizer: AdamW, if nothing else is said.
        max_grad_norm: the global gradient norm to which greater ones are scaled down; infinity for no limit.
        max_length: tokens of a row; what is beyond is cut off.
        seed: of the order of the rows and of dropout.
        dtype: of the computation. Weights, gradients and the optimizer's state should be float32 either way: in
            bfloat16 most updates would be rounded away.
        log_every: steps from one line of the log to the next.

    Raises:
        ConfigError: naming every option that cannot be honoured.
    """

    learning_rate: float = 1e-5
    duration: Epochs | Steps = Epochs(1)
    batch_size: int = 4
    gradient_accumulation_steps: int = 1
    warmup: Steps | Ratio = Ratio(0.0)
    schedule: Schedule = "cosine"
    schedule_options: Mapping[str, Any] = field(default_factory=dict)
    weight_decay: float = 0.0
    betas: tuple[float, float] | None = None
    eps: float | None = None
    max_grad_norm: float = 1.0
    max_length: int = 2048
    seed: int = 0
    dtype: Precision = "float32"
    log_every: int = 10
    optimizer: NamedOptimizer = NamedOptimizer()

    def __post_init__(self) -> None:
        faults = [
            f"{option.name}={getattr(self, option.name)!r}: {wanted}"
            for option in fields(self)
            if (wanted := self._wanted(option.name)) is not None
        ]
        if faults:
            raise ConfigError("training cannot be set up so\n  " + "\n  ".join(faults))

    def _wanted(self, name: str) -> str | None:
        """What the option should be, when it is not."""
        value = getattr(self, name)
        match name:
            case "learning_rate":
                return None if 0 < value < math.inf else "it must be greater than 0"
            case "max_grad_norm":
                return None if value > 0 else "it must be greater than 0"
            case "betas":
                is_right = value is None or all(0 <= beta < 1 for beta in value)
                return None if is_right else "each must be from 0 to below 1"
            case "eps":
                return None if value is None or 0 < value < math.inf else "it must be greater than 0"
            case "optimizer":
                ratio = value.lora_plus_ratio
                return None if ratio is None or 0 < ratio < math.inf else "lora_plus_ratio must be greater than 0"
            case "schedule_options":
                return None
            case "weight_decay":
                return None if 0 <= value < math.inf else "it must be 0 or greater"
            case "batch_size" | "gradient_accumulation_steps" | "log_every":
                return None if value >= 1 else "it must be at least 1"
            case "max_length":
                return None if value >= 2 else "it must be at least 2: one token, and one to predict from it"
            case "duration":
                return None if value.count >= 1 else "it must be at least 1"
            case "warmup":
                if isinstance(value, Steps):
                    return None if value.count >= 0 else "it must be at least 0 steps"
                return None if 0 <= value.share <= 1 else "a ratio is from 0 to 1"
            case "schedule":
                return _one_of(value, get_args(Schedule))
            case "dtype":
                return _one_of(value, get_args(Precision))
            case "seed":
                return None if 0 <= value < 2**63 else "it must be from 0 to 2**63 - 1"
            case _:
                raise AssertionError(f"{name} is not validated")

    @property
    def rows_per_rank(self) -> int:
        """Rows that a rank takes in one step."""
        return self.batch_size * self.gradient_accumulation_steps

    def warmup_steps(self, total_steps: int) -> int:
        """Steps of the warm-up in a training of ``total_steps``."""
        if isinstance(self.warmup, Steps):
            return self.warmup.count
        return math.ceil(self.warmup.share * total_steps)


def _one_of(value: str, choices: tuple[str, ...]) -> str | None:
    return None if value in choices else f"it must be one of {', '.join(choices)}"


@dataclass(frozen=True, slots=True)
class EachEpoch:
    """At the end of each pass over the data."""


Every: TypeAlias = int | EachEpoch | None
"""Every so many steps, or each epoch; None: not on the way."""


def is_time(every: Every, step: int, epochs_done: float) -> bool:
    """Whether it is done after this step, of which ``epochs_done`` passes over the data are done."""
    if isinstance(every, EachEpoch):
        return step > 0 and epochs_done.is_integer()
    return every is not None and step % every == 0
