"""``shardwise top``: a run from its files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
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
    assert words[2] == "rank time phase memory peak device read MB/s"
    assert words[3].startswith("0 0:04 ended")
    assert "2.00G" in lines[3]
    assert " silent for 0:0" in lines[5]


@pytest.mark.parametrize("width", [0, 40, 60, 200])
def test_every_line_fits(tmp_path: Path, width: int) -> None:
    make_run(tmp_path / "a_long_name_of_a_folder_of_a_run", ranks=2, seconds=2, model="m/" + "Name" * 9)
    done = top(tmp_path / "a_long_name_of_a_folder_of_a_run", "--once", COLUMNS=str(width))
    assert done.returncode == 0, done.stderr
    columns = width or 80  # a terminal whose size nobody has set
    assert max(map(len, done.stdout.splitlines())) <= columns
    assert "memory" in done.stdout
    assert ("MB/s" in done.stdout) == (columns > 70)


def test_phases_of_a_run_on_its_way(tmp_path: Path) -> None:
    path = make_rank(tmp_path, 0, 1, began=time.time() - 10, is_ended=False)
    with path.open("a") as more:
        more.write('[2,10,0,"step"]\n[2,10,0,"forward"]\n')
    assert "step: forward" in top(tmp_path, COLUMNS="100").stdout


class Terminal:
    """``top`` on a terminal of so many lines and columns."""

    def __init__(self, run: Path, size: tuple[int, int] = (24, 80), **variables: str) -> None:
        self.ours, theirs = pty.openpty()
        self.resize(*size)
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        environment |= {"TERM": "xterm-256color", **variables}
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORDS, str(run), "--every", "0.1"],
            stdout=theirs,
            stderr=theirs,
            stdin=theirs,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # else not where pytest is run by `&`
        )
        os.close(theirs)
        self.text = ""

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def until(self, pattern: str) -> str:
        """What it writes up to this."""
        start, late = len(self.text), time.monotonic() + 30
        while not re.search(pattern, self.text[start:], re.DOTALL):
            if not select.select([self.ours], [], [], 10)[0] or time.monotonic() > late:
                self.process.kill()
                raise AssertionError(f"no {pattern!r} in {self.text[-3000:]!r}")
            self.text += os.read(self.ours, 4096).decode()
        return self.text[start:]

    def end(self) -> str:
        """All that it has written until its end."""
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(self.ours, 4096):
                self.text += part.decode()
        assert self.process.wait(30) == 0
        os.close(self.ours)
        return self.text


def on_a_terminal(run: Path, **variables: str) -> str:
    """All that a run that is over has written to a terminal."""
    return Terminal(run, **variables).end()


def test_a_run_that_begins_while_it_watches_and_one_by_another_clock(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path / "out")
    terminal.until(r"waiting\sfor\s+a\s+run")
    (tmp_path / "out").mkdir()
    path = make_rank(tmp_path / "out", 0, 1, seconds=2, began=time.time() - 7200, is_ended=False)
    terminal.until("silent for (2:00|1:59):")  # by the clock of its host; nothing else is known
    with path.open("a") as more:
        more.write('[2,2.5,0,"first"]\n')
    terminal.until(r"0:02 first ")
    shutil.rmtree(tmp_path / "out")  # and another run, into a folder of the same name
    terminal.until(r"waiting\sfor\s+a\s+run")
    path = make_rank(tmp_path / "out", 0, 1, seconds=3, began=time.time() + 7200, is_ended=False, run_name="next")
    terminal.until(r"0:02 between phases ")
    terminal.resize(10, 40)
    terminal.until(r"memory\S+ \S+ peak\S+ ?\S* *\r\n")  # the last of the columns
    with path.open("a") as more:
        more.write('{"t":4,"end":true}\n')
    text = terminal.end()
    screen, stays = text.rsplit("\x1b[?1049l", 1)  # the screen of its own is left
    assert screen.count("\x1b[?1049h") == 1
    assert "ended" in stays


def test_ranks_for_which_a_screen_has_no_room_are_counted_and_silent_ones_shown(tmp_path: Path) -> None:
    for rank in range(30):
        path = make_rank(tmp_path, rank, 30, seconds=1, began=time.time(), is_ended=rank != 28)
        path.write_text(
            "".join(path.read_text().splitlines(keepends=True)[:5]) + '{"t":1,"end":true}\n' * (rank != 28)
        )
    terminal = Terminal(tmp_path, (12, 80))
    assert "silent for" in terminal.until("and 21 more: 21 ended")
    terminal.process.send_signal(signal.SIGINT)
    assert re.search("29 .*ended", terminal.end().rsplit("\x1b[?1049l", 1)[1])


def test_words_of_others_are_no_markup_and_numbers_may_be_any(tmp_path: Path) -> None:
    path = make_rank(tmp_path, 0, 1, began=time.time() - 10, is_ended=False, model="m/[red]x[bold]")
    with path.open("a") as more:
        more.write('[2,10,0,"[/nope]\\u001b[2J\\ud800"]\n')
    huge = "1" + "0" * 400
    told = [f'"loss":{huge},"learning_rate":1e999', '"loss":NaN,"epoch":"x","grad_norm":true']
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"kind":"step","step":{step},{words}}}\n' for step, words in zip((1, 2), told, strict=True))
        + f'{{"kind":"step","step":{huge}}}\n'
    )
    done = top(tmp_path, COLUMNS="100")
    assert done.returncode == 0, done.stderr
    assert " [/nope]\ufffd[2J\ufffd " in done.stdout
    assert "([red]x[bold])" in done.stdout.splitlines()[0]
    assert done.stdout.splitlines()[1].strip() == "step 2  loss nan"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_names_in_a_script_that_a_terminal_lacks(tmp_path: Path, encoding: str) -> None:
    make_rank(tmp_path / "\u6a21\u578b", 0, 1, seconds=1, model="m/\u6a21")
    done = top(tmp_path / "\u6a21\u578b", "--once", COLUMNS="80", PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("?? (?)")


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
