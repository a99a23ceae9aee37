"""The benchmark of many LoRAs, on a tiny model."""

from pathlib import Path

import pytest
from benchmarks import tenants
from benchmarks.checkpoints import write
from benchmarks.tenancy import JOINT, SWITCHED, TenancyJob, share, take_products, take_turns
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
