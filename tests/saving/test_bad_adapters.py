"""Adapters that do not fit or are damaged, and the output folder after a merge that fails."""

import json
import math
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import zoo
from tests.saving.adapters import change, merged_by_peft, save_adapter, tensors_of, ulps_apart
from tests.support.files import change_json, contents
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.core import untrusted
from shardwise.core.errors import ConfigError, FormatError, KeyMismatchError, ShardwiseError, StorageError
from shardwise.files.local_writer import LocalWriter
from shardwise.saving.merge_adapter import merge_adapter
from shardwise.saving.merge_weights import merge_weights


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return save_adapter(base, tmp_path / "adapter", r=4, target_modules=["q_proj", "v_proj"])


_Q = "base_model.model.model.layers.0.self_attn.q_proj"


def _changed_key(old: str, new: str) -> Callable[[dict], dict]:
    return lambda tensors: {key.replace(old, new): value for key, value in tensors.items()}


def _with(**tensors: torch.Tensor) -> Callable[[dict], dict]:
    return lambda found: found | tensors


FAULTS: dict[str, tuple[Callable[[dict], dict], list[str]]] = {
    "a tensor that is not used": (
        _with(**{"base_model.model.model.layers.0.self_attn.q_proj.lora_C.weight": torch.ones(2)}),
        ["not used", "q_proj.lora_C.weight"],
    ),
    "a module that the base does not have": (
        _changed_key("layers.1.self_attn.q_proj", "layers.7.self_attn.q_proj"),
        ["does not have", "model.layers.7.self_attn.q_proj.weight"],
    ),
    "another base": (
        lambda found: {k: torch.ones(4, 64) if "lora_A" in k else v for k, v in found.items()},
        ["do not fit: 4", "layers.*.self_attn.q_proj.lora_A.weight: (4, 64), but (4, 32) fits r=4", "(32, 32)"],
    ),
    "another rank than the config's": (
        lambda found: {k: v[:2] if "lora_A" in k else v[:, :2] for k, v in found.items()},
        ["lora_A.weight: (2, 32), but (4, 32) fits r=4"],
    ),
    "half of a pair": (
        lambda found: {k: v for k, v in found.items() if k != f"{_Q}.lora_B.weight"},
        ["missing in the adapter", "lora_B of model.layers.0.self_attn.q_proj"],
    ),
    "a magnitude without DoRA": (_with(**{f"{_Q}.lora_magnitude_vector": torch.ones(32)}), ["use_dora is not set"]),
    "a bias without lora_bias": (_with(**{f"{_Q}.lora_B.bias": torch.ones(32)}), ["lora_bias is not set"]),
    "a whole tensor of another shape": (
        _with(**{"base_model.model.model.embed_tokens.weight": torch.ones(98, 33)}),
        ["embed_tokens.weight: (98, 33), the base has model.embed_tokens.weight as (97, 32)"],
    ),
    "a name that climbs": (
        _with(**{"base_model.model.../../../etc/passwd.lora_A.weight": torch.ones(4, 32)}),
        ["etc/passwd"],
    ),
    "integers for a factor": (
        lambda found: {k: v.to(torch.int32) if k == f"{_Q}.lora_A.weight" else v for k, v in found.items()},
        ["q_proj.lora_A.weight", "I32"],
    ),
    "all deltas zero": (
        lambda found: {k: v * 0 if "lora_B" in k else v for k, v in found.items()},
        ["would equal the base", "4 modules"],
    ),
    "deltas that rounding swallows": (lambda its: {k: v * 1e-30 for k, v in its.items()}, ["would equal the base"]),
    "deltas that are not finite": (
        lambda found: {k: v / 0 if "layers.1" in k else v for k, v in found.items()},
        ["not finite", "layers.1"],
    ),
    "no tensors": (lambda found: {}, ["holds no tensors"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_adapters_that_do_not_fit_are_named_and_leave_no_files(
    fault: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    function, words = FAULTS[fault]
    change(adapter, function)
    with pytest.raises(ShardwiseError) as raised:
        merge_adapter(base, adapter, tmp_path / "out")
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert not list((tmp_path / "out").glob("*")) if (tmp_path / "out").exists() else True


def test_all_faults_are_reported_at_once(base: Path, adapter: Path, tmp_path: Path) -> None:
    change(adapter, _changed_key("layers.1.self_attn.v_proj.lora_A", "layers.9.mlp.v_proj.lora_A"))
    change(
        adapter, lambda found: {k: v[:, :3] if "0.self_attn.q_proj.lora_A" in k else v for k, v in found.items()}
    )
    with pytest.raises(KeyMismatchError) as raised:
        merge_adapter(base, adapter, tmp_path / "out")
    for word in ("layers.9.mlp.v_proj", "lora_A of model.layers.1.self_attn.v_proj", "(4, 3)"):
        assert word in str(raised.value)


def test_a_merge_with_missing_tensors_advises_no_consent(base: Path, adapter: Path, tmp_path: Path) -> None:
    less = shutil.copytree(base, tmp_path / "less")
    tensors = load_file(less / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, less / "model.safetensors")
    words = r"missing 1 +model\.norm\.weight\nPass a checkpoint that has them, or to merge_adapter an adapter"
    with pytest.raises(KeyMismatchError, match=words):
        merge_adapter(less, adapter, tmp_path / "out")


CONFIGS: dict[str, tuple[dict[str, Any], type[ShardwiseError], str]] = {
    "another kind": ({"peft_type": "LOHA"}, ConfigError, "only LORA"),
    "a base that was changed": ({"init_lora_weights": "pissa_niter_16"}, ConfigError, "changes the base"),
    "a feature that is not known": ({"layer_replication": [[0, 2]]}, ConfigError, "layer_replication"),
    "a feature of the future": ({"use_tomorrow": True}, ConfigError, "use_tomorrow"),
    "tokens": ({"trainable_token_indices": [1, 2]}, ConfigError, "trainable_token_indices"),
    "a rank of nothing": ({"r": 0}, FormatError, "not a rank"),
    "a huge rank": ({"r": 1 << 40}, FormatError, "not a rank"),
    "a rank in words": ({"r": "many"}, FormatError, "not a rank"),
    "a pattern that repeats too much": ({"rank_pattern": {"q{99999999999}": 4}}, FormatError, "regular expression"),
    "a pattern within another": ({"rank_pattern": {"(?i)q_proj": 4}}, FormatError, "regular expression"),
    "a pattern that is none": ({"rank_pattern": {"q_proj(": 4}}, FormatError, "regular expression"),
    "an alpha that is none": ({"lora_alpha": "x"}, FormatError, "lora_alpha"),
    "dora without magnitudes": ({"use_dora": True}, KeyMismatchError, "lora_magnitude_vector of"),
}


def test_patterns_that_take_too_long_are_refused(base: Path, adapter: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(untrusted, "_MATCHING_S", 1)
    file = adapter / "adapter_config.json"
    patterns = {"alpha_pattern": {"q_proj": 4, r"((\w|\.)+)+!": 4}}
    file.write_text(json.dumps(json.loads(file.read_text()) | patterns))
    with pytest.raises(ConfigError, match="alpha_pattern='.*!': takes more than 1 seconds to match with 4 names"):
        merge_adapter(base, adapter, tmp_path / "out")


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_that_cannot_be_merged(case: str, base: Path, adapter: Path, tmp_path: Path) -> None:
    changes, kind, words = CONFIGS[case]
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(kind, match=words):
        merge_adapter(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["run", "run/step-8"])
def test_a_checkpoint_of_a_training_is_no_adapter(place: str, base: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "step-8").mkdir(parents=True)
    (tmp_path / "run" / "step-8" / "shardwise.checkpoint.json").write_text("{}")
    with pytest.raises(FormatError, match="has no adapter_config.json. It is of a Checkpointer: restore it"):
        merge_adapter(base, tmp_path / place, tmp_path / "out")


def test_however_large_factors_are_they_are_merged_block_by_block(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch
) -> None:
    merge_adapter(base, adapter, tmp_path / "wanted")
    monkeypatch.setattr("shardwise.saving.merge_steps.BUDGET_BYTES", 8192)
    merge_adapter(base, adapter, tmp_path / "found")
    wanted, found = tensors_of(tmp_path / "wanted"), tensors_of(tmp_path / "found")
    assert wanted.keys() == found.keys()
    assert all(ulps_apart(found[key], wanted[key]) <= 1 for key in wanted)  # sums of products, in another order


def test_pickles_run_nothing(base: Path, adapter: Path, tmp_path: Path) -> None:
    place = tmp_path / "was-here"
    (adapter / "adapter_model.safetensors").unlink()

    class Touch:
        def __reduce__(self):
            return Path.touch, (place,)

    torch.save({"base_model.model.x.lora_A.weight": Touch()}, adapter / "adapter_model.bin")
    with pytest.raises(FormatError):
        merge_adapter(base, adapter, tmp_path / "out")
    assert not place.exists()
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps(Touch()))
    with pytest.raises(FormatError):
        merge_adapter(base, adapter, tmp_path / "out")
    assert not place.exists()


def test_files_of_torch_are_read_as_well(base: Path, adapter: Path, tmp_path: Path) -> None:
    merge_adapter(base, adapter, tmp_path / "wanted")
    file = adapter / "adapter_model.safetensors"
    torch.save(load_file(file), adapter / "adapter_model.bin")
    file.unlink()
    merge_adapter(base, adapter, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "wanted")


def test_modules_that_a_truncated_adapter_lacks_are_counted(base: Path, adapter: Path, tmp_path: Path) -> None:
    assert "the adapter has nothing for" not in str(merge_adapter(base, adapter, tmp_path / "whole").notes)
    change(adapter, lambda found: {key: value for key, value in found.items() if "layers.1" not in key})
    [note] = merge_adapter(base, adapter, tmp_path / "part").notes
    assert "nothing for 2 modules that its target_modules name: model.layers.1.self_attn.q_proj.weight, " in note


# Names


def test_names_with_the_name_of_the_adapter_in_them(base: Path, adapter: Path, tmp_path: Path) -> None:
    merge_adapter(base, adapter, tmp_path / "wanted")
    change(adapter, lambda found: {k.replace(".weight", ".mine.weight"): v for k, v in found.items()})
    with pytest.raises(KeyMismatchError, match="is of the adapter mine"):
        merge_adapter(base, adapter, tmp_path / "out")
    merge_adapter(base, adapter, tmp_path / "out", adapter_name="mine")
    assert contents(tmp_path / "out") == contents(tmp_path / "wanted")


def test_an_adapter_in_a_folder_of_its_own(base: Path, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "several").mkdir()
    adapter.rename(tmp_path / "several" / "mine")
    with pytest.raises(FormatError, match="Choose one by adapter_name: mine"):
        merge_adapter(base, tmp_path / "several", tmp_path / "out")
    with pytest.raises(FormatError, match="has no adapter yours"):
        merge_adapter(base, tmp_path / "several" / "mine", tmp_path / "out", adapter_name="yours")
    with pytest.raises(FormatError, match="not the name of an adapter"):
        merge_adapter(base, tmp_path / "several", tmp_path / "out", adapter_name="../several")
    (tmp_path / "several" / "tokenizer_config.json").write_text('{"of": "the training"}')
    assert merge_adapter(base, tmp_path / "several", tmp_path / "out", adapter_name="mine").modules == 4
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == '{"of": "the training"}'


def test_adapters_of_single_experts_are_merged_into_the_hubs_tensors(tmp_path: Path) -> None:
    specimen = next(item for item in zoo.causal_lm_specimens() if item.model_type == "qwen3_moe")
    model = zoo.build(specimen)
    zoo.save_original(model, tmp_path / "base")
    before = tensors_of(tmp_path / "base")
    key = next(key for key in before if "experts.1.up_proj" in key)
    out_size, in_size = before[key].shape
    a, b = torch.rand(2, in_size), torch.rand(out_size, 2)
    lora = tmp_path / "adapter"
    lora.mkdir()
    module = f"base_model.model.{key.removesuffix('.weight')}"
    save_file({f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}, lora / "adapter_model.safetensors")
    (lora / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 6}))
    merge_adapter(tmp_path / "base", lora, tmp_path / "out", dtype="float32")
    after = tensors_of(tmp_path / "out")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        wanted = tensor + 3 * (b @ a) if name == key else tensor
        torch.testing.assert_close(after[name], wanted, rtol=1e-6, atol=1e-6)


# Ties


def test_a_head_trained_beside_a_tied_embedding_is_tied_no_more(tied: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tied, tmp_path / "adapter", r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    report = merge_adapter(tied, adapter, tmp_path / "out")
    truth = merged_by_peft(tied, adapter)
    found = tensors_of(tmp_path / "out")
    assert ulps_apart(found["lm_head.weight"], truth.lm_head.weight.data) == 0
    assert ulps_apart(found["model.embed_tokens.weight"], truth.model.embed_tokens.weight.data) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert any("lm_head.weight is not tied any more" in note for note in report.notes)
    with zoo.silenced():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.lm_head.weight, truth.lm_head.weight)
    assert torch.equal(loaded.model.embed_tokens.weight, truth.model.embed_tokens.weight)


# What comes along, and where it goes


def test_configs_and_tokenizers_come_along(base: Path, adapter: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(base, tmp_path / "base"))
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool.jinja").write_text("tool")
    (base / "tekken.json").write_text("base")
    (base / "target_vocab.json").write_text("base")
    merge_adapter(base, adapter, tmp_path / "one", dtype="bfloat16")
    found = contents(tmp_path / "one")
    wanted = {
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "vocab.txt",
        "tekken.json",
        "target_vocab.json",
        "additional_chat_templates/tool.jinja",
        "model.safetensors",
        "model.fingerprints.json",
    }
    assert set(found) == wanted
    assert json.loads(found["config.json"])["dtype"] == "bfloat16"
    # All of one tokenizer, also its templates.
    (adapter / "tekken.json").write_text("adapter")
    (adapter / "chat_template.jinja").write_text("adapter")
    merge_adapter(base, adapter, tmp_path / "two")
    wanted -= {"vocab.txt", "tokenizer_config.json", "target_vocab.json", "additional_chat_templates/tool.jinja"}
    found = contents(tmp_path / "two")
    assert set(found) == wanted | {"chat_template.jinja"}
    assert found["tekken.json"] == found["chat_template.jinja"] == b"adapter"
    (adapter / "additional_chat_templates").mkdir()
    (adapter / "additional_chat_templates" / "rag.jinja").write_text("rag")
    shutil.copytree(
        tmp_path / "one" / "additional_chat_templates", tmp_path / "three" / "additional_chat_templates"
    )
    merge_adapter(base, adapter, tmp_path / "three")
    assert set(contents(tmp_path / "three")) == {*found, "additional_chat_templates/rag.jinja"}


def test_a_config_with_infinity_comes_along(base: Path, adapter: Path, tmp_path: Path) -> None:
    """As older versions of transformers wrote it for state space models."""
    base = Path(shutil.copytree(base, tmp_path / "base"))
    change_json(base / "config.json", time_step_limit=[0.0, math.inf])
    merge_adapter(base, adapter, tmp_path / "one")
    merge_weights(base, tmp_path / "two")
    for out in (tmp_path / "one", tmp_path / "two"):
        assert AutoConfig.from_pretrained(out).time_step_limit == [0.0, math.inf]


def test_never_onto_its_own_source(base: Path, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(base)
    for out in (base, base / ".", tmp_path / "link", adapter):
        with pytest.raises(ConfigError, match="is the folder that is read"):
            merge_adapter(base, adapter, out)


def test_a_full_disk_half_way_leaves_the_old_model(base: Path, adapter: Path, tmp_path: Path, monkeypatch) -> None:
    merge_adapter(base, adapter, tmp_path / "out", max_shard_size="30KB")
    before = contents(tmp_path / "out")
    written: list[int] = []
    write = LocalWriter.write

    def full(self, file, start, buffers):
        written.append(start)
        if len(written) > 6:
            raise StorageError(f"{file}: the disk is full")
        write(self, file, start, buffers)

    change(adapter, lambda found: {key: 2 * value for key, value in found.items()})
    with monkeypatch.context() as patch:
        patch.setattr(LocalWriter, "write", full)
        with pytest.raises(StorageError, match="disk is full"):
            merge_adapter(base, adapter, tmp_path / "out", max_shard_size="30KB")
    assert contents(tmp_path / "out") == before
    merge_adapter(base, adapter, tmp_path / "out")
    assert not list((tmp_path / "out").glob("model-*"))
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("size", ["nothing", "-1GB", "0", "", "5XB"])
def test_sizes_that_are_none(size: str, base: Path, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a size"):
        merge_adapter(base, adapter, tmp_path / "out", max_shard_size=size)
