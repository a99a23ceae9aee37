"""Boxes handed between processes arrive bitwise, within the staging budget, and nobody is left waiting."""

import pytest
from tests.transfer import transfers


@pytest.mark.parametrize(
    ("size", "source_ranks"), [(1, [0]), (2, [1, 1]), (2, [0, 1]), (4, [0, 0, 2, 2]), (2, None), (4, None)]
)
def test_every_dtype_arrives_bitwise(worlds, size, source_ranks):
    for wrong, traffic in worlds(size).run(transfers.transfer, source_ranks, 1024):
        assert wrong == []
        assert traffic["staging"] <= 1024


def test_who_has_its_values_sends_nothing(worlds):
    assert [traffic["sent"] for _, traffic in worlds(2).run(transfers.transfer, [0, 1], 256)] == [0, 0]
