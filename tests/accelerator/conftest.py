"""The library of the simulated accelerator, built before the first test that needs it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.accelerator.ranks import simulated_ranks
from tests.support.local_ranks import LocalRanks


@pytest.fixture(scope="session")
def library() -> Path:
    from tests.accelerator.build import build, compiler

    if compiler() is None:
        pytest.skip("no C++ compiler for the simulated accelerator (set CXX, or install g++)")
    return build()


@pytest.fixture(scope="package")
def two_ranks(library: Path) -> Iterator[LocalRanks]:
    """For modules that need no ranks of their own."""
    with simulated_ranks(2) as found:
        yield found
