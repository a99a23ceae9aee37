"""The base that banks of these tests are on."""

from pathlib import Path

import pytest
from tests.bank import banking


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return banking.save_base(tmp_path_factory.mktemp("base"))
