"""Hostile files, files of FSDP1 and files of other runs: read if possible, else refused with the reason."""

from pathlib import Path

import pytest
import torch
from tests.integrations import refusing_files, trading
from tests.support.world import require_same_error

import shardwise

PICKLES = ["pytorch_model_fsdp.bin", "pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0_rank0.bin"]


@pytest.mark.parametrize("name", PICKLES)
def test_no_code_in_a_file_is_run(worlds, tmp_path, name):
    marker = tmp_path / "it ran"
    size = 1 if "rank" in name else 2
    worlds(size).run(refusing_files.write_pickle, str(tmp_path), name, str(marker))
    require_same_error(
        worlds(size).run(refusing_files.model_refused, str(tmp_path)), "FormatError", Path(name).name
    )
    assert not marker.exists()
    if name == PICKLES[0]:  # the pickle would, read as it is
        torch.load(tmp_path / name, weights_only=False)
        assert marker.exists()


def test_a_key_that_is_missing_on_one_rank_is_an_error_on_all(worlds, tmp_path):
    worlds(2).run(refusing_files.write_rank_file_without, str(tmp_path), 1)
    found = worlds(2).run(refusing_files.model_refused, str(tmp_path))
    require_same_error(found, "RankMismatchError", "blocks.1.0.weight is not on rank 1")


def test_a_shard_that_contradicts_its_placement_is_refused(worlds, tmp_path):
    worlds(2).run(refusing_files.write_odd_shard, str(tmp_path))
    found = worlds(2).run(refusing_files.model_refused, str(tmp_path))
    require_same_error(found, "FormatError", "blocks.1.0.weight", "rank1.bin")


def test_files_of_ranks_are_for_as_many_ranks(worlds, tmp_path):
    worlds(3).run(trading.save, str(tmp_path), "ranks")
    require_same_error(
        worlds(2).run(refusing_files.model_refused, str(tmp_path)), "ShardingError", "Load it on 3 ranks"
    )
    worlds(2).run(trading.save, str(tmp_path), "ranks")  # those of the older save go
    assert len(list(tmp_path.glob("pytorch_model_fsdp_0_rank*"))) == 2


def test_flat_parameters_of_fsdp1_are_refused(worlds, tmp_path):
    worlds(2).run(refusing_files.write_flat, str(tmp_path))
    require_same_error(
        worlds(2).run(refusing_files.model_refused, str(tmp_path)), "FormatError", "LOCAL_STATE_DICT"
    )


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_checkpoints_of_fsdp1_are_read(worlds, tmp_path, form):
    assert worlds(2).run(refusing_files.from_fsdp1, str(tmp_path), form) == [[]] * 2


def test_numbers_keep_their_kind(worlds, tmp_path):
    for cast, errors in worlds(2).run(refusing_files.dtypes, str(tmp_path)):
        assert cast == dict.fromkeys(["one.weight", "one.bias", "two.weight"], ("F32", "BF16"))
        assert [kind for kind, _ in errors] == ["KeyMismatchError"] * 4
        assert "two.weight: (4, 6) F8_E4M3 on rank 0, expected (4, 6) BF16" in errors[0][1]
        assert "codes: (3,) I32" in errors[2][1]


@pytest.mark.parametrize("size", [1, 3])
def test_memory_that_is_not_in_rows(worlds, tmp_path, size):
    assert worlds(size).run(refusing_files.onto_strides, str(tmp_path)) == [[]] * size


@pytest.mark.parametrize("form", ["full", "sharded", "ranks"])
def test_several_optimizers_have_a_number_each(worlds, tmp_path, form):
    assert worlds(2).run(refusing_files.several_optimizers, str(tmp_path), form) == [[]] * 2


def test_missing_and_unexpected_keys_are_returned(worlds, tmp_path):
    for report in worlds(2).run(refusing_files.ignoring, str(tmp_path)):
        assert report["missing"] == ("gain",)
        assert report["unexpected"] == ("extra",)


@pytest.mark.parametrize(("form", "failing"), [("full", 0), ("sharded", 1), ("ranks", 1)])
def test_a_save_that_fails_leaves_the_older_one(worlds, tmp_path, form, failing):
    for (kind, text), faults in worlds(2).run(refusing_files.fails_to_write, str(tmp_path), form, failing):
        assert kind == "StorageError"
        assert "the disk is gone" in text
        assert faults == []


def test_ranks_that_pass_different_arguments_are_reported(worlds, tmp_path):
    require_same_error(
        worlds(2).run(refusing_files.unlike_arguments, str(tmp_path)), "RankMismatchError", "arguments"
    )


def test_a_state_of_other_parameters_is_refused(worlds, tmp_path):
    worlds(2).run(trading.save, str(tmp_path), "full")
    state = torch.load(tmp_path / "optimizer.bin", weights_only=True)
    state["state"]["stranger"] = state["state"].pop("gain")
    state["param_groups"][0]["params"].append("stranger")
    torch.save(state, tmp_path / "optimizer.bin")
    require_same_error(
        worlds(2).run(refusing_files.optimizer_refused, str(tmp_path)), "KeyMismatchError", "stranger"
    )


def test_a_damaged_file_is_refused(worlds, tmp_path):
    worlds(2).run(trading.save, str(tmp_path), "full")
    file = tmp_path / "pytorch_model_fsdp.bin"
    content = bytearray(file.read_bytes())
    content[8:16] = b"\xff" * 8
    file.write_bytes(content)
    require_same_error(worlds(2).run(refusing_files.model_refused, str(tmp_path)), "FormatError", file.name)


@pytest.mark.parametrize(
    "state",
    [
        {"state": {}, "param_groups": 5},
        {"state": {}, "param_groups": [5]},
        {"state": {}, "param_groups": [{}]},
        {"state": {}, "param_groups": [{"params": 5}]},
        {"state": [], "param_groups": []},
        {"state": {"weight": 5}, "param_groups": []},
    ],
)
def test_a_file_that_is_no_state_of_an_optimizer(tmp_path, state):
    model = torch.nn.Linear(3, 2)
    torch.save(state, tmp_path / "optimizer.bin")
    with pytest.raises(shardwise.ConfigError, match="the state of optimizers is not a state dict"):
        shardwise.load_accelerate_optimizer(model, torch.optim.SGD(model.parameters()), tmp_path)


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"number": -1}, "number=-1: is not an index"),
        ({"number": True}, "number=True: is not an index"),
        ({"options": 1}, "options is 1, of type int. Pass StateOptions"),
        ({"on_missing": "z"}, "on_missing='z' is not known"),
    ],
)
def test_invalid_arguments_of_a_load(tmp_path, keywords, text):
    model = torch.nn.Linear(3, 2)
    with pytest.raises(shardwise.ConfigError, match=text):
        shardwise.load_accelerate_optimizer(model, torch.optim.SGD(model.parameters()), tmp_path, **keywords)
