"""Commit plans: the files of a folder that count, and the files to remove."""

import json

import pytest

from shardwise.core.tensors import DType
from shardwise.saving.commit_plan import find_obsolete, get_folder_state, plan_commit
from shardwise.saving.plan import plan_save

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKEN = "0123abcd"


def planned(max_shard_bytes):
    tensors = [(f"w{number}", DType.F32, (8,)) for number in range(4)]
    return plan_save(tensors, max_shard_bytes=max_shard_bytes, parameters=32, save_id=TOKEN)


def index_of(*names):
    return json.dumps({"weight_map": {f"k{number}": name for number, name in enumerate(names)}}).encode()


ONE, SEVERAL = planned(1 << 20), planned(64)


def test_a_single_file_takes_precedence_over_an_index():
    folder_state = get_folder_state([SINGLE, INDEX, "a.safetensors"], index_of("a.safetensors"))
    assert folder_state.weights == {SINGLE}
    assert folder_state.listed == {"a.safetensors"}, "what the index names may be about to count"
    assert find_obsolete(ONE, folder_state) == [INDEX]
    assert find_obsolete(SEVERAL, folder_state) == [SINGLE]


def test_the_config_of_older_codes_is_removed_after_the_commit_only():
    folder_state = get_folder_state([SINGLE, "config.json", "hf_quant_config.json"], None)
    assert find_obsolete(ONE, folder_state) == []
    assert plan_commit(ONE, folder_state, {}).obsolete == ("hf_quant_config.json",)
    assert plan_commit(SEVERAL, folder_state, {}).obsolete == (SINGLE, "hf_quant_config.json")


def test_files_of_ranks_are_removed_in_any_case():
    of_ranks = [f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)]
    folder_state = get_folder_state([*of_ranks, SINGLE, "shard-1-model.safetensors"], None)
    assert find_obsolete(ONE, folder_state) == of_ranks
    assert find_obsolete(SEVERAL, folder_state) == [SINGLE, *of_ranks]
    assert get_folder_state(of_ranks, None, "adapter_model.safetensors").weights == set()


LEFT = [
    "model.89abcdef.incomplete",
    "model.89abcdef.older",
    "model-89abcdef-00001-of-00003.safetensors",
    "model-89abcdef-100001-of-100003.safetensors",
    ".config.json.89abcdef.incomplete",
    ".model-89abcdef-00001-of-00003.safetensors.0123abcd.incomplete",
    ".model.safetensors.index.json.89abcdef.incomplete",
    ".tokenizer_config.json.89abcdef.incomplete",
    ".modeling_mine.py.89abcdef.incomplete",
    ".model.fingerprints.json.89abcdef.incomplete",
    ".shardwise.saving.89abcdef.incomplete",
]

OTHERS = [
    "model-00001-of-00003.safetensors",  # of nobody's index: who knows
    "model-89ABCDEF-00001-of-00003.safetensors",
    "model-89abcdef-1-of-3.safetensors",
    "model.89abcdef.incomplete.old",
    "adapter_model.safetensors",
    "config.json",
    ".hidden",
    ".download.incomplete",
    "notes.89abcdef.incomplete",
    "shardwise.saving",
    "model.fingerprints.json",
]


@pytest.mark.parametrize("plan", [ONE, SEVERAL], ids=["one file", "several files"])
def test_only_remains_of_unfinished_saves_are_removed(plan):
    assert find_obsolete(plan, get_folder_state([*LEFT, *OTHERS], None)) == sorted(LEFT)
