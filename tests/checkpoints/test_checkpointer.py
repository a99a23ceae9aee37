"""Saved on some ranks, restored on others: the same bits."""

from __future__ import annotations

import pytest
from tests.checkpoints import on_ranks
from tests.checkpoints.tiny import differences

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_goes_on_on_other_ranks(worlds, tmp_path, mode):
    saved = worlds(4).run(on_ranks.train_and_save, str(tmp_path), 3, mode, "flat", 2)
    for size in (2, 3):
        for rank, found in enumerate(worlds(size).run(on_ranks.restore_and_train, str(tmp_path), 2)):
            assert differences(found[0], saved[0][0]) == []
            assert found[1] == pytest.approx(saved[0][1], abs=1e-6)
