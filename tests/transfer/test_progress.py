"""One bar, where somebody can see it."""

import contextlib
import io
import re

import pytest

from shardwise.transfer.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _bars_are_on(monkeypatch):
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", True)


def shown(screen, *, enabled=True):
    """What a quarter of a load writes to standard error."""
    with contextlib.redirect_stderr(screen), progress_bar("Loading weights", 4 << 20, enabled=enabled) as bar:
        bar.update(1 << 20)
        bar.refresh()
    return screen.getvalue()


def test_a_terminal_shows_bytes_rate_and_time_left():
    text = shown(Terminal())
    assert "Loading weights:  25%" in text
    assert re.search(r"1\.00M/4\.00M \[\d\d:\d\d<\d\d:\d\d", text)
    assert "B/s" in text


def test_other_ranks_show_nothing():
    assert shown(Terminal(), enabled=False) == ""


def test_the_switch_of_transformers_turns_it_off(monkeypatch):
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", False)
    assert shown(Terminal()) == ""


def test_a_log_file_is_not_filled():
    assert shown(io.StringIO()) == ""
