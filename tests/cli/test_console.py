"""What a training tells on the console, and leaves to be seen."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from inspect import signature
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.observing.made_runs import make_metrics
from tests.training import tiny

from shardwise.cli.report import report_command
from shardwise.cli.train import train_command
from shardwise.cli.training_log import LiveBar, StepLog
from shardwise.observing.run_record import RunReader
from shardwise.pictures import installed
from shardwise.pictures.curves import Curves
from shardwise.report.forecast_parts import RankForecast
from shardwise.report.load_report import LoadReport
from shardwise.training.report import CheckpointFacts, StepFacts

MIXES = "mix_stderr" in signature(CliRunner).parameters
RUNNER = CliRunner(**({"mix_stderr": False} if MIXES else {}))
CAN_DRAW = importlib.util.find_spec("matplotlib") is not None
drawing = pytest.mark.skipif(not CAN_DRAW, reason="matplotlib is not installed")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return -1


def facts(step: int) -> StepFacts:
    return StepFacts(step, 1.5, 1e-3, 0.5, 1000, 900, 0.5, 2 << 30, epoch=step / 10, fullest_bytes=3 << 30)


def shown(screen: io.StringIO, columns: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each state of the last line of a screen, while a training goes on from step 4."""
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((columns, 24)))
    monkeypatch.setenv("COLUMNS", str(columns))  # tqdm 4.66 looks here
    monkeypatch.setenv("LINES", "24")
    with contextlib.redirect_stderr(screen), contextlib.redirect_stdout(io.StringIO()), LiveBar() as bar:
        log = StepLog(5, bar=bar, total=10)
        bar.begin(10)
        log.tell(CheckpointFacts(4, 0.1, "restored", "restored it"))
        log.tell(facts(5))
        bar._bar.refresh()
        log.say("a line")
    return re.split(r"[\r\n]", screen.getvalue())


def test_a_terminal_has_one_bar_with_all_that_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    states = shown(Terminal(), 120, monkeypatch)
    [last] = {state for state in states if "loss" in state}
    assert last.startswith("training 5/10 |")
    assert last.endswith("loss 1.5000, 3.00 GiB, 2,000 tokens/s, epoch 0.50")
    assert re.search(r"\| \d\d:\d\d<\d\d:\d\d, ", last)
    assert not states[-1].strip()


def test_forty_columns_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    states = shown(Terminal(), 40, monkeypatch)
    assert max(len(state.replace("\x1b[A", "")) for state in states) <= 40
    assert any("5/10" in state and "loss 1.5" in state for state in states)


def test_no_terminal_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(io.StringIO(), 120, monkeypatch) == [""]
    screen = Terminal()
    with contextlib.redirect_stderr(screen), LiveBar(is_silent=True) as bar:
        bar.begin(10)
        bar.step(facts(1))
    assert screen.getvalue() == ""


def test_a_load_is_told_in_ten_lines() -> None:
    names = tuple(f"model.{kind}.{number}.w" for kind in "abcdefghij" for number in range(3))
    forecast = RankForecast(0, 10, 10, 0, 10, 10, 10, 1, 1)
    report = LoadReport(
        *("somewhere", 0, 1, 100, 10, 10, 10, 1, 1, {"index": 0.1, "read": 0.2}, 30, forecast, ("a.safetensors",)),
        tied=dict.fromkeys(names, "x"),
        initialized=names,
        recomputed=names,
        cast=dict.fromkeys(names, ("F32", "BF16")),
        replicated=names,
        ignored_keys=names,
        notes=tuple(f"note {number}" for number in range(9)),
        trainable_parameters=7,
        trained=dict.fromkeys(names, "float32"),
    )
    brief = report.brief().splitlines()
    assert brief[:5] == str(report).splitlines()[:5]
    assert "30 tied, 30 initialized, 30 recomputed, 30 cast, 30 replicated, 30 ignored" in brief[5]
    assert "trainable params: 7" in brief[6]
    assert brief[-1] == "  ... and 7 more notes"
    assert len(brief) == 10
    assert len(str(report).splitlines()) > 40


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a training of two observed ranks, and what it has told."""
    place = tmp_path_factory.mktemp("trained")
    model, chats = tiny.write_model(place / "model"), tiny.write_chats(place / "chats.jsonl", 8)
    asked = [f"model={model}", f"data={chats}", f"output={place / 'out'}", "training.max_steps=4"]
    asked += ["checkpoints.every=2", "training.batch_size=2", "log.every=1", "observe=50"]
    program = "from shardwise.cli.train import train_command; train_command()"
    start = [sys.executable, "-c", program, *asked, "--observe", "--nproc-per-node", "2"]
    wanted = {**os.environ, "SHARDWISE_CURVES": "1"}
    done = subprocess.run(start, check=False, timeout=100, capture_output=True, text=True, env=wanted)
    assert done.returncode == 0, done.stderr
    assert "\r" not in done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    return place / "out", done.stdout


@pytest.mark.slow
@pytest.mark.distributed
def test_an_observed_training(trained: tuple[Path, str]) -> None:
    out, told = trained
    run = RunReader(out).read()
    assert (len(run.ranks), run.notes, run.label) == (2, (), "out (model)")
    for rank in run.ranks:
        assert rank.is_ended
        assert rank.samples_per_second == 50
        times = {times.path: times for times in rank.phases()}
        for name in ("forward", "backward", "sum", "optimizer"):
            assert times["step", name].times == 4
        assert times["checkpoint",].times == 2
        assert ("checkpoint", "Checkpointer.save", "write") in times
        assert {"from_pretrained", "save"} <= {path[0] for path in times}
    assert "tokenise" in {times.name for times in run.ranks[0].phases()}
    steps = [line for line in run.metrics[""] if line["kind"] == "step"]
    peaks = [rank.peak_kib * 1024 for rank in run.ranks]
    assert all(0 < step["fullest_bytes"] <= max(peaks) for step in steps)
    before = told[: told.index("step 1/4")].splitlines()
    assert len(before) <= 10 + 4
    assert not any("F32" in line for line in before)


@drawing
@pytest.mark.distributed
@pytest.mark.slow
def test_the_report_of_a_training_has_what_its_plan_foresaw(trained: tuple[Path, str], tmp_path: Path) -> None:
    out, _ = trained
    result = RUNNER.invoke(report_command, [str(out), "--output", str(tmp_path)])
    assert result.exit_code == 0, result.stderr
    page = (tmp_path / "report.html").read_text("utf-8")
    [table] = re.findall("<h3>Training: host memory, foreseen and done</h3>.*?</table>", page, re.S)
    rows = re.findall("<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td>", table)
    assert [row[0] for row in rows] == ["load", "forward and backward", "optimizer", "checkpoint"]
    assert float(rows[1][3]) > 0
    assert "foreseen: forward and backward" in page


@pytest.mark.distributed
@pytest.mark.slow
def test_curves_are_in_the_folder_or_a_note_says_why_not(trained: tuple[Path, str]) -> None:
    out, told = trained
    names = [name for name in ("loss.png", "memory.png") if (out / name).exists()]
    assert names == (["loss.png", "memory.png"] if CAN_DRAW else [])
    note = "loss.png and memory.png are not drawn: matplotlib is not installed; pip install 'shardwise[report]'\n"
    assert told.count(note) == (0 if CAN_DRAW else 1)


def test_what_lacks_is_noted_once_and_verbose_tells_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installed, "lacking", lambda *names: list(names))
    monkeypatch.delenv("SHARDWISE_CURVES")
    model, chats = tiny.write_model(tmp_path / "model"), tiny.write_chats(tmp_path / "chats.jsonl", 2)
    asked = [f"model={model}", f"data={chats}", f"output={tmp_path / 'out'}", "training.max_steps=1", "--verbose"]
    result = RUNNER.invoke(train_command, asked)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("loss.png and memory.png are not drawn: matplotlib is not installed") == 1
    assert "  tied        lm_head.weight = model.embed_tokens.weight" in result.stdout
    assert not (tmp_path / "out" / "loss.png").exists()
    assert not (tmp_path / "out" / "observed").exists()


@drawing
def test_curves_are_drawn_beside_the_training_and_a_fault_is_told(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("ada", "bob", "cy")]
    for folder in folders:
        make_metrics(folder, 5)
    with Curves() as drawn:
        for folder in (*folders, *folders):
            drawn.draw(folder)
        assert not (folders[2] / "loss.png").exists()  # nobody has waited
        drawn.finish()
    assert drawn.fault == ""
    for folder in folders:
        for name in ("loss.png", "memory.png"):
            assert (folder / name).read_bytes().startswith(b"\x89PNG")
    with Curves() as drawn:
        drawn.draw(tmp_path / "nowhere")
        drawn.finish()
        assert drawn.fault.startswith("loss.png and memory.png are drawn no more: FileNotFoundError")
        drawn.draw(folders[0])
        drawn.finish()
    with Curves() as drawn:
        drawn.draw(folders[0])  # and is left at once, as a training that fails does


@pytest.mark.slow
def test_a_training_on_a_terminal_of_forty_columns(tmp_path: Path) -> None:
    model, chats = tiny.write_model(tmp_path / "model"), tiny.write_chats(tmp_path / "chats.jsonl", 8)
    asked = [f"model={model}", f"data={chats}", f"output={tmp_path / 'out'}", "training.max_steps=30"]
    ours, theirs = pty.openpty()
    program = "from shardwise.cli.train import train_command; train_command()"
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    environment = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "0", "NO_COLOR": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", program, *asked], stdout=subprocess.DEVNULL, stderr=theirs, env=environment
    )
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(ours, 4096):
            text += part
    assert process.wait(60) == 0
    os.close(ours)
    screen = text.decode()
    assert "training 30/30 |" in screen or "training 29/30 |" in screen
    assert not re.search(r"\x1b\[[0-9;]*m", screen)
    bars = [state for state in re.split(r"[\r\n]", screen) if "training" in state]
    assert max(len(state.replace("\x1b[A", "")) for state in bars) <= 40
