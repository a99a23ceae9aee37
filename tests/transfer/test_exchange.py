"""Boxes handed between processes arrive bitwise, within the staging budget, and nobody is left waiting."""

import pytest
from tests.support.world import require_same_error
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


@pytest.mark.parametrize("budget", [1024, 8], ids=["one round", "several rounds"])
def test_a_failure_after_a_round_is_raised_on_all_ranks(worlds, budget):
    errors = worlds(2).run(transfers.receive_without_memory, budget)
    require_same_error(errors, "CheckpointError", "rank 1: AssertionError: the plan has this rank")


def test_a_buffer_that_cannot_be_copied_is_an_error_on_all_ranks(worlds):
    errors = worlds(2).run(transfers.copy_without_memory)
    require_same_error(errors, "CheckpointError", "rank 1: out of memory (none is left). See docs/out_of_memory.md")
