"""Bytes from every rank to every other, by collectives and through windows."""

from __future__ import annotations

import pytest
from tests.execution import carrying

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(("way", "carrier"), [("windows", "_ThroughWindows"), ("collectives", "_ByCollective")])
def test_what_is_packed_arrives_round_by_round(worlds, way, carrier):
    assert worlds(3).run(carrying.carried, way) == [(carrier, [])] * 3


@pytest.mark.parametrize("where", ["absent", "other", "size"])
def test_where_one_rank_cannot_look_into_a_window_none_does(worlds, where):
    assert worlds(3).run(carrying.looked_into, where) == [False] * 3


def test_ranks_of_one_machine_look_into_each_other(worlds):
    assert worlds(3).run(carrying.looked_into, "") == [True] * 3
