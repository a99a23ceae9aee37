"""The benchmark of the Trainer, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import trainer
from benchmarks.place import machine
from benchmarks.training import SMALL
from tests.integrations.doors import require_doors

require_doors()


@pytest.mark.slow
@pytest.mark.distributed
def test_both_loops_do_the_same(tmp_path: Path) -> None:
    shape = SMALL.tiny()
    job = trainer.Job(str(trainer.write(shape, tmp_path)), 3, 1, 8, shape.config["vocab_size"])
    found = trainer.take_turns(job, 2, 2, 100)
    for rank in found:
        assert len(rank[trainer.OWN]["seconds"]) == len(rank[trainer.TRAINER]["seconds"]) == 4
        assert rank[trainer.OWN]["losses"] == pytest.approx(rank[trainer.TRAINER]["losses"], rel=1e-5)
        for losses in (rank[trainer.OWN]["losses"], rank[trainer.TRAINER]["losses"]):
            assert losses[:3] == losses[3:]


def test_the_page_and_the_verdict() -> None:
    own = {"seconds": [2.0, 4.0, 3.0], "losses": [1.0, 1.0]}
    theirs = {"seconds": [3.0, 3.0, 9.0], "losses": [1.0, 1.001]}
    quick = {"seconds": [1.0, 1.0, 1.0], "losses": [1.0, 1.0]}
    made = {"tiny": trainer.summary([{trainer.OWN: own, trainer.TRAINER: theirs}] * 2)}
    assert made["tiny"]["step_ratio"] == 1.0
    assert made["tiny"]["loss_difference"] == pytest.approx(0.001, rel=0.01)
    made["other"] = trainer.summary([{trainer.OWN: quick, trainer.TRAINER: own}])
    kept = trainer.limits(made)
    assert [(limit.value, limit.verdict) for limit in kept] == [(1.0, "pass"), (3.0, "FAIL")]
    results = {
        "date": "today",
        "commit": "none",
        "minutes": 1.0,
        "command": "none",
        "machine": machine(),
        "ranks": 2,
        "rows": 1,
        "tokens": 8,
        "summary": made,
        "limits": [vars(limit) | {"verdict": limit.verdict} for limit in kept],
    }
    text = "\n".join(trainer.lines(results))
    assert "| other: step of the Trainer / own loop | 3.000 | 1.05 | FAIL |" in text
    json.dumps(results)
