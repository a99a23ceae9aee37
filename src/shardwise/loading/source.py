"""Opens the checkpoint that a call names, the same on all ranks."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias, cast

from shardwise.core.errors import StorageError
from shardwise.core.formatting import format_ranks
from shardwise.core.machine import namespace_id
from shardwise.files.checkpoint_index import CheckpointIndex
from shardwise.files.local_reader import OpenStorage, open_storage
from shardwise.files.open_checkpoint import dequantize_index, open_checkpoint
from shardwise.files.storage import FilePlaces, StorageReader
from shardwise.files.urls import HubOptions, ModelFiles, WantedFiles, is_url, local_path
from shardwise.loading.one_checkpoint import require_one_checkpoint
from shardwise.ranks.world import World
from shardwise.transfer.read import read_identities

Source: TypeAlias = str | os.PathLike[str] | StorageReader


@dataclass(frozen=True)
class OpenSource:
    """A checkpoint whose headers have been read, and this rank's reader of its bytes.

    Attributes:
        identities: of the files, by which reads detect that a file has changed since its header was read.
        notes: lines for the report.
    """

    index: CheckpointIndex
    reader: StorageReader
    identities: Mapping[str, str]
    notes: tuple[str, ...] = ()


def open_source(
    world: World, checkpoint: Source, hub: HubOptions, extra: tuple[str, ...], stack: ExitStack
) -> OpenSource:
    """Resolve a checkpoint, read its headers on the first rank, and hand them to all. Collective: yes.

    ``extra`` are further files of weights, if they exist. The reader is closed with ``stack``, unless it is the
    caller's.
    """
    if isinstance(checkpoint, StorageReader):
        # The caller has opened this reader on every rank.
        storage = OpenStorage(checkpoint, None)
    else:
        wanted = ModelFiles(extra=extra)
        place = checkpoint if is_url(checkpoint) else resolve_everywhere(world, checkpoint, hub, wanted)
        storage = open_everywhere(world, place, hub, stack)
    return read_index(world, storage, extra=extra)


def open_everywhere(world: World, place: str | os.PathLike[str], hub: HubOptions, stack: ExitStack) -> OpenStorage:
    """Open a checkpoint's storage on every rank. The reader is closed with ``stack``. Collective: yes."""
    with world.collective("open the folder"):
        storage = open_storage(place, hub) if is_url(place) else open_storage(place)
        # Within the phase: if opening fails on another rank, this rank's reader is closed, too.
        stack.enter_context(storage.reader)
    return storage


def read_index(
    world: World,
    storage: OpenStorage,
    *,
    weights_name: str | None = None,
    extra: Sequence[str] = (),
) -> OpenSource:
    """Read the headers of a checkpoint whose storage has been opened on every rank. Collective: yes.

    Ranks verify that they have opened the same checkpoint, see [Note: One checkpoint] in
    ``loading/one_checkpoint.py``.
    """
    reader = storage.reader
    # One rank reads the headers of all files, so that a storage is not asked for them by every rank.
    with world.broadcast("read headers") as exchange:
        if world.rank == 0:
            opened = open_checkpoint(reader, weights_name=storage.file or weights_name, extra_files=extra)
            headers = dequantize_index(reader, opened)
            # Of local files, also of a network file system, each rank identifies its own: require_one_checkpoint().
            is_remote = reader.policy.is_remote and not isinstance(reader, FilePlaces)
            exchange.local = headers, read_identities(reader, list(headers.files)) if is_remote else {}
    index, remote_identities = exchange.result
    identities, notes = require_one_checkpoint(world, reader, index)
    # The identities of remote files are those that the first rank saw when it read the headers.
    return OpenSource(index, reader, identities or remote_identities, notes)


def resolve_everywhere(
    world: World,
    name_or_path: str | os.PathLike[str],
    hub: HubOptions,
    wanted: WantedFiles = ModelFiles(),  # noqa: B008 - frozen
) -> Path:
    """Return a local path on every rank. A hub repository is downloaded by one rank for all that share its cache.

    The first rank finds out which commit the revision names, and all take that one, whatever is pushed meanwhile.

    Collective: yes.
    """
    with world.all_gather("find the folder") as exchange:
        exchange.local = local_path(name_or_path, hub)
    paths: list[Path | None] = exchange.result
    # The first rank decides whether this is a folder or a repository. If each rank did, a folder that only some
    # machines have would send the ranks into different collectives.
    if paths[0] is not None:
        if absent := [rank for rank, path in enumerate(paths) if path is None]:
            raise StorageError(
                f"{os.fspath(name_or_path)}: is a directory on rank {world.global_ranks[0]}, but not on rank "
                f"{format_ranks(absent, world.global_ranks)}. "
                "Put it on every machine, or on a file system that all of them share"
            )
        return cast(Path, paths[world.rank])
    from shardwise.files.remote import get_cache_folder, record_commit, resolve, resolve_commit

    repo_id = os.fspath(name_or_path)
    with world.broadcast("resolve the revision") as exchange:
        if world.rank == 0:
            exchange.local = resolve_commit(repo_id, hub)
    commit: str = exchange.result
    pinned = replace(hub, revision=commit)
    # One rank of each cache: the caches of two machines may be one folder of a network file system, or two.
    downloads = world.is_first_at(f"{namespace_id('mnt')} {get_cache_folder(hub)}")
    downloaded = None
    with world.collective("download"):
        if downloads:
            downloaded = resolve(repo_id, pinned, wanted=wanted)
            record_commit(repo_id, hub, commit)
    # In a phase of its own, which begins when all downloads have ended.
    with world.collective("find the download"):
        return downloaded or resolve(repo_id, pinned, download=False, wanted=wanted)
