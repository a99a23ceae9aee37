"""Fixtures of the storage tests."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.files import local_reader

# The suites are no test modules by their names; their assertions should explain themselves all the same.
pytest.register_assert_rewrite("tests.support.storage_suite", "tests.support.writer_suite")


def raising(code: int) -> Callable[..., Any]:
    """A call that the system refuses."""

    def refuse(*arguments: Any, **keywords: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return refuse


def mounted(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the system say that a folder is a file system of a kind."""
    table = folder / "mountinfo"
    table.write_text(f"1 0 0:1 / / rw - ext4 x rw\n2 1 0:2 / {folder.resolve()} rw - {kind} server:/ rw\n")
    monkeypatch.setattr(local_reader, "_TABLE", str(table))
