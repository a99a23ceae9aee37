"""``plan`` of small checkpoints, against what a load of them then does."""

from __future__ import annotations

import dataclasses
import math
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests import zoo
from tests.harness.http_store import HttpStore
from tests.verbs import on_ranks
from tests.verbs.conftest import small_qwen3
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import shardwise
from shardwise import ConfigError, CoverageError, PlacementError, Sharding
from shardwise.engines.sharding import sharding_named, wrap_named
from shardwise.models.view import raw_bytes
from shardwise.models.wrapping.policies import Automatic, ModelPlan, ModuleListBlocks, NoSplitModules
from shardwise.options import Classes, Ignore, Initialize, WholeModel
from shardwise.planning.moves.sharing_choice import Alone, InIntervals, OncePerGroup
from shardwise.storage.policies import LOCAL, NETWORK_FILE_SYSTEM, OBJECT_STORE


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """A mixture of experts of several files, experts stored one by one."""
    directory = tmp_path_factory.mktemp("moe")
    (specimen,) = (item for item in zoo.representative_specimens() if item.name == "qwen3_5_moe_text")
    zoo.save_original(zoo.build(specimen), directory, max_shard_size="60KB")
    return directory


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["qwen3", "tied_qwen3", "moe"])
def test_a_load_does_what_was_foretold(worlds, name, request):
    directory = str(request.getfixturevalue(name))
    made = shardwise.plan(directory, ranks=3, device="cpu", dtype="float32")
    facts = worlds(3).run(on_ranks.report_of, directory, {"dtype": torch.float32})
    for rank, fact in zip(made.ranks, facts, strict=True):
        assert rank.rank == fact["rank"]
        assert rank.shard_bytes == fact["placed_bytes"]
        assert rank.read_bytes == fact["read_bytes"] >= rank.needed_bytes
        assert dataclasses.asdict(rank) == fact["forecast"]
        seen = (rank.reads, rank.files)
        done = (fact["reads"], fact["files_opened"])
        if rank.rank == 0:  # it reads the headers of all files, too
            assert all(ours <= theirs for ours, theirs in zip(seen, done, strict=True))
        else:
            assert seen == done
    assert made.parameters == facts[0]["parameters"]
    assert made.checkpoint_bytes == facts[0]["checkpoint_bytes"]
    assert made.tied == facts[0]["tied"]
    assert made.recomputed == facts[0]["recomputed"]
    assert tuple(made.whole) == facts[0]["replicated"]
    assert made.cast == facts[0]["cast"]


def test_nothing_is_left_behind(qwen3):
    default = torch.get_default_dtype()
    shardwise.plan(qwen3, ranks=8, dtype="bfloat16")
    assert not dist.is_initialized()
    assert torch.get_default_dtype() == default


def test_the_groups_are_those_of_the_wrap_policy(qwen3):
    made = shardwise.plan(qwen3, ranks=4)
    assert [group.modules for group in made.groups] == [
        ("model.layers.0",),
        ("model.layers.1",),
        ("model.embed_tokens",),
        ("",),
    ]
    whole = shardwise.plan(qwen3, ranks=4, sharding=Sharding(wrap=WholeModel()))
    assert [group.modules for group in whole.groups] == [("",)]
    assert whole.largest_group.parameters == made.parameters


def test_mixed_precision_and_offload_change_what_they_should(qwen3):
    plain = shardwise.plan(qwen3, ranks=2, dtype="float32")
    mixed = shardwise.plan(
        qwen3,
        ranks=2,
        dtype="float32",
        sharding=Sharding(
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), offload_policy=CPUOffloadPolicy()
        ),
    )
    assert mixed.largest_group.gathered_bytes * 2 == plain.largest_group.gathered_bytes
    assert plain.ranks[0].host_bytes + plain.ranks[0].padded_bytes == mixed.ranks[0].host_bytes
    assert plain.ranks[0].device_bytes - plain.ranks[0].padded_bytes == mixed.ranks[0].device_bytes


def test_a_dtype_is_half_the_memory_and_the_same_reads(qwen3):
    full, half = (shardwise.plan(qwen3, ranks=2, dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert half.ranks[0].shard_bytes * 2 == full.ranks[0].shard_bytes
    assert half.ranks[0].needed_bytes == full.ranks[0].needed_bytes
    assert set(half.cast.values()) == {("F32", "BF16")}
    assert not full.cast


def test_replicas_read_the_checkpoint_once_each(qwen3):
    made = shardwise.plan(qwen3, ranks=8, nodes=2, mesh={"replicate": 2, "shard": 4})
    assert (made.mesh, made.nodes, len(made.ranks)) == ({"replicate": 2, "shard": 4}, 2, 8)
    assert sum(rank.needed_bytes for rank in made.ranks) == 2 * made.checkpoint_bytes
    assert made.ranks[1].shard_bytes == made.ranks[5].shard_bytes


def test_the_budget_and_the_way_of_reading_are_arguments(qwen3):
    made = shardwise.plan(qwen3, ranks=2, budget_bytes=8192, read_policy=LOCAL)
    assert made.ranks[0].host_bytes == 8192


def test_experts_of_each_rank(moe):
    made = shardwise.plan(moe, ranks=2)
    held = {str(experts) for experts in made.ranks[1].experts.values()}
    assert held == {"2 of 4 (2..3)"}
    few = shardwise.plan(moe, ranks=8)
    assert {experts.is_cut for experts in few.ranks[1].experts.values()} == {True}


def test_ties_that_are_stored_twice_are_taken_to_be_equal(tied_qwen3, changed):
    twice = changed(
        tied_qwen3, lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
    )
    made = shardwise.plan(twice, ranks=2)
    assert made.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    (note,) = made.notes
    assert note.startswith("lm_head.weight is tied to model.embed_tokens.weight, and both are stored")


def without_norm(tensors):
    return {key: value for key, value in tensors.items() if key != "model.norm.weight"} | {"extra": torch.ones(1)}


def test_what_does_not_fit_is_told_as_by_a_load(qwen3, changed):
    directory = changed(qwen3, without_norm)
    with pytest.raises(CoverageError) as foretold:
        shardwise.plan(directory, ranks=64)
    with pytest.raises(CoverageError) as told:
        shardwise.from_pretrained(directory)
    assert str(foretold.value) == str(told.value)


def test_consent_is_honoured(qwen3, changed):
    directory = changed(qwen3, without_norm)
    made = shardwise.plan(
        directory, ranks=2, on_missing=Initialize(("model.norm.*",)), on_unexpected=Ignore(("extra",))
    )
    assert (made.initialized, made.ignored_keys) == (("model.norm.weight",), ("extra",))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"ranks": 0}, ConfigError, "ranks=0"),
        (
            {"ranks": 8, "nodes": 3},
            ConfigError,
            "8 ranks cannot be dealt evenly to 3 nodes; take nodes=2, or ranks=9",
        ),
        ({"ranks": 8, "nodes": 0}, ConfigError, "take nodes=1"),
        ({"ranks": 8, "nodes": 16}, ConfigError, "take nodes=8, or ranks=16"),
        ({"ranks": 8, "mesh": {"shard": 4}}, ConfigError, "of 4 ranks, not of 8; take shard=8"),
        ({"ranks": 8, "mesh": {"shrad": 8}}, ConfigError, "did you mean shard"),
        ({"ranks": 2, "dtype": "int8"}, ConfigError, "int8"),
        ({"ranks": 2, "sharding": Sharding(wrap=Classes(("Bert",)))}, PlacementError, "matches nothing in Qwen3"),
        ({"ranks": 2, "config_overrides": {"num_layers": 3}}, ConfigError, "num_layers"),
    ],
)
def test_what_cannot_be_planned_is_named(qwen3, arguments, error, message):
    with pytest.raises(error, match=message):
        shardwise.plan(qwen3, **arguments)


def test_a_mesh_of_real_ranks_is_refused(qwen3):
    with pytest.raises(ConfigError, match='as mesh={"replicate": 2'):
        shardwise.plan(qwen3, ranks=2, sharding=Sharding(mesh=mock.create_autospec(DeviceMesh, instance=True)))


def test_a_repository_that_is_not_in_the_cache_is_not_downloaded(tmp_path):
    with pytest.raises(shardwise.ShardwiseError, match="no/such-model"):
        shardwise.plan("no/such-model", ranks=2, hub=shardwise.options.HubOptions(cache_dir=tmp_path))


def test_a_checkpoint_at_a_url_is_planned_by_its_headers(qwen3):
    with HttpStore(qwen3) as store:
        there = shardwise.plan(store.url, ranks=4, mesh={"replicate": 2, "shard": 2})
    here = shardwise.plan(qwen3, ranks=4, mesh={"replicate": 2, "shard": 2}, read_policy=OBJECT_STORE)
    assert there.checkpoint == store.url
    assert there.to_dict() == here.to_dict() | {"checkpoint": store.url}


def test_more_ranks_than_rows_hold_nothing_of_some_tensors(tmp_path):
    zoo.save_original(small_qwen3(), tmp_path)
    made = shardwise.plan(tmp_path, ranks=128, device="cpu")
    assert min(rank.shard_bytes for rank in made.ranks) == 0
    assert {rank.padded_bytes for rank in made.ranks} == {made.ranks[0].shard_bytes}
    assert made.held_imbalance > 1.1
    assert any("is dealt unevenly to 128 ranks" in note for note in made.notes)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("auto", Automatic()),
        ("model-plan", ModelPlan()),
        ("no-split", NoSplitModules()),
        ("module-lists", ModuleListBlocks()),
        ("whole", WholeModel()),
        ("classes=Block,Embedding", Classes(("Block", "Embedding"))),
    ],
)
def test_wrap_policies_by_name(text, policy):
    assert wrap_named(text) == policy


@pytest.mark.parametrize(
    ("text", "near"),
    [("atuo", "auto"), ("class=X", "classes=NAME"), ("classes=", "classes=NAME"), ("min-size=x", "min-size=EL")],
)
def test_an_unknown_wrap_policy_is_refused_with_the_nearest(text, near):
    with pytest.raises(ConfigError, match=f"did you mean {near}"):
        wrap_named(text)


@pytest.mark.parametrize("dtype", ["int8", "float17", "nn"])
def test_mixed_precision_has_a_floating_dtype(dtype):
    with pytest.raises(ConfigError, match=f"param_dtype='{dtype}'"):
        sharding_named("auto", param_dtype=dtype, offload=False)


@pytest.mark.distributed
@pytest.mark.parametrize("mode", [OncePerGroup(), Alone()])
def test_what_replicas_share_is_foretold(worlds, qwen3, mode):
    made = shardwise.plan(
        qwen3, ranks=4, device="cpu", mesh={"replicate": 2, "shard": 2}, shared_reads=mode, budget_bytes=1 << 16
    )
    word = "once" if isinstance(mode, OncePerGroup) else "alone"
    facts = [report for _, report in worlds(4).run(on_ranks.shared_load, str(qwen3), (2, 2), word)]
    assert set(made.read_once) == set(facts[0]["read_once"])
    assert made.read_bytes == pytest.approx(sum(fact["read_bytes"] for fact in facts), rel=0.02)
    assert made.read_ratio == pytest.approx(1 if made.read_once else 2, rel=0.02)


@pytest.mark.distributed
@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=["flat", "hybrid"])
def test_intervals_open_few_files_and_read_every_byte_once(worlds, moe, shape):
    mesh = dict(zip(("replicate", "shard")[-len(shape) :], shape, strict=True))
    ranks = math.prod(shape)
    made = shardwise.plan(
        moe, ranks=ranks, device="cpu", mesh=mesh, shared_reads=InIntervals(), budget_bytes=1 << 20
    )
    assert made.checkpoint_files > 2 * ranks
    assert made.file_opens <= made.checkpoint_files + ranks - 1
    assert made.read_bytes == made.checkpoint_bytes
    assert made.read_imbalance < 1.05
    found = worlds(ranks).run(on_ranks.shared_load, str(moe), shape, "intervals", 1 << 20)
    facts = [report for _, report in found]
    for rank, fact in zip(made.ranks, facts, strict=True):  # small gaps to what another round hands over
        assert rank.read_bytes <= fact["read_bytes"] < 1.005 * rank.read_bytes
    assert set(facts[0]["read_once"]) == set(made.read_once)
    # The first rank has opened all files for their headers, and the index; they stay open.
    assert [fact["files_opened"] for fact in facts[1:]] == [rank.files for rank in made.ranks[1:]]
    assert facts[0]["files_opened"] == made.checkpoint_files + 1
    alone = worlds(ranks).run(on_ranks.shared_load, str(moe), shape, "alone")
    for (values, _), (expected, _) in zip(found, alone, strict=True):
        assert values.keys() == expected.keys()
        assert all(torch.equal(raw_bytes(values[name]), raw_bytes(expected[name])) for name in expected)


@pytest.mark.distributed
@pytest.mark.parametrize("modes", [("intervals", "alone"), ("alone", "intervals")])
def test_intervals_on_some_ranks_only_are_refused(worlds, qwen3, modes):
    """Rather than that one rank waits to be handed what the other does not read."""
    said = r"options.shared_reads on rank 1 is not that of rank 0 \(\w+\(\) against \w+\(\)\)"
    (first, second) = worlds(2).run(on_ranks.shared_as_told, str(qwen3), modes)
    assert first == second
    assert first[0] == "DisagreementError"
    assert re.fullmatch(f"{said}; give every rank the same", first[1])


def test_replicas_on_a_network_file_system_read_once(qwen3):
    for policy, times in ((LOCAL, 2), (NETWORK_FILE_SYSTEM, 1)):
        made = shardwise.plan(qwen3, ranks=8, mesh={"replicate": 2, "shard": 4}, read_policy=policy)
        assert made.read_ratio == pytest.approx(times, rel=0.05)
        assert sum(rank.needed_bytes for rank in made.ranks) == 2 * made.checkpoint_bytes
