"""Models and ranks for trainings by the Trainer and TRL's. A module says what its ranks have imported before."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integrations.runs import write
from tests.support.local_ranks import LocalRanks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def one() -> Iterator[LocalRanks]:
    with LocalRanks(1, is_forked=True) as found:
        yield found
