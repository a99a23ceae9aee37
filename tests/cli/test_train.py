"""`train` from the command line, and where its ranks come from."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.running import RUNNER
from tests.support.local_ranks import LocalRanks
from tests.training import tiny
from tests.training.on_ranks import by_command

from shardwise.cli import main
from shardwise.cli.launch import read_launch
from shardwise.cli.train import STOPPED
from shardwise.errors import ConfigError
from shardwise.training.run import stopping_on_signals


def config(folder: Path, **values: object) -> str:
    """A configuration of a small model that is not there yet."""
    return str(tiny.write_config(folder, **{"output_dir": str(folder / "out"), **values}))


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "shardwise", "train", *map(str, arguments)]


def test_a_configuration_is_checked(tmp_path: Path) -> None:
    result = RUNNER.invoke(main, ["train", "dpo", config(tmp_path), "--check", "--max_steps", "3"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "model: there is no such folder" in result.stderr or "model" in result.stderr
    (tmp_path / "model").mkdir()
    result = RUNNER.invoke(main, ["train", "dpo", config(tmp_path), "--check", "--max_steps", "3"])
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{tmp_path / 'config.yaml'}: is a valid configuration of dpo\n"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_lenght": 3}, "max_lenght: is not a key of sft. Did you mean max_length?"),
        ({"fsdp": "full_shard"}, "fsdp: the model is sharded by shardwise"),
    ],
)
def test_a_mistake_is_one_error(tmp_path: Path, values: dict[str, object], message: str) -> None:
    result = RUNNER.invoke(main, ["train", config(tmp_path, **values)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "values", "words", "ranks"),
    [
        ({"num_processes": 3}, {}, (), 3),
        ({"num_processes": 3}, {"num_processes": 2}, (), 2),
        ({"num_processes": 3}, {"num_processes": 2}, ("--nproc-per-node", "4"), 4),
        (None, {"accelerate_config": "fsdp2"}, (), 8),
        ({}, {}, (), 1),
        ({"num_processes": 4, "num_machines": 2}, {}, (), "num_machines: 2 in"),
        ({"num_processes": "two"}, {}, (), "num_processes: two in"),
    ],
)
def test_ranks_are_those_that_trl_would_start(tmp_path, monkeypatch, content, values, words, ranks):
    (tmp_path / "model").mkdir()
    (tmp_path / "fsdp.yaml").write_text(json.dumps(content))
    started: list[object] = []
    monkeypatch.setattr("shardwise.cli.train.run_ranks", lambda size, *_, **__: started.append(size))
    given = config(tmp_path, **{"accelerate_config": str(tmp_path / "fsdp.yaml"), **values})
    result = RUNNER.invoke(main, ["train", given, *words])
    assert started == ([] if isinstance(ranks, str) else [ranks]), result.stderr
    assert not isinstance(ranks, str) or ranks in result.stderr


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "number"), [(1, signal.SIGTERM), (2, signal.SIGUSR1), (2, signal.SIGINT)])
def test_a_signal_stops_a_training_that_the_same_command_resumes(tmp_path, ranks, number):
    tiny.write_model(tmp_path / "model")
    tiny.write_chats(tmp_path / "chats.jsonl", 8)
    start = command(config(tmp_path, max_steps=10_000, disable_tqdm=True), f"--nproc-per-node={ranks}", "--observe")
    with subprocess.Popen(start, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert any("'loss'" in line for line in process.stdout)
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        # A rank that went on would hold the other end of the pipe, and there would be no end to read.
        told = process.stdout.read()
        assert process.wait(timeout=60) == STOPPED, told
    assert "Run the same command to resume" in told
    [checkpoint] = (tmp_path / "out").glob("checkpoint-*")
    assert len(list((tmp_path / "out" / "observed").iterdir())) >= ranks
    step = int(checkpoint.name.partition("-")[2])
    words = [config(tmp_path), "--max_steps", str(step + 2)]
    if ranks == 1:
        again = command(*words, "--json")
        done = subprocess.run(again, check=True, capture_output=True, text=True, timeout=110)
        outcome = json.loads(done.stdout[done.stdout.index("{\n") :])
        assert (outcome["steps"], outcome["has_stopped"]) == (step + 2, False)
    else:
        with LocalRanks(ranks, timeout_s=110, is_forked=True) as world:
            for told in world.run(by_command, words, tmp_path):
                assert (told.steps, told.has_stopped) == (step + 2, False)
    assert (tmp_path / "out" / "model.safetensors").is_file()


# Where ranks come from

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_where_ranks_come_from() -> None:
    for environment, nproc_per_node in (({}, 1), ({}, 4), ({"WORLD_SIZE": "8"}, 1)):
        assert read_launch(environment, nproc_per_node) is None
    assert read_launch(TORCHRUN) == {"RANK": 3, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "MASTER_PORT": 29500}


@pytest.mark.parametrize(
    ("change", "nproc_per_node", "message"),
    [
        ({"MASTER_PORT": "", "LOCAL_RANK": ""}, 1, r"RANK is in the environment, with LOCAL_RANK=, MASTER_PORT=."),
        ({"MASTER_ADDR": ""}, 1, r"RANK is in the environment, with MASTER_ADDR=."),
        ({"RANK": "8"}, 1, "RANK is in the environment, with RANK=8, WORLD_SIZE=8"),
        ({"MASTER_PORT": "65536"}, 1, "RANK is in the environment, with RANK=3"),
        ({"RANK": "-1"}, 1, "RANK is in the environment, with RANK=-1"),
        ({"WORLD_SIZE": "²"}, 1, "RANK is in the environment, with WORLD_SIZE=²"),
        ({}, 2, "--nproc-per-node=2, but the ranks have been started already"),
    ],
)
def test_an_invalid_environment_is_refused(change: dict[str, str], nproc_per_node: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_launch({**TORCHRUN, **change}, nproc_per_node)
    assert str(caught.value).startswith(message)


@pytest.fixture
def interruptible():
    """SIGINT as in a terminal: a shell ignores it for commands in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_requested_stop_is_acknowledged_at_once(capfd, interruptible):
    with stopping_on_signals() as request:
        os.kill(os.getpid(), signal.SIGINT)
        assert request.is_made
        assert "finishing the current step, then saving" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
