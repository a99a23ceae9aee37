"""States of schedules are held against what is there: torch's own by their meaning, others by their names alone."""

from typing import Any

import pytest
import torch

from shardwise.models.optimizer_parsing import scheduler_mismatch


@pytest.mark.parametrize(
    "state",
    [
        {"base_lrs": {"decay": 1e-3, "no_decay": 1e-3}, "step": 3},
        {"max_lrs": 3e-4, "min_lrs": 1e-5},
        {"_last_lr": None},
        {"_schedulers": {"warm": {"step": 1}}},
        {"lr_lambdas": {"warm": 1.0}},
        {"_last_lr": [torch.tensor([1.0, 2.0])]},
        {"base_lrs": [{"first": 0.1}]},
        {"_scale_fn_custom": "triangular"},
    ],
)
def test_a_schedule_of_ones_own_may_keep_anything_under_names_of_torchs(state: dict[str, Any]) -> None:
    assert scheduler_mismatch(state, dict(state)) is None


def test_what_is_a_list_of_numbers_here_has_to_be_one_there() -> None:
    here = {"base_lrs": [0.1, 0.2], "_schedulers": [{"step": 1}], "lr_lambdas": [None, {"at": 1}]}
    for name, other in (
        ("base_lrs", [0.1]),
        ("base_lrs", {"a": 0.1}),
        ("base_lrs", [0.1, "x"]),
        ("_schedulers", {}),
        ("_schedulers", [{"at": 1}]),
        ("lr_lambdas", [None, None]),
        ("lr_lambdas", [None, 3]),
    ):
        assert scheduler_mismatch(here, {**here, name: other}), (name, other)
