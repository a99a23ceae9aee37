"""Codes without a config that says what they stand for are refused, whatever is consented to."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Gemma3Config

import shardwise
from shardwise.core.consents import Ignore, Initialize
from shardwise.loading.meta_model import load_config
from shardwise.models import pretrained
from shardwise.saving.merge_steps import config_content, parse_config

QUIET = shardwise.options.LoadOptions(progress=False)
FP8 = {"quant_method": "fp8"}
EVERYTHING = {"on_unexpected": Ignore(), "on_missing": Initialize(("*",))}


def folder_of(tmp_path: Path, tensors: dict[str, torch.Tensor], **files: Any) -> Path:
    save_file({f"m.{key}": value.contiguous() for key, value in tensors.items()}, tmp_path / "model.safetensors")
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


def model_of() -> nn.ModuleDict:
    return nn.ModuleDict({"m": nn.Linear(4, 2, bias=False)})


def float8() -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(8.0).view(2, 4).to(torch.float8_e4m3fn), "weight_scale": torch.tensor(0.5)}


def bytes_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(2, 4, dtype=dtype)


@pytest.mark.parametrize("consent", [{}, EVERYTHING], ids=["none", "everything"])
@pytest.mark.parametrize(
    ("tensors", "scale"),
    [
        (float8(), "weight_scale"),
        ({"weight": bytes_of(torch.int8), "scale": torch.ones(2)}, "scale"),
        ({"weight": bytes_of(torch.int8), "SCB": torch.ones(2)}, "SCB"),
        ({"weight": bytes_of(torch.uint8), "weight_scale_inv": torch.ones(2)}, "weight_scale_inv"),
    ],
)
def test_codes_whose_scales_nothing_reads(tmp_path, tensors, scale, consent):
    told = rf"m\.weight: stored in \w+, and its scales, m\.{scale}, would not be read"
    with pytest.raises(shardwise.KeyMismatchError, match=told) as caught:
        shardwise.load(model_of(), folder_of(tmp_path, tensors), options=QUIET, **consent)
    assert "on_unexpected" not in str(caught.value)
    assert "quantization_config" in str(caught.value)


def test_scales_are_not_left_out_either_where_the_model_is_of_floats_of_8_bits(tmp_path):
    with pytest.raises(shardwise.KeyMismatchError, match="would not be read"):
        shardwise.load(
            model_of().to(torch.float8_e4m3fn), folder_of(tmp_path, float8()), options=QUIET, **EVERYTHING
        )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_narrow_numbers_without_scales_are_numbers(tmp_path, dtype):
    model = model_of()
    shardwise.load(model, folder_of(tmp_path, {"weight": torch.full((2, 4), 2.0).to(dtype)}), options=QUIET)
    assert torch.equal(model["m"].weight.detach(), torch.full((2, 4), 2.0))


@pytest.mark.parametrize("consent", [{}, {"on_unexpected": Ignore()}], ids=["none", "unexpected"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_in_a_checkpoint_that_is_quantized_they_are_not(tmp_path, dtype, consent):
    folder = folder_of(tmp_path, {"weight": bytes_of(dtype)}, config={"quantization_config": FP8})
    words = r"without scales, and the checkpoint is quantized \(fp8\)"
    with pytest.raises(shardwise.KeyMismatchError, match=words):
        shardwise.load(model_of(), folder, options=QUIET, **consent)


def test_codes_under_names_of_their_own(tmp_path):
    tensors = {"weight_packed": torch.ones(2, 1, dtype=torch.int32), "weight_scale": torch.ones(2, 1)}
    words = r"m\.weight: stored as codes, in m\.weight_packed"
    with pytest.raises(shardwise.KeyMismatchError, match=words) as caught:
        shardwise.load(model_of(), folder_of(tmp_path, tensors), options=QUIET)
    assert not re.search("on_(missing|unexpected|mismatched)", str(caught.value))


NESTED = {"config": {"text_config": {"quantization_config": FP8}}}
MODELOPT = {
    "config": {},
    "hf_quant_config": {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
}


@pytest.mark.parametrize("files", [NESTED, MODELOPT], ids=["of a part", "modelopt"])
def test_other_places_of_the_config(tmp_path, files):
    model = model_of()
    shardwise.load(model, folder_of(tmp_path, float8(), **files), options=QUIET)
    assert torch.equal(model["m"].weight.detach(), torch.arange(8.0).view(2, 4) / 2)


def test_parts_with_different_metadata_are_refused(tmp_path):
    files = {"config": {"quantization_config": {"quant_method": "mxfp4"}, **NESTED["config"]}}
    with pytest.raises(shardwise.ConfigError, match="several quantization_configs that differ"):
        shardwise.load(model_of(), folder_of(tmp_path, float8(), **files), options=QUIET)


def test_a_model_of_numbers_is_not_reported_as_quantized(tmp_path):
    config = Gemma3Config()
    config.text_config.quantization_config = FP8
    config.save_pretrained(tmp_path)
    assert pretrained.quantized_configs(config) == [config.text_config]
    assert pretrained.quantized_configs(load_config(tmp_path, {})) == []
    assert b"quantization_config" not in config_content(parse_config(tmp_path), dtype=None, untied=False)


class Attention(nn.Linear):
    """With a scale of its own."""

    def __init__(self) -> None:
        super().__init__(4, 2, bias=False)
        self.k_scale = nn.Parameter(torch.zeros(()))


def test_scales_that_a_model_has_are_its_tensors(tmp_path):
    tensors = float8() | {"k_scale": torch.tensor(3.0), "v_scale": torch.tensor(4.0)}
    folder = folder_of(tmp_path, tensors, config={"quantization_config": FP8})
    model = nn.ModuleDict({"m": Attention()})
    report = shardwise.load(model, folder, options=QUIET)
    assert model["m"].k_scale == 3
    assert report.not_loaded == ("m.v_scale",)
    without = model_of()
    assert shardwise.load(without, folder, options=QUIET).not_loaded == ("m.k_scale", "m.v_scale")
    shardwise.save(model, tmp_path / "saved")
    (saved,) = (tmp_path / "saved").glob("*.safetensors")
    assert load_file(saved).keys() == {"m.weight", "m.k_scale"}
