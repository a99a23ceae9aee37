"""Output of `inspect`, as text and JSON, without torch."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from click.testing import Result
from huggingface_hub import constants
from tests.cli.running import RUNNER
from tests.files.building import file_of, index_of, tensor
from tests.files.fake_hub import hub_that_has, snapshot_in
from torch.distributed import checkpoint as dcp

from shardwise.cli import main
from shardwise.files.remote import resolve


def layer(number: int, start: int) -> dict[str, object]:
    return {
        f"model.layers.{number}.mlp.up_proj.weight": tensor("BF16", [4, 8], start, start + 64),
        f"model.layers.{number}.norm.weight": tensor("F32", [8], start + 64, start + 96),
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Twelve equal layers in one file, the embedding in another."""
    layers: dict[str, object] = {}
    for number in range(12):
        layers |= layer(number, number * 96)
    (tmp_path / "layers.safetensors").write_bytes(file_of(layers, bytes(12 * 96)))
    embedding = {"__metadata__": {"format": "pt"}, "model.embed.weight": tensor("BF16", [1000, 8], 0, 16000)}
    (tmp_path / "embed.safetensors").write_bytes(file_of(embedding, bytes(16000)))
    weight_map = {"model.embed.weight": "embed.safetensors"}
    weight_map |= dict.fromkeys(layers, "layers.safetensors")
    (tmp_path / "model.safetensors.index.json").write_bytes(index_of(weight_map))
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True, "other": 1}))
    return tmp_path


def run(*arguments: str | Path) -> Result:
    return RUNNER.invoke(main, ["inspect", *map(str, arguments)])


def lines(result: Result) -> list[list[str]]:
    assert result.exit_code == 0, result.output
    return [line.split() for line in result.stdout.splitlines()]


def test_the_summary(checkpoint: Path) -> None:
    printed = lines(run(checkpoint))
    for line in (
        ["layout", "indexed"],
        ["tensors", "25"],
        ["parameters", "8,480"],
        ["bytes", "16.75", "KiB"],
        ["BF16", "16.38", "KiB"],
        ["F32", "384", "B"],
        ["architectures", '["LlamaForCausalLM"]'],
        ["model_type", '"llama"'],
        ["dtype", '"bfloat16"'],
        ["tie_word_embeddings", "true"],
    ):
        assert line in printed
    assert any(line[:1] == ["embed.safetensors"] for line in printed)
    assert not any("up_proj" in word for line in printed for word in line)
    assert not any("other" in line for line in printed)


def test_equal_layers_are_one_line(checkpoint: Path) -> None:
    printed = lines(run(checkpoint, "--tensors"))
    pattern = "model.layers.{0..11}.mlp.up_proj.weight"
    assert [pattern, "(4,", "8)", "BF16", "x12", "768", "B"] in printed
    assert ["model.embed.weight", "(1000,", "8)", "BF16", "15.62", "KiB"] in printed
    assert len([line for line in printed if line and line[0].startswith("model.")]) == 3


def test_tensors_of_other_shape_or_dtype_are_other_groups(tmp_path: Path) -> None:
    header = {
        "l.0.w": tensor("U8", [2], 0, 2),
        "l.1.w": tensor("U8", [2], 2, 4),
        "l.2.w": tensor("U8", [3], 4, 7),
        "l.3.w": tensor("I8", [2], 7, 9),
        "l.4.w": tensor("U8", [2], 9, 11),
    }
    (tmp_path / "f.safetensors").write_bytes(file_of(header, bytes(11)))
    table = run(tmp_path, "--tensors").stdout.rpartition("\n\n")[2]
    wanted = ["l.2.w (3,) U8 3 B", "l.3.w (2,) I8 2 B", "l.{0..1,4}.w (2,) U8 x3 6 B"]
    assert sorted(" ".join(line.split()) for line in table.splitlines()[1:]) == wanted


def test_json_has_everything_in_one_object(checkpoint: Path) -> None:
    result = run(checkpoint, "--json")
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    sizes = {name: (checkpoint / name).stat().st_size for name in ("embed.safetensors", "layers.safetensors")}
    assert (facts["layout"], facts["root"]) == ("indexed", str(checkpoint))
    assert {file["name"]: file["bytes"] for file in facts["files"]} == sizes
    assert (facts["tensor_count"], facts["parameter_count"], facts["bytes"]) == (25, 8480, 17152)
    assert facts["bytes_per_dtype"] == {"BF16": 16768, "F32": 384}
    assert facts["config"].keys() == {"architectures", "model_type", "dtype", "tie_word_embeddings"}
    assert facts["metadata"] == {"format": "pt", "total_size": "1"}
    assert len(facts["tensors"]) == 25
    (embedding,) = [entry for entry in facts["tensors"] if entry["key"] == "model.embed.weight"]
    stop = sizes["embed.safetensors"]
    wanted = ("BF16", [1000, 8], 16000, "embed.safetensors", stop - 16000, stop)
    assert tuple(embedding[name] for name in ("dtype", "shape", "bytes", "file", "start", "stop")) == wanted


def test_a_single_file(checkpoint: Path) -> None:
    assert ["tensors", "1"] in lines(run(checkpoint / "embed.safetensors"))


def test_the_file_that_the_configuration_names(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text('{"transformers_weights": "embed.safetensors"}')
    assert ["tensors", "1"] in lines(run(checkpoint))


def test_infinity_in_a_configuration_is_fine(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text('{"model_type": "mamba2", "time_step_limit": [0.0, Infinity]}')
    assert ["model_type", '"mamba2"'] in lines(run(checkpoint))


def error_line(result: Result) -> str:
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize("config", [b"", b"[]", b"\xff", b"{", b"[" * 100_000])
def test_a_damaged_configuration_is_named(checkpoint: Path, config: bytes) -> None:
    (checkpoint / "config.json").write_bytes(config)
    assert "config.json: cannot be read" in error_line(run(checkpoint))


def test_errors_are_one_line_and_exit_code_two(checkpoint: Path) -> None:
    assert "no such directory" in error_line(run(checkpoint / "absent"))
    (checkpoint / "model.safetensors.index.json").write_bytes(b"{}")
    assert "no object named weight_map" in error_line(run(checkpoint))


def test_an_adapter_has_its_folder_for_itself(tmp_path: Path) -> None:
    last = tmp_path / "out" / "last"
    last.mkdir(parents=True)
    (last / "adapter_config.json").write_text("{}")
    (last / "adapter_model.safetensors").write_bytes(
        file_of({"layer.lora_A.weight": tensor("F32", [2, 3], 0, 24)}, bytes(24))
    )
    assert ["tensors", "1"] in lines(run(last))


def test_nothing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def download(repo_id: str, *, local_files_only: bool, **options: object) -> str:
        assert local_files_only
        raise huggingface_hub.errors.LocalEntryNotFoundError("not there")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert "org/name at revision v2: is not a local directory" in error_line(run("org/name", "--revision", "v2"))


def test_a_repository_in_the_cache(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = {file.name: file.read_bytes() for file in checkpoint.iterdir()}
    repository |= {"README.md": b"", "x/y.bin": b""}
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    with hub_that_has(repository, tmp_path / "hub", monkeypatch):
        resolve("org/name")
    [(_, path), *rest] = lines(run("org/name"))
    assert path == str(snapshot_in(tmp_path / "hub"))
    assert rest == lines(run(checkpoint))[1:]


def test_many_faults_are_a_list(checkpoint: Path) -> None:
    (checkpoint / "layers.safetensors").write_bytes(b"")
    (checkpoint / "embed.safetensors").unlink()
    result = run(checkpoint)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "layers.safetensors: the file is empty" in result.stderr
    assert "embed.safetensors" in result.stderr


def test_hostile_names_are_printed_harmlessly(tmp_path: Path) -> None:
    header = {
        "\x1b[2J": tensor("U8", [1], 0, 1),
        "[red]x[/red]": tensor("U8", [1], 1, 2),
        "9" * 10_000: tensor("U8", [1], 2, 3),
    }
    (tmp_path / "f.safetensors").write_bytes(file_of(header, bytes(3)))
    result = run(tmp_path, "--tensors")
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert "[red]x[/red]" in result.stdout


def test_it_runs_in_a_process_without_torch(checkpoint: Path) -> None:
    program = (
        "import sys; from shardwise.cli.checkpoints import inspect_command; "
        "inspect_command(sys.argv[1:], standalone_mode=False); "
        "loaded = {'torch', 'transformers', 'huggingface_hub', 'numpy'} & set(sys.modules); "
        "assert not loaded, loaded"
    )
    command = [sys.executable, "-c", program, str(checkpoint), "--tensors"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "model.layers.{0..11}.norm.weight" in printed


# What torch wrote


def test_a_file_of_torch(tmp_path: Path) -> None:
    content = {"model": {"a": torch.zeros(2, 3), "t": torch.zeros(2, 3).t()}, "optimizer": {"x": torch.ones(1)}}
    torch.save({**content, "epoch": 3}, tmp_path / "pytorch_model.bin")
    printed = lines(run(tmp_path))
    for line in (
        ["layout", "torch", "file"],
        ["tensors", "2"],
        ["parameters", "12"],
        ["bytes", "48", "B"],
        ["taken", "from", "model"],
        ["not", "loaded", "optimizer", "(an", "optimizer's", "state)"],
        ["not", "loaded", "epoch", "(int)"],
    ):
        assert line in printed
    told = json.loads(run(tmp_path, "--json").stdout)
    assert told["wrapper"] == "model"
    assert told["not_loaded"] == ["optimizer (an optimizer's state)", "epoch (int)"]
    plain, turned = sorted(told["tensors"], key=lambda tensor: tensor["key"])
    assert (plain["file"], plain["stop"] - plain["start"]) == ("pytorch_model.bin", 24)
    assert [part["key"] for part in turned["parts"]] == ["t (storage)"]
    assert turned["shape"] == [3, 2]


def test_a_distributed_checkpoint(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save({"model": {"a": torch.zeros(2, 3)}}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0", no_dist=True)
    for place in (tmp_path, tmp_path / "pytorch_model_fsdp_0"):
        printed = lines(run(place, "--tensors"))
        assert ["layout", "torch", "distributed", "checkpoint"] in printed
        assert ["taken", "from", "model"] in printed
    assert ["a", "(2,", "3)", "F32", "24", "B"] in printed
