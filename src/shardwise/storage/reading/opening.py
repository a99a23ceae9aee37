"""Opens a reader of a checkpoint, from whatever names it: whose code does so is in one table, by scheme."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

from shardwise._face import found_at
from shardwise.errors import StorageError
from shardwise.storage.contract import StorageReader
from shardwise.storage.names import (
    HubOptions,
    Repositories,
    is_url,
    local_place,
    scheme_of,
    shown,
    split_file,
    why_unsafe,
    without_secrets,
)


@dataclass(frozen=True, slots=True)
class OpenStorage:
    """A reader of a checkpoint's folder, and the file in it that was named, if one was."""

    reader: StorageReader
    file: str | None


Opener: TypeAlias = Callable[[str, Mapping[str, Any]], StorageReader]
"""Opens a folder by its URL, with ``storage_options``."""

Pinner: TypeAlias = Callable[[str, HubOptions], str]
"""The URL of the state that a URL, with the options' revision, names now; asks the network."""


@dataclass(frozen=True, slots=True)
class UrlScheme:
    """Who reads the URLs of one scheme; each is a ``package.module:name`` that is imported when it is asked for.

    Attributes:
        opener: an :data:`Opener`.
        told: attributes of :class:`HubOptions` that it takes among the ``storage_options``.
        pinner: a :data:`Pinner`, of a storage that keeps revisions.
    """

    opener: str
    told: tuple[str, ...] = ()
    pinner: str = ""


_REMOTE: Final = "shardwise.storage.reading.remote_reader:open_remote"

SCHEMES: Final[dict[str, UrlScheme]] = {
    "http": UrlScheme(_REMOTE),
    "https": UrlScheme(_REMOTE),
    "hf": UrlScheme(_REMOTE, ("token", "revision"), "shardwise.storage.reading.hub_files:named_commit"),
}
"""A storage of one's own is a line here. All other schemes are asked of obstore."""

_OBJECTS: Final = UrlScheme(_REMOTE)
_FOLDERS: Final = "shardwise.storage.reading.local:LocalReader"
_REPOSITORIES: Final = "shardwise.storage.hub"


def repositories() -> Repositories:
    """Whoever has the repositories that names without a scheme are of."""
    return cast(Repositories, found_at(_REPOSITORIES))


def pinner_of(url: str) -> Pinner | None:
    """What pins a URL to the state it names now; None where its storage keeps no revisions."""
    scheme = SCHEMES.get(scheme_of(url), _OBJECTS)
    return cast(Pinner, found_at(scheme.pinner)) if scheme.pinner else None


def _open_folder(folder: str | os.PathLike[str]) -> StorageReader:
    opener: Callable[[str | os.PathLike[str]], StorageReader] = found_at(_FOLDERS)
    return opener(folder)


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
        raise StorageError(
            f"{shown(os.fspath(name_or_path))}: storage_options are for URLs, and this is none; leave them out"
        )
    place = local_place(name_or_path, hub)
    if place is None:
        place = repositories().resolve(name_or_path, hub, download=download)
    if place.is_file():
        return OpenStorage(_open_folder(place.parent), place.name)
    return OpenStorage(_open_folder(place), None)


def _open_url(url: str, hub: HubOptions, storage_options: Mapping[str, Any]) -> OpenStorage:
    where = shown(without_secrets(url))
    if scheme_of(url) == "file":
        raise StorageError(f"{where}: is on this machine; pass the path without file://")
    if hub.local_files_only:
        raise StorageError(f"{where}: is read over the network, but local_files_only is set; pass a local folder")
    folder, file = split_file(url)
    if hub.variant and file is not None:
        raise StorageError(f"{where}: is a file, so variant={hub.variant!r} has no place; leave it out")
    if hub.subfolder:
        fault = why_unsafe(hub.subfolder)
        if fault is not None:
            raise StorageError(f"{where}: subfolder {hub.subfolder!r} is refused, {fault}; name it as in 'a/b'")
        if file is not None:
            raise StorageError(f"{where}: is a file, so subfolder={hub.subfolder!r} has no place; leave it out")
        before, mark, query = folder.partition("?")
        folder = f"{before.rstrip('/')}/{hub.subfolder}{mark}{query}"
    scheme = SCHEMES.get(scheme_of(url), _OBJECTS)
    told = {name: value for name in scheme.told if (value := getattr(hub, name)) is not None}
    opener: Opener = found_at(scheme.opener)
    return OpenStorage(opener(folder, {**told, **storage_options}), file)
