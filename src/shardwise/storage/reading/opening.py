"""Opens a reader of a checkpoint from a path, a URL, or the name of a repository on the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.errors import StorageError
from shardwise.storage.contract import StorageReader
from shardwise.storage.names import (
    HubOptions,
    is_url,
    local_place,
    require_subfolder,
    scheme_of,
    shown,
    split_file,
    without_secrets,
)
from shardwise.storage.reading.local import LocalReader


@dataclass(frozen=True, slots=True)
class OpenStorage:
    """A reader of a checkpoint's folder, and the file in it that was named, if one was."""

    reader: StorageReader
    file: str | None


def open_storage(
    name_or_path: str | os.PathLike[str],
    hub: HubOptions = HubOptions(),  # noqa: B008 - frozen
    *,
    download: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> OpenStorage:
    """Open a folder, a safetensors or index file, a hub id or a URL; whoever calls closes the reader.

    URLs are read in place. A hub id is downloaded, or taken from the cache alone with ``download=False``.
    ``hub.subfolder`` holds for all of them, ``hub.token`` and ``hub.revision`` for hf:// as for hub ids.
    ``storage_options`` are those of :class:`~shardwise.storage.reading.remote_reader.RemoteReader`, for URLs only.

    Raises:
        StorageError: for what is not there, or cannot be opened.
    """
    if is_url(name_or_path):
        return _open_url(os.fspath(name_or_path), hub, storage_options or {})
    if storage_options:
        raise StorageError(f"{shown(os.fspath(name_or_path))}: storage_options are for URLs. Leave them out")
    place = local_place(name_or_path, hub)
    if place is None:
        from shardwise.storage.hub import resolve

        place = resolve(name_or_path, hub, download=download)
    if place.is_file():
        return OpenStorage(LocalReader(place.parent), place.name)
    return OpenStorage(LocalReader(place), None)


def _open_url(url: str, hub: HubOptions, storage_options: Mapping[str, Any]) -> OpenStorage:
    where = shown(without_secrets(url))
    if scheme_of(url) == "file":
        raise StorageError(f"{where}: is on this machine. Pass the path without file://")
    if hub.local_files_only:
        raise StorageError(f"{where}: is read over the network, but local_files_only is set. Pass a local folder")
    folder, file = split_file(url)
    if file is not None and (hub.subfolder or hub.variant):
        raise StorageError(f"{where}: is a file, which has no subfolder and no variant. Leave them out")
    require_subfolder(where, hub)
    if hub.subfolder:
        before, mark, query = folder.partition("?")
        folder = f"{before.rstrip('/')}/{hub.subfolder}{mark}{query}"
    named = {"token": hub.token, "revision": hub.revision} if scheme_of(url) == "hf" else {}
    options = {name: value for name, value in named.items() if value is not None}
    # Imported here: what is local needs no network code.
    from shardwise.storage.reading.remote_reader import RemoteReader

    return OpenStorage(RemoteReader(folder, storage_options={**options, **storage_options}), file)
