"""Context, tensor and expert parallelism: gradients of one process, and saves and checkpoints of any mesh."""

from pathlib import Path

import pytest
from tests import zoo
from tests.integrations import larger_meshes
from tests.integrations.test_accelerate import ALL_SAME
from tests.support.world import agreed, require_words
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

SIZES = {"vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "pad_token_id": 0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> str:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, intermediate_size=24))
    zoo.fill(model)
    return str(zoo.save_original(model, tmp_path_factory.mktemp("dense")))


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> str:
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, num_key_value_heads=2, intermediate_size=8))
    zoo.fill(model)
    return str(zoo.save_original(model, tmp_path_factory.mktemp("experts")))


@pytest.mark.parametrize(
    ("ranks", "sizes", "axes"),
    [
        (2, {"cp_size": 2}, ()),
        pytest.param(4, {"dp_shard_size": 2, "cp_size": 2}, ("dp_shard_cp",), marks=pytest.mark.slow),
        pytest.param(4, {"dp_shard_size": 2, "cp_size": 2}, (), marks=pytest.mark.slow),
        pytest.param(
            4,
            {"dp_replicate_size": 2, "dp_shard_size": 2, "cp_size": 1},
            ("dp_replicate", "dp_shard_cp"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_gradients_of_split_sequences_are_those_of_whole_ones(worlds, dense, ranks, sizes, axes):
    for faults, furthest in worlds(ranks).run(larger_meshes.trained_in_contexts, dense, sizes, axes):
        assert faults == []
        assert furthest < 1e-5


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [(2, {"cp_size": 2}), pytest.param(4, {"dp_shard_size": 2, "cp_size": 2}, marks=pytest.mark.slow)],
)
def test_a_trainer_with_split_sequences_trains_as_with_whole_ones(worlds, dense, tmp_path, ranks, sizes):
    ((losses, weights),) = worlds(1).run(larger_meshes.trained_by_the_trainer, dense, str(tmp_path / "1"), {})
    assert len(losses) == 3
    for found, own in worlds(ranks).run(larger_meshes.trained_by_the_trainer, dense, str(tmp_path / "2"), sizes):
        assert found == pytest.approx(losses, rel=1e-5)
        assert max(float((own[name] - value).abs().max()) for name, value in weights.items()) < 1e-5


def test_settings_that_would_change_the_training_are_refused_by_name(worlds, dense):
    found = agreed(worlds(2), larger_meshes.refusals, dense)
    expected = {
        "no ring": "NotImplementedError: Operator aten._scaled_dot_product_flash_attention_for_cpu",
        "no positions": "ConfigError: FSDPLlamaForCausalLM without position_ids: it would make them from",
        "no positions, sharded by accelerate": "ConfigError: FSDPLlamaForCausalLM without position_ids",
        "no labels": "ConfigError: FSDPLlamaForCausalLM without shift_labels: it would make them from",
        "eager": "ConfigError: FSDPLlamaForCausalLM with attn_implementation='eager': under context parallelism",
        "mesh": "ShardingError: LlamaForCausalLM cannot be sharded on the mesh dp=2, tp=1: fully_shard",
        "part": "FSDP2 averages over fewer than the 2 ranks that get rows of their own",
        "sp": "ConfigError: ParallelismConfig(sp_size=2): only DeepSpeed splits sequences so",
    }
    require_words(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes", "shards"),
    [
        ("dense", {"tp_size": 2, "fsdp_size": 2}, "(Shard(dim=0), Shard(dim=1))"),
        ("experts", {"tp_size": 2, "fsdp_size": 2}, "(Shard(dim=0), Shard(dim=2))"),
        ("experts", {"fsdp_size": 4, "ep_size": 2}, "(_StridedShard(dim=0, sf=2), Shard(dim=0))"),
        ("experts", {"tp_size": 2, "fsdp_size": 2, "ep_size": 2}, "(_StridedShard(dim=0, sf=2), Shard(dim=0))"),
    ],
)
def test_plans_of_transformers(worlds, request, tmp_path: Path, kind, sizes, shards):
    checkpoint = request.getfixturevalue(kind)
    for found in worlds(4).run(larger_meshes.by_plans, checkpoint, str(tmp_path), sizes):
        assert shards in found.pop("kinds")
        assert found.pop("gradient") < 1e-5
        assert found == {"loaded": [], "saved": [], "resumed": [], "moments": True}


def test_a_lora_of_peft_on_a_plan_of_transformers_is_saved_as_by_peft(worlds, dense, tmp_path: Path):
    assert worlds(2).run(larger_meshes.adapter_by_plans, dense, str(tmp_path)) == [[], []]


@pytest.mark.slow
def test_ranks_that_share_rows_in_a_loop_of_accelerate(worlds, dense):
    for found in worlds(4).run(larger_meshes.prepared_by_plans, dense):
        assert all(found[name] < most for name, most in ALL_SAME.items()), found
