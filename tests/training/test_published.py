"""Configurations as people have published them, with names and hours of training replaced: see ``published.py``."""

from pathlib import Path

import pytest
import yaml
from tests.integrations.requirements import require_patched_names

require_patched_names()

from tests.training import published  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    published.write_rows(folder)
    return folder


@pytest.mark.parametrize("file", sorted(published.FOLDER.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_published_configuration_trains(folder: Path, tmp_path: Path, file: Path) -> None:
    """On one rank and on two with the same losses and gradients, and TRL's losses where it reads such rows."""
    method = file.stem.partition("-")[0]
    values = published.adapt(yaml.safe_load(file.read_text("utf-8")), method, folder)
    assert published.find_differences(published.run(values, method, tmp_path)) == []
