"""The benchmark of the Trainer, on a tiny model."""

from pathlib import Path

import pytest
from benchmarks import trainer
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
