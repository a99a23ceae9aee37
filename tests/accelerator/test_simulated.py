"""The simulated accelerator punishes what a GPU may punish."""

import math

import pytest
from tests.accelerator import simulation
from tests.accelerator.ranks import simulated_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def rank(library):
    """One process with the accelerator."""
    with simulated_ranks(1) as ranks:
        yield ranks


def test_who_does_not_wait_reads_poison(rank):
    ((early, late),) = rank.run(simulation.read_too_early)
    assert late == [0, 1, 2, 3]
    assert all(value < -1e8 for value in early)


def test_memory_is_freed_in_the_order_of_its_stream(rank):
    (found,) = rank.run(simulation.freed_too_early, False)
    assert all(map(math.isnan, found))
    assert rank.run(simulation.freed_too_early, True) == [[1, 1, 1, 1]]


def test_what_is_counted(rank):
    (found,) = rank.run(simulation.counts)
    names = ("pageable_to_device", "pageable_to_host", "pinned_to_device", "pinned_to_host", "async_copies")
    assert [found[name] for name in names] == [1, 1, 1, 1, 2]
    assert found["host_waits"] == 5  # the mask counts twice: its nonzero, and the index
    assert found["pinned_bytes"] == 2048


def test_a_forked_process_cannot_use_it(rank):
    assert rank.run(simulation.use_in_a_fork) == [7]
