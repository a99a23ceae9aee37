"""`train` from the command line, and where its ranks come from."""

import json
import math
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.cli.running import RUNNER
from tests.support.local_ranks import LocalRanks
from tests.training import tiny
from tests.training.on_ranks import by_command

from shardwise.cli import main
from shardwise.cli.launch import read_launch, run_ranks
from shardwise.cli.train import SOME_FAILED, STOPPED, _exit_code, _print_outcome
from shardwise.core.errors import ConfigError
from shardwise.training.run_outcome import TrlOutcome


def config(folder: Path, **values: object) -> str:
    """A configuration of a small model that is not there yet."""
    return str(tiny.write_config(folder, **{"output_dir": str(folder / "out"), **values}))


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "shardwise", "train", *map(str, arguments)]


def test_a_configuration_is_checked(tmp_path: Path) -> None:
    result = RUNNER.invoke(main, ["train", "dpo", config(tmp_path), "--check", "--max_steps", "3"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "model: no such directory" in result.stderr
    (tmp_path / "model").mkdir()
    result = RUNNER.invoke(main, ["train", "dpo", config(tmp_path), "--check", "--max_steps", "3"])
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{tmp_path / 'config.yaml'}: is a valid configuration of dpo\n"


def test_the_help_has_our_keys_and_is_fast() -> None:
    result = RUNNER.invoke(main, ["train", "--help"])
    for key in ("dp_replicate_size  ", "replicas of the sharded model (HSDP)", "tokens_per_pass  "):
        assert key in result.stdout
    code = (
        "import sys\nfrom shardwise.cli import main\nmain(['train', '--help'], standalone_mode=False)\n"
        "assert not {'torch', 'transformers', 'trl', 'datasets', 'yaml'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"load_in_4bit": True}, "load_in_4bit: packed weights are not trained. Set use_peft"),
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


TWO_LORAS = {"adapters": {"ada": {"lora_r": 2}, "bob": {"lora_r": 4}}, "gradient_checkpointing": False}
WORKERS = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "number", "console", "further"),
    [
        (2, signal.SIGUSR1, "file", WORKERS),
        (2, signal.SIGINT, "pipe", {}),
        (1, signal.SIGHUP, "terminal", TWO_LORAS),
    ],
)
@pytest.mark.usefixtures("terminal_signals")
def test_a_stop_saves_whatever_becomes_of_the_console(tmp_path, ranks, number, console, further):
    """The signal goes to the process group, so it reaches each rank directly, too."""
    tiny.write_model(tmp_path / "model")
    tiny.write_chats(tmp_path / "chats.jsonl", 8)
    values = {"save_steps": 2, "save_total_limit": 1, **further}
    start = command(config(tmp_path, **values, max_steps=10_000), f"--nproc-per-node={ranks}")
    log = tmp_path / "log"
    ours, theirs = {
        "pipe": os.pipe,
        "terminal": os.openpty,
        "file": lambda: (None, os.open(log, os.O_CREAT | os.O_WRONLY)),
    }[console]()
    with subprocess.Popen(start, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        out = tmp_path / "out"
        while not saved_steps(out):  # the limit of the test ends a wait in vain
            assert process.poll() is None
            if ours is not None and select.select([ours], [], [], 0)[0]:
                os.read(ours, 1 << 16)  # or else the process would wait for it
            time.sleep(0.05)
        if ours is not None:
            os.close(ours)
        os.killpg(process.pid, number)
        assert process.wait() == STOPPED, log.read_text() if log.exists() else ""
    assert ours is not None or "Run the same command to resume" in log.read_text()
    steps = saved_steps(out)
    assert min(steps) > 0
    values = {key: value for key, value in values.items() if key not in WORKERS}  # ranks of a test have no children
    again = [config(tmp_path, **values, max_steps=max(steps) + 2)]
    with LocalRanks(ranks, is_forked=True) as world:
        for told in world.run(by_command, again, tmp_path):
            assert not told.has_stopped
            assert told.steps == (max(steps) + 2) * (2 if further is TWO_LORAS else 1)
    assert list(out.rglob("*model.safetensors"))


def saved_steps(out: Path) -> list[int]:
    """Steps of the newest checkpoint, of each LoRA."""
    by_folder: dict[Path, list[int]] = {}
    for state in out.rglob("checkpoint-*/trainer_state.json"):
        by_folder.setdefault(state.parents[1], []).append(int(state.parent.name.partition("-")[2]))
    return [max(steps) for steps in by_folder.values()]


def test_the_outcome_is_json_even_if_a_loss_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = TrlOutcome("out", 2, False, {"loss": math.nan}, ({"loss": math.inf},), ("NaN",))
    _print_outcome(outcome, as_json=True)
    told = capsys.readouterr().out
    assert "Infinity" not in told
    assert json.loads(told)["metrics"] == {"loss": None}
    assert json.loads(told)["summary"] == ["NaN"]


def test_the_outcome_is_read_without_importing_libraries() -> None:
    """By the process that has started the ranks: a scheduler may kill it while it imports."""
    message = pickle.dumps(TrlOutcome("out", 2, True, {"loss": 0.5}, ({},), ()))
    code = (
        "import pickle, sys\npickle.load(sys.stdin.buffer)\n"
        "assert not {'torch', 'transformers', 'trl', 'datasets'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, input=message)


def test_an_adapter_that_has_failed_is_in_the_exit_code() -> None:
    metrics = {"ada": {"failure": "failed in step 2"}, "bob": {"loss": 0.5}}
    assert _exit_code(TrlOutcome("out", 2, False, metrics, ({},), ())) == SOME_FAILED == 3
    assert _exit_code(TrlOutcome("out", 2, False, {"bob": metrics["bob"]}, ({},), ())) == 0
    assert _exit_code(TrlOutcome("out", 2, True, metrics, ({},), ())) == STOPPED


# Where ranks come from

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_where_ranks_come_from() -> None:
    for environment, nproc_per_node in (({}, 1), ({}, 4), ({"WORLD_SIZE": "8"}, 1)):
        assert read_launch(environment, nproc_per_node) is None
    assert read_launch(TORCHRUN) == {"RANK": 3, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "MASTER_PORT": 29500}


@pytest.mark.parametrize("command", ["merge-adapter", "merge-weights"])
def test_ranks_do_not_repeat_what_one_process_does(command: str, tmp_path: Path) -> None:
    arguments = [command, *["in"] * (1 + (command == "merge-adapter")), str(tmp_path / "out")]
    result = RUNNER.invoke(main, arguments, env=TORCHRUN)
    assert result.exit_code == 2
    assert "with WORLD_SIZE=8, and this command is one process. Start it without torchrun" in result.stderr
    assert "importing" not in result.stderr


def test_one_rank_is_this_process_if_there_is_no_accelerator(monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("shardwise.ranks.processes.run_spawned", lambda size, *_, **__: f"{size} spawned")
    for device, expected in ((None, [3]), (torch.device("cuda"), "1 spawned")):
        monkeypatch.setattr("shardwise.fsdp.torch_private.accelerator", lambda device=device: device)
        assert run_ranks(1, sum, (1, 2), libraries=None) == expected


def test_ranks_may_open_all_files_that_the_system_allows(monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("shardwise.fsdp.torch_private.accelerator", lambda: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        assert run_ranks(1, resource.getrlimit, resource.RLIMIT_NOFILE, libraries=None) == [(hard, hard)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("change", "nproc_per_node", "message"),
    [
        ({"MASTER_PORT": "", "LOCAL_RANK": ""}, 1, r"RANK: is in the environment, with LOCAL_RANK=, MASTER_PORT=."),
        ({"MASTER_ADDR": ""}, 1, r"RANK: is in the environment, with MASTER_ADDR=."),
        ({"RANK": "8"}, 1, "RANK: is in the environment, with RANK=8, WORLD_SIZE=8"),
        ({"MASTER_PORT": "65536"}, 1, "RANK: is in the environment, with RANK=3"),
        ({"RANK": "-1"}, 1, "RANK: is in the environment, with RANK=-1"),
        ({"WORLD_SIZE": "²"}, 1, "RANK: is in the environment, with WORLD_SIZE=²"),
        ({}, 2, "--nproc-per-node=2: the ranks have been started already"),
    ],
)
def test_an_invalid_environment_is_refused(change: dict[str, str], nproc_per_node: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_launch({**TORCHRUN, **change}, nproc_per_node)
    assert str(caught.value).startswith(message)
