"""Weights are put into 4 bits by the ranks that hold their rows, as the weights whole would be."""

import re

import pytest
from tests.quantized import four_bit_node


@pytest.mark.parametrize("budget", [1 << 14, 1 << 22])
def test_one_process(tmp_path, budget):
    four_bit_node.store(tmp_path)
    assert four_bit_node.go_through(str(tmp_path), budget) == []


BAD = (
    r"(rank 1: )?Stack\(experts.0.weight, .*experts.4.weight\): quantizing: row \(3, 23\) "
    "has values that are not finite in BF16, and cannot be put into 4 bits. .*"
)


def test_a_row_that_is_not_finite_is_named(tmp_path):
    four_bit_node.store(tmp_path, ("experts.3.weight", 23))
    assert re.fullmatch(BAD, four_bit_node.fault_of(str(tmp_path)))


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 3])
def test_ranks(worlds, tmp_path, size):
    good, bad = tmp_path / "good", tmp_path / "bad"
    for folder, row in ((good, None), (bad, ("experts.3.weight", 23))):
        folder.mkdir()
        four_bit_node.store(folder, row)
    assert worlds(size).run(four_bit_node.go_through, str(good), 1 << 16) == [[]] * size
    faults = worlds(size).run(four_bit_node.fault_of, str(bad))
    assert len(set(faults)) == 1
    assert re.fullmatch(BAD, faults[0])
