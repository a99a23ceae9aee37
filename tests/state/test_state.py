"""States of models in memory: bitwise those of the whole model, from and onto every sharding."""

import pytest
from tests.quantized.requirements import SHARDS_PACKED
from tests.state import stating
from tests.support.world import require_same_error

from shardwise import ConfigError

WORLDS = [(1, ""), (3, ""), (2, "wrapped"), (2, "offload"), (4, "hsdp"), (4, "tp"), (2, "shard1")]


@pytest.mark.parametrize(("size", "way"), WORLDS)
def test_the_full_state_is_that_of_the_whole_model(worlds, size, way):
    assert worlds(size).run(stating.full_state, way) == [[]] * size


def test_replicas_share_large_tensors(worlds):
    assert worlds(4).run(stating.large_state) == [[]] * 4


def test_without_a_process_group_it_is_the_same():
    assert stating.full_state("") == []


@pytest.mark.parametrize(
    ("size", "way", "provided_by"),
    [
        *((size, way, "first") for size, way in WORLDS[1:]),
        *((3, "", by) for by in ("every", "shards", "last")),
        *((4, "hsdp", by) for by in ("every", "shards")),
        (1, "", "every"),
        (4, "tp", "shards"),
    ],
)
def test_a_state_is_set_on_another_model(worlds, size, way, provided_by):
    found = worlds(size).run(stating.there_and_back, way, provided_by, way)
    assert [faults for faults, _ in found] == [[]] * size
    for _, report in found:
        assert report["missing"] == report["unexpected"] == report["mismatched"] == report["on_meta"] == ()
        assert report["cast"] == {}
        if provided_by in ("every", "shards"):
            assert report["sent_bytes"] == report["received_bytes"] == 0
            assert report["provided_by"] == tuple(range(size))
    if provided_by == "first":
        assert found[0][1]["provided_by"] == (0,)
        # Every other rank is sent its own shards, and not a byte more.
        told = [report["received_bytes"] for _, report in found[1:]]
        assert told == [report["own_bytes"] for _, report in found[1:]]


@pytest.mark.parametrize(("way", "onto"), [("", "hsdp"), ("hsdp", ""), ("tp", "shard1"), ("shard1", "tp")])
def test_shards_of_another_sharding_are_dealt_anew(worlds, way, onto):
    found = worlds(4).run(stating.there_and_back, way, "shards", onto)
    assert [faults for faults, _ in found] == [[]] * 4
    assert sum(report["received_bytes"] for _, report in found) > 0


def test_some_ranks_may_act_alone(worlds):
    assert worlds(3).run(stating.in_a_subgroup) == [[]] * 3


def test_a_model_on_meta_gets_memory(worlds):
    for faults, report in worlds(3).run(stating.onto_meta):
        assert [fault for fault in faults if "on meta" not in fault] == []
        assert report["on_meta"] == ("blocks.0.table.angles", "blocks.1.table.angles")


def test_a_transformers_model_on_meta_gets_its_computed_buffers(worlds):
    """Its rotary frequencies are in no state: they are computed, as a load computes them."""
    for differing, leftovers, recomputed in [*worlds(2).run(stating.onto_meta_of_transformers)]:
        assert differing == []
        assert leftovers == []
        assert recomputed == ("model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq")


FAULTS = {
    "missing": ("KeyMismatchError", "missing 2        blocks.0.norm.bias\n  {17}blocks.1.linear.weight"),
    "unexpected": ("KeyMismatchError", "unexpected 1     blocks.2.linear.weight"),
    "shape": ("KeyMismatchError", "blocks.1.linear.weight: (5, 5) BF16 on rank 0, expected (5, 6) BF16"),
    "absent on rank 1": ("RankMismatchError", "blocks.1.linear.weight is not on rank 1"),
    "shape on rank 1": (
        "KeyMismatchError",
        "blocks.1.linear.weight: (4, 6) BF16 on rank 1, expected (5, 6)",
    ),
    "ties": ("KeyMismatchError", "embed.weight and head.weight: are one tensor in the model"),
    "ties on rank 1": ("KeyMismatchError", "rank 1: embed.weight and head.weight: are one tensor"),
    "meta on rank 1": ("ShardingError", "rank 1: 1 tensors of the given state are on meta"),
    "no tensor": ("ConfigError", "blocks.1.linear.weight in the state is a list"),
    "sparse": ("ConfigError", "blocks.1.linear.weight in the state is a torch.sparse_coo"),
    "no mapping on rank 1": ("ConfigError", "rank 1: state: is a "),
    "twice": ("ConfigError", "state: has blocks.1.linear.weight twice"),
    "nobody": ("KeyMismatchError", "missing"),
    "parts of several": ("RankMismatchError", "do not provide each element once"),
}
if SHARDS_PACKED:
    FAULTS["kind"] = ("KeyMismatchError", "blocks.0.codes: (9, 2) F32 on rank 0, expected (9, 2) I32")


def test_mismatches_are_one_error_and_change_nothing(worlds):
    for found in zip(*worlds(3).run(stating.refused, list(FAULTS)), strict=True):
        ((fault, *_), *_) = found
        kind, text = FAULTS[fault]
        require_same_error([end[1:3] for end in found], kind, text.replace("{17}", " " * 17))
        assert [changed for *_, changed in found] == [[]] * 3, fault


def test_ignored_tensors_keep_their_values_and_are_reported(worlds):
    for faults, report in worlds(2).run(stating.tolerated):
        assert faults == []
        assert report["missing"] == ("blocks.0.norm.bias",)
        assert report["unexpected"] == ("more",)
        assert report["mismatched"] == ("blocks.0.norm.weight",)


def test_values_are_cast_to_the_parameter_s_dtype_and_reported(worlds):
    for faults, report in worlds(2).run(stating.cast):
        assert faults == []
        assert report["cast"] == {f"blocks.{block}.linear.weight": ("F64", "BF16") for block in (0, 1)}


def test_other_models_are_an_error_on_every_rank(worlds):
    require_same_error(worlds(2).run(stating.other_models), "RankMismatchError", "more is")


def test_other_arguments_are_an_error_on_every_rank(worlds):
    require_same_error(worlds(2).run(stating.other_arguments), "RankMismatchError", "form ('full_on_all")


def test_unknown_choices_of_one_rank_are_an_error_on_every_rank(worlds):
    one, other = worlds(2).run(stating.unknown_choices)
    assert one == other
    words = ["on_missing is Initialize"] * 2 + ["on_unexpected='ignore' is not known"] * 2 + ["options is None"] * 4
    for (kind, text), expected in zip(one, words, strict=True):
        assert kind == "ConfigError"
        assert f"rank 1: {expected}" in text


def test_half_of_a_mesh_is_refused(worlds):
    errors = worlds(4).run(stating.on_half_of_the_mesh)[:2]
    require_same_error(errors, "ShardingError", "together do not have each element of")


def test_a_mesh_of_some_ranks_is_refused_before_they_wait_for_the_others(worlds, tmp_path):
    words = "the mesh has the ranks [0], but the process group of the call has [0, 1]"
    for error in worlds(2).run(stating.of_a_half_alone, str(tmp_path))[0]:
        require_same_error([error], "ShardingError", words)


@pytest.mark.parametrize("form", ["first_rank", "local", None])
def test_an_unknown_form_is_refused(form):
    with pytest.raises(ConfigError, match="is not known. Pass one of 'full', 'full_on_all_ranks', 'sharded'"):
        stating.shardwise.get_model_state_dict(stating.sharding.Net(), form)


def test_a_model_without_values_has_no_state(worlds):
    require_same_error(worlds(2).run(stating.without_values), "ShardingError", "are on meta")


def test_gathering_stages_no_more_than_its_budget(worlds):
    budget = 1 << 20
    assert all(0 < staged <= budget for staged in worlds(2).run(stating.staged, budget))


@pytest.mark.parametrize("adapter", ["default", "second"])
def test_an_adapter_state_equals_that_of_peft(worlds, adapter):
    for faults, changed in worlds(2).run(stating.adapter_state, adapter, ("default", "second")):
        assert faults == []
        assert changed
        assert all(f".{adapter}." in name or name.endswith(f".{adapter}") for name in changed)


def test_an_adapter_that_is_not_there_is_named():
    (first, text), (second, other) = stating.adapter_faults()
    assert (first, second) == ("ConfigError", "ConfigError")
    assert "adapter='other'" in text
    assert "default" in text
    assert "Net has no such adapter" in other
