"""Inconsistent and hostile metadata of quantized checkpoints is refused."""

import json
import struct
from typing import Any

import pytest
from tests.support.memory_storage import MemoryReader

from shardwise.core.errors import ConfigError, FormatError
from shardwise.core.tensors import DType, Form4, numel
from shardwise.files.checkpoint_index import CheckpointIndex, TensorEntry
from shardwise.files.open_checkpoint import dequantize_index, find_form, open_checkpoint

NOTHING = MemoryReader({})


def index_of(*told: tuple[str, DType, tuple[int, ...]]) -> CheckpointIndex:
    entries = {
        key: TensorEntry(key, dtype, shape, "f", 0, numel(shape) * dtype.itemsize) for key, dtype, shape in told
    }
    return CheckpointIndex("here", {"f": 1 << 20}, entries, {}, "single file")


def packed(**weights: Any) -> dict[str, Any]:
    told = {"type": "int", "num_bits": 4, "strategy": "channel", **weights}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": told, "format": "pack-quantized"}},
    }


@pytest.mark.parametrize("dtype", [DType.F32, DType.I64, DType.F16, DType.I8])
def test_integers_are_packed_into_words_of_32_bits_and_nothing_else(dtype: DType) -> None:
    index = index_of(("m.weight_packed", dtype, (8, 8)), ("m.weight_scale", DType.F32, (8, 1)))
    with pytest.raises(FormatError, match=rf"m.weight_packed is stored as {dtype.label} .8, 8., not as I32"):
        find_form(packed()).dequantize(NOTHING, index)


INT8 = packed(num_bits=8, strategy="group", group_size=8)
INT8["config_groups"]["group_0"]["format"] = "int-quantized"


@pytest.mark.parametrize(
    ("config", "dtype", "scales"),
    [({"quant_method": "modelopt", "quant_algo": "NVFP4"}, DType.U8, DType.F8_E4M3), (INT8, DType.I8, DType.F32)],
)
def test_one_number_is_no_matrix_in_blocks(config: dict[str, Any], dtype: DType, scales: DType) -> None:
    told = [("m.weight", dtype, ()), ("m.weight_scale", scales, (1,))]
    if dtype is DType.U8:
        told.append(("m.weight_scale_2", DType.F32, (1,)))
    with pytest.raises(FormatError, match=r"m.weight, \(\) in blocks of"):
        find_form(config).dequantize(NOTHING, index_of(*told))


@pytest.mark.parametrize("dtype", [DType.U8, DType.I8])
def test_blocks_of_microscaling_floats_are_of_32_numbers(dtype: DType) -> None:
    def of(nbytes: int) -> CheckpointIndex:
        return index_of(
            ("m.down_proj_blocks", dtype, (2, 6, 3, nbytes)), ("m.down_proj_scales", DType.U8, (2, 6, 3))
        )

    found = find_form({"quant_method": "mxfp4"}).dequantize(NOTHING, of(16))
    assert found.composed["m.down_proj"].shape == (2, 96, 6)
    for nbytes in (15, 17):
        with pytest.raises(FormatError, match="m.down_proj_blocks is stored as .*, not as blocks of 16 bytes"):
            find_form({"quant_method": "mxfp4"}).dequantize(NOTHING, of(nbytes))


WORDS = [("m.weight_packed", DType.I32, (8, 1)), ("m.weight_scale", DType.F32, (8, 1))]
NVFP4 = [
    ("m.weight", DType.U8, (8, 8)),
    ("m.weight_scale", DType.F8_E4M3, (8, 1)),
    ("m.weight_scale_2", DType.F32, (1,)),
]
MXFP4 = [("m.down_proj_blocks", DType.U8, (2, 6, 3, 16)), ("m.down_proj_scales", DType.U8, (2, 6, 3))]


@pytest.mark.parametrize(
    ("config", "tensors", "offsets"),
    [
        (packed(), WORDS, "m.qzeros"),
        (packed(), WORDS, "m.g_idx"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, NVFP4, "m.weight_zero_point"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, NVFP4, "m.weight_g_idx"),
        ({"quant_method": "mxfp4"}, MXFP4, "m.down_proj_zero_point"),
    ],
)
def test_offsets_that_a_form_does_not_have(
    config: dict[str, Any], tensors: list[tuple[str, DType, tuple[int, ...]]], offsets: str
) -> None:
    find_form(config).dequantize(NOTHING, index_of(*tensors))
    with pytest.raises(FormatError, match=f"{offsets} is not supported for weights in this form"):
        find_form(config).dequantize(NOTHING, index_of(*tensors, (offsets, DType.I32, (8, 1))))


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "modelopt", "quantization": ["FP8"]},
        {"quant_method": "modelopt", "quantization": "FP8"},
        packed(num_bits=4.0),
        packed(num_bits=True, type="float"),
        packed(strategy="group", group_size=True),
        {"quant_method": "fp8", "weight_block_size": [True, 128]},
    ],
)
def test_an_invalid_config_is_an_error(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is not supported|is not a list of two sizes"):
        find_form(config)


def in_four_bits(state: dict[str, Any], dtype: str = "U8") -> MemoryReader:
    """Two rows of 64 in NF4, with scales that are nested."""
    width = {"U8": 1, "F4": 2}[dtype]
    told = json.dumps(state).encode()
    parts = {
        "m.weight": (dtype, [64 * width, 1], bytes(64)),
        "m.weight.absmax": ("U8", [2], bytes(2)),
        "m.weight.quant_map": ("F32", [16], struct.pack("<16f", *Form4.NF4.codebook)),
        "m.weight.nested_absmax": ("F32", [1], struct.pack("<f", 1.0)),
        "m.weight.nested_quant_map": ("F32", [256], bytes(1024)),
        "m.weight.quant_state.bitsandbytes__nf4": ("U8", [len(told)], told),
    }
    header: dict[str, Any] = {}
    body = b""
    for key, (name, shape, content) in parts.items():
        header[key] = {"dtype": name, "shape": shape, "data_offsets": [len(body), len(body) + len(content)]}
        body += content
    text = json.dumps(header).encode()
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    return MemoryReader(
        {
            "model.safetensors": struct.pack("<Q", len(text)) + text + body,
            "config.json": json.dumps(config).encode(),
        }
    )


STATE = {
    "shape": [2, 64],
    "blocksize": 64,
    "quant_type": "nf4",
    "dtype": "bfloat16",
    "nested_blocksize": 256,
    "nested_offset": 0.5,
}


@pytest.mark.parametrize("dtype", ["U8", "F4"])
def test_packed_bytes_may_be_stored_under_any_dtype(dtype: str) -> None:
    reader = in_four_bits(STATE, dtype)
    assert dequantize_index(reader, open_checkpoint(reader)).composed["m.weight"].shape == (2, 64)


@pytest.mark.parametrize("offset", [10**400, -(10**39), 1e39, True, "1", None], ids=lambda value: str(value)[:6])
def test_an_offset_of_scales_must_be_float32(offset: object) -> None:
    reader = in_four_bits({**STATE, "nested_offset": offset})
    with pytest.raises(FormatError, match="m.weight: its quant_state has the nested_offset"):
        dequantize_index(reader, open_checkpoint(reader))


@pytest.mark.parametrize("name", ["quantization", "quantization_config"])
def test_the_form_of_mlx_is_named(name: str) -> None:
    reader = MemoryReader({"config.json": json.dumps({name: {"bits": 4, "group_size": 64}}).encode()})
    with pytest.raises(ConfigError, match="not supported \\(MLX's form\\)"):
        dequantize_index(reader, index_of(("m.weight", DType.U32, (2, 8))))
