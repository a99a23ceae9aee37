"""Everything of Python's own library that has an underscore, in one file. Checked with Python 3.11 and 3.12."""

from __future__ import annotations

from shardwise.errors import KnownNames

with KnownNames("Python", "3.11 or 3.12"):
    from multiprocessing.util import _exit_function  # type: ignore[attr-defined]


def end_multiprocessing() -> None:
    """What multiprocessing does at the end of an interpreter: finalizers are run, and children waited for.

    For a process that leaves by ``os._exit``.
    """
    _exit_function()
