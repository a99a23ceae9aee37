"""Integers as compressed-tensors packs them: what it unpacks comes up, and what is half there is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.quantized import quantizing
from tests.quantized.quantizing import E2M1, in_words
from torch import nn

import shardwise
from shardwise.core import untrusted

QUIET = shardwise.options.LoadOptions(progress=False)


def folder_of(tmp_path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    save_file({key: value.contiguous() for key, value in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return tmp_path


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"weights": weights, "format": form}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


def loaded(folder: Path, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = nn.ModuleDict({"m": nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)})
    shardwise.load(model, folder, options=QUIET)
    return model["m"].weight.detach()


@pytest.mark.parametrize(
    ("bits", "packed", "zeros", "sixteenths"),
    [
        (4, [[55924], [475627], [964690]], 2913, [[3, 6, 9, 12, -1], [10, 16, -10, -4, 2], [-27, -18, -9, 0, 9]]),
        (
            8,
            [[286133000, 5908], [404034063, 7707], [521935126, 9506]],
            722433,
            [[7, 10, 13, 16, 19, 22], [18, 24, 30, 36, 42, 48], [33, 42, 51, 60, 69, 78]],
        ),
    ],
)
def test_rows_that_do_not_fill_their_words(tmp_path, bits, packed, zeros, sixteenths):
    """Made with compressed-tensors 0.20 (``PackedQuantizationCompressor``), and unpacked by it."""
    wanted = torch.tensor(sixteenths) / 16
    tensors = {
        "m.weight_packed": torch.tensor(packed, dtype=torch.int32),
        "m.weight_zero_point": torch.tensor([[zeros]], dtype=torch.int32),
        "m.weight_scale": torch.arange(1, 4)[:, None] / 16,
        "m.weight_shape": torch.tensor(wanted.shape),
    }
    config = compressed("pack-quantized", num_bits=bits, type="int", strategy="channel", symmetric=False)
    assert torch.equal(loaded(folder_of(tmp_path, tensors, config), wanted.shape), wanted)


FOUR = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 4}
WHOLE = {
    "m.weight_packed": in_words(torch.arange(24).view(2, 12) % 16 - 8),
    "m.weight_scale": torch.ones(2, 3),
    "m.weight_shape": torch.tensor((2, 12)),
}


@pytest.mark.parametrize(
    ("changes", "weights", "told"),
    [
        ({}, {"symmetric": False}, "m.weight: m.weight_zero_point is missing, and quantization_config requires it"),
        ({}, {"actorder": "group"}, "m.weight: m.weight_g_idx is missing, and quantization_config requires it"),
        ({"weight_zero_point": torch.ones(2, 3, dtype=torch.int32)}, {}, r"needs \(1, 12\)"),
        ({"weight_zero_point": torch.ones(3, 3, dtype=torch.int8)}, {}, r"m.weight needs \(2, 3\)"),
        ({"weight_g_idx": torch.ones(11, dtype=torch.int32)}, {}, "an integer for each of 12 columns"),
        ({"weight_g_idx": torch.full((12,), 3, dtype=torch.int32)}, {}, "m.weight_g_idx: .*groups are 3 to 3"),
        ({"weight_g_idx": torch.full((12,), -1)}, {}, "m.weight_g_idx: .*groups are -1 to -1"),
        ({"weight_shape": torch.tensor((2, 17))}, {}, r"m.weight_shape says \(2, 17\)|needs \(2, 5\)"),
        ({"weight_shape": torch.tensor((2, -12))}, {}, "m.weight_scale has the shape"),
        ({"weight_shape": torch.tensor(())}, {}, "not the sizes of a tensor|m.weight_scale has the shape"),
        ({"weight_shape": torch.ones(3)}, {}, "m.weight_shape is F32 .3,., not the sizes of a tensor"),
        ({"weight": torch.ones(2, 12)}, {}, "m.weight is stored twice, as numbers and as m.weight_packed"),
        ({}, {"actorder": "other"}, "is quantized in a way that is not supported .*actorder"),
    ],
)
def test_what_does_not_go_together(tmp_path, changes, weights, told):
    tensors = WHOLE | {f"m.{key}": value for key, value in changes.items()}
    config = compressed("pack-quantized", **FOUR, **weights)
    with pytest.raises(shardwise.ShardwiseError, match=told):
        loaded(folder_of(tmp_path, tensors, config), (2, 12))


@pytest.mark.parametrize(
    ("apply", "told"),
    [([{"location": "weight_input"}], ""), ([{"location": "input"}], "transforms of input in"), (1, "an invalid")],
)
def test_transforms_in_the_forward_pass_are_refused(tmp_path, apply, told):
    """QuIP and SpinQuant rotate activations there. Those of weights are merged into what is stored."""
    config = compressed("pack-quantized", **FOUR)
    config["transform_config"] = {"config_groups": {"v": {"type": "hadamard", "apply": apply}}}
    folder = folder_of(tmp_path, WHOLE, config)
    if not told:
        loaded(folder, (2, 12))
        return
    with pytest.raises(shardwise.ConfigError, match=f"{told} transform_config"):
        loaded(folder, (2, 12))


NVFP4 = compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)


def nvfp4() -> dict[str, torch.Tensor]:
    return {
        "m.weight_packed": torch.arange(32, dtype=torch.uint8).view(2, 16) * 7,
        "m.weight_scale": torch.tensor([[1.0, 2.0], [3.0, 0.5]]).to(torch.float8_e4m3fn),
        "m.weight_global_scale": torch.tensor([2.0]),
    }


def test_two_in_a_byte_that_has_a_sign(tmp_path):
    tensors = nvfp4()
    packed = tensors["m.weight_packed"]
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    scales = (tensors["m.weight_scale"].float() / 2).repeat_interleave(16, 1)
    tensors["m.weight_packed"] = packed.view(torch.int8)
    folder = folder_of(tmp_path, tensors, NVFP4)
    assert torch.equal(loaded(folder, (2, 32)), torch.tensor(E2M1)[codes.long()] * scales)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("weight_scale", torch.full((2, 2), 448.0).to(torch.float8_e5m2), "scales of F8_E5M2 are not supported"),
        ("weight_scale", torch.full((2, 2), torch.nan).to(torch.float8_e4m3fn), "m.weight_scale: .*a scale is NaN"),
        ("weight_global_scale", torch.zeros(1), "m.weight_global_scale: .*the scale of the whole tensor is 0.0"),
        ("weight_global_scale", torch.full((1,), torch.inf), "m.weight_global_scale: .*whole tensor is inf"),
        ("weight", torch.ones(2, 32), "m.weight is stored twice, as numbers and as m.weight_packed"),
    ],
)
def test_scales_that_are_none(tmp_path, key, value, told):
    with pytest.raises(shardwise.FormatError, match=told):
        loaded(folder_of(tmp_path, nvfp4() | {f"m.{key}": value}, NVFP4), (2, 32))


SHAPE = torch.Size((24, 48))


def load_layers(
    folder: Path, layers: dict[str, quantizing.Made], config: dict[str, Any], **files: Any
) -> list[str]:
    """Write and load layers by name (``block.layer``). Return the names of those with other numbers."""
    stored = {f"{name}.{part}": value for name, made in layers.items() for part, value in made.stored.items()}
    blocks: dict[str, nn.ModuleDict] = {}
    for name, made in layers.items():
        block, _, layer = name.partition(".")
        rows, columns = made.numbers.shape
        blocks.setdefault(block, nn.ModuleDict())[layer] = nn.Linear(columns, rows, bias=False, device="meta")
    folder_of(folder, stored, config)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    model = nn.ModuleDict(blocks)
    shardwise.load(model, folder, options=QUIET)
    return [
        name for name, made in layers.items() if not torch.equal(model.get_submodule(name).weight, made.numbers)
    ]


def int8_words(shape: torch.Size, seed: int) -> quantizing.Made:
    numbers = torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed))
    scales = torch.rand((shape[0], shape[1] // 16), generator=torch.Generator().manual_seed(seed + 1))
    stored = {"weight_packed": in_words(numbers, 8), "weight_scale": scales, "weight_shape": torch.tensor(shape)}
    return quantizing.Made(stored, numbers.float() * scales.repeat_interleave(16, 1))


def fp8_squares(shape: torch.Size, seed: int, size: int = 16, *, spread: bool = False) -> quantizing.Made:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn)
    counts = [-(-length // size) for length in shape]
    scales = torch.rand(counts, generator=torch.Generator().manual_seed(seed + 1)) + 0.01
    numbers = quantizing.by_global_index(values, scales, (size, size))
    return quantizing.Made(
        {"weight": values, "weight_scale": scales[:, None, :, None] if spread else scales}, numbers
    )


def group(form: str | None, bits: int, kind: str, strategy: str, *targets: str, **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, **weights}
    return {"targets": list(targets), "weights": weights, "format": form, "input_activations": None}


GROUPS = [
    group("float-quantized", 8, "float", "channel", "Linear"),
    group("float-quantized", 8, "float", "block", "re:.*lora_", "a.square", block_structure=[16, 16]),
    group("pack-quantized", 4, "int", "group", "re:b[.].*", group_size=8),
    group("pack-quantized", 8, "int", "group", "re:.*", "b.eight", group_size=16),
    group("nvfp4-pack-quantized", 4, "float", "tensor_group", "re:c.*fp4$", group_size=8),
    {"targets": ["Attention"], "weights": None, "input_activations": {"num_bits": 8, "type": "float"}},
]


def mixed(groups: list[dict[str, Any]]) -> dict[str, Any]:
    named = {f"group_{number}": found for number, found in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": named}


def test_several_forms_in_one_checkpoint(tmp_path):
    """What is stored decides, then the closest target of a module, then the shapes."""
    layers = {
        "a.rows": quantizing.fp8_rows(SHAPE, 0),
        "a.square": fp8_squares(SHAPE, 2),
        "b.four": quantizing.int4_groups(SHAPE, 4),
        "b.eight": int8_words(SHAPE, 6),
        "c.fp4": quantizing.nvfp4(SHAPE, 8),
        "c.eight": int8_words(SHAPE, 10),
    }
    assert load_layers(tmp_path, layers, mixed(GROUPS)) == []


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        # Nothing names the layer, and 48 columns are 3 groups of 16 and of 22.
        (
            [group("pack-quantized", 4, "int", "group", "x", group_size=size) for size in (16, 22)],
            "fits 2 of the 2",
        ),
        ([group("pack-quantized", 4, "int", "group", "x", group_size=size) for size in (8, 48)], "fits 0 of the 2"),
        ([group("float-quantized", 8, "float", "channel", "re:("), GROUPS[2]], r"the target 're:\('"),
        ([{**GROUPS[2], "targets": "Linear"}, GROUPS[0]], "with targets 'Linear'"),
        ([GROUPS[-1], GROUPS[-1]], "compressed-tensors without weights"),
    ],
)
def test_several_forms_that_do_not_say_which(tmp_path, groups, told):
    layers = {"b.four": quantizing.int4_groups(SHAPE, 0)}
    layers["b.four"].stored["weight_scale"] = torch.ones(24, 3)
    with pytest.raises(shardwise.ShardwiseError, match=told):
        load_layers(tmp_path, layers, mixed(groups))


def test_targets_are_tried_on_the_names_of_modules(tmp_path, monkeypatch):
    """The pattern is quick for each stored name, and endless for that of the module."""
    monkeypatch.setattr(untrusted, "_MATCHING_S", 1)
    layers = {"a." + "a" * 60: quantizing.int4_groups(SHAPE, 0)}
    groups = [group("pack-quantized", 4, "int", "group", "re:(?!.*weight)a.(a|aa)+b", group_size=8), GROUPS[3]]
    with pytest.raises(shardwise.ShardwiseError, match="quantization_config.targets"):
        load_layers(tmp_path, layers, mixed(groups))


PRODUCER = {"producer": {"name": "modelopt", "version": "0.44.0"}}
LAYERS = {
    "a.tensor": {"quant_algo": "FP8"},
    "a.square": {"quant_algo": "FP8_PB_WO", "group_size": 16},
    "b": {"quant_algo": "W4A16_NVFP4", "group_size": 8},
}


def tensor_fp8(seed: int) -> quantizing.Made:
    made = quantizing.fp8_tensor(SHAPE, seed)
    return quantizing.Made(
        {"weight": made.stored["weight"], "weight_scale": made.stored["qscale_weight"]}, made.numbers
    )


@pytest.mark.parametrize("is_beside", [False, True], ids=["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("kind", ["blocks", "mixed"])
def test_modelopt(tmp_path, kind, is_beside):
    """Scales of blocks have four dimensions, and blocks 128 rows and columns, or ``group_size``."""
    if kind == "blocks":
        layers = {"a.square": fp8_squares(torch.Size((130, 132)), 0, 128, spread=True)}
        settings: dict[str, Any] = {"quant_algo": "fp8_pb_wo"}
    else:
        layers = {"a.tensor": tensor_fp8(0), "a.square": fp8_squares(SHAPE, 2, spread=True)}
        layers["b.fp4"] = quantizing.nvfp4(SHAPE, 4, divides=False)
        settings = {"quant_algo": "MIXED_PRECISION", "quantized_layers": LAYERS}
    if not is_beside:
        assert load_layers(tmp_path, layers, {"quant_method": "modelopt", **settings}) == []
        return
    beside = {**PRODUCER, "quantization": settings}
    config = {"quant_method": "modelopt", "quant_algo": settings["quant_algo"], "ignore": []}
    assert load_layers(tmp_path, layers, config, hf_quant_config=beside) == []


def test_modelopt_of_an_unknown_layer(tmp_path):
    layers = {"a.tensor": tensor_fp8(0)}
    settings = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.tensor": {"quant_algo": "NVFP4_AWQ"}}}
    with pytest.raises(shardwise.ConfigError, match="modelopt's NVFP4_AWQ"):
        load_layers(tmp_path, layers, {"quant_method": "modelopt", **settings})
