"""``shard``: the same model from every state that the ranks may start in."""

import pytest
import torch
from safetensors.torch import save_file
from tests.quantized.requirements import SHARDS_PACKED
from tests.state import sharding
from tests.support.world import require_same_error, run_forked

import shardwise
from shardwise.fsdp.policies import Classes
from shardwise.fsdp.wrap import require_trainable_dtype


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    sharding.save(str(folder))
    return str(folder)


@pytest.fixture(scope="session")
def net_checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("net")
    save_file(sharding.net_of(3).state_dict(), folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize(
    ("size", "state", "mesh"),
    [
        (1, "everywhere", ""),
        (2, "compiled", ""),
        (2, "meta", ""),
        (3, "last", ""),
        (4, "nodes", "hsdp"),
        (4, "buffers", "hsdp"),
    ],
)
def test_every_state_ends_in_the_same_bits(worlds, checkpoint, size, state, mesh):
    for faults, report in worlds(size).run(sharding.shard_from, state, mesh, checkpoint):
        assert faults == []
        assert report["staging_bytes"] <= 4096
        assert report["tied"] == {"head.weight": "embed.weight"}
        assert report["cast"] == report["differed"] == {}
        whole = {f"blocks.{block}.{name}" for block in (0, 1) for name in ("scale", "registers")}
        assert set(report["replicated"]) == (whole if report["mesh"] else set())
        if state in ("everywhere", "compiled"):
            assert report["sent_bytes"] == 0


def test_one_process_without_a_group_keeps_its_model(checkpoint):
    faults, report = sharding.shard_from("everywhere", "", checkpoint)
    assert faults == []
    assert (report["mesh"], report["world_size"], report["sent_bytes"]) == ("", 1, 0)


def test_parameters_may_be_disjoint_views_of_one_storage():
    whole = torch.arange(24.0).view(4, 6)
    disjoint = [whole[:2, :3], whole[:2, 3:], whole[2], whole[3, :0], *torch.empty(2, 3, device="meta")]
    shardwise.shard(torch.nn.ParameterList(torch.nn.Parameter(view) for view in disjoint))
    overlapping = [whole[2:3].view(6, 1), whole[2, 2:4], whole.view(-1), whole.t(), whole[2].view(torch.int32)]
    for view in overlapping:
        parameters = [torch.nn.Parameter(each, requires_grad=False) for each in (*disjoint, view)]
        with pytest.raises(shardwise.ShardingError, match="[026] and [026] are two parameters that share memory"):
            shardwise.shard(torch.nn.ParameterList(parameters))


def test_differing_values_become_those_of_rank_0_and_are_reported(worlds):
    for faults, report in worlds(3).run(sharding.other_values):
        assert faults == []
        assert report["differed"] == {"embed.weight": 0, "blocks.0.table.angles": 0}


def test_the_source_casts_to_the_receivers_dtype_but_never_bits(worlds):
    for faults, report in worlds(2).run(sharding.other_dtypes):
        assert faults == []
        codes = {"blocks.1.codes": ("int64", "int32")} if SHARDS_PACKED else {}
        assert report["cast"] == codes | {
            "blocks.0.linear.weight": ("float32", "bfloat16"),
            "blocks.0.linear.bias": ("float32", "bfloat16"),
            "blocks.1.packed": ("bfloat16", "float8_e4m3fn"),
        }


@pytest.mark.parametrize("state", ["everywhere", "first"])
def test_only_trained_parameters_are_upcast_and_each_is_reported(worlds, state):
    for faults, report in worlds(2).run(sharding.upcast, state):
        assert faults == []
        cast = {"embed.weight"} | {
            f"blocks.{block}.{name}"
            for block in (0, 1)
            for name in ("linear.weight", "linear.bias", "experts", "scale")
        }
        assert report["cast"] == dict.fromkeys(cast, ("bfloat16", "float32"))


def test_upcast_takes_a_dtype_to_train_in():
    with pytest.raises(shardwise.ConfigError, match="not a floating dtype of 16 bits or more"):
        require_trainable_dtype(torch.float8_e4m3fn)


def test_offloaded_shards_arrive_too(worlds):
    assert worlds(2).run(sharding.offload) == [[], []]


def test_tensors_without_values_on_any_rank_stay_on_meta(worlds):
    for faults, on_meta in worlds(3).run(sharding.partly_live):
        assert on_meta == ("blocks.0.linear.bias",)
        assert faults == ["blocks.0.linear.bias is on meta, or has another shape"]


@pytest.mark.parametrize("name", ["qwen3", "tied_qwen3"])
def test_a_transformers_model_of_one_rank_is_that_of_all(worlds, name, request):
    directory = str(request.getfixturevalue(name))
    assert worlds(2).run(sharding.against_from_pretrained, directory) == [([], [])] * 2


# What cannot be


NOTHING = {"sharding": shardwise.Sharding(wrap=Classes(("Nothing",)))}


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (NOTHING, "ShardingError", "matches nothing in Model"),
        ("another architecture", "RankMismatchError", "blocks.2.linear.weight is a parameter of shape (5, 6)"),
        ("another shape", "RankMismatchError", "blocks.0.experts is a parameter of shape (2, 12, 4)"),
        ("untied", "RankMismatchError", "tied to head.weight on rank 0"),
        ("other gradients", "RankMismatchError", "trained, with gradients of torch.float32 on rank 1"),
        ("frozen", "RankMismatchError", "(2, 12, 3), trained on rank 0"),
        ("in part", "ShardingError", "sharded in part: fully_shard was applied to blocks.0.linear, but not to"),
        ("FSDP1", "ShardingError", "blocks.0.linear is under FSDP1 (FullyShardedDataParallel). Use"),
        ("sharded on one rank", "RankMismatchError", "the state of the model (sharded already, or not) on rank 1"),
        ("gradient", "ShardingError", "blocks.1.scale: a gradient would be lost"),
        ("shared memory", "ShardingError", "head.weight and embed.weight are two parameters that share memory"),
        ("subclass", "ShardingError", "blocks.0.experts is a Special"),
    ],
)
def test_a_model_that_cannot_be_sharded_is_identified_by_name_and_left_alone(worlds, fault, kind, words):
    """For what it is, or for keywords."""
    given = ("", fault) if isinstance(fault, dict) else (fault, {})
    for found, text, same in worlds(2).run(sharding.refused, *given):
        assert (found, same) == (kind, True)
        assert words in text


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("divisor", "ShardingError", "reshard_after_forward=3: is not a number of ranks that divides the 2"),
        ("axes", "ShardingError", "cannot be sharded on the mesh a=1, b=1, c=2: fully_shard takes one axis"),
        ("tp", "ShardingError", "cannot be sharded on the mesh tp=2"),
        ("backend", "ConfigError", "compile={'backend': 'nosuch'}: torch.compile does not accept it"),
        ("keyword", "ConfigError", "compile={'nosuch': 1}: torch.compile does not accept it"),
    ],
)
def test_settings_that_fit_no_model_are_refused_before_its_values_are_moved(worlds, fault, kind, words):
    found = worlds(2).run(sharding.refused_settings, fault)
    require_same_error([end[:2] for end in found], kind, words)
    assert [changed for *_, changed in found] == [[], []]


def test_ranks_with_other_arguments_are_reported(worlds):
    errors = worlds(2).run(sharding.other_arguments)
    require_same_error(errors, "RankMismatchError", "arguments (mesh, policies, modes, budget) on rank 1")


def test_a_function_in_a_policy_is_the_same_wherever_it_lies(worlds):
    assert worlds(2).run(sharding.a_function_in_the_policy) == [(True, True)] * 2


def test_a_budget_has_a_page():
    with pytest.raises(shardwise.ConfigError, match="less than a page"):
        shardwise.options.StateOptions(budget_bytes=100)


# Optimizers


@pytest.mark.parametrize(
    ("size", "maker", "state"),
    [(3, "adamw", "first"), (2, "fused", "first"), (3, "momentum", "last"), (3, "two", "everywhere")],
)
def test_training_continues_as_if_on_one_process(worlds, size, maker, state):
    for found in worlds(size).run(sharding.train_across, maker, state):
        assert found["gap"] < 2e-6  # sums in another order
        assert found["moved"] > 1e-3
        assert sum(count for count, _ in found["rebound"]) == 11


def test_scalars_that_differ_in_their_last_digit_are_reported(worlds):
    assert worlds(2).run(sharding.other_scalars) == [({"head.weight: scale of optimizer 0": 0}, 1.5)] * 2


def test_an_optimizer_of_a_model_on_meta_holds_what_is_loaded(worlds, net_checkpoint):
    assert worlds(2).run(sharding.load_after, net_checkpoint) == [[], []]


def test_a_whole_parameter_that_was_on_meta_gets_the_mean_gradient(worlds, net_checkpoint):
    for mine, expected in worlds(2).run(sharding.mean_gradient_of_whole, net_checkpoint):
        assert mine == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("another model", "ShardingError", "parameter blocks.0.0.weight, (7, 5), in group 0 of optimizer 0 (SGD)"),
        ("twice", "ShardingError", "blocks.0.0.weight is in group 0 of optimizer 1 (SGD) and in group 0 of"),
        ("factored", "ShardingError", "head.weight: rows of optimizer 0 has shape (3,), the parameter (3, 5)"),
        ("history", "ShardingError", "head.weight: old of optimizer 0 is a list"),
        ("not a sequence", "ConfigError", "optimizers=(optimizer,)"),
        ("other settings", "RankMismatchError", "the setup of the optimizers"),
        ("other order", "RankMismatchError", "the setup of the optimizers"),
        ("stale", "ShardingError", "is not the model's"),
    ],
)
def test_an_optimizer_that_cannot_be_bound_is_refused_by_name(worlds, fault, kind, words):
    require_same_error(worlds(2).run(sharding.strange_optimizer, fault), kind, words)


# Memory


@pytest.mark.distributed
def test_only_the_source_ever_holds_more_than_its_shards():
    """In new processes, because memory that was in use before is not given back as a whole."""
    budget, slack, blocks = 16 << 20, 12 << 20, 12
    source, *others = run_forked(3, sharding.memory, budget, blocks)
    model = blocks * (8 << 20)
    assert source["shards"] == pytest.approx(model / 3, rel=0.01)
    assert source["grown"] < budget + slack  # it gives whole tensors away as fast as its shards grow
    assert source["left"] < source["shards"] - model + slack
    for other in others:
        assert other["grown"] < other["shards"] + budget + slack
