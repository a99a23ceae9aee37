"""The library of the simulated accelerator, built before the first test that needs it."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def library() -> Path:
    from tests.accelerator.build import build, compiler

    if compiler() is None:
        pytest.skip("no C++ compiler for the simulated accelerator (set CXX, or install g++)")
    return build()
