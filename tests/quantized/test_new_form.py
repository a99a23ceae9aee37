"""A quantized form added in one file, and a line in each of two tables."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardwise
from shardwise.core.errors import ConfigError
from shardwise.files.open_checkpoint import QUANTIZED
from shardwise.files.stored_tensors import NODES


def stored(folder: Path, **config: object) -> torch.Tensor:
    codes = torch.randint(0, 256, (6, 10), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    save_file({"weight": codes}, folder / "model.safetensors")
    told = {"quantization_config": {"quant_method": "own", **config}}
    (folder / "config.json").write_text(json.dumps(told))
    return codes.float()


def test_a_model_is_loaded_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes, model = stored(tmp_path, offset=128), nn.Linear(10, 6, bias=False)
    with pytest.raises(ConfigError, match="not supported .quant_method 'own'"):
        shardwise.load(model, tmp_path)
    monkeypatch.setitem(QUANTIZED, "own", "tests.quantized.own_form:form_of")
    with pytest.raises(ConfigError, match="'offset bytes': has no entry in NODES"):
        shardwise.load(model, tmp_path)
    monkeypatch.setitem(NODES, "offset bytes", "tests.quantized.own_form:numbers")
    assert shardwise.load(model, tmp_path).computed == ("weight",)
    assert torch.equal(model.weight, codes - 128)
    stored(tmp_path)
    with pytest.raises(ConfigError, match="wants an offset"):
        shardwise.load(model, tmp_path)
