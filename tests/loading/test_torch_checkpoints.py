"""Checkpoints that torch saved, loaded on any number of ranks, bit by bit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from tests import truth, zoo
from tests.loading import torch_saves
from tests.saving.adapters import tensors_of
from tests.small_checkpoints import small_qwen3
from tests.support.world import require_same_error
from torch import nn
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

import shardwise
from shardwise import ConfigError, FormatError, KeyMismatchError
from shardwise.files.open_checkpoint import open_checkpoint


def as_torch_files(source: Path, target: Path) -> Path:
    """The same checkpoint as transformers wrote it before there was safetensors, every third matrix a view."""
    target.mkdir()
    weight_map: dict[str, str] = {}
    files = sorted(source.glob("*.safetensors"))
    for number, file in enumerate(files, 1):
        tensors = load_file(file)
        for place, key in enumerate(sorted(tensors)):
            if tensors[key].ndim == 2 and place % 3 == 0:
                tensors[key] = tensors[key].t().contiguous().t()
            elif tensors[key].ndim == 2 and place % 3 == 1:
                wide = torch.zeros(tensors[key].shape[0], tensors[key].shape[1] + 5, dtype=tensors[key].dtype)
                wide[:, 2:-3] = tensors[key]
                tensors[key] = wide[:, 2:-3]
        name = f"pytorch_model-{number:05d}-of-{len(files):05d}.bin" if len(files) > 1 else "pytorch_model.bin"
        torch.save(tensors, target / name)
        weight_map |= dict.fromkeys(tensors, name)
    if len(files) > 1:
        (target / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    shutil.copy(source / "config.json", target)
    return target


def wanted(worlds, source):
    (found,) = worlds(1).run(torch_saves.loaded, str(source), str(source), {})
    return found


def check(worlds, folder, source, *, wrapper=""):
    expected = wanted(worlds, source)
    for found in worlds(3).run(torch_saves.loaded, str(folder), str(source), {}):
        assert truth.differences(found, expected) == []
        assert found["wrapper"] == wrapper


# Files of torch


@pytest.mark.parametrize("name", ["qwen3", "tied_qwen3", "mixtral"])
def test_torch_files(worlds, tmp_path, request, name):
    source = request.getfixturevalue(name)
    check(worlds, as_torch_files(source, tmp_path / "bin"), source)


def test_each_rank_reads_only_its_own_bytes(worlds, tmp_path, qwen3):
    target = tmp_path / "bin"
    target.mkdir()
    tensors = tensors_of(qwen3)
    torch.save(tensors, target / "pytorch_model.bin")
    total = sum(tensor.nbytes for tensor in tensors.values())
    read = [found["read_bytes"] for found in worlds(3).run(torch_saves.loaded, str(target), str(qwen3), {})]
    assert total <= sum(read) < 1.02 * total  # torch leaves small gaps, which are read over
    assert max(read) < 0.5 * total


def test_a_tied_model_stored_under_both_names(tmp_path, tied_qwen3):
    model = small_qwen3(tie_word_embeddings=True)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    shutil.copy(tied_qwen3 / "config.json", tmp_path)
    found, report = shardwise.from_pretrained(tmp_path, output_loading_info=True)
    assert truth.differences(truth.snapshot(found), truth.snapshot(model)) == []
    assert report.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert report.checkpoint_bytes == sum(item.nbytes for item in model.parameters())


def test_other_files_of_a_trainer_are_reported(tmp_path):
    model = nn.Linear(3, 4)
    torch.save({"model": model.state_dict(), "optimizer": {"x": torch.ones(2)}, "epoch": 3}, tmp_path / "all.pt")
    found = nn.Linear(3, 4, device="meta")
    report = shardwise.load(found, tmp_path / "all.pt")
    assert torch.equal(found.weight, model.weight)
    assert (report.wrapper, report.not_loaded) == ("model", ("optimizer (an optimizer's state)", "epoch (int)"))
    assert "taken from  model\n" in str(report)
    assert "not loaded  epoch (int)" in str(report)


def test_of_two_models_one_is_named_by_key_mapping(tmp_path):
    one, other = nn.Linear(3, 4), nn.Linear(3, 4)
    torch.save({"model": one.state_dict(), "ema": other.state_dict()}, tmp_path / "all.pt")
    found = nn.Linear(3, 4, device="meta")
    with pytest.raises(KeyMismatchError, match=r"unexpected 4 +\*\.|ema\.weight"):
        shardwise.load(found, tmp_path / "all.pt")
    shardwise.load(
        found,
        tmp_path / "all.pt",
        key_mapping={r"^ema\.": ""},
        on_unexpected=shardwise.options.Ignore(("model.*",)),
    )
    assert torch.equal(found.weight, other.weight)


def wrapped(key: str, prefix: str, part: str) -> str:
    """The key of a wrapped model, of which a block is wrapped as well."""
    return prefix + key.replace(".layers.0.", f".layers.0.{part}")


def write_wrapped(folder: Path, source: Path, form: str, prefix: str, part: str) -> None:
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    tensors = {wrapped(key, prefix, part): tensor for key, tensor in tensors_of(source).items()}
    match form:
        case "safetensors":
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        case "bin":
            torch.save(tensors, folder / "pytorch_model.bin")
        case "dcp":
            with zoo.silenced():
                dcp.save({"model": tensors}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


@pytest.mark.parametrize(
    ("form", "prefix", "part"),
    [
        pytest.param("safetensors", "_orig_mod.", "", marks=pytest.mark.slow),
        ("bin", "_fsdp_wrapped_module.", "_fsdp_wrapped_module._checkpoint_wrapped_module."),
        ("dcp", "module._orig_mod.", "_checkpoint_wrapped_module."),
    ],
)
def test_names_of_wrappers(tmp_path, mixtral, form, prefix, part):
    write_wrapped(tmp_path / "saved", mixtral, form, prefix, part)
    count = len(tensors_of(mixtral))
    line = (
        f"{count} keys have the names of wrappers, and are taken without: {prefix}lm_head.weight as lm_head.weight"
    )
    merged = shardwise.merge_weights(tmp_path / "saved", tmp_path / "out")
    truth.require_equal(tensors_of(tmp_path / "out"), tensors_of(mixtral))
    assert line in merged.notes
    found, report = shardwise.from_pretrained(tmp_path / "saved", output_loading_info=True)
    again = shardwise.from_pretrained(tmp_path / "out")
    assert truth.differences(truth.snapshot(found), truth.snapshot(again)) == []
    assert line in str(report)
    if form == "dcp":  # the rest does not depend on it
        assert line in shardwise.plan(tmp_path / "saved", ranks=1).notes
        (tmp_path / "saved" / "config.json").unlink()
        merged = shardwise.merge_weights(tmp_path / "saved", tmp_path / "unknown")
        truth.require_equal(tensors_of(tmp_path / "unknown"), tensors_of(mixtral))
        assert line in merged.notes


def test_a_model_that_has_the_names_of_wrappers(tmp_path):
    """Its own names come first, and then those by ``key_mapping``."""
    model = nn.ModuleDict({"module": nn.Linear(3, 4)})
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    found = nn.ModuleDict({"module": nn.Linear(3, 4, device="meta")})
    assert shardwise.load(found, tmp_path).notes == ()
    assert torch.equal(found["module"].weight, model["module"].weight)
    other = nn.ModuleDict({"body": nn.Linear(3, 4, device="meta")})
    assert shardwise.load(other, tmp_path, key_mapping={r"^module\.": "body."}).notes == ()
    assert torch.equal(other["body"].weight, model["module"].weight)
    with pytest.raises(ConfigError, match=r"key_mapping: '\(' is no valid regex"):
        shardwise.load(other, tmp_path, key_mapping={"(": ""})
    for target in (r"y.\1.\2", r"y.\g<1>"):
        with pytest.raises(ConfigError, match=r"key_mapping: the replacement 'y.* has a group other than \\1"):
            shardwise.load(other, tmp_path, key_mapping={r"^x\.(\w+)\.(\w+)$": target})


# Distributed checkpoints


@pytest.mark.parametrize(
    ("name", "size", "mesh", "levels"),
    [("tied_qwen3", 2, "flat", ()), ("mixtral", 2, "flat", ("app", "model")), ("qwen3", 4, "hsdp", ("model",))],
)
def test_a_sharded_model_comes_back(worlds, tmp_path, request, name, size, mesh, levels):
    source = request.getfixturevalue(name)
    worlds(size).run(torch_saves.save_sharded, str(source), str(tmp_path / "saved"), mesh, levels)
    assert len(list((tmp_path / "saved").glob("*.distcp"))) >= (2 if mesh == "flat" else 1)
    check(worlds, tmp_path / "saved", source, wrapper=".".join(levels))


def test_chunks_under_the_names_of_the_hub(worlds, tmp_path, mixtral):
    worlds(2).run(torch_saves.save_hub_tensors, str(mixtral), str(tmp_path / "saved"))
    check(worlds, tmp_path / "saved", mixtral)


def test_chunks_of_a_mesh_of_two_dimensions(worlds, tmp_path):
    worlds(4).run(torch_saves.save_grid, str(tmp_path / "saved"))
    model = nn.Linear(7, 5, bias=False, device="meta")
    shardwise.load(model, tmp_path / "saved")
    assert torch.equal(model.weight, torch.arange(35.0).reshape(5, 7))


def test_safetensors_files_of_chunks(worlds, tmp_path, mixtral):
    worlds(2).run(torch_saves.save_safetensors, str(mixtral), str(tmp_path))
    assert len(list(tmp_path.glob("shard-*.safetensors"))) == 2
    check(worlds, tmp_path, mixtral)
    # In place: the files of ranks stay, beside an index and what it names.
    consolidate_safetensors_files(str(tmp_path), str(tmp_path), dict.fromkeys(tensors_of(mixtral), 1))
    check(worlds, tmp_path, mixtral)
    # A save that was killed between its commit and its removal of the older files leaves both, too.
    plain = nn.Linear(2, 2)
    shardwise.save(plain, tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.fingerprints.json", tmp_path)
    words = "has {} and a distributed checkpoint .* Remove the one that you do not want"
    with pytest.raises(FormatError, match=words.format("model.safetensors.index.json")):
        open_checkpoint(tmp_path)
    # So does a later save of transformers, into several files or one.
    (tmp_path / "model.fingerprints.json").unlink()
    model = small_qwen3()
    for size, name in ("30KB", "model.safetensors.index.json"), ("1MB", "model.safetensors"):
        model.save_pretrained(tmp_path, max_shard_size=size)
        with pytest.raises(FormatError, match=words.format(name)):
            open_checkpoint(tmp_path)
    # A save replaces them.
    shardwise.save(plain, tmp_path)
    assert list(tmp_path.glob("*.safetensors")) == [tmp_path / "model.safetensors"]


def test_names_of_the_model_leave_those_of_the_hub_to_a_save(tmp_path, mixtral):
    model = shardwise.from_pretrained(mixtral)
    with zoo.silenced():  # that there is one process
        dcp.save(dict(model.state_dict()), checkpoint_id=tmp_path / "own", no_dist=True)
    shardwise.load(model, tmp_path / "own")
    shardwise.save(model, tmp_path / "saved")
    assert tensors_of(tmp_path / "saved").keys() == tensors_of(mixtral).keys()


def test_a_folder_of_accelerate(worlds, tmp_path, qwen3):
    worlds(2).run(torch_saves.save_like_accelerate, str(qwen3), str(tmp_path))
    check(worlds, tmp_path, qwen3, wrapper="model")
    errors = worlds(2).run(torch_saves.error_of, str(tmp_path / "optimizer_0"), str(qwen3))
    require_same_error(errors, "FormatError", f"Pass the folder of the model: {tmp_path}/pytorch_model_fsdp_0")


def test_a_distributed_checkpoint_without_a_config_names_the_missing_argument(tmp_path):
    model = small_qwen3()
    with zoo.silenced():  # that there is one process
        dcp.save(dict(model.state_dict()), checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(ConfigError, match=r"there is no config\.json.*pass config="):
        shardwise.from_pretrained(tmp_path)
    found = shardwise.from_pretrained(tmp_path, config=model.config, model_class=type(model), dtype=torch.float32)
    assert all(torch.equal(value, found.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_shape_that_does_not_fit_is_reported(tmp_path):
    torch.save({"weight": torch.ones(3, 4).t(), "bias": torch.ones(4)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(KeyMismatchError, match=r"weight: stored \(4, 3\) .*model has \(4, 5\)"):
        shardwise.load(nn.Linear(5, 4, device="meta"), tmp_path)


def test_a_program_in_a_checkpoint_is_an_error_of_the_load(tmp_path):
    torch.save(nn.Linear(3, 4), tmp_path / "pytorch_model.bin")
    with pytest.raises(FormatError, match=r"torch\.nn\.modules\.linear\.Linear, which does not belong"):
        shardwise.load(nn.Linear(3, 4, device="meta"), tmp_path)
