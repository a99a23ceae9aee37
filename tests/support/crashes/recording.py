"""A record of what all writers do below a folder within a block."""

import functools
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

from tests.support.crashes.effects import (
    Created,
    Effect,
    EffectLog,
    FolderMade,
    FolderRemoved,
    NamesSynced,
    Removed,
    Renamed,
    ReplacedFile,
    Synced,
    Wrote,
)

from shardwise.files.local_writer import LocalWriter
from shardwise.files.storage import StorageWriter

PARENT: Final = ".."
"""The folder in which the root lies."""

_CALLS: Final = ("create", "write", "sync", "rename", "replace", "remove", "sync_names")
"""The methods of a writer that have effects."""


@contextmanager
def recorded(
    log: EffectLog, root: str | os.PathLike[str], *, writer: int = 0, before: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Notes what every local writer does below ``root`` within the block, opened by any code.

    Folders that are made, removed or synced there are noted, too, even where that is done beside any writer; what
    else is done to files beside writers is not, so that a replay does not end with what is really there.

    The methods of the writers and a few functions of ``os`` are replaced meanwhile, in this process.

    Args:
        log: shared with whom else writes there.
        root: a folder, which need not be there yet.
        writer: tells this process from others (the rank).
        before: called before each effect; it may wait, raise, or end the process.
    """
    seen = _SeenRoot(log, os.fspath(root), writer, before)
    with ExitStack() as stack:
        for name in _CALLS:
            original = getattr(LocalWriter, name)
            stack.enter_context(mock.patch.object(LocalWriter, name, seen.of_writer(name, original)))
        for name, effect in (("mkdir", FolderMade), ("rmdir", FolderRemoved)):
            stack.enter_context(mock.patch.object(os, name, seen.of_folder(getattr(os, name), effect)))
        stack.enter_context(mock.patch.object(os, "fsync", seen.of_sync(os.fsync)))
        yield


class _SeenRoot:
    """What is done to one root."""

    def __init__(self, log: EffectLog, root: str, writer: int, before: Callable[[], None]) -> None:
        self._log = log
        self._root = os.path.abspath(root)
        self._writer = writer
        self._before = before
        self._inside = threading.local()

    def of_writer(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(writer: StorageWriter, *args: Any) -> Any:
            folder = self._within(writer.root)
            if folder is None or getattr(self._inside, "note", None) is not None:
                return original(writer, *args)  # in the latter case as a part of what is noted
            with self._effect(folder) as note:
                effects = _effects_of(name, self._writer, folder, args)
                result = original(writer, *args)
                for effect in effects:
                    note(effect)
            return result

        return call

    def of_folder(self, original: Callable[..., Any], kind: type[FolderMade | FolderRemoved]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **keywords: Any) -> Any:
            folder = self._within(os.path.abspath(os.fsdecode(path)))
            if folder is None:
                return original(path, *args, **keywords)
            with self._effect(None) as note:
                result = original(path, *args, **keywords)
                note(kind(self._writer, folder))
            return result

        return call

    def of_sync(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def call(file: Any) -> None:
            descriptor = file if isinstance(file, int) else file.fileno()
            folder = None
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                path = os.readlink(f"/proc/self/fd/{descriptor}")
                folder = PARENT if path == os.path.dirname(self._root) else self._within(path)
            if folder is None or folder == getattr(self._inside, "folder", None):
                return original(file)  # the effect that it is a part of is noted
            with self._effect(None) as note:
                original(file)
                note(NamesSynced(self._writer, folder))
            return None

        return call

    def _within(self, path: str) -> str | None:
        """The folder by its way from the root; None for others."""
        if path == self._root:
            return ""
        return path.removeprefix(f"{self._root}/") if path.startswith(f"{self._root}/") else None

    @contextmanager
    def _effect(self, folder: str | None) -> Iterator[Callable[[Effect], None]]:
        """One effect, or one inside another."""
        outer = getattr(self._inside, "note", None)
        if outer is not None:
            yield outer
            return
        self._before()
        with self._log.next() as note:
            self._inside.note, self._inside.folder = note, folder
            try:
                yield note
            finally:
                self._inside.note = self._inside.folder = None


def _effects_of(name: str, writer: int, folder: str, args: Sequence[Any]) -> list[Effect]:
    """What a call of the method ``name`` is about to do."""

    def at(file: str) -> str:
        return f"{folder}/{file}" if folder else file

    match name, args:
        case "create", (file, nbytes):
            return [Created(writer, at(file), nbytes)]
        case "write", (file, start, buffers):
            return [Wrote(writer, at(file), start, b"".join(buffer.tobytes() for buffer in buffers))]
        case "sync", (file,):
            return [Synced(writer, at(file))]
        case "rename", (file, new):
            return [Renamed(writer, at(file), at(new))]
        case "replace", (file, content):
            return [ReplacedFile(writer, at(file), bytes(content))]
        case "remove", (file,):
            return [Removed(writer, at(file))]
        case "sync_names", ():
            return [NamesSynced(writer, folder)]
        case _:
            raise TypeError(f"{name}{tuple(args)}: is no call that has an effect")
