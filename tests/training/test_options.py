"""Options that cannot be honoured are named, all of them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.training.options import Epochs, Ratio, Steps, TrainOptions


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 0.0),
        ("learning_rate", math.nan),
        ("learning_rate", math.inf),
        ("duration", Epochs(0)),
        ("duration", Steps(-1)),
        ("batch_size", 0),
        ("gradient_accumulation_steps", 0),
        ("warmup", Ratio(1.5)),
        ("warmup", Steps(-1)),
        ("schedule", "quadratic"),
        ("weight_decay", -0.1),
        ("max_grad_norm", 0.0),
        ("max_length", 1),
        ("seed", -1),
        ("dtype", "float8"),
        ("log_every", 0),
    ],
)
def test_an_option_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"\n  {name}="):
        TrainOptions(**{name: value})


def test_all_faults_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)batch_size=0.*seed=-1"):
        TrainOptions(batch_size=0, seed=-1)


def test_the_warm_up_in_steps() -> None:
    assert TrainOptions(warmup=Ratio(0.1)).warmup_steps(25) == 3
    assert TrainOptions(warmup=Steps(7)).warmup_steps(25) == 7


def test_no_limit_to_the_gradient_norm() -> None:
    assert TrainOptions(max_grad_norm=math.inf).max_grad_norm == math.inf
