"""What should have the same values on all ranks is looked at before it is taken out."""

import pytest
import torch
from peft import LoraConfig, PeftModel
from tests.verbs import differing

import shardwise
from shardwise.options import AdapterOnly

pytestmark = pytest.mark.distributed


def told(worlds, size, function, folder):
    """What all ranks say of each way out; they say the same."""
    first, *others = worlds(size).run(function, str(folder))
    assert all(other == first for other in others)
    return first


def test_buffers_that_differ_are_the_first_ranks_and_the_reports_say_so(worlds, tmp_path):
    found = told(worlds, 2, differing.buffers_that_are_not_the_firsts, tmp_path)
    assert len(found) == 9
    assert not any(found.values()), found


def test_buffers_that_differ_are_refused_where_the_user_asks(worlds, tmp_path):
    found = told(worlds, 2, differing.refused_buffers, tmp_path)
    assert len(found) == 10
    for error in found.values():
        assert error.startswith("RankMismatchError: 6 tensors have other values on rank 1 than on the first rank")
        assert "norms.{0..2}.running_mean, " in error
        assert "on_differing_buffers='first_rank'" in error


def test_all_ranks_ask_for_the_same(worlds, tmp_path):
    found = told(worlds, 2, differing.modes_that_differ, tmp_path)
    assert all(error.startswith("RankMismatchError: ") and "rank" in error for error in found.values())


@pytest.mark.parametrize(
    ("function", "ways", "names"),
    [
        (differing.added_after_sharding, 10, ["added.weight", "added.bias", "adapter or a module that was added"]),
        (differing.state_of_an_optimizer, 8, ["added", "exp_avg", "exp_avg_sq"]),
        (differing.counts_of_steps, 4, ["first.weight", "step"]),
        (differing.adapter_added_after_sharding, 14, ["layers.{0..1}.self_attn.q_proj.lora_A.", "down_proj"]),
    ],
)
def test_parameters_that_differ_are_refused_by_name(worlds, tmp_path, function, ways, names):
    found = told(worlds, 2, function, tmp_path)
    assert len(found) == ways
    for error in found.values():
        assert error.startswith("RankMismatchError: ")
        assert "other values on rank 1 than on the first rank" in error
        assert all(name in error for name in names)


def test_replicas_of_a_shard_that_differ_by_one_bit_are_refused(worlds, tmp_path):
    found = told(worlds, 4, differing.replicas_apart, tmp_path)
    assert len(found) == 10
    for error in found.values():
        assert error.startswith("RankMismatchError: one tensor has other values on rank 3 than on the first rank")
        assert "first.weight, and a save" in error
    assert told(worlds, 4, differing.replicas_alike, tmp_path / "alike") == {}


def test_what_drifts_between_two_checkpoints_is_refused(worlds, tmp_path):
    found = told(worlds, 2, differing.drifted_between_checkpoints, tmp_path)
    for mode in ("sync", "async"):
        assert found[f"{mode}, 0"] == found[f"{mode}, 2"] == ": "
        assert found[f"{mode}, 1"].startswith("RankMismatchError: one tensor has other values on rank 1")
        assert "model.added, and a save" in found[f"{mode}, 1"]
        assert found[f"{mode}, steps"] == "[0, 2]"


def test_of_an_adapter_only_the_adapter_is_looked_at(worlds, tmp_path):
    found = told(worlds, 2, differing.adapter_of_an_uneven_base, tmp_path)
    assert len(found) == 8
    assert all("lora_" in name for name in found)


def test_an_adapter_that_transformers_added_is_saved_as_peft_loads_it(tmp_path):
    model, plain = differing.small_qwen3(), differing.small_qwen3()
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    shardwise.save_adapter(model, tmp_path, options=differing.QUIET)
    loaded = PeftModel.from_pretrained(plain, tmp_path)
    tokens = torch.arange(10)[None]
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    shardwise.set_model_state_dict(
        loaded, shardwise.get_model_state_dict(model, only=AdapterOnly()), only=AdapterOnly()
    )
