"""Trainings that end badly: every rank that is left says who was lost, and what can be gone on from."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.doomed import Doomed
from tests.training import ending, tiny

from shardwise.errors import RankLostError

GOING_ON = "The newest checkpoint is of step 2; the same command goes on from there"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "rank", "told"),
    [
        ("kill", 0, "is lost: its process has ended"),
        ("memory", 2, "has left the call: out of memory ("),
        ("mistake", 1, "has left the call: ValueError: not like this"),
    ],
)
def test_a_rank_that_dies_in_a_step_is_named_on_all_others(kind, rank, told, tmp_path):
    tiny.write_chats(tmp_path / "chats.jsonl", 18)
    with Doomed(3) as world:
        outcome = world.run(ending.train_until, str(tmp_path), kind, rank, limit_s=60)
    own = outcome.ends.pop(rank, None)
    assert sorted(outcome.ends) == [other for other in range(3) if other != rank]
    ((error, text),) = set(outcome.errors().values())
    assert error == "RankLostError"
    assert text.startswith(f"in step 4: rank {rank} (host {socket.gethostname()}, process {outcome.pids[rank]}) ")
    assert told in text
    assert text.endswith(GOING_ON)
    assert "\n" not in text
    if kind == "memory":
        assert own is not None
        assert (own.error, own.text) == (error, text)
    if kind == "mistake":
        assert own is not None
        assert (own.error, own.text) == ("ValueError", "not like this")
    assert outcome.seconds() < 15


@pytest.mark.distributed
def test_a_rank_that_waits_in_a_collective_for_one_that_is_stopped_can_say_so(tmp_path):
    tiny.write_chats(tmp_path / "chats.jsonl", 18)
    with Doomed(3) as world:
        outcome = world.run(ending.train_stuck, str(tmp_path), limit_s=60)
    ((error, text),) = set(outcome.errors().values())
    assert sorted(outcome.ends) == [0, 2]
    assert error == "RankLostError"
    assert text.startswith(f"in step 4: rank 1 (host {socket.gethostname()}, process {outcome.pids[1]}) is lost")
    assert "no sign of life" in text
    assert outcome.seconds() < 15


@pytest.mark.parametrize("kind", ["memory", "memory of Python"])
def test_one_process_that_runs_out_of_memory_says_so_in_a_line(kind, tmp_path):
    tiny.write_chats(tmp_path / "chats.jsonl", 8)
    with pytest.raises(RankLostError, match=r"^in step 2: out of memory \(.+\); smaller batches"):
        ending.alone(kind, str(tmp_path))


@pytest.mark.slow
@pytest.mark.distributed
def test_the_command_prints_one_line_for_a_rank_that_was_killed(tmp_path):
    model = tiny.write_model(tmp_path / "model")
    chats = tiny.write_chats(tmp_path / "chats.jsonl", 8)
    program = (
        "from shardwise.cli import train; from tests.training import ending; "
        "train.train_on_rank = ending.train_on_rank; train.train_command()"
    )
    options = ("training.max_steps=6", "training.batch_size=1", "checkpoints.every=2", "--nproc-per-node=2")
    arguments = (f"model={model}", f"data={chats}", f"output={tmp_path / 'out'}", *options)
    start = [sys.executable, "-c", program, *arguments]
    root = Path(__file__).parents[2]
    result = subprocess.run(start, check=False, timeout=100, capture_output=True, text=True, cwd=root)
    assert result.returncode == 2, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert f"in step 4: rank 1 (host {socket.gethostname()}, process " in lines[0]
    assert "its process has ended" in lines[0]
    assert lines[0].endswith(GOING_ON)
