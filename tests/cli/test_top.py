"""``shardwise top``: a run from its files."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.observing.made_runs import make_metrics, make_rank, make_run

WORDS = "from shardwise.cli.top import top_command; top_command()"


def top(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WORDS, *map(str, arguments)],
        env={**{name: value for name, value in os.environ.items() if name != "NO_COLOR"}, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_run_is_shown_once_where_the_output_is_piped(tmp_path: Path) -> None:
    make_run(tmp_path / "out", ranks=3, steps=7, seconds=4, device_gib=2.0, began=time.time() - 5)
    make_rank(tmp_path / "out", 2, 3, is_ended=False, seconds=2, step_s=0.7, began=time.time() - 9)
    done = top(tmp_path / "out", COLUMNS="120", LINES="50")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0].strip() == "out (Tiny)"
    words = [" ".join(line.split()) for line in lines]
    assert words[1] == "step 7 loss 2.0950 lr 7.00e-04 grad norm 1.143 2,007 tokens/s epoch 1.00"
    assert words[2] == "rank for phase host peak device read MB/s"
    assert words[3].startswith("0 0:04 ended")
    assert "2.00G" in lines[3]
    assert " silent for 0:0" in lines[5]


@pytest.mark.parametrize("width", [40, 60, 200])
def test_every_line_fits(tmp_path: Path, width: int) -> None:
    make_run(tmp_path / "a_long_name_of_a_folder_of_a_run", ranks=2, seconds=2, model="m/" + "Name" * 9)
    done = top(tmp_path / "a_long_name_of_a_folder_of_a_run", "--once", COLUMNS=str(width))
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= width
    assert "host" in done.stdout
    assert ("MB/s" in done.stdout) == (width > 70)


def test_phases_of_a_run_on_its_way(tmp_path: Path) -> None:
    path = make_rank(tmp_path, 0, 1, began=time.time() - 10, is_ended=False)
    with path.open("a") as more:
        more.write('[2,10,0,"step"]\n[2,10,0,"forward"]\n')
    assert "step: forward" in top(tmp_path, COLUMNS="100").stdout


def on_a_terminal(run: Path, **variables: str) -> str:
    """All that a run that is over has written to a terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", **variables}
    process = subprocess.Popen(
        [sys.executable, "-c", WORDS, str(run)], stdout=theirs, stderr=theirs, stdin=theirs, env=environment
    )
    os.close(theirs)
    text = b""
    try:
        while part := os.read(ours, 4096):
            text += part
    except OSError:  # the other end is closed
        pass
    assert process.wait(30) == 0
    os.close(ours)
    return text.decode()


def test_a_terminal_has_a_board_that_ends_with_the_run(tmp_path: Path) -> None:
    make_run(tmp_path, seconds=2)
    assert "\x1b[1m" in on_a_terminal(tmp_path)
    plain = on_a_terminal(tmp_path, NO_COLOR="1")
    assert "rank" in plain
    assert "\x1b[3" not in plain


def test_a_folder_of_nothing_is_one_error(tmp_path: Path) -> None:
    done = top(tmp_path, "--once")
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is neither observed/ with files of observed ranks nor metrics.jsonl" in done.stderr
    done = top(tmp_path / "nowhere")
    assert (done.returncode, "no such folder" in done.stderr) == (2, True)


def test_many_tenants_and_no_ranks(tmp_path: Path) -> None:
    for number in range(14):
        make_metrics(tmp_path / f"t{number:02}")
    done = top(tmp_path, COLUMNS="100")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" step 20 ") == 12
    assert "and 2 more trainings" in done.stdout
