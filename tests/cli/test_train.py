"""`train` from the command line, and where its ranks come from."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from tests.training import tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardwise.cli.launch import Alone, Launch, Launched, Spawned, read_launch
from shardwise.cli.train import train_command
from shardwise.errors import ConfigError

# click before 8.2 mixes stderr into stdout unless told not to.
MIXES = "mix_stderr" in signature(CliRunner).parameters
RUNNER = CliRunner(**({"mix_stderr": False} if MIXES else {}))

FAST = ("--learning-rate", 3e-3, "--max-steps", 25, "--batch-size", 2, "--warmup-ratio", 0.1, "--log-every", 10)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return tiny.write_chats(tmp_path / "chats.jsonl", 8)


def run(*arguments: object) -> Result:
    return RUNNER.invoke(train_command, [str(argument) for argument in arguments])


def refusal(*arguments: object) -> str:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    return result.stderr


@pytest.mark.distributed
def test_training_on_two_ranks(
    checkpoint: Path, chats: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    result = run(
        "--model", checkpoint, "--data", chats, "--nproc-per-node", 2, "--json", "--output-dir", out, *FAST
    )
    told = capfd.readouterr().err
    assert result.exit_code == 0, result.stderr + told
    ranks = json.loads(result.stdout)["ranks"]
    assert [rank["load"]["rank"] for rank in ranks] == [0, 1]
    assert [rank["train"]["world_size"] for rank in ranks] == [2, 2]
    losses = [[step["loss"] for step in rank["train"]["steps"]] for rank in ranks]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0] / 2
    assert [rank["save"]["is_verified"] for rank in ranks] == [True, True]
    trained, untrained = (AutoModelForCausalLM.from_pretrained(place) for place in (out, checkpoint))
    assert trained.dtype == untrained.dtype
    assert not torch.equal(trained.get_input_embeddings().weight, untrained.get_input_embeddings().weight)
    assert len(AutoTokenizer.from_pretrained(out)) == len(AutoTokenizer.from_pretrained(checkpoint))
    assert "training: 25 steps on 2 ranks" in told
    assert [line.split()[1] for line in told.splitlines() if line.startswith("step")] == [
        "1/25",
        "10/25",
        "20/25",
        "25/25",
    ]


def test_training_in_one_process(checkpoint: Path, chats: Path) -> None:
    result = run("--model", checkpoint, "--data", chats, *FAST)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == f"loaded {checkpoint}"
    # An answer is "It is n", n exclamation marks and the end; 30 tokens are around it.
    learned = sum(len(f"It is {n}") + n + 1 for n in range(8))
    assert f"  8 rows, {8 * 30 + learned} tokens, {learned} learned" in lines
    assert "training: 25 steps on 1 rank" in lines
    assert any(line.startswith("step 25/25  loss") for line in lines)
    assert lines[-3].startswith("trained 23,904 parameters in 25 steps: loss ")
    assert lines[-1] == "The trained weights were not saved: pass --output-dir to have them."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--learning-rate", -1), "learning_rate=-1.0: it must be greater than 0"),
        (("--batch-size", 0, "--seed", -3), "batch_size=0: it must be at least 1\n  seed=-3"),
        (("--schedule", "square"), "schedule='square': it must be one of constant, linear, cosine"),
        (("--epochs", 1, "--max-steps", 1), "--epochs and --max-steps both say how long to train"),
    ],
)
def test_an_option_that_cannot_be(chats: Path, arguments: tuple[object, ...], message: str) -> None:
    assert message in refusal("--model", "nowhere", "--data", chats, *arguments)


def test_a_place_that_cannot_be_written_to_is_refused_before_the_training(checkpoint, chats, tmp_path) -> None:
    (tmp_path / "file").touch()
    result = run("--model", checkpoint, "--data", chats, "--output-dir", tmp_path / "file", *FAST)
    assert result.exit_code == 2
    assert "is there and is no folder" in result.stderr
    assert "step" not in result.stdout


def test_what_is_saved_may_have_another_dtype(checkpoint, chats, tmp_path) -> None:
    arguments = ("--output-dir", tmp_path / "out", "--save-dtype", "bfloat16", "--max-steps", 1)
    result = run("--model", checkpoint, "--data", chats, *arguments)
    assert result.exit_code == 0, result.stderr
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    assert "F32→BF16" in result.stdout


def test_an_option_of_no_number() -> None:
    result = run("--model", "a", "--data", "b", "--batch-size", "many")
    assert result.exit_code == 2
    assert "--batch-size" in result.stderr


def test_a_data_file_that_is_not_there(checkpoint: Path, tmp_path: Path) -> None:
    assert "none.jsonl: the data cannot be read" in refusal(
        "--model", checkpoint, "--data", tmp_path / "none.jsonl"
    )


def test_malformed_data(checkpoint: Path, tmp_path: Path) -> None:
    data = tiny.write_rows(tmp_path / "chats.jsonl", tiny.chat("Hi", "Ho"), "{")
    assert "chats.jsonl: 1 row cannot be used\n  line 2: it is not valid JSON" in refusal(
        "--model", checkpoint, "--data", data
    )


def test_a_model_without_a_tokenizer(tmp_path: Path, chats: Path) -> None:
    tiny.model().config.save_pretrained(tmp_path / "model")
    assert "its tokenizer has no vocabulary; is tokenizer.json missing?" in refusal(
        "--model", tmp_path / "model", "--data", chats
    )


def test_a_tokenizer_of_another_model(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "model")
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([f"<{n}>" for n in range(5)])
    tokenizer.save_pretrained(tmp_path / "model")
    data = tiny.write_rows(tmp_path / "rows.jsonl", {"text": "a <4>"})
    message = refusal("--model", tmp_path / "model", "--data", data)
    assert "makes the token 263 of it, but Qwen3ForCausalLM has embeddings for the tokens 0 to 259 only" in message


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ranks_end_with_the_command(checkpoint: Path, chats: Path, number: signal.Signals, code: int) -> None:
    program = "from shardwise.cli.train import train_command; train_command()"
    arguments = ["--model", checkpoint, "--data", chats, "--nproc-per-node", 2, "--epochs", 10000, "--log-every", 1]
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert any(line.startswith("step") for line in process.stdout)
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        # A rank that went on would hold the other end of the pipe, and there would be no end to read.
        process.stdout.read()
        assert process.wait(timeout=30) == code


# Where ranks come from

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "nproc_per_node", "launch"),
    [
        ({}, 1, Alone()),
        ({}, 4, Spawned(4)),
        ({"WORLD_SIZE": "8"}, 1, Alone()),
        (TORCHRUN, 1, Launched(rank=3, size=8, local_rank=1)),
    ],
)
def test_where_ranks_come_from(environment: dict[str, str], nproc_per_node: int, launch: Launch) -> None:
    assert read_launch(environment, nproc_per_node) == launch


@pytest.mark.parametrize(
    ("change", "nproc_per_node", "message"),
    [
        (
            {"MASTER_PORT": "", "LOCAL_RANK": ""},
            1,
            "RANK is in the environment, but LOCAL_RANK, MASTER_PORT is not",
        ),
        ({"RANK": "8"}, 1, "RANK=8 in the environment is not below WORLD_SIZE=8"),
        ({"RANK": "-1"}, 1, "RANK='-1' in the environment is not a number"),
        ({"WORLD_SIZE": "²"}, 1, "WORLD_SIZE='²' in the environment is not a number"),
        ({}, 2, "--nproc-per-node=2, but the ranks have been started already"),
    ],
)
def test_an_environment_that_makes_no_sense(change: dict[str, str], nproc_per_node: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_launch({**TORCHRUN, **change}, nproc_per_node)
    assert str(caught.value).startswith(message)
