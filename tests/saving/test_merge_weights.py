"""``merge_weights``: checkpoints of training, written as transformers saves the model."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tests import zoo
from tests.loading import torch_saves
from tests.quantized import quantizing
from tests.saving.adapters import tensors_of
from tests.small_checkpoints import small_qwen3
from tests.support.files import change_json, contents
from tests.truth import require_equal as same
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM

import shardwise
from shardwise.cli import main
from shardwise.core.errors import ConfigError, FormatError, KeyMismatchError, ShardwiseError, StorageError
from shardwise.files.local_writer import LocalWriter
from shardwise.saving.merge_weights import merge_weights
from shardwise.saving.saving_lock import LOCK_FILE

_NAMES = ("qwen3", "qwen3_moe", "llama", "gpt_oss", "mixtral", "phi3", "gpt2")


def specimen(name: str) -> zoo.Specimen:
    return next(item for item in zoo.causal_lm_specimens() if item.model_type == name)


def save_distributed(state: dict, folder: Path) -> Path:
    with zoo.silenced():  # that one process saves alone
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=False), no_dist=True)
    return folder


@pytest.mark.parametrize("name", _NAMES)
def test_a_distributed_checkpoint_becomes_what_transformers_saves(name: str, tmp_path: Path) -> None:
    model = zoo.build(specimen(name))
    zoo.save_original(model, tmp_path / "wanted")
    model.config.save_pretrained(tmp_path / "run")
    save_distributed({"model": model.state_dict()}, tmp_path / "run" / "pytorch_model_fsdp_0")
    report = merge_weights(tmp_path / "run", tmp_path / "out", max_shard_size="200KB")
    same(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "wanted"))
    assert "the hub's" in report.names
    with zoo.silenced():
        _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run of a trainer: its config, and a checkpoint with a model and an optimizer. And what the model is."""
    run = tmp_path_factory.mktemp("run")
    model = zoo.build(specimen("qwen3_moe"))
    zoo.save_original(model, run / "wanted")
    step = run / "checkpoint-5"
    model.config.save_pretrained(step)
    (step / "tokenizer_config.json").write_text("{}")
    state = {name: {"exp_avg": value.clone(), "step": 3} for name, value in list(model.state_dict().items())[:2]}
    save_distributed({"model": model.state_dict()}, step / "pytorch_model_fsdp_0")
    save_distributed({"optimizer": {"state": state, "param_groups": [{"lr": 0.1}]}}, step / "optimizer_0")
    return step, tensors_of(run / "wanted")


def copied(step: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(step, tmp_path / "copy" / step.name))


@pytest.mark.parametrize("inner", ["", "pytorch_model_fsdp_0"])
def test_the_folder_of_the_model_is_found_and_the_config_above_it(inner: str, small, tmp_path: Path) -> None:
    step, wanted = small
    report = merge_weights(step / inner, tmp_path / "out")
    same(tensors_of(tmp_path / "out"), wanted)
    assert report.files == ("model.safetensors",)
    assert (tmp_path / "out" / "tokenizer_config.json").exists()


@pytest.mark.parametrize("inner", ["", "pytorch_model_fsdp_0"])
def test_the_tokenizer_of_a_run_is_taken_before_that_of_the_base(inner: str, small, tmp_path: Path) -> None:
    base = Path(shutil.copytree(small[0].parent / "wanted", tmp_path / "base"))
    (base / "tokenizer_config.json").write_text('{"of": "the base"}')
    merge_weights(small[0] / inner, tmp_path / "out", base=base)
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == "{}"


def test_without_a_config_names_stay_and_that_is_reported(small, tmp_path: Path) -> None:
    step = copied(small[0], tmp_path)
    (step / "config.json").unlink()
    report = merge_weights(step, tmp_path / "out")
    assert "no config.json" in report.names
    assert any("experts.gate_up_proj" in key for key in tensors_of(tmp_path / "out"))
    merge_weights(step, tmp_path / "named", base=small[0])
    same(tensors_of(tmp_path / "named"), small[1])
    with pytest.raises(ConfigError, match="no config.json"):
        merge_weights(step, tmp_path / "out", dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"no config.json. Pass a folder"):
        merge_weights(step, tmp_path / "out", base=tmp_path)


def test_tensors_of_an_adapter_are_reported_as_no_model(tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_{}.default.weight"
    state = {name.format(part): torch.ones(4, 4) for part in "AB"}
    save_distributed({**state, "step": torch.zeros(1)}, tmp_path / "run")
    report = merge_weights(tmp_path / "run", tmp_path / "out")
    [note] = [note for note in report.notes if "adapter" in note]
    assert note.startswith("2 of 3 tensors are an adapter's")
    assert "adapter's" in str(report)
    small_qwen3().save_pretrained(tmp_path)
    with pytest.raises(KeyMismatchError, match=r"\nPass the weights of the model alone: the keys with lora_"):
        merge_weights(tmp_path / "run", tmp_path / "whole", base=tmp_path)


@pytest.mark.parametrize("has_config", [True, False])
def test_keys_are_renamed_as_in_a_load(has_config: bool, small, tmp_path: Path) -> None:
    step = copied(small[0], tmp_path)
    tensors = {f"ema.net.{key}": tensor for key, tensor in small[1].items()}
    shutil.rmtree(step / "pytorch_model_fsdp_0")
    save_file(tensors, step / "model.safetensors", metadata={"format": "pt"})
    if not has_config:
        (step / "config.json").unlink()
    renames = [r"--key-mapping", r"^ema\.", "", "--key-mapping", r"^net\.(.+)", r"\1"]
    ran = CliRunner().invoke(main, ["merge-weights", str(step), str(tmp_path / "out"), *renames])
    assert ran.exit_code == 0, ran.output
    same(tensors_of(tmp_path / "out"), small[1])
    for key_mapping, words in (
        ({"(": ""}, "is no valid regex"),
        ({"^.*$": "x"}, "the name x to several keys|missing"),
    ):
        with pytest.raises(ShardwiseError, match=words):
            merge_weights(step, tmp_path / "other", key_mapping=key_mapping)


def test_the_names_of_the_base_are_those_of_the_outcome(tmp_path: Path) -> None:
    model = zoo.build(specimen("qwen3_5_text"))
    zoo.save_original(model, tmp_path / "base", prefixes=True)
    save_distributed(model.state_dict(), tmp_path / "run")
    merge_weights(tmp_path / "run", tmp_path / "out", base=tmp_path / "base")
    same(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "base"))


def test_each_tensor_keeps_its_dtype_which_the_config_states(small, tmp_path: Path) -> None:
    step = copied(small[0], tmp_path)
    change_json(step / "config.json", dtype="bfloat16")
    for dtype in (None, "auto"):
        merge_weights(step, tmp_path / "out", dtype=dtype)
        same(tensors_of(tmp_path / "out"), small[1])
        assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    for dtype in ("bfloat16", torch.bfloat16):
        merge_weights(step, tmp_path / "half", dtype=dtype)
        same(tensors_of(tmp_path / "half"), {key: value.bfloat16() for key, value in small[1].items()})
        assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_head_with_values_of_its_own_is_not_tied_in_the_config(tmp_path: Path) -> None:
    base = zoo.save_original(small_qwen3(tie_word_embeddings=True), tmp_path / "base")
    trained = small_qwen3()
    save_distributed(trained.state_dict(), tmp_path / "run")
    report = merge_weights(tmp_path / "run", tmp_path / "out", base=base)
    same(tensors_of(tmp_path / "out"), trained.state_dict())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert "lm_head.weight is not tied any more: it has its own values" in report.notes


def test_a_quantized_checkpoint_is_dequantized(tmp_path: Path) -> None:
    folder = zoo.save_original(zoo.build(specimen("qwen3")), tmp_path / "fp8")
    quantizing.quantize(folder, "fp8 of a tensor")
    merge_weights(folder, tmp_path / "out", dtype="bfloat16")
    shardwise.save(shardwise.from_pretrained(folder, dtype="bfloat16"), tmp_path / "wanted")
    same(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "wanted"))
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("fp8", "out")]
    assert ["quantization_config" in config for config in configs] == [True, False]


def test_quantized_tensors_that_are_carried_along_get_the_dtype_of_the_output(tmp_path: Path) -> None:
    folder = zoo.save_original(zoo.build(specimen("qwen3")), tmp_path / "fp8")
    others = {"mtp.up_proj.weight": torch.ones(16, 16), "mtp.norm.weight": torch.ones(16)}
    file = min(folder.glob("*.safetensors"))
    save_file({**load_file(file), **others}, file, metadata={"format": "pt"})
    quantizing.quantize(folder, "fp8 of a tensor")
    merge_weights(folder, tmp_path / "out", dtype="bfloat16")
    found = tensors_of(tmp_path / "out")
    assert [found[key].dtype for key in others] == [torch.bfloat16, torch.float32]


def test_files_of_torch_and_safetensors_are_merged_as_well(small, tmp_path: Path) -> None:
    torch.save(small[1], tmp_path / "pytorch_model.bin")
    shutil.copy(small[0] / "config.json", tmp_path)
    merge_weights(tmp_path, tmp_path / "out", max_shard_size="100KB")
    same(tensors_of(tmp_path / "out"), small[1])
    merge_weights(tmp_path / "out", tmp_path / "again")
    same(tensors_of(tmp_path / "again"), small[1])


def test_the_source_is_removed_once_the_outcome_has_been_read_back(small, tmp_path: Path) -> None:
    step = copied(small[0], tmp_path)
    report = merge_weights(step, tmp_path / "out", remove_source=True)
    same(tensors_of(tmp_path / "out"), small[1])
    assert report.verified == report.tensors == len(small[1])
    assert not (step / "pytorch_model_fsdp_0").exists()
    assert (step / "optimizer_0" / ".metadata").exists()
    assert (step / "config.json").exists()


def test_an_index_is_removed_with_its_files_and_first(small, tmp_path: Path, monkeypatch) -> None:
    merge_weights(small[0], tmp_path / "run", max_shard_size="100KB")
    other = tmp_path / "run" / "other.safetensors.index.json"
    other.write_text('{"weight_map": {"a": "other.safetensors"}}')
    removed, unlink = [], Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda self, **options: removed.append(self) or unlink(self, **options))
    merge_weights(tmp_path / "run", tmp_path / "out", remove_source=True)
    first, *_ = (file for file in removed if file.parent == tmp_path / "run")
    assert first.name == "model.safetensors.index.json"
    assert [file.name for file in (tmp_path / "run").glob("*.safetensors*")] == [other.name]


@pytest.mark.parametrize("inner", ["pytorch_model_fsdp_0", "optimizer_0"])
def test_a_difference_on_reading_back_keeps_the_source(small, tmp_path: Path, monkeypatch, inner: str) -> None:
    """Of a model in safetensors, and of an optimizer in a file of torch."""
    step = copied(small[0], tmp_path)
    write = LocalWriter.write

    def lossy(self, file, start, buffers):
        damaged = [memoryview(bytes(buffer)) for buffer in buffers]
        if start > 8 and file != LOCK_FILE:
            damaged[0] = memoryview(bytes([damaged[0][0] ^ 1]) + bytes(damaged[0][1:]))
        write(self, file, start, damaged)

    monkeypatch.setattr(LocalWriter, "write", lossy)
    with pytest.raises(StorageError, match="differ from what was written"):
        merge_weights(step / inner, tmp_path / "out", remove_source=True)
    assert (step / inner / ".metadata").exists()


def test_a_source_that_holds_more_than_the_model_is_not_removed(tmp_path: Path) -> None:
    model = zoo.build(specimen("llama"))
    zoo.save_original(model, tmp_path / "wanted")
    model.config.save_pretrained(tmp_path / "run")
    save_distributed({"model": model.state_dict(), "optimizer": {"x": torch.ones(3)}}, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"optimizer.*would be lost"):
        merge_weights(tmp_path / "run", tmp_path / "out", remove_source=True)
    assert any("optimizer" in note for note in merge_weights(tmp_path / "run", tmp_path / "out").notes)
    folder = zoo.save_original(model, tmp_path / "fp8")
    quantizing.quantize(folder, "fp8 of a tensor")  # with scales of activations
    before = contents(folder)
    with pytest.raises(ConfigError, match=r"qscale_act.*would be lost"):
        merge_weights(folder, tmp_path / "dequantized", remove_source=True)
    assert contents(folder) == before
    assert not (tmp_path / "dequantized").exists()


def test_the_metadata_of_another_checkpoint_in_the_folder_stays(tmp_path: Path) -> None:
    save_distributed({"optimizer": {"state": {"a": torch.ones(3)}}}, tmp_path / "run")
    save_file({"a": torch.ones(4)}, tmp_path / "run" / "model.safetensors")
    merge_weights(tmp_path / "run" / "model.safetensors", tmp_path / "out", remove_source=True)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert (tmp_path / "run" / ".metadata").exists()


def test_never_onto_its_own_source(small, tmp_path: Path) -> None:
    step = copied(small[0], tmp_path)
    (tmp_path / "link").symlink_to(step / "pytorch_model_fsdp_0")
    for out in (step, step / "pytorch_model_fsdp_0", tmp_path / "link"):
        with pytest.raises(ConfigError, match="is the folder that is read"):
            merge_weights(step, out)


@pytest.mark.parametrize(
    ("kept", "lacking", "words"),
    [
        (
            {"pytorch_model_fsdp_0", "optimizer_0"},
            {"pytorch_model_fsdp_0", "optimizer_0"},
            "optimizer_0, pytorch_model_fsdp_0: .*no .metadata",
        ),
        (
            {"pytorch_model_fsdp_0", "optimizer_0"},
            {"pytorch_model_fsdp_0"},
            "5: pytorch_model_fsdp_0: there are .distcp files, but no .metadata, .*\ncopy .metadata there",
        ),
        ({"pytorch_model_fsdp_0"}, {"pytorch_model_fsdp_0"}, "5: pytorch_model_fsdp_0: .*no .metadata"),
        ({"optimizer_0"}, set(), "an optimizer's state, without the folder of a model next to it"),
        (set(), set(), "no weights found"),
    ],
)
def test_a_folder_without_metadata_is_explained(
    kept: set[str], lacking: set[str], words: str, small, tmp_path: Path
) -> None:
    step = copied(small[0], tmp_path)
    for folder in ("pytorch_model_fsdp_0", "optimizer_0"):
        if folder in lacking:
            (step / folder / ".metadata").unlink()
        if folder not in kept:
            shutil.rmtree(step / folder)
    with pytest.raises(FormatError, match=words):
        merge_weights(step, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_config_that_names_no_model_is_reported(small, tmp_path: Path) -> None:
    step = copied(small[0], tmp_path)
    change_json(step / "config.json", architectures=["NobodysModel"])
    assert "NobodysModel" in merge_weights(step, tmp_path / "out").names
    with pytest.raises(ConfigError, match="NobodysModel"):
        merge_weights(step, tmp_path / "out", base=step)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no such file or folder"):
        merge_weights(tmp_path / "nowhere", tmp_path / "out")


# Files of torch.save


def test_one_file_of_torch(small, tmp_path: Path) -> None:
    step = copied(small[0], tmp_path)
    with torch.device("meta"):
        report = merge_weights(step, tmp_path / "out", file_format="bin", remove_source=True)
    assert report.files == ("pytorch_model.bin",)
    same(torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True), small[1])
    wanted = ["config.json", "pytorch_model.bin", "tokenizer_config.json"]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == wanted
    assert not (step / "pytorch_model_fsdp_0").exists()
    merge_weights(tmp_path / "out", tmp_path / "back")
    same(tensors_of(tmp_path / "back"), small[1])


def test_a_file_of_torch_is_one_and_beside_no_safetensors(small, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="more than max_shard_size"):
        merge_weights(small[0], tmp_path / "out", file_format="bin", max_shard_size="10KB")
    with pytest.raises(ConfigError, match="Pass a larger max_shard_size$"):
        merge_weights(small[0] / "optimizer_0", tmp_path / "out", max_shard_size="1KB")
    merge_weights(small[0], tmp_path / "out")
    with pytest.raises(ConfigError, match="read instead of"):
        merge_weights(small[0], tmp_path / "out", file_format="bin")


def test_the_state_of_an_optimizer_becomes_one_file(small, tmp_path: Path) -> None:
    step = copied(small[0], tmp_path)
    report = merge_weights(step / "optimizer_0", tmp_path / "out", remove_source=True)
    assert report.files == ("optimizer.bin",)
    found = torch.load(tmp_path / "out" / "optimizer.bin", weights_only=True)
    assert found["param_groups"] == [{"lr": 0.1}]
    assert [entry["step"] for entry in found["state"].values()] == [3, 3]
    for name, entry in found["state"].items():
        assert torch.equal(entry["exp_avg"], small[1][name]), name
    assert not (step / "optimizer_0").exists()
    assert (step / "pytorch_model_fsdp_0").exists()


def test_tensors_in_tuples_of_an_optimizer_are_merged_and_read_back(tmp_path: Path, monkeypatch) -> None:
    """As betas of an Adam that is captured in a graph; in a distributed checkpoint they are one value."""
    group = {"betas": (torch.tensor(0.9), torch.tensor(0.999)), "capturable": True, "params": ["a"]}
    state = {"state": {"a": {"exp_avg": torch.ones(3)}}, "param_groups": [group]}
    source = save_distributed({"optimizer": state}, tmp_path / "optimizer_0")
    write, beta = LocalWriter.write, group["betas"][0].numpy().tobytes()

    def lossy(self, file, start, buffers):
        is_beta = [bytes(buffer) for buffer in buffers] == [beta]
        write(self, file, start, [memoryview(bytes(4))] if is_beta else buffers)

    with monkeypatch.context() as patched:
        patched.setattr(LocalWriter, "write", lossy)
        with pytest.raises(StorageError, match=r"param_groups.0.betas.0 differ from what was written"):
            merge_weights(source, tmp_path / "out", remove_source=True)
    report = merge_weights(source, tmp_path / "out", remove_source=True)
    assert report.verified == 3
    assert not source.exists()
    found = torch.load(tmp_path / "out" / "optimizer.bin", weights_only=True)
    assert found["param_groups"] == [group]
    assert torch.equal(found["state"]["a"]["exp_avg"], torch.ones(3))


def test_files_written_by_ranks_with_functions_of_accelerate(worlds, tmp_path: Path) -> None:
    model = zoo.build(specimen("qwen3_moe"))
    zoo.save_original(model, tmp_path / "base")
    run = tmp_path / "run"
    worlds(3).run(torch_saves.save_like_accelerate, str(tmp_path / "base"), str(run))
    merge_weights(run, tmp_path / "out", base=tmp_path / "base")
    same(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "base"))
    merge_weights(run / "optimizer_0", tmp_path / "out")
    found = torch.load(tmp_path / "out" / "optimizer.bin", weights_only=True)
    with zoo.silenced():
        dcp_to_torch_save(run / "optimizer_0", tmp_path / "wanted.bin")
    wanted = torch.load(tmp_path / "wanted.bin", weights_only=True)["optimizer"]
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    for name, entry in wanted["state"].items():
        for part, value in entry.items():
            assert torch.equal(torch.as_tensor(found["state"][name][part]), torch.as_tensor(value)), (name, part)
