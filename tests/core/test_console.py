"""Writes to a console that is gone."""

import os
import subprocess
import sys

import pytest

WRITES = """
import sys
from shardwise.core.console import surviving_console
with surviving_console():
    sys.stdin.read()  # until the console is gone
    for _ in range(3):
        print("some loss", flush=True)
        print("some progress", file=sys.stderr)
    print("not flushed")
print("at the end")
"""


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_output_is_dropped_once_the_console_is_gone(kind: str) -> None:
    ours, theirs = os.pipe() if kind == "pipe" else os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", WRITES], stdin=subprocess.PIPE, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        os.close(ours)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 0


def test_output_to_a_console_arrives() -> None:
    done = subprocess.run([sys.executable, "-c", WRITES], check=True, capture_output=True, text=True, input="")
    assert done.stdout.split("\n") == [*["some loss"] * 3, "not flushed", "at the end", ""]
    assert done.stderr.count("some progress") == 3
