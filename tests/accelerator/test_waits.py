"""How often the host waits in a step of the Trainer, and in a pass of experts."""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from tests.accelerator import simulated
from tests.accelerator.test_ranks import written
from tests.integrations import runs
from tests.integrations.accelerating import launched
from tests.integrations.requirements import require_patched_names
from transformers import TrainerCallback

import shardwise

pytestmark = pytest.mark.distributed

WITHOUT_MASKS = mock.patch("transformers.masking_utils.find_packed_sequence_indices", return_value=None)
"""transformers looks for packed rows in the positions, and waits for the answer, in each forward pass."""

WAITS = ("host_waits", "pageable_to_device", "pageable_to_host")


class _Marks(TrainerCallback):
    """Counters at the beginnings of steps, and where losses are logged."""

    def __init__(self) -> None:
        self.found: list[tuple[str, dict[str, int]]] = []

    def on_step_begin(self, *_given: Any, **_others: Any) -> None:
        self.found.append(("step", simulated.counters()))

    def on_log(self, *_given: Any, **_others: Any) -> None:
        self.found.append(("log", simulated.counters()))


def steps(folder: str, out: str, by: str) -> dict[str, list[list[int]]]:
    """Waits between two marks, without those of the first step. Every third loss is logged."""
    arguments = {
        "output_dir": out,
        "use_cpu": False,
        "max_steps": 6,
        "logging_steps": 3,
        "logging_nan_inf_filter": False,
        "gradient_accumulation_steps": 1,
    }
    with launched(), WITHOUT_MASKS:
        trainer = runs.made(runs.Run(folder, by=by, arguments=arguments))
        trainer.add_callback(marks := _Marks())
        trainer.train()
    found: dict[str, list[list[int]]] = {}
    for (one, before), (other, after) in itertools.pairwise(marks.found[1:]):
        found.setdefault(f"{one} to {other}", []).append([after[name] - before[name] for name in WAITS])
    return found


def test_steps_of_the_trainer(two_ranks, tmp_path):
    require_patched_names()
    folder = str(runs.write(tmp_path / "models"))
    ours, theirs = (two_ranks.run(steps, folder, str(tmp_path / by), by)[0] for by in ("shardwise", "patches"))
    assert ours["step to step"] == [[0, 0, 0]] * 3
    assert ours["log to step"] == [[0, 0, 0]]
    assert ours["step to log"] == theirs["step to log"]
    assert [waits for waits, *_ in theirs["step to step"]] == [2] * 3, "for batches that are not in pinned memory"


def experts(folder: str) -> dict[str, list[int]]:
    """Waits in a forward pass of two layers, after a first one."""
    model: Any = shardwise.from_pretrained(folder, dtype="bfloat16")
    tokens, found = torch.randint(0, 60, (2, 8)).to("npu"), {}
    for implementation in ("grouped_mm", "batched_mm"):
        model.set_experts_implementation(implementation)
        for _ in range(2):
            with simulated.counting() as counts, torch.no_grad(), WITHOUT_MASKS:
                model(input_ids=tokens, use_cache=False)
        found[implementation] = [counts[name] for name in WAITS]
    return found


def test_a_pass_of_experts(two_ranks, tmp_path):
    """torch's grouped product waits twice in a layer, for the rows of each expert, where it has no kernel."""
    expected = {"grouped_mm": [4, 0, 4], "batched_mm": [0, 0, 0]}
    assert two_ranks.run(experts, written("mixtral", tmp_path)) == [expected] * 2
