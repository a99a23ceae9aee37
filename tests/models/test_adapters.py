"""Adapters that are saved, opened by stock PEFT, and taken up again."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tests.conftest import Worlds
from tests.models import on_ranks, reference
from tests.models.test_tunings import COPIES, DORA, EXPERTS, GAUSSIAN, NARROW
from tests.support.files import change_json, contents
from tests.truth import require_equal
from transformers import Qwen3Config, Qwen3ForSequenceClassification

import shardwise
from shardwise import ConfigError, ExistingLora, FormatError, KeyMismatchError, Lora, merge_adapter
from shardwise.core.errors import StorageError
from shardwise.files.local_writer import LocalWriter
from shardwise.saving.save import _warn_of_engines

BIASED = LoraConfig(r=2, target_modules=["q_proj"], bias="lora_only")
FUSED = LoraConfig(r=2, target_modules=["q_proj", "w1", "w2", "w3"])
"""Names of layers that transformers has fused since."""

KINDS: dict[str, tuple[str, LoraConfig]] = {
    "replicated": ("tied", NARROW),
    "dora": ("tied", DORA),
    "embedding": ("tied", GAUSSIAN),
    "copies of tied": ("tied", COPIES),
    "biased": ("biased", BIASED),
    "experts": ("experts", EXPERTS),
    "experts by module": ("experts", FUSED),
}


@pytest.fixture(scope="session")
def folders(tied: Path, untied: Path, experts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    biased = reference.save_tiny(tmp_path_factory.mktemp("biased") / "model", attention_bias=True)
    return {"tied": tied, "untied": untied, "experts": experts, "biased": biased}


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_adapter_opens_in_peft_and_is_taken_up_again(
    kind: str, folders: dict[str, Path], tmp_path: Path, worlds: Worlds
) -> None:
    base, config = KINDS[kind]
    placement: Any = "replicated" if kind == "replicated" else "sharded"
    folder, adapter = str(folders[base]), str(tmp_path / "adapter")
    tuning = Lora(config, placement=placement)
    live = worlds(3).run(on_ranks.save_adapter, folder, {"tuning": tuning}, adapter)
    stock = reference.stock_with_adapter(folder, adapter)
    logits = reference.logits(stock)
    for answer, _ in live:
        torch.testing.assert_close(answer, logits, rtol=1e-5, atol=1e-5)
    values = reference.values_of(stock)
    require_equal(values, live[0][1])
    again = {"tuning": ExistingLora(adapter, placement=placement)}
    for found in worlds(2).run(on_ranks.values_after_load, folder, again):
        require_equal(found, values)


def test_every_ranks_part_of_a_saved_adapter_arrives(tied: Path, tmp_path: Path, worlds: Worlds) -> None:
    adapter = tmp_path / "adapter"
    parts = worlds(3).run(on_ranks.save_adapter_of_ranks, str(tied), {"tuning": Lora(DORA)}, str(adapter))
    saved = load_file(adapter / "adapter_model.safetensors")
    assert saved
    for key, value in saved.items():
        rows = value.reshape(value.shape[0], -1)
        expected = torch.cat([torch.full((part[key],), rank + 1.0) for rank, part in enumerate(parts)])
        assert torch.equal(rows, expected[:, None].expand(rows.shape)), key


def test_a_saved_adapter_equals_the_file_of_peft(tied: Path, tmp_path: Path, worlds: Worlds) -> None:
    adapter = tmp_path / "adapter"
    for size in (1, 2):
        run = worlds(size).run if size > 1 else lambda function, *args: [function(*args)]
        run(on_ranks.save_adapter, str(tied), {"tuning": Lora(NARROW, adapter="mine")}, str(adapter))
        stock = reference.stock_with_adapter(tied, adapter)
        stock.save_pretrained(tmp_path / "stock")
        mine, theirs = (load_file(path / "adapter_model.safetensors") for path in (adapter, tmp_path / "stock"))
        require_equal(mine, theirs)
        written, wanted = (
            json.loads((path / "adapter_config.json").read_text()) for path in (adapter, tmp_path / "stock")
        )
        for config in (written, wanted):
            config["target_modules"].sort()
        assert written == wanted
        assert written["base_model_name_or_path"] == str(tied)
        assert written["inference_mode"] is True
        expected = ["adapter_config.json", "adapter_model.fingerprints.json", "adapter_model.safetensors"]
        assert sorted(path.name for path in adapter.iterdir()) == expected


def test_wrappers_leave_no_trace_in_the_names(tied: Path, tmp_path: Path, worlds: Worlds) -> None:
    worlds(2).run(on_ranks.save_wrapped, str(tied), {"tuning": Lora(NARROW)}, str(tmp_path / "adapter"))
    keys = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in keys
    assert not [key for key in keys if "_orig_mod" in key or "_checkpoint_wrapped" in key or "default" in key]
    reference.stock_with_adapter(tied, tmp_path / "adapter")


def test_an_adapter_lies_beside_a_model_and_replaces_an_older_one(
    tied: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = shardwise.from_pretrained(tied, tuning=Lora(NARROW))
    shardwise.save(shardwise.from_pretrained(tied), tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    (tmp_path / "adapter_model.0123abcd.incomplete").write_bytes(b"left behind")
    for _ in range(2):
        report = shardwise.save_adapter(model, tmp_path, verify=True)
    assert report.is_verified
    assert report.files == ("adapter_model.safetensors",)
    wanted = {"adapter_config.json", "adapter_model.fingerprints.json", "adapter_model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} - before == wanted
    assert shardwise.verify(tmp_path).compared > 0
    half = shardwise.save_adapter(model, tmp_path / "half", dtype="bfloat16")
    assert half.dtypes == {"BF16": report.tensors}
    with pytest.raises(ConfigError, match="no such adapter. Adapters: default"):
        shardwise.save_adapter(model, tmp_path, adapter="other")
    with pytest.raises(ConfigError, match="It has none"):
        shardwise.save_adapter(shardwise.from_pretrained(tied), tmp_path)
    with pytest.raises(ConfigError, match="Call save_adapter"):
        shardwise.save(model, tmp_path)
    _, loaded = shardwise.from_pretrained(tmp_path, output_loading_info=True)
    assert "adapter_config.json beside the model: this adapter is not read" in loaded.notes[0]
    assert caplog.messages == [f"{tmp_path}: {loaded.notes[0]}"]
    _, loaded = shardwise.from_pretrained(tmp_path, tuning=ExistingLora(tmp_path), output_loading_info=True)
    assert not [note for note in loaded.notes if "not read" in note]
    assert len(caplog.messages) == 1


@pytest.fixture
def adapter(tied: Path, tmp_path: Path) -> Path:
    shardwise.save_adapter(shardwise.from_pretrained(tied, tuning=Lora(NARROW)), tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_existing_adapter_continues_under_another_name(tied: Path, adapter: Path) -> None:
    model: Any = shardwise.from_pretrained(tied, tuning=ExistingLora(adapter, adapter="mine"))
    assert list(model.peft_config) == ["mine"]
    stored = load_file(adapter / "adapter_model.safetensors")
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert len(trained) == len(stored)
    assert all(torch.equal(value, stored[name.replace(".mine", "")]) for name, value in trained.items())
    # As torch saves the parameters.
    save_file(trained, adapter / "adapter_model.safetensors")
    (adapter / "adapter_model.fingerprints.json").unlink()
    again = shardwise.from_pretrained(tied, tuning=ExistingLora(adapter, adapter="mine"))
    require_equal(reference.values_of(again), reference.values_of(model))


@pytest.mark.parametrize(
    ("prefix", "inner"),
    [
        pytest.param("", "_orig_mod.", marks=pytest.mark.slow),
        pytest.param("_fsdp_wrapped_module.", "", marks=pytest.mark.slow),
        ("module.", "_orig_mod."),
    ],
)
def test_an_adapter_with_the_names_of_wrappers(tied: Path, adapter: Path, prefix: str, inner: str) -> None:
    file = adapter / "adapter_model.safetensors"
    stored = {key: torch.rand_like(value) for key, value in load_file(file).items()}
    save_file(stored, file)
    expected = reference.values_of(shardwise.from_pretrained(tied, tuning=ExistingLora(adapter)))
    merge_adapter(tied, adapter, adapter / "expected")
    part = "layers.0._checkpoint_wrapped_module."
    save_file(
        {
            prefix + key.replace("model.model.", f"model.{inner}model.").replace("layers.0.", part): value
            for key, value in stored.items()
        },
        file,
    )
    (adapter / "adapter_model.fingerprints.json").unlink()
    model, report = shardwise.from_pretrained(tied, tuning=ExistingLora(adapter), output_loading_info=True)
    assert report.reads >= report.files_opened == 2
    assert "the adapter's config has the base" not in str(report)
    require_equal(reference.values_of(model), expected)
    assert "keys have the names of wrappers, and are taken without: " in str(report)
    merged = merge_adapter(tied, adapter, adapter / "out")
    require_equal(*(load_file(adapter / name / "model.safetensors") for name in ("out", "expected")))
    assert "keys have the names of wrappers" in str(merged.notes)
    bank = shardwise.AdapterBank(shardwise.from_pretrained(tied))
    bank.load("mine", adapter, training_state=False)
    require_equal(bank.state_dict("mine")["adapter"], stored)


def test_a_base_of_another_name_than_in_the_config_is_noted(tied: Path, adapter: Path) -> None:
    change_json(adapter / "adapter_config.json", base_model_name_or_path="org/other")
    _, report = shardwise.from_pretrained(tied, tuning=ExistingLora(adapter), output_loading_info=True)
    assert f"the adapter's config has the base org/other, and this is {tied}" in report.notes


def test_an_adapter_of_all_linear_layers_but_some_is_taken_up_again(tied: Path, tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules="all-linear", exclude_modules=["down_proj"])
    model = shardwise.from_pretrained(tied, tuning=Lora(config))
    shardwise.save_adapter(model, tmp_path)
    stored = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    change_json(tmp_path / "adapter_config.json", target_modules=[*stored, "query_key_value"])  # of another model
    again = shardwise.from_pretrained(tied, tuning=ExistingLora(tmp_path))
    require_equal(reference.values_of(again), reference.values_of(model))


@pytest.mark.parametrize("config", [EXPERTS, FUSED], ids=["by parameter", "by module"])
def test_engines_that_may_ignore_an_adapter_on_experts_are_named_once(
    config: LoraConfig, experts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_of_engines.cache_clear()
    for tuning in (Lora(LoraConfig(r=2, target_modules=["q_proj"])), Lora(config)):
        model = shardwise.from_pretrained(experts, tuning=tuning)
        for _ in range(2):
            shardwise.save_adapter(model, tmp_path)
    (record,) = caplog.records
    assert "vLLM and SGLang" in record.getMessage()
    assert "gate_up_proj" in record.getMessage()


def test_an_adapter_of_another_kind_is_saved_as_peft_saves_it(tied: Path, tmp_path: Path) -> None:
    config = IA3Config(target_modules=["k_proj"], feedforward_modules=[], init_ia3_weights=False)
    model = get_peft_model(shardwise.from_pretrained(tied), config)
    shardwise.save_adapter(model, tmp_path / "found")
    model.save_pretrained(tmp_path / "wanted")
    require_equal(*(load_file(tmp_path / name / "adapter_model.safetensors") for name in ("found", "wanted")))


def test_an_adapter_of_a_classifier_is_taken_up_again(tmp_path: Path) -> None:
    Qwen3ForSequenceClassification(Qwen3Config(**reference.SIZES, head_dim=12)).save_pretrained(tmp_path / "base")
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS")  # whose heads may have two names
    model = shardwise.from_pretrained(tmp_path / "base", tuning=Lora(config))
    shardwise.save_adapter(model, tmp_path / "adapter")
    again = shardwise.from_pretrained(tmp_path / "base", tuning=ExistingLora(tmp_path / "adapter"))
    require_equal(reference.values_of(again), reference.values_of(model))


def test_an_adapter_of_a_tied_head_is_not_merged_as_if_it_were_none(tied: Path, worlds: Worlds) -> None:
    for kind, text in worlds(2).run(on_ranks.merged_tensors, str(tied), ["q_proj", "lm_head"]):
        assert kind == "ConfigError"
        assert "lm_head is tied to" in text
        assert "embed_tokens, which a merge would change, too. Take it out of target_modules" in text


@pytest.mark.parametrize(
    ("tuning", "safe", "told"),
    [
        (Lora(NARROW), False, ""),
        (Lora(NARROW), True, "q_proj: is sharded, and 'default' cannot be merged into it"),
        (Lora(NARROW, placement="replicated"), False, "cannot be merged into it. Only a plain, sharded"),
    ],
)
def test_peft_merges_into_shards_or_the_error_names_the_reason(
    tuning: Lora, safe: bool, told: str, tied: Path, worlds: Worlds
) -> None:
    for (kind, text), apart in worlds(2).run(on_ranks.merge_in_place, str(tied), {"tuning": tuning}, safe):
        assert kind == ("ConfigError" if told else ""), text
        assert told in text
        assert apart < 1e-6


def test_a_second_adapter_of_peft_is_a_reference_and_not_trained(tied: Path, worlds: Worlds) -> None:
    for errors in worlds(2).run(on_ranks.use_second_adapter, str(tied), {"tuning": Lora(NARROW)}):
        kind, text = errors.pop("trained")
        assert kind == "ConfigError"
        assert "q_proj.lora_B.second.weight: trained, but neither sharded nor averaged over the 2 ranks" in text
        kind, text = errors.pop("saved by PEFT")
        assert kind == "ConfigError"
        assert text.startswith("save_pretrained: the adapter is sharded. Call shardwise.save_adapter(")
        assert set(errors.values()) == {("", "")}


def test_what_peft_computes_from_shards_is_refused(tied: Path, worlds: Worlds) -> None:
    for kind, text in worlds(2).run(on_ranks.save_prompt, str(tied)):
        assert kind == "ShardingError"
        assert "prompt_embeddings (1 in all): is not a tensor of the model, but computed by PEFT" in text
        assert "shardwise.save(model, folder, names='internal')" in text


def test_an_adapter_of_pickles_is_read_too(tied: Path, adapter: Path) -> None:
    wanted = on_ranks.values_after_load(str(tied), {"tuning": ExistingLora(adapter)})
    file = adapter / "adapter_model.safetensors"
    torch.save(load_file(file), adapter / "adapter_model.bin")
    file.unlink()
    found = on_ranks.values_after_load(str(tied), {"tuning": ExistingLora(adapter)})
    require_equal(found, wanted)


def test_an_adapter_that_does_not_fit_is_refused_in_one_sentence(tied: Path, adapter: Path, tmp_path: Path) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(KeyMismatchError, match="the adapter does not fit the model") as caught:
            shardwise.from_pretrained(
                folder,
                tuning=ExistingLora(adapter),
                on_missing=shardwise.options.Initialize(only=("*",)),
                on_mismatched=shardwise.options.Initialize(only=("*",)),
                on_unexpected=shardwise.options.Ignore(),
            )
        return str(caught.value)

    wide = reference.save_tiny(tmp_path / "wide", hidden_size=32)
    assert "layers.{0..1}.self_attn.q_proj.lora_A.weight: stored (2, 24)" in refused(wide)
    assert f"Its config has the base {tied}, r=" in refused(wide)
    words = r"missing 4 +base_model\.model\.model\.layers\.2\."
    assert re.search(words, refused(reference.save_tiny(tmp_path / "deep", num_hidden_layers=3)))
    words = r"unexpected 4 +base_model\.model\.model\.layers\.1\."
    assert re.search(words, refused(reference.save_tiny(tmp_path / "flat", num_hidden_layers=1)))
    change_json(adapter / "adapter_config.json", r=3)
    assert "r=3 and target_modules" in refused(tied)
    change_json(adapter / "adapter_config.json", r=2, target_modules=["q_proj"])
    words = r"unexpected 4 +base_model\.model\.model\.layers\.\{0\.\.1\}\.mlp\.down_proj\.lora_A\.weight"
    assert re.search(words, refused(tied))
    change_json(adapter / "adapter_config.json", target_modules=["q_proj", "down_proj", "up_proj"])
    words = r"missing 4 +base_model\.model\.model\.layers\.\{0\.\.1\}\.mlp\.up_proj\.lora_A\.weight"
    assert re.search(words, refused(tied))


def test_an_adapter_that_is_not_whole_is_refused(tied: Path, adapter: Path, tmp_path: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    stored = load_file(file)
    save_file(dict(list(stored.items())[1:]), file)
    words = r"missing 1 +base_model\.model\.model\.layers\.0\.mlp\.down_proj\.lora_A"
    with pytest.raises(KeyMismatchError, match=words):
        shardwise.from_pretrained(tied, tuning=ExistingLora(adapter))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(FormatError, match=r"adapter_model\.safetensors"):
        shardwise.from_pretrained(tied, tuning=ExistingLora(adapter))
    file.unlink()
    with pytest.raises(FormatError, match="neither adapter_model.safetensors nor"):
        shardwise.from_pretrained(tied, tuning=ExistingLora(adapter))
    with pytest.raises(FormatError, match="has no adapter_config.json"):
        shardwise.from_pretrained(tied, tuning=ExistingLora(tied))
    with pytest.raises(ConfigError, match=f"is an adapter. Merge it .shardwise merge-adapter {tied} {adapter} OUT"):
        shardwise.from_pretrained(adapter)
    change_json(adapter / "adapter_config.json", init_lora_weights="pissa")
    save_file(stored, file)
    with pytest.raises(ConfigError, match=f"{adapter}: .*\n.*'pissa': changes the base's weights. Save it"):
        shardwise.from_pretrained(tied, tuning=ExistingLora(adapter))
    change_json(adapter / "adapter_config.json", init_lora_weights=True, use_dora=True)
    with pytest.raises(ConfigError, match="use_dora: .*Pass placement='sharded'"):
        shardwise.from_pretrained(tied, tuning=ExistingLora(adapter, placement="replicated"))
    change_json(adapter / "adapter_config.json", use_dora=False, of_no_use=None, of_later={"a": 1})
    with pytest.raises(ConfigError, match="the adapter uses of_later, which PEFT .* does not know"):
        shardwise.from_pretrained(tied, tuning=ExistingLora(adapter))
    for content in ("{", "[]", "3", "[" * 100_000, '{"peft_type": "UNHEARD_OF"}'):
        (adapter / "adapter_config.json").write_text(content)
        with pytest.raises(ConfigError, match="PEFT cannot read"):
            shardwise.from_pretrained(tied, tuning=ExistingLora(adapter))


def _other_scaling(folder: Path, **settings: Any) -> Any:
    """A model with an adapter of the same shapes as the fixture's, and other values."""
    other = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_alpha=30, **settings)
    return shardwise.from_pretrained(folder, tuning=Lora(other), options=shardwise.options.LoadOptions(seed=9))


def _adapter_in(files: Mapping[str, bytes]) -> tuple[bytes, ...] | None:
    """What PEFT reads; None where it finds no weights."""
    weights = files.get("adapter_model.safetensors")
    return None if weights is None else (files["adapter_config.json"], weights)


@pytest.mark.parametrize("failing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_commit_that_fails_puts_the_older_adapter_back(
    failing: str, tied: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(adapter)
    replace, rename = LocalWriter.replace, LocalWriter.rename
    broken = [failing]

    def failing_once(name: str) -> None:
        if name in broken:
            broken.remove(name)
            raise StorageError(f"{name}: the disk is full")

    def replacing(self: LocalWriter, file: str, content: bytes) -> None:
        failing_once(file)
        replace(self, file, content)

    def renaming(self: LocalWriter, file: str, name: str) -> None:
        failing_once(name)
        rename(self, file, name)

    monkeypatch.setattr(LocalWriter, "replace", replacing)
    monkeypatch.setattr(LocalWriter, "rename", renaming)
    with pytest.raises(StorageError, match="the disk is full"):
        shardwise.save_adapter(_other_scaling(tied), adapter)
    after = contents(adapter)
    assert _adapter_in(after) == _adapter_in(before)
    assert after.keys() == before.keys()
    shardwise.save_adapter(_other_scaling(tied), adapter)
    assert contents(adapter).keys() == before.keys()
