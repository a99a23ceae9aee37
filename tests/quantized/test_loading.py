"""Quantized checkpoints come up as numbers, each rank's part by itself: bitwise as by each element's own scale."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tests import zoo
from tests.quantized import quantizing
from tests.quantized.stored_experts import make_gpt_oss
from tests.saving.adapters import tensors_of
from tests.small_checkpoints import small_qwen3
from tests.support.files import change_json
from tests.support.world import agreed, said
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import shardwise
from shardwise.cli import main
from shardwise.files.dequantize import Dequantize

QUIET = shardwise.options.LoadOptions(progress=False)


def write(folder: Path, **changes: object) -> Path:
    return zoo.save_original(small_qwen3(dtype="bfloat16", **changes).bfloat16(), folder, max_shard_size="30KB")


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def quantized(plain, tmp_path_factory):
    return quantizing.folders_of(plain, tmp_path_factory, quantizing.KINDS)


@pytest.mark.parametrize(
    ("kind", "budget"),
    [*((kind, 1 << 14) for kind in quantizing.KINDS), ("fp8 blocks", 1 << 20), ("nvfp4", 1 << 20)],
)
def test_one_process(quantized, kind, budget, tmp_path):
    folder, numbers = quantized(kind)
    assert quantizing.go_through(str(folder), numbers, "flat", budget, str(tmp_path)) == []


@pytest.mark.parametrize(
    ("mesh", "size"),
    [
        ("flat", 3),
        pytest.param("shard1", 2, marks=pytest.mark.slow),
        pytest.param("hsdp", 4, marks=pytest.mark.slow),
    ],
)
def test_ranks(worlds, quantized, tmp_path, mesh, size):
    for kind in quantizing.KINDS:
        folder, numbers = quantized(kind)
        found = worlds(size).run(quantizing.go_through, str(folder), numbers, mesh, 1 << 16, str(tmp_path / kind))
        assert found == [[]] * size, kind


def test_one_scale_of_a_layer_beside_blocks_of_others(quantized, tmp_path):
    folder, numbers = quantized("fp8 blocks")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    scales = load_file(tmp_path / "scales.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    scales[f"{name}_scale_inv"] = torch.tensor([0.5])
    save_file(scales, tmp_path / "scales.safetensors", metadata={"format": "pt"})
    values = tensors_of(tmp_path)[name].float() * 0.5
    model = shardwise.from_pretrained(tmp_path, dtype=torch.float32, options=QUIET)
    assert quantizing.differing(model, {**numbers, name: values}) == []


def test_equal_layers_are_foreseen_once(tmp_path, monkeypatch):
    """However many layers, blocks are asked for as often; and each rank's bytes are those of its blocks."""
    asked: dict[int, int] = {}
    blocks = Dequantize.blocks
    for layers in (2, 5):
        folder = write(tmp_path / str(layers), num_hidden_layers=layers)
        quantizing.quantize(folder, "fp8 blocks")
        calls: list[int] = []

        def counted(self, wanted, max_block_bytes, calls=calls):
            calls.append(max_block_bytes)
            return blocks(self, wanted, max_block_bytes)

        monkeypatch.setattr(Dequantize, "blocks", counted)
        estimate = shardwise.plan(folder, ranks=3, dtype="bfloat16")
        monkeypatch.setattr(Dequantize, "blocks", blocks)
        asked[layers] = len(calls)
        assert len(estimate.ranks) == 3
    assert asked[2] == asked[5] > 0


def test_a_config_that_is_kept_is_not_saved_as_that_of_a_quantized_one(quantized, tmp_path):
    folder, numbers = quantized("fp8 blocks")
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    kept = model.config.quantization_config
    shardwise.load(model, folder, options=QUIET)
    shardwise.save(model, tmp_path / "out")
    assert model.config.quantization_config is kept
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert quantizing.differing(again, numbers) == []


def test_inspect_shows_what_is_stored(quantized):
    folder, _ = quantized("fp8 blocks")
    shown = CliRunner().invoke(main, ["inspect", str(folder), "--json"])
    dtypes = {item["key"]: item["dtype"] for item in json.loads(shown.output)["tensors"]}
    name = "model.layers.0.mlp.up_proj.weight"
    assert (dtypes[name], dtypes[f"{name}_scale_inv"]) == ("F8_E4M3", "F32")


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """Experts as gpt-oss stores them, and the numbers that transformers makes of them."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    make_gpt_oss(folder)
    numbers = load_file(folder / "model.safetensors")
    for key in [key.removesuffix("_blocks") for key in numbers if key.endswith("_blocks")]:
        blocks, scales = (numbers.pop(f"{key}_{part}") for part in ("blocks", "scales"))
        numbers[key] = convert_moe_packed_tensors(blocks, scales).contiguous()
    return folder, numbers


def refusal_of(folder: str) -> str:
    return said(shardwise.from_pretrained, folder)


def test_a_scale_that_is_none_is_the_same_error_on_all_ranks(worlds, quantized, tmp_path):
    folder, _ = quantized("fp8 blocks")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    scales = load_file(tmp_path / "scales.safetensors")
    name = "model.layers.1.mlp.down_proj.weight_scale_inv"
    scales[name][-1, -1] = torch.nan
    save_file(scales, tmp_path / "scales.safetensors", metadata={"format": "pt"})
    told = f"{name}: dequantizing: a scale is NaN or infinite"
    assert told in agreed(worlds(3), refusal_of, str(tmp_path))


def loaded(folder: str, numbers: dict[str, torch.Tensor]) -> list[str]:
    options = shardwise.options.LoadOptions(budget_bytes=1 << 16, progress=False)
    return quantizing.differing(shardwise.from_pretrained(folder, options=options), numbers)


def test_mxfp4_is_as_transformers_has_it(worlds, gpt_oss):
    folder, numbers = gpt_oss
    assert loaded(str(folder), numbers) == []
    assert worlds(3).run(loaded, str(folder), numbers) == [[]] * 3


def test_the_plan_is_of_numbers(quantized, plain):
    folder, _ = quantized("fp8 blocks")
    found, wanted = (shardwise.plan(str(place), ranks=3) for place in (folder, plain))
    assert [rank.shard_bytes for rank in found.ranks] == [rank.shard_bytes for rank in wanted.ranks]
    assert sum(rank.read_bytes for rank in found.ranks) < sum(rank.read_bytes for rank in wanted.ranks)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        *(
            ({"quant_method": method}, f"not supported .quant_method '{method}'.. Load the original weights")
            for method in ("awq", "gptq", "auto-round", "aqlm")
        ),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "not supported .bitsandbytes .*load_in_8bit"),
        ({"quant_method": "fp8", "weight_block_size": [16]}, "is not a list of two sizes"),
        ({"quant_method": "fp8", "weight_block_size": [16, 16]}, "blocks of 16 x 16, needs"),
    ],
)
def test_another_quantizer(quantized, tmp_path, config, told):
    folder, _ = quantized("fp8 blocks")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    change_json(tmp_path / "config.json", quantization_config=config)
    with pytest.raises(shardwise.ShardwiseError, match=told):
        shardwise.from_pretrained(str(tmp_path))


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        ("q_proj.weight_scale_inv", r"q_proj.weight is stored as F8_E4M3, and has no scale"),
        ("q_proj.weight", r"q_proj.weight_scale_inv: the weights of this scale are not stored"),
    ],
)
def test_a_half_of_a_pair(quantized, tmp_path, lost, told):
    folder, _ = quantized("fp8 blocks")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    key = f"model.layers.0.self_attn.{lost}"
    file = tmp_path / index["weight_map"].pop(key)
    tensors = load_file(file)
    del tensors[key]
    save_file(tensors, file, metadata={"format": "pt"})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(shardwise.FormatError, match=told):
        shardwise.from_pretrained(str(tmp_path))
