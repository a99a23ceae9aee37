"""Checkpoints of bitsandbytes that no layer can be kept in, or that name modules of other models, come up."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.quantized import bitsandbytes_files, quantizing
from tests.quantized.test_four_bits import written
from tests.support.world import run_forked
from transformers import GPT2Config, GPT2LMHeadModel

import shardwise
from shardwise.options import LoadOptions

SIZES = {
    "some rows": {"head_dim": 32, "hidden_size": 64, "intermediate_size": 73},
    "all rows": {
        "head_dim": 26,
        "hidden_size": 50,
        "intermediate_size": 73,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}
"""Those of ``down_proj`` are no whole blocks; of no matrix, and the last blocks are smaller."""


def plain(folder: Path) -> list[str]:
    return [str(written(folder / name.replace(" ", "-"), **sizes)) for name, sizes in SIZES.items()]


def test_rows_that_are_no_whole_blocks_and_modules_that_are_absent(tmp_path):
    for folder in plain(tmp_path):
        bitsandbytes_files.pack(folder, bitsandbytes_files.by_hand)
        assert bitsandbytes_files.go_through(f"{folder}-packed", "flat") == []


def test_weights_of_conv1d_are_packed_transposed(tmp_path):
    def by_hand(tensor: torch.Tensor, *, is_nested: bool) -> bitsandbytes_files.Packed:
        packed, beside, numbers = bitsandbytes_files.by_hand(tensor.T.contiguous(), is_nested=is_nested)
        return packed, beside, numbers.T.contiguous()

    # One of the two matrices that are packed is square.
    config = GPT2Config(n_embd=64, n_head=2, n_layer=1, vocab_size=64, n_positions=32, eos_token_id=1)
    GPT2LMHeadModel(config).bfloat16().save_pretrained(tmp_path / "plain")
    bitsandbytes_files.pack(str(tmp_path / "plain"), by_hand)
    numbers = load_file(tmp_path / "plain-packed/numbers")
    model = shardwise.from_pretrained(tmp_path / "plain-packed", options=LoadOptions(progress=False))
    assert quantizing.differing(model, numbers) == []


def test_a_scale_that_is_none_is_an_error_that_names_it(tmp_path):
    folder = str(written(tmp_path / "plain"))
    bitsandbytes_files.pack(folder, bitsandbytes_files.by_hand)
    file, key = f"{folder}-packed/model.safetensors", "model.layers.1.mlp.down_proj.weight.absmax"
    stored = load_file(file)
    stored[key][-1] = torch.inf
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.raises(shardwise.FormatError, match=rf"{key}.*: dequantizing: a scale is NaN or infinite"):
        shardwise.from_pretrained(f"{folder}-packed", quantization="dequantize")


@pytest.mark.slow
def test_as_bitsandbytes_has_it(worlds, tmp_path):
    folders = plain(tmp_path)
    run_forked(1, bitsandbytes_files.pack_by_bitsandbytes, folders)
    for folder in folders:
        assert bitsandbytes_files.go_through(f"{folder}-packed", "flat") == []
        for size in (2, 3, 5):
            assert worlds(size).run(bitsandbytes_files.go_through, f"{folder}-packed", "flat") == [[]] * size
