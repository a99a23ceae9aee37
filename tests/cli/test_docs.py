"""``shardwise docs`` and ``shardwise train --keys``: what the package says about itself, without torch."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shardwise.cli import main
from shardwise.tenants.sections import ManySection, config_keys
from shardwise.training.configuration.config import known_keys

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def on_terminal(columns: int, *arguments: str) -> str:
    """What a command writes on a terminal so wide."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "PAGER": "cat"}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "shardwise", *arguments]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        read = b"".join(_chunks(ours))
        os.close(ours)
    assert process.returncode == 0, read.decode()
    return re.sub(r"\x1b\[[0-9;]*m", "", read.decode().replace("\r\n", "\n"))


def _chunks(file: int) -> Iterator[bytes]:
    while True:
        try:
            chunk = os.read(file, 65536)
        except OSError:  # Linux says so once the other side is closed
            return
        if not chunk:
            return
        yield chunk


# ── pages ─────────────────────────────────────────────────────────────────────────────────────────


def test_pages_are_those_of_the_sources():
    folder = Path(call("docs", "--print").output.strip())
    assert {path.name for path in folder.glob("*.md")} == {path.name for path in DOCS.glob("*.md")}
    listed = dict(line.split("\t") for line in call("docs", "--list").output.splitlines())
    assert listed.keys() == {path.stem for path in DOCS.glob("*.md")}
    assert listed["merge"] == "Merging"
    assert call("docs").output == (DOCS / "index.md").read_text()
    assert call("docs", "four-bits.md").output == (DOCS / "four_bits.md").read_text()
    assert Path(call("docs", "save", "--print").output.strip()).samefile(DOCS / "save.md")


def test_a_page_that_is_not_there_is_answered_with_the_nearest():
    result = call("docs", "checkpoint")
    assert result.exit_code == 2
    assert "no such page; did you mean checkpoints?" in result.output
    assert "no such page; `shardwise docs --list`" in call("docs", "../README").output


def test_a_command_that_is_not_there_is_answered_with_the_nearest():
    result = call("trian")
    assert result.exit_code == 2
    assert "No such command 'trian'. Did you mean 'train'?" in result.output
    assert "No such command 'xyz'." in call("xyz").output


def test_a_page_on_a_terminal_is_rendered():
    shown = on_terminal(60, "docs", "merge")
    assert "merge-adapter BASE ADAPTER OUT" in shown
    assert "## " not in shown
    assert max(map(len, shown.splitlines())) <= 60


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────


def test_every_key_is_listed_with_type_and_default():
    lines = [line.split("\t") for line in call("train", "--keys").output.splitlines()]
    listed = {key: (kind, default) for key, kind, default in lines}
    assert len(listed) == len(lines)
    every = {*known_keys(), *known_keys(ManySection)}
    sections = {key.rpartition(".")[0] for key in every} - {""}
    leaves = every - sections
    assert leaves <= listed.keys() <= every
    assert listed["model.name"] == ("text", "required")
    assert listed["tuning.method"] == ("full | freeze | lora", "full")
    assert listed["tuning.lora_dropout"] == ("number >= 0 < 1", "0.0")
    assert listed["checkpoints.every"] == ("integer >= 1 | epoch", "epoch")
    assert listed["sharding.reshard_after_forward"] == ("true | false | integer >= 1", "true")
    assert listed["bank.tokens_per_pass"] == ("integer >= 1", "4096")


@pytest.mark.parametrize("columns", [40, 100])
def test_keys_fit_a_terminal(columns: int):
    shown = on_terminal(columns, "train", "--keys")
    assert max(map(len, shown.splitlines())) <= columns
    for key in config_keys():
        assert any(line.split(" ")[0] == key.path for line in shown.splitlines()), key.path


def documented() -> dict[str, str]:
    """By key, the default that the tables of docs/train.md state."""
    found: dict[str, str] = {}
    for keys, default in re.findall(
        r"^\| (`[\w.`, ]+`) \| ([^|]*?) ?\|", (DOCS / "train.md").read_text(), re.MULTILINE
    ):
        names = re.findall(r"`([\w.]+)`", keys)
        parts = default.split(", ") if len(default.split(", ")) == len(names) else [default] * len(names)
        found |= {name: part.strip("` ") for name, part in zip(names, parts, strict=True)}
    return found


def test_defaults_of_the_page_are_those_of_the_configuration():
    """Words may stand for what is not given; a value has to be the one."""
    page, wrong = documented(), {}
    for key in config_keys():
        stated = page.get(key.path)
        if key.path == "tuning.method" or key.path in ("tenants", "sweep"):
            continue  # said in words around the tables
        if stated is None or not _says(stated, key.default):
            wrong[key.path] = stated, key.default
    assert wrong == {}


def _says(stated: str, default: str) -> bool:
    if default == "required":
        return stated in ("", "as above")
    if default in ("null", "[]", "{}"):  # in words, or not at all
        return not re.fullmatch(r"[\d.e-]+|true|false", stated)
    try:
        return float(stated) == float(default)
    except ValueError:
        return stated == default
