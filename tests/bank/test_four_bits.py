"""Adapters on a base in four bits: as on the same base with one LoRA in it."""

from pathlib import Path
from typing import Any

import pytest
from tests.bank import four_bits
from tests.quantized.requirements import needs_packed_shards
from tests.quantized.stored_experts import make_gpt_oss
from tests.quantized.test_four_bit_experts import plain as mixture  # noqa: F401 - a fixture


def require_learned(told: dict[str, Any]) -> None:
    assert told["losses"] < 1e-6, told
    assert told["adapters"] < 1e-4, told
    assert told["falls"], told


@needs_packed_shards
@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_adapters_learn_as_by_a_lora(worlds, mixture: Path, tmp_path, size):  # noqa: F811
    """Experts are in four bits, too. What is saved is opened by PEFT alone."""
    for told in worlds(size).run(four_bits.learned, str(mixture), str(tmp_path)):
        require_learned(told)
        assert not told["opened"], told


@needs_packed_shards
@pytest.mark.slow
def test_adapters_of_experts_need_no_numbers(worlds, mixture: Path):  # noqa: F811
    for told in worlds(2).run(four_bits.experts_learned, str(mixture)):
        require_learned(told)


@needs_packed_shards
@pytest.mark.slow
@pytest.mark.parametrize("size", [None, 2])
def test_adapters_learn_on_experts_as_they_are_stored(worlds, tmp_path, size):
    """In MXFP4, with biases."""
    make_gpt_oss(tmp_path)
    learned = four_bits.stored_experts_learned
    found = [learned(str(tmp_path))] if size is None else worlds(size).run(learned, str(tmp_path))
    for told in found:
        require_learned(told)
