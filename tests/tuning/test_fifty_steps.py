"""Fifty steps in float32 on one, two and four ranks, against transformers and PEFT in one process.

Sums in another order differ in their last bits, and fifty steps make more of it. How much is not guessed: one
process that cuts its batch into parts of another size differs from itself; ranks may differ three times as much.
"""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from tests.conftest import Worlds
from tests.tuning import on_ranks, reference

import shardwise
from shardwise import Freeze, Full, Lora

STEPS, ROWS = 50, 4
ADAPTER = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
TUNINGS: dict[str, Any] = {
    "full": Full(),
    "freeze": Freeze(trainable_layers=1, extra_modules=("lm_head",)),
    "lora": Lora(ADAPTER),
    "replicated lora": Lora(ADAPTER, adapters="replicated"),
}


def alone(folder: Path, tuning: Any, parts: int) -> list[float]:
    """The losses of one process without shardwise, which gave it the values to begin with."""
    model = reference.stock(folder, tuning.config if isinstance(tuning, Lora) else None)
    start = on_ranks.values_after_load(str(folder), {"tuning": tuning})
    on_ranks.set_values(model, {**start, **reference.unsettle(start)})
    brought_up = shardwise.from_pretrained(folder, tuning=tuning).named_parameters()
    trained = {name for name, parameter in brought_up if parameter.requires_grad}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    return reference.train(model, STEPS, ROWS, parts=parts, learning_rate=on_ranks.SLOWLY)


def mostly_slow(*fast: str) -> list[Any]:
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in TUNINGS]


@pytest.mark.distributed
@pytest.mark.parametrize("name", mostly_slow())
def test_losses_are_those_of_one_process(name: str, untied: Path, worlds: Worlds) -> None:
    tuning = TUNINGS[name]
    runs = [alone(untied, tuning, parts) for parts in (1, 2, 4)]
    differences = [abs(one - other) for pair in combinations(runs, 2) for one, other in zip(*pair, strict=True)]
    assert 0 < max(differences) < 1e-3
    for ranks in (1, 2, 4):
        found = worlds(ranks).run(on_ranks.train_long, str(untied), {"tuning": tuning}, STEPS, ROWS)
        together = [sum(losses) / ranks for losses in zip(*(losses for losses, _ in found), strict=True)]
        worst = max(abs(one - other) for one, other in zip(together, runs[0], strict=True))
        assert worst <= 3 * max(differences), ranks
        # Every rank has the same adapter after each of the steps, and no two steps leave it the same.
        digests = [digests for _, digests in found]
        assert all(other == digests[0] for other in digests)
        if isinstance(tuning, Lora):
            assert len(set(digests[0])) == STEPS


@pytest.mark.distributed
@pytest.mark.parametrize("name", mostly_slow("full"))
def test_losses_are_bitwise_those_of_a_model_loaded_as_ever(name: str, untied: Path, worlds: Worlds) -> None:
    keywords = {"tuning": TUNINGS[name]}
    world = worlds(2)
    found = world.run(on_ranks.train_long, str(untied), keywords, STEPS, ROWS)
    wanted = world.run(_by_hand, str(untied), keywords)
    assert [losses for losses, _ in found] == [losses for losses, _ in wanted]


def _by_hand(directory: str, keywords: dict[str, Any]) -> tuple[list[float], list[str]]:
    return on_ranks.train_long(directory, keywords, STEPS, ROWS, by_hand=True)
