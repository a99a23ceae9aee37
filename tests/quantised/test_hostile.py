"""What a stranger's quantised checkpoint says is looked at before anything is made of it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from shardwise.errors import ConfigError, FormatError
from shardwise.formats.checkpoint_index import CheckpointIndex
from shardwise.formats.entries import TensorEntry
from shardwise.formats.quantisation import form_of
from shardwise.formats.quantised import dequantised_index
from shardwise.tensors import DType, numel


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


@pytest.mark.parametrize("dtype", [DType.F32, DType.I64, DType.F16, DType.U8])
def test_integers_are_packed_into_words_of_32_bits_and_nothing_else(dtype: DType) -> None:
    index = index_of(("m.weight_packed", dtype, (8, 8)), ("m.weight_scale", DType.F32, (8, 1)))
    with pytest.raises(FormatError, match=rf"m.weight_packed is stored as {dtype.label}, and I32 is wanted"):
        dequantised_index(index, packed())


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
def test_a_config_that_makes_no_sense_is_an_error_that_says_so(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="not known here|makes no sense"):
        form_of(config)


def test_what_is_said_of_activations_is_passed_over_quickly() -> None:
    """A mixture of experts has one for each matrix of each expert of each layer: tens of thousands."""
    matrices = [f"model.layers.{number}.mlp" for number in range(20_000)]
    index = index_of(
        *((f"{name}.weight", DType.F8_E4M3, (4, 4)) for name in matrices),
        *((f"{name}.weight_scale", DType.F32, ()) for name in matrices),
        *((f"{name}.input_scale", DType.F32, ()) for name in matrices),
    )
    before = time.process_time()
    found = dequantised_index(index, {"quant_method": "fp8"})
    assert time.process_time() - before < 6
    assert len(found.composed) == len(found.ignored) == len(matrices)
