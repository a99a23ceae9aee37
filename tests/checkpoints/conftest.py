"""A training that has been saved."""

import pytest
from tests.checkpoints import on_ranks


@pytest.fixture(scope="session")
def run(worlds, tmp_path_factory):
    """Saved by two ranks after three steps; tests change copies of it."""
    folder = tmp_path_factory.mktemp("run")
    worlds(2).run(on_ranks.train_and_save, str(folder), 3)
    return folder
