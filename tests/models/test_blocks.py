"""Blocks that are recomputed: the same numbers, the same names."""

import copy
import inspect
import pickle
from collections import OrderedDict

import pytest
import torch
from tests.models import stepping
from tests.truth import require_equal
from torch import nn

from shardwise.core.errors import ConfigError, ShardingError
from shardwise.fsdp import wrap
from shardwise.fsdp.policies import find_listed_blocks, find_repeated_blocks, select_blocks
from shardwise.fsdp.wrap import Sharding

LAYERS = [f"transformer.h.{index}" for index in range(3)]


def require_recomputed(found, every):
    kept, again = found["kept"], found["recomputed"]
    assert again["loss"] == kept["loss"]
    assert again["random"] == kept["random"]
    assert again["names"] == kept["names"]
    require_equal(again["gradients"], kept["gradients"])
    assert set(kept["runs"].values()) == {1}
    assert list(again["runs"].values()) == [2 if index % every == 0 else 1 for index in range(3)]


@pytest.mark.parametrize("every", [1, 2])
def test_recomputing_is_exact_with_dropout(every):
    require_recomputed(stepping.dropout_recomputed(every, False), every)


@pytest.mark.parametrize(("every", "offload"), [(1, False), (2, False), (1, True)])
def test_recomputing_is_exact_when_sharded(worlds, every, offload):
    for found in worlds(2).run(stepping.dropout_recomputed, every, offload):
        require_recomputed(found, every)


def test_recomputing_is_exact_with_groups_inside_of_blocks(worlds):
    for found in worlds(2).run(stepping.islands_recomputed):
        require_recomputed(found, 1)


def test_a_copy_of_a_prepared_model_is_its_own():
    model = stepping.sharded(stepping.qwen3(), activation_checkpointing=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        stepping.stepped(other, stepping.batch())
        assert all(parameter.grad is not None for parameter in other.parameters())
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_cache_that_no_one_requested_is_left_out():
    model = stepping.sharded(stepping.qwen3(), activation_checkpointing=True)
    ids = stepping.batch().input_ids
    output = model(input_ids=ids, labels=ids)  # transformers makes a cache
    output.loss.backward()
    expected = stepping.qwen3()
    expected(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_cache_that_holds_tokens_is_refused_by_name():
    model = stepping.sharded(stepping.qwen3(), activation_checkpointing=True)
    ids = stepping.batch().input_ids
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    assert cache.get_seq_length() == ids.shape[1]
    # transformers 5.24 renames the keyword
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with pytest.raises(ConfigError, match=r"^model\.layers\.0: a cache that holds 12 tokens"):
        model(input_ids=ids, **{keyword: cache})


def enable_own(model):
    """By the name that the installed transformers has for it."""
    enable = "activation_checkpointing_enable"
    getattr(model, enable if hasattr(model, enable) else "gradient_checkpointing_enable")()


def test_the_models_own_checkpointing_is_a_conflict():
    model = stepping.qwen3()
    enable_own(model)
    with pytest.raises(ConfigError, match=r"^model recomputes activations by itself"):
        stepping.sharded(model, activation_checkpointing=True)
    model = stepping.sharded(stepping.qwen3(), activation_checkpointing=True)
    enable_own(model)
    with pytest.raises(ConfigError, match=r"^model\.layers\.0 recomputes activations by itself"):
        model.train()(input_ids=stepping.batch().input_ids)


def test_blocks_are_prepared_once():
    model = stepping.sharded(stepping.qwen3(), activation_checkpointing=True)
    with pytest.raises(ConfigError, match=r"^model\.layers\.0 is recomputed already"):
        stepping.sharded(model, activation_checkpointing=True)
    stepping.sharded(model)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ShardingError, match="Linear: has neither _no_split_modules nor an nn.ModuleList"):
        wrap.prepare_blocks(nn.Linear(2, 2), Sharding(activation_checkpointing=True))
    wrap.prepare_blocks(nn.Linear(2, 2), Sharding(activation_checkpointing=False))


@pytest.mark.parametrize("every", [-1, "off"])
def test_every_is_a_number_of_blocks(every):
    with pytest.raises(ConfigError, match="is not known. Pass True, False, or n"):
        Sharding(activation_checkpointing=every)


def test_blocks_are_the_outermost_that_repeat():
    assert find_repeated_blocks(stepping.dropping()) == LAYERS
    model = nn.Module()
    pairs = [nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(2)]
    model.blocks = nn.ModuleList([nn.Sequential(OrderedDict(pair=pair)) for pair in pairs])
    assert find_repeated_blocks(model) == ["blocks.0", "blocks.1"]


class Stage(nn.ModuleList):
    def forward(self, rows):
        return self[1](self[0](rows))


def test_a_list_with_a_forward_is_a_block_and_others_are_left_out():
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    model = nn.Module()
    model.stages = nn.ModuleList([Stage(layers), Stage(layers)])
    assert find_listed_blocks(model) == ["stages.0", "stages.1"]
    model.stages = nn.ModuleList([*layers, nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])])
    assert find_listed_blocks(model) == ["stages.0", "stages.1", "stages.2.0", "stages.2.1"]


def test_lists_of_blocks_in_a_list_are_no_blocks():
    model = nn.Module()
    model.stages = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(2)])
    blocks = ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]
    assert find_repeated_blocks(model) == select_blocks(model, "auto") == blocks
