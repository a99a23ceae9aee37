"""What a command is doing, on stderr: a line before torch is imported, and a sign of life every five seconds."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click

from shardwise.core.console import last_output
from shardwise.core.errors import require_versions
from shardwise.core.phases import main_thread_work

_NEW_PHASE_S: Final = 1.0
"""Seconds after which a phase is shown on a terminal. A shorter one is not."""

_TERMINAL_S: Final = 5.0
"""Seconds without output after which a terminal gets a sign of life."""

_LOG_S: Final = 60.0
"""As above, for the log of a job."""


@contextmanager
def importing(libraries: str) -> Iterator[None]:
    """Write to stderr that the block imports these libraries. Of a launcher's ranks, the first one does.

    Raises:
        ConfigError: torch or transformers is too old.
    """
    require_versions()  # so that its error is all that the command writes
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    click.echo(f"importing {libraries} (about 10 s) ...", err=True)
    with signs_of_life(f"import {libraries}"):
        yield


@contextmanager
def signs_of_life(work: str) -> Iterator[None]:
    """Write to stderr, within the block, what the main thread has been doing if there is no other output.

    On a terminal after five seconds, and when a phase has lasted for one. Otherwise after a minute.

    Args:
        work: what it does between phases. "" for nothing that the user waits for.
    """
    has_ended = threading.Event()
    thread = threading.Thread(target=_report, args=(work, has_ended), name="shardwise-signs-of-life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join(1.0)  # no longer: a terminal that is paused (Ctrl-S) blocks its write


def _report(work: str, has_ended: threading.Event) -> None:
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    begin_s, last_phases = time.monotonic(), ""
    while not has_ended.wait(0.5):
        # Phases of shardwise, such as "load, read headers", or else what user code or a library is doing.
        phases, busy, changed_s = main_thread_work()
        output_s, is_line_open = last_output()
        now_s = time.monotonic()
        since_s = changed_s if phases or busy else begin_s
        # A new phase is shown soon. The same work again, only after a longer time without output.
        if is_terminal and phases not in ("", last_phases):
            is_due = now_s - max(output_s, since_s) >= _NEW_PHASE_S
        else:
            is_due = now_s - max(output_s, begin_s) >= (_TERMINAL_S if is_terminal else _LOG_S)
        if is_due and (text := phases or busy or work):
            last_phases = phases
            # A progress bar leaves its line open.
            click.echo(f"{chr(10) * is_line_open}{text} ({now_s - since_s:.0f} s) ...", err=True)
