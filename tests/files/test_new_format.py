"""A format added in one file, and a line in the table."""

import json
from pathlib import Path

import pytest
import torch
from tests.files import own_format
from tests.support.memory_storage import MemoryReader
from torch import nn

import shardwise
from shardwise.core.errors import FormatError
from shardwise.files import open_checkpoint


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_checkpoint, "FORMATS", [*open_checkpoint.FORMATS, "tests.files.own_format:FORMAT"])


def listed(model: nn.Module) -> dict[str, bytes]:
    lines, content = [], b""
    for key, tensor in model.state_dict().items():
        start = len(content)
        content += tensor.numpy().tobytes()
        lines.append(json.dumps([key, "F32", list(tensor.shape), start, len(content)]))
    return {own_format.LIST: "\n".join(lines).encode(), own_format.BYTES: content}


@pytest.mark.usefixtures("known")
def test_a_model_is_loaded_from_it(tmp_path: Path) -> None:
    stored, model = nn.Linear(5, 3), nn.Linear(5, 3)
    files = listed(stored)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    report = shardwise.load(model, tmp_path)
    assert torch.equal(model.weight, stored.weight)
    assert report.files == (own_format.BYTES,)
    assert open_checkpoint.open_checkpoint(tmp_path, weights_name=own_format.LIST).layout == "listed bytes"
    with pytest.raises(FormatError, match="weight ends at byte 60 of 10"):
        open_checkpoint.open_checkpoint(MemoryReader({**files, own_format.BYTES: b" " * 10}))


@pytest.mark.usefixtures("known")
def test_errors_speak_of_it() -> None:
    with pytest.raises(FormatError, match=r"\.metadata, tensors\.list\n(.*\n)*  tensors\.bytes lacks its"):
        open_checkpoint.open_checkpoint(MemoryReader({own_format.BYTES: b""}))
    with pytest.raises(FormatError, match=r"a file that ends in .*\.bin\.index\.json or tensors\.list"):
        open_checkpoint.open_checkpoint(MemoryReader({}), weights_name="x.gguf")


def test_without_the_line_it_is_not_there() -> None:
    with pytest.raises(FormatError, match="no weights found"):
        open_checkpoint.open_checkpoint(MemoryReader(listed(nn.Linear(5, 3))))
