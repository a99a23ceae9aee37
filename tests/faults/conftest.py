"""Checkpoints for worlds that something happens to."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests import zoo
from tests.loading.on_ranks import Plain
from tests.small_checkpoints import small_qwen3


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory) -> str:
    """A checkpoint of several files."""
    return str(zoo.save_original(small_qwen3(), tmp_path_factory.mktemp("qwen3"), max_shard_size="30KB"))


@pytest.fixture(scope="session")
def plain(tmp_path_factory) -> str:
    """A checkpoint of a module of nobody's library."""
    directory: Path = tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    save_file(Plain().state_dict(), directory / "model.safetensors")
    return str(directory)
