"""A part of the sweep (``tests/sweep.py``): bitwise equality with transformers at every world size."""

import pytest
from tests import load_cases, truth, zoo
from tests.loading import on_ranks

# Beyond the zoo's dozen: the rules that those do not use.
_FURTHER = {
    "mixtral",
    "qwen3",
    "molmo2:Molmo2ForConditionalGeneration",
    "qwen3_vl_moe:Qwen3VLMoeForConditionalGeneration",
    "ernie4_5_vl_moe:Ernie4_5_VLMoeForConditionalGeneration",
    "mistral_large4:MistralLarge4ForConditionalGeneration",
}


def specimens():
    further = [item for item in zoo.causal_lm_specimens() + zoo.converter_specimens() if item.name in _FURTHER]
    return zoo.representative_specimens() + further


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("architectures")
    return [case for specimen in specimens() for case in truth.prepare(specimen, folder)]


@pytest.mark.parametrize("size", [1, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 3, 5, 8))])
def test_every_tensor_is_bitwise_equal(worlds, cases, size):
    # All layouts and dtypes at three ranks, where most shards are uneven; the hub's layout elsewhere.
    chosen = [
        case for case in cases if size == 3 or (case.directory.endswith("original") and case.dtype == "bfloat16")
    ]
    assert len(chosen) >= 14
    way = load_cases.Way()
    load_cases.require_no_faults(chosen, lambda case: worlds(size).run(load_cases.load_and_compare, case, way))


@pytest.mark.slow
def test_memory_full_of_nan_shows_nowhere(worlds, cases):
    for case in cases:
        if case.directory.endswith("original") and case.dtype == "float32":
            assert worlds(3).run(on_ranks.poisoned_load, case) == [[], [], []], str(case)


def test_without_a_process_group_too(cases):
    for case in cases:
        if case.directory.endswith("original"):
            assert load_cases.load_and_compare(case, load_cases.Way()) == [], str(case)
