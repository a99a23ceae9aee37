"""Something that happens in the middle of a save."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from shardwise.files.local_writer import LocalWriter

MARK = "shardwise.saving"


@contextmanager
def meanwhile(is_moment: Callable[..., bool], act: Callable[[], object]) -> Iterator[None]:
    """``act`` happens once, before the first call of a local writer with ``is_moment(name, *arguments)``."""
    with ExitStack() as stack:

        def patch(name: str) -> None:
            original = getattr(LocalWriter, name)

            def called(writer: LocalWriter, *arguments: Any) -> Any:
                if is_moment(name, *arguments):
                    stack.close()
                    act()
                return original(writer, *arguments)

            stack.enter_context(mock.patch.object(LocalWriter, name, called))

        for name in ("create", "write", "rename", "replace"):
            patch(name)
        yield


def unmark(root: Path) -> None:
    """Take away the marks of all saves, by hand and too early."""
    for mark in root.rglob(f"{MARK}*"):
        mark.unlink()
