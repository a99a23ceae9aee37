"""accelerate loads what is written here, and what accelerate writes is loaded here: models and optimizers."""

from __future__ import annotations

import pytest
from tests.interchange import trading

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(("size", "number"), [(1, 0), (2, 1), (3, 0)])
@pytest.mark.parametrize("form", trading.THEIR_FORMS)
def test_accelerate_loads_what_is_written(worlds, tmp_path, form, size, number):
    assert worlds(size).run(trading.ours_to_theirs, str(tmp_path), form, number) == [[]] * size


@pytest.mark.parametrize(("size", "number", "child"), [(1, 0, True), (2, 0, False), (3, 1, False), (2, 1, True)])
@pytest.mark.parametrize("form", trading.THEIR_FORMS)
def test_what_accelerate_writes_is_loaded(worlds, tmp_path, form, size, number, child):
    assert worlds(size).run(trading.theirs_to_ours, str(tmp_path), form, number, child) == [[]] * size


@pytest.mark.parametrize("writer", ["accelerate", "shardwise"])
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_another_number_of_ranks_goes_on(worlds, tmp_path, form, writer):
    worlds(3).run(trading.save, str(tmp_path), form, writer)
    assert worlds(2).run(trading.resume, str(tmp_path)) == [[]] * 2
    assert worlds(1).run(trading.resume, str(tmp_path)) == [[]]
    assert trading.resume(str(tmp_path)) == []


def test_no_rank_holds_the_whole(worlds, tmp_path):
    for rank, (arrived, staged, nbytes) in enumerate(worlds(3).run(trading.batches, str(tmp_path))):
        assert max(arrived) <= 8192
        assert max(staged) <= 8192
        assert sum(arrived) == (nbytes if rank == 0 else 0)


def test_one_process_needs_no_group(worlds, tmp_path):
    for form in trading.FORMS:
        folder = tmp_path / form
        folder.mkdir()
        trading.save(str(folder), form, "shardwise")
        assert trading.resume(str(folder)) == []
        assert worlds(1).run(trading.resume, str(folder)) == [[]]
