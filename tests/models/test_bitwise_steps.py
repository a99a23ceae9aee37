"""Steps on two ranks, bit for bit those of the model that transformers and PEFT bring up on every rank."""

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from tests.conftest import Worlds
from tests.models import on_ranks, reference

from shardwise import ExistingLora, Freeze, Full, Lora

STEPS, ROWS = 10, 4
ADAPTER = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
TUNINGS: dict[str, Any] = {
    "full": Full(),
    "freeze": Freeze(trainable_layers=1, extra_modules=("lm_head",)),
    "lora": Lora(ADAPTER),
    "replicated lora": Lora(ADAPTER, placement="replicated"),
}


@pytest.mark.parametrize("name", ["full", *(pytest.param(name, marks=pytest.mark.slow) for name in [*TUNINGS][1:])])
def test_losses_are_bitwise_those_of_a_model_that_fsdp2_shards_by_itself(
    name: str, untied: Path, worlds: Worlds, tmp_path: Path
) -> None:
    tuning = TUNINGS[name]
    runs = [
        worlds(2).run(on_ranks.train_long, str(untied), {"tuning": tuning}, STEPS, ROWS, by_hand)
        for by_hand in (False, True)
    ]
    if name == "replicated lora":
        # The same values, of an adapter that is stored.
        reference.stock(untied, ADAPTER).save_pretrained(tmp_path)
        stored = {"tuning": ExistingLora(tmp_path, placement="replicated")}
        runs.append(worlds(2).run(on_ranks.train_long, str(untied), stored, STEPS, ROWS, False))
    losses, digests = ([[rank[what] for rank in found] for found in runs] for what in (0, 1))
    assert all(found == losses[0] for found in losses)
    assert all(found == digests[0] for found in digests)
    # Both ranks have the same adapter after each of the steps, and no two steps leave it the same.
    assert digests[0][0] == digests[0][1]
    if isinstance(tuning, Lora):
        assert len(set(digests[0][0])) == STEPS
