"""``verify``: what is found in a checkpoint that is opened again."""

import json
import re
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tests.cli.running import RUNNER
from tests.small_checkpoints import small_qwen3
from tests.support.files import change_json, flip_bit
from torch import nn

import shardwise
from shardwise.cli import main
from shardwise.files.open_checkpoint import open_checkpoint

SIDECAR = "model.fingerprints.json"


@pytest.fixture(params=["1GB", "30KB"], ids=["one file", "several files"])
def saved(request, tmp_path):
    shardwise.save(small_qwen3(), tmp_path, max_shard_size=request.param)
    return tmp_path


def command(folder, *options):
    return RUNNER.invoke(main, ["verify", str(folder), *options])


def test_a_sound_checkpoint(saved):
    report = shardwise.verify(saved)
    assert report.is_sound
    assert report.model_class == "Qwen3ForCausalLM"
    assert report.compared == report.tensors == len(small_qwen3().state_dict())
    assert report.nbytes == sum(tensor.nbytes for tensor in small_qwen3().state_dict().values())
    result = command(saved)
    assert result.exit_code == 0, result.output
    assert f"{report.tensors} of {report.tensors} fingerprints equal to what was saved" in result.stdout
    assert "all that Qwen3ForCausalLM needs" in result.stdout


def test_one_flipped_bit_is_found_and_named(saved):
    for number, entry in enumerate(list(open_checkpoint(saved).entries.values())[::7]):
        position = (entry.start, (entry.start + entry.stop) // 2, entry.stop - 1)[number % 3]
        flip_bit(saved / entry.file, position)
        assert shardwise.verify(saved).damaged == (entry.key,)
        flip_bit(saved / entry.file, position)
    assert shardwise.verify(saved).is_sound


def test_damage_is_reported_on_the_command_line(saved):
    entry = open_checkpoint(saved).entries["model.norm.weight"]
    flip_bit(saved / entry.file, entry.start)
    result = command(saved)
    assert result.exit_code == 1
    assert "DAMAGED" in result.stdout
    assert "model.norm.weight" in result.stdout
    result = command(saved, "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert (report["is_sound"], report["damaged"]) == (False, ["model.norm.weight"])


def test_swapped_tensors_are_found(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    shardwise.save(model, tmp_path)
    values = load_file(tmp_path / "model.safetensors")
    values["0.weight"], values["1.weight"] = values["1.weight"], values["0.weight"]
    save_file(values, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert set(shardwise.verify(tmp_path).damaged) == {"0.weight", "1.weight"}


def _without_a_norm(folder):
    for file in folder.glob("*.safetensors"):
        values = load_file(file)
        if values.pop("model.norm.weight", None) is not None:
            save_file(values, file, metadata={"format": "pt"})
    for record in folder.glob("*.index.json"):
        index = json.loads(record.read_text())
        del index["weight_map"]["model.norm.weight"]
        record.write_text(json.dumps(index))


def _cut_short(folder):
    file = max(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-5])


@pytest.mark.parametrize(
    ("spoil", "error", "named"),
    [
        (_cut_short, shardwise.FormatError, r"model[^ ]*\.safetensors"),
        (_without_a_norm, shardwise.KeyMismatchError, r"model\.norm\.weight"),
        (lambda folder: max(folder.glob("*.safetensors")).unlink(), shardwise.CheckpointError, "."),
        (shutil.rmtree, shardwise.CheckpointError, "."),
    ],
)
def test_files_that_cannot_be_opened_are_named(saved, spoil, error, named):
    spoil(saved)
    with pytest.raises(error, match=named):
        shardwise.verify(saved)
    result = command(saved)
    assert result.exit_code == 2
    assert re.search(named, result.stderr)
    assert "Traceback" not in result.stderr
    assert "on_missing" not in result.stderr  # which is no option of verify


def test_without_config_the_coverage_is_unknown(tmp_path):
    shardwise.save(nn.Linear(3, 3), tmp_path)
    report = shardwise.verify(tmp_path)
    assert (report.model_class, report.compared) == ("", 2)
    assert "coverage    not known" in str(report)


def test_tensors_that_the_model_does_not_have_are_listed(tmp_path):
    """As those of MTP layers, which merges carry along."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    shardwise.save(small_qwen3(), base)
    file, more = base / "model.safetensors", {"model.layers.9.eh_proj.weight": torch.ones(2, 2)}
    save_file({**load_file(file), **more}, file, metadata={"format": "pt"})
    report = shardwise.verify(base)
    assert (report.unexpected, report.is_sound) == (tuple(more), True)
    assert "all that Qwen3ForCausalLM needs, and 1 more, such as model.layers.9.eh_proj.weight" in str(report)
    model = get_peft_model(small_qwen3(), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(adapter, save_embedding_layers=False)
    shutil.copy(base / "config.json", adapter)
    assert "an adapter" in shardwise.verify(adapter).holds
    shardwise.merge_adapter(base, adapter, tmp_path / "merged")
    shardwise.merge_weights(base, tmp_path / "moved", remove_source=True)
    for name in ("merged", "moved"):
        report = shardwise.verify(tmp_path / name)
        assert (report.unexpected, report.is_sound, report.compared) == (tuple(more), True, report.tensors)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"auto_map": {"AutoModel": "own.Own"}, "architectures": ["Own"]}, "contains its own model code"),
        ({"auto_map": {"AutoConfig": "own.Config"}, "model_type": "own"}, "contains custom code|its own"),
        ({"architectures": ["NobodysModel"]}, "names NobodysModel"),
        ({"model_type": "nobodys"}, "nobodys"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quant_method 'aqlm'"),
    ],
)
def test_of_a_model_that_is_not_known_only_files_are_verified(tmp_path, config, reason):
    shardwise.save(small_qwen3(), tmp_path)
    change_json(tmp_path / "config.json", **config)
    report = shardwise.verify(tmp_path)
    assert report.is_sound
    assert re.search(f"coverage    not known: .*({reason})", str(report), re.DOTALL)
    assert "Pass" not in report.unknown


def test_the_file_that_a_config_names_is_verified(tmp_path):
    shardwise.save(small_qwen3(), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    save_file({"model.norm.weight": torch.ones(2)}, tmp_path / "stray.safetensors")
    with pytest.raises(shardwise.FormatError, match="model.norm.weight"):
        shardwise.verify(tmp_path)
    change_json(tmp_path / "config.json", transformers_weights="other.safetensors")
    assert shardwise.verify(tmp_path).tensors == len(small_qwen3().state_dict())
    assert shardwise.verify(tmp_path / "other.safetensors").model_class == "Qwen3ForCausalLM"


def test_a_path_that_does_not_exist_is_no_repository():
    with pytest.raises(shardwise.StorageError, match=r"^out/typo: no such directory\. Check the path$"):
        shardwise.verify("out/typo")


def test_files_of_other_programs_are_not_compared(saved):
    """The fingerprints are of other files: nothing is known of these."""
    record = record_of(saved)
    record["files"] = {name: nbytes + 8 for name, nbytes in record["files"].items()}
    write_records(saved, record)
    report = shardwise.verify(saved)
    assert (report.compared, report.is_sound) == (0, True)
    assert "not compared" in str(report)


def record_of(saved):
    return json.loads((saved / SIDECAR).read_text())["saves"][0]


def write_records(saved, *records):
    """As earlier versions did, without a digest of the record itself."""
    (saved / SIDECAR).write_text(json.dumps({"format": "shardwise fingerprints 1", "saves": records}))


def test_during_a_commit_two_saves_are_on_record(saved):
    """Equal sizes, other values: the one that fits better is meant."""
    record = record_of(saved)
    other = {"files": record["files"], "tensors": dict.fromkeys(record["tensors"], "0" * 15 + "1")}
    for saves in ([record, other], [other, record]):
        write_records(saved, *saves)
        assert shardwise.verify(saved).is_sound
    entry = open_checkpoint(saved).entries["model.norm.weight"]
    flip_bit(saved / entry.file, entry.start)
    assert shardwise.verify(saved).damaged == ("model.norm.weight",)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 5000,
        '{"format": "another"}',
        '{"format": "shardwise fingerprints 1", "saves": [{"files": {"a": 1}, "tensors": {"b": "xyz"}}]}',
    ],
)
def test_an_invalid_record_is_damage(tmp_path, text):
    shardwise.save(nn.Linear(3, 3), tmp_path)
    (tmp_path / SIDECAR).write_text(text, encoding="latin-1")
    report = shardwise.verify(tmp_path)
    assert (report.compared, report.is_sound) == (0, False)
    assert "damaged     model.fingerprints.json: the record of fingerprints" in str(report)
    assert command(tmp_path).exit_code == 1
    shardwise.save(nn.Linear(3, 3), tmp_path)  # and stands in nobody's way
    assert shardwise.verify(tmp_path).compared == 2


def test_a_header_that_was_changed_is_reported(saved):
    """Where it is as good a header as before: what is in it is not what was saved."""
    file = sorted(saved.glob("*.safetensors"))[0]
    assert file.read_bytes().count(b'{"format":"pt"}') == 1
    file.write_bytes(file.read_bytes().replace(b'{"format":"pt"}', b'{"format":"pu"}'))
    report = shardwise.verify(saved)
    assert (report.damaged, report.damaged_files, report.is_sound) == ((), (f"{file.name}: its header",), False)
    assert command(saved).exit_code == 1


def test_a_record_that_is_too_large_is_refused(tmp_path, monkeypatch):
    shardwise.save(nn.Linear(3, 3), tmp_path)
    with (tmp_path / SIDECAR).open("r+b") as file:
        file.truncate(300_000_000)
    with pytest.raises(shardwise.FormatError, match=r"model\.fingerprints\.json .*more than any save writes"):
        shardwise.verify(tmp_path)


def test_a_record_that_leaves_tensors_out_is_damage(tmp_path):
    shardwise.save(nn.Linear(3, 3), tmp_path)
    record = record_of(tmp_path)
    del record["tensors"]["bias"]
    record["tensors"]["more"] = "0" * 16
    write_records(tmp_path, record)
    assert shardwise.verify(tmp_path).damaged == ("bias", "more")


def test_a_tensor_of_several_blocks(tmp_path, monkeypatch):
    """Ranges of one tensor are added up."""
    monkeypatch.setattr("shardwise.saving.verify._VERIFIED_BYTES", 4096)
    model = nn.Linear(130, 77)
    shardwise.save(model, tmp_path, dtype=torch.float16)
    assert shardwise.verify(tmp_path).is_sound
    entry = open_checkpoint(tmp_path).entries["weight"]
    flip_bit(tmp_path / entry.file, entry.start + 4095)
    assert shardwise.verify(tmp_path).damaged == ("weight",)


# Small files, and adapters


def test_a_config_that_was_changed_is_reported(saved):
    """By hand or by damage, in words that fit; weights are sound all the same."""
    assert shardwise.verify(saved).changed == ()
    change_json(saved / "config.json", rope_theta=5.0)
    (saved / "generation_config.json").unlink()
    report = shardwise.verify(saved)
    assert report.changed == ("config.json", "generation_config.json (it is gone)")
    assert report.is_sound
    result = command(saved)
    assert result.exit_code == 0
    assert "changed     config.json: edited since it was saved, or damaged" in result.stdout


@pytest.mark.parametrize("content", ["{", "[" * 100_000, '{"max_length": null, "dtype": 3}', "\x80"])
def test_a_damaged_generation_config_is_one_error_that_names_it(saved, content):
    """And the exit code is that of a model that cannot be opened."""
    (saved / "generation_config.json").write_bytes(content.encode("latin-1"))
    for act in (shardwise.verify, shardwise.from_pretrained):
        words = "^generation_config.json in .* It is damaged: restore the file$"
        with pytest.raises(shardwise.FormatError, match=words):
            act(saved)
    result = command(saved)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.fullmatch(r"importing .*\nerror: generation_config.json in .*\n", result.stderr)


@pytest.mark.parametrize("content", ["null", "[" * 100_000])
def test_a_damaged_config_is_one_error_that_names_its_folder(saved, content):
    (saved / "config.json").write_text(content)
    with pytest.raises(shardwise.ConfigError, match="no usable config in"):
        shardwise.verify(saved)
    assert command(saved).exit_code == 2


@pytest.mark.parametrize("stored", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_adapter_is_verified(tmp_path, stored):
    model = get_peft_model(small_qwen3(), LoraConfig(r=4, target_modules=["q_proj"]))
    shardwise.save_adapter(model, tmp_path)
    report = shardwise.verify(tmp_path)
    assert report.compared == report.tensors == 4
    assert (report.damaged, report.changed) == ((), ())
    assert "an adapter" in report.holds
    flip_bit(tmp_path / stored, -1 if stored.endswith("s") else 4)
    report = shardwise.verify(tmp_path)
    if stored.endswith("s"):
        assert len(report.damaged) == 1
        assert command(tmp_path).exit_code == 1
    else:
        assert report.damaged_files == (f"{stored}: edited, or damaged",)
        assert command(tmp_path).exit_code == 1


def test_saves_of_before_have_no_record_of_small_files(saved):
    record = record_of(saved)
    del record["beside"], record["headers"]
    write_records(saved, record)
    (saved / "config.json").write_text((saved / "config.json").read_text() + " ")
    report = shardwise.verify(saved)
    assert report.compared == report.tensors
    assert report.changed == ()
