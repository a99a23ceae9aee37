"""Checkpoints that many tests share."""

from pathlib import Path

import pytest
import torch
from tests.models import reference


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.save_tiny(tmp_path_factory.mktemp("tied") / "model")


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.save_tiny(tmp_path_factory.mktemp("untied") / "model", tied=False)


@pytest.fixture(scope="session")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In bfloat16, with biases."""
    folder = tmp_path_factory.mktemp("half") / "model"
    return reference.save_tiny(folder, dtype=torch.bfloat16, attention_bias=True)


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.save_experts(tmp_path_factory.mktemp("experts") / "model")
