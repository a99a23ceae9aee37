"""``plan`` of small checkpoints, against what a load of them then does."""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests import zoo
from tests.loading import on_ranks
from tests.small_checkpoints import small_qwen3
from tests.support.http_store import HttpStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from transformers import CodeGenConfig, CodeGenForCausalLM

import shardwise
from shardwise import ConfigError, KeyMismatchError, Sharding, ShardingError
from shardwise.files import local_reader
from shardwise.files.storage import NETWORK_FILE_SYSTEM, OBJECT_STORE
from shardwise.options import Classes, Ignore, Initialize


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """A mixture of experts of several files, experts stored one by one."""
    model = zoo.causal_lm("qwen3_5_moe_text")
    return zoo.save_original(model, tmp_path_factory.mktemp("moe"), max_shard_size="60KB")


@pytest.mark.parametrize("name", ["qwen3", "tied_qwen3", "moe"])
def test_a_load_equals_its_estimate(worlds, name, request):
    directory = str(request.getfixturevalue(name))
    made = shardwise.plan(directory, ranks=3, device="cpu", dtype="float32")
    facts = worlds(3).run(on_ranks.report_of, directory, {"dtype": torch.float32})
    for rank, fact in zip(made.ranks, facts, strict=True):
        assert rank.rank == fact["rank"]
        assert rank.shard_bytes == fact["placed_bytes"]
        assert rank.read_bytes <= fact["read_bytes"] <= rank.read_bytes + 4096  # gaps are read over
        assert dataclasses.asdict(rank) == fact["estimate"]
    assert made.parameters == facts[0]["parameters"]
    assert made.checkpoint_bytes == facts[0]["checkpoint_bytes"]
    assert made.tied == facts[0]["tied"]
    assert made.recomputed == facts[0]["recomputed"]
    assert tuple(made.whole) == facts[0]["replicated"]
    assert made.cast == facts[0]["cast"]


@pytest.mark.parametrize("reshards", [True, False, 2])
def test_blocks_that_stay_gathered_are_counted(worlds, qwen3, reshards):
    sharding = Sharding(reshard_after_forward=reshards)
    made = shardwise.plan(qwen3, ranks=4, device="cpu", dtype="float32", tuning=shardwise.Full(), sharding=sharding)
    planned = {phase.phase: phase.host.get("gathered groups", 0) for phase in made.training.phases}
    kept = worlds(4).run(on_ranks.gathered_at_the_loss, str(qwen3), sharding)[0]
    # The plan also has the last block's buffer.
    assert kept <= planned["loss"] <= kept + made.largest_group.gathered_bytes
    assert planned["backward"] == planned["loss"] + max(group.gathered_bytes for group in made.groups[:-1])


@pytest.mark.parametrize("attention", ["flash_attention_2", {"": "flash_attention_2"}, "sdpa"])
def test_flash_attention_is_planned_where_it_cannot_run(qwen3, attention):
    step = {"tuning": shardwise.Full(), "per_device_train_batch_size": 2, "max_length": 8}
    made, plain = (
        shardwise.plan(qwen3, ranks=2, **step, **more) for more in ({"attn_implementation": attention}, {})
    )
    assert made.training == plain.training
    assert ("FlashAttention" in " ".join(made.notes)) == (attention != "sdpa")


def test_a_config_may_lack_a_padding_token(tmp_path):
    sizes = {
        "vocab_size": 64,
        "n_positions": 32,
        "n_ctx": 32,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "rotary_dim": 4,
    }
    model = CodeGenForCausalLM(CodeGenConfig(**sizes))
    assert not hasattr(model.config, "pad_token_id")
    model.save_pretrained(tmp_path)
    step = {"tuning": shardwise.Full(), "per_device_train_batch_size": 2, "max_length": 8}
    assert shardwise.plan(tmp_path, ranks=2, **step).training.batch_size == 2


def test_nothing_is_left_behind(qwen3):
    default = torch.get_default_dtype()
    shardwise.plan(qwen3, ranks=8, dtype="bfloat16")
    assert not dist.is_initialized()
    assert torch.get_default_dtype() == default


def test_the_groups_are_those_of_the_wrap_policy(qwen3):
    made = shardwise.plan(qwen3, ranks=4)
    wanted = [("model.layers.0",), ("model.layers.1",), ("model.embed_tokens",), ("",)]
    assert [group.modules for group in made.groups] == wanted
    whole = shardwise.plan(qwen3, ranks=4, sharding=Sharding(wrap="whole_model"))
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
    assert half.ranks[0].read_bytes == full.ranks[0].read_bytes
    assert set(half.cast.values()) == {("F32", "BF16")}
    assert not full.cast


def test_replicas_read_the_checkpoint_once_each(qwen3):
    made = shardwise.plan(qwen3, ranks=8, mesh={"replicate": 2, "shard": 4})
    assert (made.mesh, len(made.ranks)) == ({"replicate": 2, "shard": 4}, 8)
    assert sum(rank.read_bytes for rank in made.ranks) == 2 * made.checkpoint_bytes
    assert made.ranks[1].shard_bytes == made.ranks[5].shard_bytes


def test_the_budget_is_an_argument(qwen3):
    made = shardwise.plan(qwen3, ranks=2, budget_bytes=8192)
    assert made.ranks[0].host_bytes == 8192


def test_ties_that_are_stored_twice_are_taken_to_be_equal(tied_qwen3, changed):
    twice = changed(
        tied_qwen3, lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
    )
    made = shardwise.plan(twice, ranks=2)
    assert made.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    (note,) = made.notes
    assert note.startswith("lm_head.weight = model.embed_tokens.weight: stored twice")


def without_norm(tensors):
    return {key: value for key, value in tensors.items() if key != "model.norm.weight"} | {"extra": torch.ones(1)}


def test_mismatches_are_reported_as_by_a_load(qwen3, changed):
    directory = changed(qwen3, without_norm)
    with pytest.raises(KeyMismatchError) as foretold:
        shardwise.plan(directory, ranks=64)
    with pytest.raises(KeyMismatchError) as told:
        shardwise.from_pretrained(directory)
    assert str(foretold.value) == str(told.value)


def test_consent_is_honoured(qwen3, changed):
    directory = changed(qwen3, without_norm)
    on_missing = Initialize(("model.norm.*",))
    made = shardwise.plan(directory, ranks=2, on_missing=on_missing, on_unexpected=Ignore(("extra",)))
    assert (made.initialized, made.ignored_keys) == (("model.norm.weight",), ("extra",))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"ranks": 0}, ConfigError, "ranks=0"),
        ({"ranks": 8, "nodes": 2}, ConfigError, "plan.. got an unexpected keyword argument 'nodes'"),
        ({"ranks": 8, "mesh": {"shard": 4}}, ConfigError, "has 4 ranks, not 8"),
        ({"ranks": 8, "mesh": {"shrad": 8}}, ConfigError, "no axis 'shrad'"),
        ({"ranks": 2, "sharding": Sharding(replicas=2)}, ConfigError, "2 replicas: 2 ranks cannot be divided"),
        ({"ranks": 8, "sharding": Sharding(replicas=3)}, ConfigError, "3 replicas: .* Use 6 ranks .* 1 replica"),
        ({"ranks": 2, "sharding": Sharding(reshard_after_forward=3)}, ShardingError, "Pass one of .2., True or"),
        ({"ranks": 2, "max_length": -1}, ConfigError, "max_length=-1: is not a number"),
        ({"ranks": 2, "gradient_accumulation_steps": 0}, ConfigError, "gradient_accumulation_steps=0: is not"),
        ({"ranks": 2, "dtype": "int8"}, ConfigError, "int8"),
        ({"ranks": 2, "sharding": Sharding(wrap=Classes(("Bert",)))}, ShardingError, "matches nothing in Qwen3"),
        ({"ranks": 2, "config_overrides": {"num_layers": 3}}, ConfigError, "num_layers"),
    ],
)
def test_arguments_that_cannot_be_planned_are_named(qwen3, arguments, error, message):
    with pytest.raises(error, match=message):
        shardwise.plan(qwen3, **arguments)


def test_a_mesh_of_real_ranks_is_refused(qwen3):
    with pytest.raises(ConfigError, match='as mesh={"replicate": 2'):
        shardwise.plan(qwen3, ranks=2, sharding=Sharding(mesh=mock.create_autospec(DeviceMesh, instance=True)))


def test_a_repository_that_is_not_in_the_cache_is_not_downloaded(tmp_path):
    with pytest.raises(shardwise.ShardwiseError, match="no/such-model"):
        shardwise.plan("no/such-model", ranks=2, hub=shardwise.options.HubOptions(cache_dir=tmp_path))


def test_a_checkpoint_at_a_url_is_planned_by_its_headers(qwen3, monkeypatch):
    with HttpStore(qwen3) as store:
        there = shardwise.plan(store.url, ranks=4, mesh={"replicate": 2, "shard": 2})
    monkeypatch.setattr(local_reader, "LOCAL", OBJECT_STORE)
    here = shardwise.plan(qwen3, ranks=4, mesh={"replicate": 2, "shard": 2})
    assert there.checkpoint == store.url
    assert there.to_dict() == here.to_dict() | {"checkpoint": store.url}


def test_each_file_on_a_network_file_system_is_identified_once(qwen3, monkeypatch):
    monkeypatch.setattr(local_reader, "LOCAL", NETWORK_FILE_SYSTEM)
    identity = mock.Mock(wraps=local_reader.LocalReader.identity)
    monkeypatch.setattr(local_reader.LocalReader, "identity", lambda reader, file: identity(reader, file))
    shardwise.plan(qwen3, ranks=2)
    assert sorted(call.args[1] for call in identity.mock_calls) == sorted(
        file.name for file in qwen3.glob("*.safetensors")
    )


def test_more_ranks_than_rows_hold_nothing_of_some_tensors(tmp_path):
    zoo.save_original(small_qwen3(), tmp_path)
    made = shardwise.plan(tmp_path, ranks=128, device="cpu")
    assert min(rank.shard_bytes for rank in made.ranks) == 0
    assert {rank.padded_bytes for rank in made.ranks} == {made.ranks[0].shard_bytes}
