"""What a storage takes that is not ours: one class. The suite says whether it holds, and verbs read from it."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.harness.storage_suite import MakeReader, StorageReaderSuite
from tests.storage.zipped import ZipReader
from torch import nn

import shardwise
from shardwise.storage.reading.opening import SCHEMES, UrlScheme, open_storage


class TestZipReader(StorageReaderSuite):
    @pytest.fixture
    def make_reader(self, tmp_path: Path) -> MakeReader:
        numbers = iter(range(1_000))

        def make(files: Mapping[str, bytes]) -> ZipReader:
            path = tmp_path / f"{next(numbers)}.zip"
            with zipfile.ZipFile(path, "w") as archive:
                for name, content in files.items():
                    archive.writestr(name, content)
            return ZipReader(path)

        return make


def test_a_model_is_loaded_from_it(tmp_path: Path) -> None:
    stored, model = nn.Linear(5, 3), nn.Linear(5, 3)
    save_file(dict(stored.state_dict()), tmp_path / "model.safetensors")
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.write(tmp_path / "model.safetensors", "model.safetensors")
    with ZipReader(tmp_path / "model.zip") as reader:
        shardwise.load(model, reader)
    assert torch.equal(model.weight, stored.weight)
    assert torch.equal(model.bias, stored.bias)


def test_a_line_in_the_table_has_urls_read_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMES, "zipped", UrlScheme("tests.storage.zipped:open_zipped"))
    stored, model = nn.Linear(5, 3), nn.Linear(5, 3)
    save_file(dict(stored.state_dict()), tmp_path / "model.safetensors")
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.write(tmp_path / "model.safetensors", "model.safetensors")
    shardwise.load(model, f"zipped://{tmp_path}/model.zip")
    assert torch.equal(model.weight, stored.weight)
    with pytest.raises(shardwise.errors.StorageError, match="takes no storage_options; leave .'key'. out"):
        open_storage(f"zipped://{tmp_path}/model.zip", storage_options={"key": "x"})
