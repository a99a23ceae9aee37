"""Bases that adapters are merged into."""

from pathlib import Path

import pytest
from tests import zoo
from tests.small_checkpoints import _quiet, changed, mixtral, qwen3, small_qwen3, tied_qwen3

__all__ = ["_quiet", "changed", "mixtral", "qwen3", "tied_qwen3"]


def save_base(folder: Path, **changes) -> Path:
    zoo.save_original(small_qwen3(**changes), folder)
    (folder / "tokenizer_config.json").write_text('{"of": "the base"}')
    (folder / "vocab.txt").write_text("base")
    (folder / "training_args.bin").write_bytes(b"of no concern")
    return folder


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def tied(tmp_path_factory) -> Path:
    return save_base(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)
