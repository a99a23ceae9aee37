"""Opens a checkpoint on every rank: a reader, and headers that are the same everywhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias, cast

from shardwise.errors import StorageError
from shardwise.execution.reading import identities_of
from shardwise.execution.world import World
from shardwise.formats.contract import CheckpointIndex
from shardwise.formats.opening import as_the_model_has_it, open_checkpoint
from shardwise.report.names import shown_ranks
from shardwise.storage.contract import FilePlaces, StorageReader
from shardwise.storage.machine import file_space
from shardwise.storage.names import HubOptions, ModelFiles, WantedFiles, is_url, local_place
from shardwise.storage.reading import OpenStorage, open_storage

Source: TypeAlias = str | os.PathLike[str] | StorageReader


@dataclass(frozen=True)
class OpenSource:
    """A checkpoint whose headers have been read, and this rank's reader of its bytes.

    ``identities`` are those of the files when they were compared with the first rank's, of a remote storage when
    their headers were read. ``is_own`` tells a reader opened here from one the user gave, which stays open.
    """

    index: CheckpointIndex
    reader: StorageReader
    identities: Mapping[str, str]
    is_own: bool
    notes: tuple[str, ...] = ()

    def closing(self) -> AbstractContextManager[object]:
        """A context at whose end a reader opened here is closed."""
        return self.reader if self.is_own else nullcontext()


def open_source(world: World, checkpoint: Source, hub: HubOptions) -> OpenSource:
    """Resolve a checkpoint, read its headers on the first rank, and hand them to all. Collective: yes."""
    if isinstance(checkpoint, StorageReader):
        opened, is_own = OpenStorage(checkpoint, None), False
    elif is_url(checkpoint):
        opened, is_own = open_everywhere(world, lambda: open_storage(checkpoint, hub)), True
    else:
        path = resolve_everywhere(world, checkpoint, hub)
        opened, is_own = open_everywhere(world, lambda: open_storage(path)), True
    return read_index(world, opened, variant=hub.variant, is_own=is_own)


def open_everywhere(world: World, open_own: Callable[[], OpenStorage]) -> OpenStorage:
    """A checkpoint's storage opened on every rank, or kept open on none. Collective: yes."""
    with ExitStack() as stack:

        def begin() -> OpenStorage:
            opened = open_own()
            stack.enter_context(opened.reader)
            return opened

        opened = world.together(begin)
        stack.pop_all()
        return opened


def read_index(
    world: World,
    opened: OpenStorage,
    *,
    weights_name: str | None = None,
    variant: str | None = None,
    extra: Sequence[str] = (),
    is_own: bool = True,
) -> OpenSource:
    """The headers of a checkpoint whose storage has been opened on every rank. Collective: yes.

    What the ranks have opened is one checkpoint, see [Note: One checkpoint] in
    ``execution/reading.py``. One that is refused is closed, unless it is the user's (``is_own``
    False).
    """
    reader = opened.reader

    def read() -> tuple[CheckpointIndex, dict[str, str]]:
        index = as_the_model_has_it(
            reader,
            open_checkpoint(reader, weights_name=opened.file or weights_name, extra_files=extra, variant=variant),
        )
        return index, identities_of(reader, list(index.files), lambda: None) if reader.policy.is_remote else {}

    with ExitStack() as stack:
        if is_own:
            stack.enter_context(reader)
        index, identities = world.from_first(read)
        found: dict[str, str] = {}
        notes: tuple[str, ...] = ()
        if world.size > 1:
            from shardwise.execution.reading import require_one_checkpoint

            found, notes = require_one_checkpoint(world, reader, index)
        elif isinstance(reader, FilePlaces):
            found = {file: reader.identity(file) for file in index.files}
        stack.pop_all()
    return OpenSource(index, reader, found or identities, is_own, notes)


def resolve_everywhere(
    world: World,
    name_or_path: str | os.PathLike[str],
    hub: HubOptions,
    wanted: WantedFiles = ModelFiles(),  # noqa: B008 - frozen
) -> Path:
    """A local path on every rank; a hub repository is downloaded by one rank for all that share its cache.

    The first rank finds out which commit the revision names, and all take that one, whatever is pushed meanwhile.

    Collective: yes.
    """
    found = world.each(lambda: local_place(name_or_path, hub))
    # One rank decides: what exists on some machines only must not send the ranks different ways.
    if found[0] is not None:
        if absent := [rank for rank, path in enumerate(found) if path is None]:
            raise StorageError(
                f"{os.fspath(name_or_path)}: is a directory on rank 0, but not on rank "
                f"{shown_ranks(absent)}; "
                "put it on every machine, or on a file system that all of them share"
            )
        return cast(Path, found[world.rank])
    from shardwise.storage.remote import commit_of, note_commit, place_of_cache, resolve

    repo_id = os.fspath(name_or_path)
    commit = world.from_first(lambda: commit_of(repo_id, hub))
    pinned = replace(hub, revision=commit)
    downloads = world.is_first_of(f"{file_space()} {place_of_cache(hub)}")

    def download() -> Path | None:
        if not downloads:
            return None
        folder = resolve(repo_id, pinned, wanted=wanted)
        note_commit(repo_id, hub, commit)
        return folder

    downloaded = world.together(download)
    return world.together(lambda: downloaded or resolve(repo_id, pinned, download=False, wanted=wanted))
