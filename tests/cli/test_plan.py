"""``shardwise plan``: text, JSON and exit codes."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests import zoo
from tests.cli.running import RUNNER
from tests.small_checkpoints import small_qwen3

from shardwise.cli import main
from shardwise.cli.train import parse_mesh
from shardwise.core.errors import ConfigError, require_version


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    model = small_qwen3(**sizes, num_attention_heads=2, num_key_value_heads=1)
    return str(zoo.save_original(model, tmp_path_factory.mktemp("plan"), max_shard_size="8KB"))


def invoke(*arguments):
    return RUNNER.invoke(main, ["plan", *arguments])


def planned(*arguments):
    """What is told in JSON."""
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refusal(*arguments):
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    # Some errors are found before torch is imported.
    return result.stderr.removeprefix("importing torch and transformers (about 10 s) ...\n")


def test_text(checkpoint):
    result = invoke(checkpoint, "--ranks", "4", "--mesh", "replicate=2,shard=2")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"plan for {checkpoint}\n")
    assert "mesh        replicate=2, shard=2, cuda\n" in result.stdout
    assert "groups      " in result.stdout
    assert " by all ranks" in result.stdout


def test_json(checkpoint):
    found = planned(checkpoint, "--ranks", "4", "--device", "cpu:0")
    assert len(found["ranks"]) == 4
    assert found["mesh"] == {"fsdp": 4}
    assert found["ranks"][0]["device_bytes"] == 0
    assert found["ranks"][0]["host_bytes"] >= found["ranks"][0]["padded_bytes"]
    assert sum(rank["read_bytes"] for rank in found["ranks"]) == found["summary"]["read_bytes"]


def test_options_reach_the_plan(checkpoint):
    wide, narrow = (planned(checkpoint, "--ranks=2", f"--dtype={dtype}") for dtype in ("float32", "bfloat16"))
    assert wide["groups"][0]["gathered_bytes"] == 2 * narrow["groups"][0]["gathered_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks=4", "--mesh=shard:4"], "is not a new AXIS=SIZE"),
        (["--ranks=4", "--wrap=whole_model"], "--wrap=whole_model: is not an option for a model"),
        (["--ranks=4", "--tuning=lora"], "tuning='lora' is not known"),
        (["--ranks=4", "--tuning=lora=0"], "tuning='lora=0' is not known"),
        (["--ranks=4", "--tuning=freeze=0"], "tuning='freeze=0' is not known"),
        (["--ranks=4", "--tuning=full=1"], "tuning='full=1' is not known"),
        (["--ranks=4", "--dtype=float17"], "float17"),
        (["--ranks=4", "--device=gpu"], "device='gpu': is no device of torch"),
        (["--ranks=4", "--tuning=full", "--optim=adam"], "optim: adam is none of TrainingArguments"),
    ],
)
def test_arguments_that_cannot_be_planned_exit_with_2(checkpoint, arguments, message):
    told = refusal(checkpoint, *arguments)
    assert told.startswith("error: ")
    assert message in told


def test_a_folder_without_a_model_exits_with_2(tmp_path):
    assert str(tmp_path) in refusal(str(tmp_path), "--ranks=2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_size": -1},
            "cannot be built from Qwen3Config: RuntimeError: .* negative dimension -1: .64, -1.. ",
        ),
        (
            {"hidden_size": 1 << 62},
            "cannot be built from Qwen3Config: RuntimeError: .* overflowed .*4611686018427387904",
        ),
        ({"hidden_size": 16.5}, "no usable config in .*'hidden_size' expected int, got float"),
        ({"vocab_size": 10**9}, r"does not fit the model\n .*model has \(1000000000, 16\)"),
        ({"num_attention_heads": 0}, "cannot be built from Qwen3Config: ZeroDivisionError: "),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, and no model has more than 10,000"),
        ({"num_labels": 1 << 62}, "num_labels is 4611686018427387904, and no model has more than 1,000,000"),
        ({"head_dim": 10**9}, "Qwen3ForCausalLM: its buffers take 3.73 GiB, more than the weights"),
        ({"rope_parameters": {"rope_type": "none"}}, "cannot be built from Qwen3Config: KeyError: 'none'"),
        ({"hidden_act": "none"}, "cannot be built from Qwen3Config: KeyError: 'none'"),
        ({"architectures": 5}, "(has architectures 5. Write a list|.architectures. expected a list, got int)"),
        ({"dtype": 5}, "dtype=5: is not a floating dtype of torch"),
    ],
)
def test_a_config_with_absurd_values_exits_with_2(checkpoint, tmp_path, changes, message):
    for file in Path(checkpoint).glob("*.safetensors*"):
        (tmp_path / file.name).symlink_to(file)
    config = json.loads(Path(checkpoint, "config.json").read_text())
    del config["layer_types"]  # one for each layer
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    assert re.match(rf"error: .*{message}", refusal(str(tmp_path), "--ranks=2"), re.DOTALL)


def test_the_number_of_ranks_is_required(checkpoint):
    assert "--ranks" in refusal(checkpoint)


def test_meshes_in_words():
    assert parse_mesh("replicate=2,shard=4") == {"replicate": 2, "shard": 4}
    assert parse_mesh("shard=4, replicate=2") == {"shard": 4, "replicate": 2}


@pytest.mark.parametrize(
    "text",
    ["", "shard", "shard=", "=4", "shard=x", "shard=-4", "shard=²", "shard=4,", "shard=1e3", "shard=2,shard=2"],
)
def test_other_words_make_no_mesh(text):
    with pytest.raises(ConfigError, match="is not a new AXIS=SIZE"):
        parse_mesh(text)


# Training


def test_a_training_by_options(checkpoint):
    arguments = [checkpoint, "--batch=2", "--seq=16", "--ranks=2"]
    full, lora = planned(*arguments, "--tuning=full"), planned(*arguments, "--tuning=lora=4")
    assert (full["training"]["batch_size"], full["training"]["max_length"]) == (2, 16)
    assert lora["trainable_parameters"] < full["trainable_parameters"]
    assert lora["summary"]["training_bytes"] < full["summary"]["training_bytes"]
    sgd = planned(*arguments, "--tuning=full", "--optim=sgd")
    assert sgd["training"]["optimizer_bytes"] == [0, 0]


def test_a_training_that_does_not_fit_exits_with_2(checkpoint):
    arguments = [checkpoint, "--batch=2", "--seq=16", "--ranks=1", "--device=cpu", "--tuning=full"]
    fitting = invoke(*arguments, "--memory=1GiB")
    assert fitting.exit_code == 0
    assert re.match(r"fits: \d+\.\d+ [KM]iB of 1\.00 GiB on a rank, largest batch \d+\n", fitting.stdout)
    result = invoke(*arguments, "--memory=100KB")
    assert result.exit_code == 2
    assert re.match(r"does not fit: .* on a rank, no batch fits\n", result.stdout)
    assert re.search(r"--memory: the plan does not fit: .* of 97\.66 KiB on a rank, no batch fits\.", result.stderr)
    assert "peak " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch=2"], "--batch, --seq: need --tuning"),
        (["--memory=much"], "'much' is not a size"),
        (["--max_length=2"], "--max_length=2: is not an option for a model"),
    ],
)
def test_options_that_contradict(checkpoint, arguments, message):
    assert message in refusal(checkpoint, "--ranks=2", *arguments)


@pytest.fixture
def training(checkpoint, tmp_path):
    try:
        require_version("transformers", "5.19")
    except ConfigError as error:
        pytest.skip(f"shardwise train: {error}")
    file = tmp_path / "config.yaml"
    file.write_text(
        f"model_name_or_path: {checkpoint}\ndataset_name: none.jsonl\noutput_dir: out\nmax_length: 32\n"
        "use_peft: true\nlora_r: 4\nlora_target_modules: all-linear\nbf16: false\n"
    )
    return str(file)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")  # TRL's own
def test_a_training_by_its_configuration(training):
    found = planned(training, "--per_device_train_batch_size", "3", "--ranks=4", "--device=cpu")
    assert (found["training"]["batch_size"], found["training"]["max_length"]) == (3, 32)
    assert found["training"]["optim"] == "adamw_torch_fused"
    assert len(found["training"]["optimizer_bytes"]) == 4
    assert found["trained"][0].endswith("lora_A.default.weight")
    replicated = {
        "num_processes": 4,
        "fsdp_config": {"fsdp_version": 2},
        "parallelism_config": {"parallelism_config_dp_replicate_size": 2},
    }
    file = Path(training).with_name("accelerate.json")
    file.write_text(json.dumps(replicated))
    hsdp = planned(training, "--accelerate_config", str(file), "--optim", "sgd", "--seq=16")
    assert hsdp["mesh"] == {"replicate": 2, "shard": 2}
    assert (hsdp["training"]["optim"], hsdp["training"]["max_length"]) == ("sgd", 16)
    more = planned(training, "--gradient_checkpointing", "false", "--ranks=4")
    assert more["summary"]["training_bytes"] > found["summary"]["training_bytes"]
    by_file = ["--accelerate_config", str(file), "--device=cpu", "--tokens_per_pass=64"]
    swept = planned(training, "--sweep={lora_r: [4, 8]}", *by_file)
    assert swept["mesh"] == {"replicate": 2, "shard": 2}
    assert swept["trainable_parameters"] > 0
    assert swept["training"]["optimizer_bytes"] == [8 * swept["trainable_parameters"]] * 4
    assert swept["training"]["gradient_bytes"] == 4 * swept["trainable_parameters"]
    assert (swept["training"]["batch_size"], swept["training"]["max_length"]) == (2, 32)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")  # TRL's own
def test_a_model_is_found_in_the_cache_that_the_configuration_names(training, checkpoint, tmp_path):
    cached = tmp_path / "hub" / "models--own--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    shutil.copytree(checkpoint, cached / "snapshots" / ("0" * 40))
    Path(training).write_text(
        Path(training).read_text().replace(checkpoint, "own/tiny") + f"env:\n  HF_HUB_CACHE: {cached.parent}\n"
    )
    program = "from shardwise.cli import main; main()"  # torch reads the environment once
    command = [sys.executable, "-c", program, "plan", training, "--ranks=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("plan for ")


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")  # TRL's own
@pytest.mark.parametrize(
    ("arguments", "rows", "note"),
    [
        (["--method=dpo", "--use_peft=false", "--trainable_layers=1"], 2, "the reference model is not included"),
        (["--method=reward", "--lora_task_type=SEQ_CLS"], 2, ""),
        (["--method=orpo"], 2, "TRL computes the logits of all tokens at once"),
        (["--method=cpo"], 2, "TRL computes the logits of all tokens at once"),
        (["--method=tpo"], 3, "TRL computes the logits of all tokens at once"),
        (["--method=tpo", "--tpo_alpha=0"], 2, "TRL computes the logits of all tokens at once"),
    ],
)
def test_all_answers_of_an_example_are_rows(training, arguments, rows, note):
    found = planned(training, "--ranks=2", "--device=cpu", "--per_device_train_batch_size=2", *arguments)
    assert found["training"]["batch_size"] == 2 * rows
    assert note in " ".join(found["notes"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "num_process"),
        (["--ranks=2", "--mesh=shard=2"], "--mesh: is for a model, and "),
        (["--ranks=2", "--dtype=float17"], "dtype: 'float17' is not a choice"),
        (["--ranks=2", "--max_lenght=16"], "Did you mean max_length?"),
    ],
)
def test_a_configuration_that_cannot_be_planned(training, arguments, message):
    assert message in refusal(training, *arguments)
