"""Opens a writer, from a path or a URL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from shardwise.errors import StorageError
from shardwise.storage.contract import StorageWriter
from shardwise.storage.names import is_url, scheme_of, shown, without_secrets
from shardwise.storage.writing.local_writer import LocalWriter


def open_writer(
    target: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> StorageWriter:
    """Open a folder, which need not be there, or a URL for writing; whoever calls closes the writer.

    Nothing is made before the first file is. ``storage_options`` are those of
    :class:`~shardwise.storage.writing.object_writer.ObjectWriter`, for URLs only.

    Raises:
        StorageError: for what cannot be written to: the hub, an HTTP server, a path that is a file.
    """
    if not is_url(target):
        if storage_options:
            raise StorageError(
                f"{shown(os.fspath(target))}: storage_options are for URLs, and this is none; leave them out"
            )
        return LocalWriter(os.path.expanduser(target))
    url = os.fspath(target)
    where, scheme = shown(without_secrets(url)), scheme_of(url)
    if scheme == "file":
        raise StorageError(f"{where}: is on this machine; pass the path without file://")
    if scheme == "hf":
        raise StorageError(
            f"{where}: the hub is not written to; save into a local folder, then upload it "
            "(hf upload organisation/name folder)"
        )
    if scheme in ("http", "https"):
        raise StorageError(
            f"{where}: {scheme}:// cannot be written to; save into a local folder or a bucket (s3://)"
        )
    # Imported here: what is local needs no network code.
    from shardwise.storage.writing.object_writer import ObjectWriter

    return ObjectWriter(url, storage_options=storage_options)
