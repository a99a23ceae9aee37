"""Buckets on this machine that outlive processes: obstore's local store in the place of ``s3://`` and ``az://``.

A bucket is a folder in memory. An object is seen whole once its upload is complete, and replaced in one step; an
upload that is not completed is never seen.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from shardwise.files import objects

BUCKETS = Path("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())


def _local(url: str, options: Mapping[str, Any]) -> Any:
    from obstore.store import LocalStore

    return LocalStore(prefix=behind(url), mkdir=True)


def register() -> None:
    """Have this process reach the buckets."""
    objects._bucket = _local


@contextmanager
def bucket(scheme: str) -> Iterator[str]:
    """The URL of a bucket that is there for the block, and that this process reaches within it."""
    with (
        mock.patch.object(objects, "_bucket", _local),
        tempfile.TemporaryDirectory(dir=BUCKETS, prefix="shardwise-bucket-") as folder,
    ):
        yield f"{scheme}://{Path(folder).name}"


def behind(url: str) -> Path:
    """The folder in which the objects of a URL lie."""
    return BUCKETS / url.partition("://")[2].strip("/")
