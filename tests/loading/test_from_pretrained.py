"""``from_pretrained``: the model that it returns, and the errors that it raises."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file
from tests import truth, zoo
from tests.files.fake_hub import snapshot_in
from tests.loading import on_ranks
from tests.small_checkpoints import SMALL, small_qwen3
from tests.support.files import change_json
from tests.support.world import require_same_error
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3ForCausalLM,
)

import shardwise
from shardwise import CheckpointError, ConfigError, KeyMismatchError, Sharding, StorageError
from shardwise.options import Ignore, Initialize


def test_loss_and_gradients_are_those_of_a_normal_load(worlds, qwen3, tied_qwen3):
    for directory in (qwen3, tied_qwen3):
        assert worlds(2).run(on_ranks.meta_against_normal, str(directory)) == [[], []]


def test_blocks_are_recomputed_in_every_way_of_sharding(worlds, qwen3):
    for runs in (*worlds(2).run(on_ranks.recomputing, str(qwen3)), on_ranks.recomputing(str(qwen3))):
        assert runs == {"from_pretrained": {2}, "shard": {2}}


def test_tied_weights_are_one_parameter_with_one_gradient(worlds, tied_qwen3):
    for same, count, with_gradient in worlds(2).run(on_ranks.ties, str(tied_qwen3)):
        assert same
        assert count == len(list(small_qwen3(tie_word_embeddings=True).parameters()))
        assert "model.embed_tokens.weight" in with_gradient


def test_ties_that_are_stored_twice(worlds, qwen3, tied_qwen3, changed):
    def store_twice(tensors):
        return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}

    (same, *_), _ = worlds(2).run(on_ranks.ties, str(changed(tied_qwen3, store_twice)))
    assert same


def test_declared_ties_with_different_values_stay_apart(worlds, qwen3, changed):
    """As in transformers: both are stored, they differ, so they are not tied."""
    directory = str(changed(qwen3, lambda tensors: tensors, tie_word_embeddings=True))
    for same, *_ in worlds(2).run(on_ranks.ties, directory):
        assert not same


def test_missing_tensors_are_initialized_alike_at_every_world_size(worlds, qwen3):
    keywords = {
        "model_class": AutoModelForSequenceClassification,
        "on_missing": Initialize(("score.*",)),
        "on_unexpected": Ignore(("lm_head.*",)),
        "config_overrides": {"num_labels": 5},
    }
    alone = on_ranks.whole_values(str(qwen3), keywords)
    for values in worlds(3).run(on_ranks.whole_values, str(qwen3), keywords):
        truth.require_equal(values, alone)
    stored = truth.snapshot(small_qwen3())["values"]
    assert alone["score.weight"].std() == pytest.approx(0.02, rel=0.3)
    assert all(torch.equal(alone[name], stored[name]) for name in alone if name != "score.weight")


def test_mismatched_tensors_are_initialized_with_consent(qwen3):
    keywords = {"config_overrides": {"vocab_size": 101}, "output_loading_info": True}
    with pytest.raises(KeyMismatchError, match="mismatched 1"):
        shardwise.from_pretrained(qwen3, on_mismatched=Initialize(("lm_head.*",)), **keywords)
    consent = Initialize(("lm_head.*", "model.embed_tokens.*"))
    model, report = shardwise.from_pretrained(qwen3, on_mismatched=consent, **keywords)
    assert model.lm_head.weight.shape == (101, 32)
    assert set(report.mismatched_keys) == {"lm_head.weight", "model.embed_tokens.weight"}
    assert set(report.initialized) == set(report.mismatched_keys)


def test_the_report_lists_tied_initialized_and_cast_tensors(tied_qwen3):
    _, report = shardwise.from_pretrained(tied_qwen3, dtype="bfloat16", output_loading_info=True)
    assert report.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert report.recomputed == ("model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq")
    assert report.cast["model.norm.weight"] == ("F32", "BF16")
    assert report.read_bytes == report.checkpoint_bytes == 2 * report.placed_bytes
    assert list(report.seconds) == ["index", "plan", "materialize", "read", "fill", "audit"]
    assert json.loads(json.dumps(report.to_dict()))["world_size"] == 1
    assert "tied        lm_head.weight = model.embed_tokens.weight" in str(report)


def test_each_rank_reads_its_own_part(worlds, qwen3):
    reports = worlds(2).run(on_ranks.report_of, str(qwen3), {})
    checkpoint = reports[0]["checkpoint_bytes"]
    assert checkpoint <= sum(report["read_bytes"] for report in reports) <= 1.02 * checkpoint


def test_the_class_comes_from_the_config_or_is_given(qwen3):
    assert type(shardwise.from_pretrained(qwen3)).__name__ == "Qwen3ForCausalLM"
    assert type(shardwise.from_pretrained(qwen3, model_class=AutoModelForCausalLM)).__name__ == "Qwen3ForCausalLM"
    backbone = shardwise.from_pretrained(qwen3, model_class=AutoModel, on_unexpected=Ignore(("lm_head.*",)))
    assert type(backbone).__name__ == "Qwen3Model"


def test_requires_grad_is_the_model_class_s_own(tmp_path):
    """Transformers' own loader loses it."""
    model = zoo.causal_lm("ernie4_5_moe")
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen
    zoo.save_original(model, tmp_path)
    loaded = shardwise.from_pretrained(tmp_path)
    assert {name for name, parameter in loaded.named_parameters() if not parameter.requires_grad} == frozen


def test_attributes_that_saving_reads_are_set_on_the_model(mixtral, tmp_path):
    model = shardwise.from_pretrained(mixtral)
    model.save_pretrained(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert truth.differences(truth.snapshot(again), truth.snapshot(model)) == []


def test_a_custom_key_mapping_is_applied_first(qwen3, changed):
    def rename(tensors):
        return {f"net.{name}": value for name, value in tensors.items()}

    directory = changed(qwen3, rename)
    with pytest.raises(KeyMismatchError, match="missing"):
        shardwise.from_pretrained(directory)
    model = shardwise.from_pretrained(directory, key_mapping={r"^net\.(.+)": r"\1"})
    assert truth.differences(truth.snapshot(model), truth.snapshot(shardwise.from_pretrained(qwen3))) == []


# What is refused


def test_all_faults_of_a_checkpoint_are_reported_at_once(qwen3, changed):
    def spoil(tensors):
        del tensors["model.layers.0.self_attn.q_norm.weight"]
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 32)
        return tensors | {"extra": torch.zeros(2)}

    with pytest.raises(KeyMismatchError) as caught:
        shardwise.from_pretrained(changed(qwen3, spoil))
    message = str(caught.value)
    assert "missing 1        model.layers.0.self_attn.q_norm.weight" in message
    assert "stored (3, 32) F32 in model.safetensors" in message
    assert "model has (56, 32)" in message
    assert "unexpected 1     extra" in message
    assert message.splitlines()[-1].startswith(
        "Pass on_mismatched=Initialize(only=...) for tensors that may be initialized"
    )


def test_a_checkpoint_of_another_architecture_is_refused_on_all_ranks(worlds, qwen3):
    sizes = small_qwen3().config.to_dict()
    config = LlamaConfig(**{name: sizes[name] for name in LlamaConfig().to_dict() if name in sizes})
    keywords = {"model_class": LlamaForCausalLM, "config": config}
    errors = worlds(2).run(on_ranks.error_of, str(qwen3), keywords)
    require_same_error(errors, "KeyMismatchError", "self_attn.q_norm.weight")


@pytest.mark.parametrize(
    ("number", "told"),
    [
        ("4", r"numbered with gaps: \[3\] absent"),
        ("3000000", r"numbered with gaps: \[3, 4, 5, 6, 7, 8\] and more absent"),
        ("9" * 12, r"experts\.9{12}\.\S+ has a number of more than 9 digits"),
        ("9" * 4400, r"experts\.9+.* has a number that cannot be read"),
        ("²", r"experts\.².* has a number that cannot be read"),
    ],
    ids=["small", "large", "too large", "unlimited", "superscript"],
)
def test_experts_numbered_with_gaps_are_refused(mixtral, changed, number, told):
    def renumber(tensors):
        return {name.replace("experts.3.", f"experts.{number}."): value for name, value in tensors.items()}

    with pytest.raises(CheckpointError, match=told):
        shardwise.from_pretrained(changed(mixtral, renumber))


def test_ranks_that_plan_differently_are_stopped_by_name(worlds, qwen3):
    told = "the config on rank 1 is not that of rank 0: vocab_size (98 against 97)."
    errors = worlds(2).run(on_ranks.another_config_on_each_rank, str(qwen3))
    require_same_error(errors, "RankMismatchError", told)


def test_ranks_that_declare_other_ties_are_stopped(worlds, qwen3):
    errors = worlds(2).run(on_ranks.tied_on_one_rank_only, str(qwen3))
    require_same_error(errors, "RankMismatchError", "the list of declared ties")


def test_a_process_group_of_some_ranks_loads_together(worlds, qwen3):
    *members, outsider = worlds(3).run(on_ranks.in_a_subgroup, str(qwen3))
    expected = truth.snapshot(small_qwen3())["values"]
    assert outsider is None
    for found in members:
        assert all(torch.equal(found[name], expected[name]) for name in expected)


_SLOW_WAYS = [pytest.param(way, marks=pytest.mark.slow) for way in ("state", "accelerate", "checkpoint")]


@pytest.mark.parametrize("way", ["load", *_SLOW_WAYS])
def test_whole_parameters_are_trained_alike_however_they_are_filled(worlds, qwen3, tmp_path, way):
    first, second = worlds(2).run(on_ranks.gradients_of_whole_parameters, str(qwen3), str(tmp_path / way), way)
    assert len(first) == 4
    for name, gradient in first.items():
        assert gradient.any()
        assert torch.equal(gradient, second[name]), name


def test_a_mesh_of_other_ranks_than_the_process_group_is_refused(worlds, qwen3):
    require_same_error(worlds(3).run(on_ranks.mesh_of_others, str(qwen3))[:2], "ShardingError")


def test_a_path_that_some_machines_lack_ends_all_ranks(worlds, qwen3):
    require_same_error(worlds(2).run(on_ranks.path_on_one_rank_only, str(qwen3)), "StorageError", "rank 1: ")


def test_cpu_offload(worlds, qwen3):
    assert worlds(2).run(on_ranks.offloaded, str(qwen3)) == [[], []]


def test_a_trained_model_can_be_loaded_again(worlds, qwen3):
    assert worlds(3).run(on_ranks.load_again_after_a_step, str(qwen3)) == [[], [], []]


def test_a_meta_device_context_does_not_change_new_tensors(qwen3):
    options = {
        "tuning": shardwise.Lora(LoraConfig(r=4, target_modules="all-linear")),
        "resize_vocab": 200,
    }
    plainly = shardwise.from_pretrained(qwen3, **options)
    with torch.device("meta"):
        model = shardwise.from_pretrained(qwen3, **options)
    assert truth.differences(truth.snapshot(model), truth.snapshot(plainly)) == []


class Scaled(Qwen3ForCausalLM):
    """A model with a tensor that is neither a parameter nor a buffer."""

    def __init__(self, config):
        super().__init__(config)
        self.factor = torch.tensor([2.0])


def test_models_that_are_loaded_in_inference_mode_can_be_trained(qwen3, tmp_path):
    tokens = on_ranks.batch(97, rows=1, seed=0)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SMALL)).to(torch.bfloat16)
    with torch.inference_mode():
        shardwise.load(model, qwen3, on_unexpected=Ignore(("*_norm.weight",)))
        returned = shardwise.from_pretrained(qwen3, dtype=torch.bfloat16)
        hollow = {"model_class": Scaled, "dtype": torch.bfloat16, "load_weights": False}
        filled, restored = (shardwise.from_pretrained(qwen3, **hollow) for _ in range(2))
        shardwise.set_model_state_dict(filled, returned.state_dict())
        shardwise.Checkpointer(tmp_path).save(1, shardwise.TrainState(returned))
        shardwise.Checkpointer(tmp_path).restore(shardwise.TrainState(restored))
    for each in (model, returned, filled, restored):
        assert len(on_ranks.loss_and_gradients(each, tokens)) > 5
    for each in (filled, restored):
        assert each.factor.item() == 2
        assert not each.factor.is_inference()


def test_a_model_has_the_generation_config_of_its_class(qwen3, tmp_path):
    class Settings(GenerationConfig):
        pass

    class Model(type(small_qwen3())):
        generation_config_class = Settings

    (copied := shutil.copytree(qwen3, tmp_path / "model")).joinpath("generation_config.json").unlink(
        missing_ok=True
    )
    change_json(copied / "config.json", max_length=7)
    assert type(shardwise.from_pretrained(copied, model_class=Model).generation_config) is Settings
    Settings(max_new_tokens=3).save_pretrained(copied)
    settings = shardwise.from_pretrained(copied, model_class=Model).generation_config
    assert (type(settings), settings.max_new_tokens) == (Settings, 3)


def test_a_given_config_is_used_as_it_is(qwen3):
    config = AutoConfig.from_pretrained(qwen3, attn_implementation="eager")
    model = shardwise.from_pretrained(qwen3, config=config)
    assert model.config._attn_implementation == "eager"
    assert model.config is not config


def test_three_names_of_one_tensor_as_in_transformers(tmp_path):
    """The source is not stored, its targets are: equal ones are tied, and so is the source."""

    class Three(type(small_qwen3())):
        _tied_weights_keys = {  # noqa: RUF012
            "lm_head.weight": "model.embed_tokens.weight",
            "other.weight": "model.embed_tokens.weight",
        }

        def __init__(self, config):
            super().__init__(config)
            self.other = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

    model = small_qwen3(tie_word_embeddings=True)
    tensors = dict(model.state_dict())
    shared = tensors.pop("model.embed_tokens.weight")
    tensors |= {"lm_head.weight": shared.clone(), "other.weight": shared.clone()}
    model.config.save_pretrained(tmp_path)
    for values, tied in ((shared, True), (shared + 1, False)):
        tensors["other.weight"] = values.clone()
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        found = shardwise.from_pretrained(tmp_path, model_class=Three)
        assert (found.other.weight is found.model.embed_tokens.weight) is tied
        assert found.lm_head.weight is found.model.embed_tokens.weight
        assert ("other.weight" in found.all_tied_weights_keys) is tied
        assert torch.equal(found.other.weight, values)


def test_missing_tensors_that_nothing_initializes_are_reported_before_reading(qwen3):
    class Extra(type(small_qwen3())):
        def __init__(self, config):
            super().__init__(config)
            self.extra = torch.nn.Parameter(torch.empty(3))
            self.post_init()

    with pytest.raises(KeyMismatchError, match="extra: no initializer of the model writes it"):
        shardwise.from_pretrained(qwen3, model_class=Extra, on_missing=Initialize(("extra",)))


def test_a_hub_id_that_is_not_cached_is_refused_offline(tmp_path):
    with pytest.raises(StorageError, match="nobody/nothing"):
        shardwise.from_pretrained("nobody/nothing", hub=shardwise.options.HubOptions(cache_dir=str(tmp_path)))


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"dtype": "int8"}, "is not a floating dtype of torch. Pass 'auto'"),
        ({"dtype": "float33"}, "is not a floating dtype of torch. Pass 'auto'"),
        ({"config_overrides": {"hiden_size": 3}}, "has no hiden_size"),
        ({"model_class": "Qwen3ForCausalLM"}, "must be a model class or an Auto class"),
    ],
)
def test_an_argument_that_cannot_be_is_refused(qwen3, keywords, reason):
    with pytest.raises(ConfigError, match=reason):
        shardwise.from_pretrained(qwen3, **keywords)


def test_a_directory_without_a_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no usable config"):
        shardwise.from_pretrained(tmp_path)


def test_one_rank_of_a_machine_downloads(worlds, tmp_path):
    found = worlds(3).run(on_ranks.downloads, str(tmp_path))
    assert found == [(is_first, str(snapshot_in(tmp_path))) for is_first in (True, False, False)]


def test_one_rank_copies_the_code_of_a_config_before_all_import_it(worlds, qwen3, tmp_path):
    folder = tmp_path / "coded"
    shutil.copytree(qwen3, folder)
    (folder / "configuration_own.py").write_text(
        "from transformers import Qwen3Config\n\n\nclass OwnConfig(Qwen3Config):\n    pass\n"
    )
    change_json(folder / "config.json", auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    cache = str(tmp_path / "modules")
    assert worlds(2).run(on_ranks.with_own_code, str(folder), cache) == [[False, True], [True]]


def test_a_load_that_does_not_fit_is_refused_before_anything_is_read(qwen3, monkeypatch):
    from shardwise.core.reports import Available
    from shardwise.loading import load
    from shardwise.transfer import memory

    def read(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(memory, "available_memory", lambda device: Available(host_bytes=100_000))
    with monkeypatch.context() as reading:
        reading.setattr(load.ReadExecutor, "read_into", read)
        told = r"rank 0 needs .* of host memory, of which 97.66 KiB is free"
        with pytest.raises(shardwise.ShardingError, match=told):
            shardwise.from_pretrained(qwen3)
    options = shardwise.options.LoadOptions(check_memory=False)
    _, report = shardwise.from_pretrained(qwen3, options=options, output_loading_info=True)
    assert report.estimate.host_bytes > 100_000
    assert report.estimate.shard_bytes == report.placed_bytes
    assert report.estimate.read_bytes == report.read_bytes


def test_a_policy_without_a_process_group_is_a_warning_if_it_would_change_dtypes(qwen3, caplog):
    policy = Sharding(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    shardwise.from_pretrained(qwen3, dtype="bfloat16", sharding=policy, load_weights=False)
    assert caplog.records == []
    shardwise.from_pretrained(qwen3, dtype="float32", sharding=policy, load_weights=False)
    shardwise.shard(nn.Linear(2, 2), policy)
    for record in caplog.records:
        assert record.getMessage().startswith("mp_policy has no effect without a process group")
    assert len(caplog.records) == 2
