"""What of a folder counts, by which steps a save does, and what is removed afterwards."""

import json

import pytest

from shardwise.planning.commit_plan import (
    NOTHING_BOUND,
    Publish,
    Remove,
    Rename,
    commit_of,
    is_on_its_way,
    look_at_folder,
    obsolete,
)
from shardwise.planning.save_plan import plan_save
from shardwise.tensors import DType

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKEN = "0123abcd"


def planned(max_shard_bytes):
    tensors = [(f"w{number}", DType.F32, (8,)) for number in range(4)]
    return plan_save(tensors, max_shard_bytes=max_shard_bytes, parameters=32, save_id=TOKEN)


def index_of(*names):
    return json.dumps({"weight_map": {f"k{number}": name for number, name in enumerate(names)}}).encode()


ONE, SEVERAL = planned(1 << 20), planned(64)


READY = f".{INDEX}.{TOKEN}.incomplete"


def steps(plan, standing, can_rename=True, bound=NOTHING_BOUND):
    return list(commit_of(plan, standing, can_rename=can_rename, bound=bound).steps)


def test_one_file_is_renamed_and_several_are_named_by_an_index():
    empty, single = look_at_folder([], None), look_at_folder([SINGLE], None)
    assert steps(ONE, empty) == [Rename(f"model.{TOKEN}.incomplete", SINGLE)]
    assert steps(SEVERAL, empty) == [Publish(READY, INDEX)]
    assert commit_of(SEVERAL, empty, can_rename=True).ready == {READY: SEVERAL.index}
    assert steps(SEVERAL, single) == [Publish(READY, INDEX), Rename(SINGLE, f"model.{TOKEN}.older")]
    assert commit_of(SEVERAL, single, can_rename=True).aside == (Rename(SINGLE, f"model.{TOKEN}.older"),)
    assert commit_of(ONE, empty, can_rename=True).aside == ()


def test_where_nothing_large_is_renamed_a_single_file_is_removed():
    empty, single = look_at_folder([], None), look_at_folder([SINGLE], None)
    assert steps(SEVERAL, empty, can_rename=False) == [Publish(READY, INDEX)]
    assert steps(SEVERAL, single, can_rename=False) == [Publish(READY, INDEX), Remove(SINGLE)]


@pytest.mark.parametrize("plan", [ONE, SEVERAL], ids=["one file", "several files"])
def test_what_is_asked_for_is_every_file_with_its_size(plan):
    commit = commit_of(plan, look_at_folder([], None), can_rename=True)
    assert commit.files == {file.name: file.nbytes for file in plan.files}
    assert list(commit.then) == list(plan.names)
    assert all(is_on_its_way(name) for name in commit.without - {SINGLE})


def test_weights_that_a_new_config_would_belie_are_set_aside_first():
    bound = {"adapter_config.json": b"{}"}
    ready = f".adapter_config.json.{TOKEN}.incomplete"
    into_place = [Publish(ready, "adapter_config.json"), Rename(f"model.{TOKEN}.incomplete", SINGLE)]
    assert steps(ONE, look_at_folder([], None), bound=bound) == into_place
    assert steps(ONE, look_at_folder([SINGLE], None), bound=bound) == [
        Rename(SINGLE, f"model.{TOKEN}.older"),
        *into_place,
    ]
    commit = commit_of(ONE, look_at_folder([], None), can_rename=True, bound=bound)
    assert (commit.ready, commit.says) == ({ready: b"{}"}, bound), "whoever takes the folder over removes it"


def test_a_single_file_counts_whatever_an_index_says():
    standing = look_at_folder([SINGLE, INDEX, "a.safetensors"], index_of("a.safetensors"))
    assert standing.weights == {SINGLE}
    assert standing.named == {"a.safetensors"}, "what the index names may be about to count"
    assert obsolete(ONE, standing) == [INDEX]
    assert obsolete(SEVERAL, standing) == [SINGLE]


@pytest.mark.parametrize("plan", [ONE, SEVERAL], ids=["one file", "several files"])
def test_what_the_index_names_is_removed_where_it_is_a_weight_file_of_the_folder(plan):
    index = index_of("a.safetensors", "../b.safetensors", "notes.txt", "gone.safetensors", INDEX, "")
    standing = look_at_folder(["a.safetensors", "c.safetensors", "notes.txt", INDEX], index)
    removed = obsolete(plan, standing)
    assert removed == (["a.safetensors"] if plan is SEVERAL else ["a.safetensors", INDEX])


LEFT = [
    "model.89abcdef.incomplete",
    "model.89abcdef.older",
    "model-89abcdef-00001-of-00003.safetensors",
    "model-89abcdef-100001-of-100003.safetensors",
    ".config.json.89abcdef.incomplete",
    ".model-89abcdef-00001-of-00003.safetensors.0123abcd.incomplete",  # of a storage that shows what is on its way
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
def test_what_unfinished_saves_left_is_removed_and_nothing_else(plan):
    assert obsolete(plan, look_at_folder([*LEFT, *OTHERS], None)) == sorted(LEFT)


@pytest.mark.parametrize("plan", [ONE, SEVERAL], ids=["one file", "several files"])
def test_what_was_just_saved_is_never_removed(plan):
    new = {*plan.names, *([] if plan.index is None else [INDEX])}
    standing = look_at_folder(sorted(new), plan.index)
    assert not new & set(obsolete(plan, standing))
