"""States of schedules are held against what is there: torch's own by their meaning, others by their names alone."""

from typing import Any

import pytest
import torch

from shardwise.fsdp.optimizer_states_by_name import list_differences, scheduler_mismatch


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


def test_scheduler_states_must_have_the_same_structure() -> None:
    here = {"base_lrs": [0.1, 0.2], "_schedulers": [{"step": 1}], "lr_lambdas": [None, {"at": 1}]}
    for name, other in (
        ("base_lrs", [0.1]),
        ("base_lrs", {"a": 0.1}),
        ("base_lrs", [0.1, "x"]),
        ("base_lrs", [0.1, float("nan")]),
        ("_schedulers", {}),
        ("_schedulers", [{"at": 1}]),
        ("lr_lambdas", [None, None]),
        ("lr_lambdas", [None, 3]),
    ):
        assert scheduler_mismatch(here, {**here, name: other}), (name, other)


PRESENT = {"lr": 0.1, "betas": (0.9, 0.999), "eps": (None, 1e-3), "fused": None, "amsgrad": False}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("lr", value) for value in (1, None, torch.tensor(0.2), float("inf"))),
        *(("betas", value) for value in ([0.8, 0.9], (torch.tensor(0.8), 0.9))),
        *(("eps", value) for value in (None, (1e-30, 1e-3))),
        ("fused", True),
        ("other", "x"),
    ],
)
def test_settings_of_an_optimizer_that_may_be_set(setting: str, value: Any) -> None:
    assert list_differences({"w": ("AdamW", PRESENT)}, {"w": ("AdamW", {**PRESENT, setting: value})}) == []


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("lr", value) for value in ("x", float("nan"), torch.tensor(float("nan")), [0.1], torch.ones(2))),
        *(("betas", value) for value in (0.5, (0.9,), ("x", 0.9), (float("nan"), 0.9))),
    ],
)
def test_settings_of_an_optimizer_that_are_damaged(setting: str, value: Any) -> None:
    [fault] = list_differences({"w": ("AdamW", PRESENT)}, {"w": ("AdamW", {**PRESENT, setting: value})})
    assert fault == f"the setting {setting} of AdamW is {value!r}: w"
