"""The benchmark of many LoRAs, on a tiny model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from benchmarks import tenants
from benchmarks.checkpoints import write
from benchmarks.place import machine
from benchmarks.tenancy import IN_TURN, JOINT, SWITCHED, TenancyJob, share, take_products, take_turns
from tests.conftest import Worlds


def job(folder: str) -> TenancyJob:
    return TenancyJob(folder, 512, (4, 8), rows=1, tokens=8, steps=2, repeats=1, counts=(1, 2), shared_rows=2)


@pytest.mark.distributed
@pytest.mark.slow
def test_all_arms_train_the_same(worlds: Worlds, tmp_path: Path) -> None:
    own = job(str(write(tenants.SHAPE.tiny(), tmp_path)))
    turns, shares = worlds(2).run(take_turns, own), worlds(2).run(share, own)
    made = tenants.summary({"turns": turns, "share": shares, "products": take_products(64, 2, 4, 4, 1)})
    assert max(made["loss_difference"].values()) < 1e-5
    gathers = made["gathered_bytes"]
    assert gathers[SWITCHED] == len(own.ranks_of_tenants) * gathers[JOINT] > 0
    assert made["share_s"].keys() == {"1", "2", "tuning=Lora"}
    assert made["comings_ms"].keys() == {"2", "1"}


def test_the_page_and_the_verdict() -> None:
    def rank(factor: float) -> dict[str, Any]:
        return {
            "bring_up_s": factor,
            "seconds": {
                JOINT: [[9.0, factor, factor]],
                SWITCHED: [[9.0, 4 * factor, 4 * factor]],
                IN_TURN: [[9.0, factor / 2, factor / 2]],
            },
            "losses": {JOINT: [[1.0, 2.0]], SWITCHED: [[1.0, 2.0]], IN_TURN: [[1.0, 2.002]]},
            "bytes": {
                JOINT: {"_allgather_base_": 100, "allreduce_": 7, "collectives": 3},
                SWITCHED: {"_allgather_base_": 200, "allreduce_": 7, "collectives": 6},
                IN_TURN: {"_allgather_base_": 200, "allreduce_": 7, "collectives": 6},
            },
        }

    def shared(factor: float) -> dict[str, Any]:
        came = {"create": [factor], "save": [factor], "remove": [factor]}
        return {
            "seconds": {"1": [[9.0, factor]], "32": [[9.0, 1.1 * factor]], "tuning=Lora": [[9.0, factor]]},
            "comings": {"32": came, "1": came},
        }

    found = {
        "turns": [rank(1.0), rank(2.0)],
        "share": [shared(1.0), shared(0.5)],
        "products": {"float32": {"grouped": [0.001], "loop": [0.002]}},
    }
    made = tenants.summary(found)
    assert made["step_s"][JOINT]["median"] == 2.0, "of the slowest rank"
    assert made["loss_difference"][IN_TURN] == pytest.approx(0.001, rel=0.01)
    kept = tenants.limits(made, 2)
    assert [limit.value for limit in kept] == [0.25, 2.0, 1.0, pytest.approx(1.1)]
    assert [limit.verdict for limit in kept] == ["pass", "FAIL", "pass", "pass"]
    results = {
        "date": "today",
        "command": "none",
        "commit": "none",
        "machine": machine(),
        "model": "tiny",
        "ranks": 2,
        "job": asdict(job("")),
        "shared_tokens": 32,
        "products": "2 tenants",
        "minutes": 1.0,
        "limits": [vars(limit) | {"verdict": limit.verdict} for limit in kept],
        "summary": made,
    }
    text = "\n".join(tenants.lines(results))
    assert "| step / PEFT's set_adapter | 0.250 | 0.5 | pass |" in text
    assert "| 32 tenants | 1100.0 | 1100.0 .. 1100.0 | 1.100 | 1.100 .. 1.100 |" in text
    assert "| float32 | 1.00 | 2.00 | 0.500 |" in text
    json.dumps(results)
