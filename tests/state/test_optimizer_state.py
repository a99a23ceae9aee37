"""States of optimizers by name: those of the whole model bit for bit, and torch's, both ways."""

import pytest
import torch
from tests.state import optimizing, sharding
from tests.support.world import require_same_error

from shardwise.core.errors import ConfigError
from shardwise.fsdp.optimizer_states_by_name import read

ALL = sorted(sharding.MAKERS)


@pytest.mark.parametrize("maker", ALL)
@pytest.mark.parametrize(("size", "way"), [(1, ""), (3, "")])
def test_the_full_state_is_that_of_the_whole_model(worlds, size, way, maker):
    assert worlds(size).run(optimizing.full_state, way, maker) == [[]] * size


@pytest.mark.parametrize("way", ["hsdp", "tp"])
def test_on_meshes_of_two_axes_too(worlds, way):
    assert worlds(4).run(optimizing.full_state, way, "adamw") == [[]] * 4


def test_without_a_process_group_it_is_the_same():
    assert optimizing.full_state("", "two") == []


@pytest.mark.parametrize("maker", ALL)
def test_torch_writes_the_same_and_reads_it(worlds, maker):
    assert worlds(2).run(optimizing.against_torch, maker) == [[], []]


@pytest.mark.parametrize(
    ("maker", "provided_by"),
    [*((maker, by) for maker in ALL for by in ("first", "shards")), ("two", "every"), ("two", "last")],
)
def test_training_continues_bitwise_with_a_state_that_was_set(worlds, maker, provided_by):
    found = worlds(3).run(optimizing.there_and_back, "", maker, provided_by, "")
    assert [faults for faults, _ in found] == [[]] * 3
    for _, report in found:
        assert report["missing"] == report["unexpected"] == report["without_state"] == ()
        assert report["cast"] == {}
        assert len(report["set_names"]) > 5
        if provided_by in ("every", "shards"):
            assert report["received_bytes"] == 0


@pytest.mark.parametrize(("way", "onto"), [("", "hsdp"), ("hsdp", ""), ("tp", "tp")])
@pytest.mark.parametrize("provided_by", [pytest.param("first", marks=pytest.mark.slow), "shards"])
def test_meshes_may_change(worlds, way, onto, provided_by):
    found = worlds(4).run(optimizing.there_and_back, way, "adamw", provided_by, onto)
    assert [faults for faults, _ in found] == [[]] * 4


FAULTS = {
    "group": ("KeyMismatchError", "no group of the state has the parameters of group 0"),
    "missing": ("KeyMismatchError", "missing 1        blocks.1.1.weight\nPass on_missing=Ignore"),
    "unexpected": ("KeyMismatchError", "unexpected 1     blocks.9.weight\nPass on_unexpected=Ignore"),
    "twice": ("KeyMismatchError", "twice 1          embed.weight"),
    "lost moment": ("KeyMismatchError", "missing 1        blocks.0.0.weight: exp_avg"),
    "shape": ("KeyMismatchError", "blocks.0.0.weight: exp_avg: (4, 5) F32 on rank 0, expected (7, 5) F32"),
    "numbers": ("ConfigError", "indices in place of parameter names"),
    "layout": ("ConfigError", "the state of optimizers is not a state dict"),
    "flattened": ("ConfigError", "flattened (state.NAME.ENTRY). Pass that of get_optimizer_state_dict() without"),
    "object": ("ConfigError", "blocks.0.0.weight: exp_avg in the state is a list"),
    "lost moment on rank 1": ("RankMismatchError", "blocks.0.0.weight: exp_avg"),
    "meta on rank 1": ("ShardingError", "rank 1: 1 tensors of the given state are on meta"),
    "nobody": ("KeyMismatchError", "missing"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_mismatches_are_one_error_and_change_nothing(worlds, fault):
    kind, text = FAULTS[fault]
    found = worlds(2).run(optimizing.refused, fault)
    require_same_error([end[:2] for end in found], kind, text)
    assert [changed for _, _, changed in found] == [[], []]


def test_ignored_state_is_unchanged_and_reported(worlds):
    for faults, report in worlds(2).run(optimizing.tolerated):
        assert faults == []
        assert report["missing"] == ("blocks.0.0.weight",)
        assert report["unexpected"] == ("old.weight",)
        assert report["mismatched"] == ("blocks.1.0.weight: exp_avg",)


def test_parameters_without_state_are_reported(worlds):
    for faults, names in worlds(2).run(optimizing.without_state):
        assert faults == []
        assert names == ("blocks.0.0.bias",)


def test_state_is_widened_to_its_parameter_and_reported(worlds):
    for report, faults in worlds(2).run(optimizing.wider):
        assert faults == []
        assert set(report["cast"].values()) == {("BF16", "F32")}
        assert all(name.endswith(": exp_avg") for name in report["cast"])


def test_optimizers_that_differ_are_an_error_on_every_rank(worlds):
    errors = worlds(2).run(optimizing.other_setup)
    require_same_error(errors, "RankMismatchError", "the list of optimizer state")


@pytest.mark.parametrize("other", [1.0, 2.0])
def test_a_state_with_two_names_of_a_parameter_has_one_value(other):
    first_names, shapes = dict.fromkeys(("embed", "head"), "embed"), {"embed": torch.Size([3])}
    state = {"state": {"embed": {"exp_avg": torch.ones(3)}, "_orig_mod.head": {"exp_avg": torch.full((3,), other)}}}
    state["param_groups"] = []
    if other == 1:
        assert read(state, first_names, shapes).tensors.keys() == {"embed: exp_avg"}
    else:
        with pytest.raises(
            ConfigError, match="separate values for embed and _orig_mod.head, which are one parameter"
        ):
            read(state, first_names, shapes)
