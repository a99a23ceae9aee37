"""An object store on this machine that outlives processes: ``s3://`` as it is promised, and ``az://`` with less.

A bucket is a folder in memory. An object is seen whole once its upload is complete, and replaced in one step; an
upload that is not completed is never seen. ``s3://`` also puts an object only where there is none, when asked to.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
from fsspec.registry import _registry
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

BUCKETS = Path("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())
UPLOADS = ".uploads"

_numbers = itertools.count()


def place_of(path: str) -> Path:
    """The file of an object, or the folder of those that begin so."""
    return BUCKETS / path


class _Upload(AbstractBufferedFile):
    """An upload in parts, which ends in one step."""

    def _initiate_upload(self) -> None:
        bucket = place_of(self.path.partition("/")[0])
        if not bucket.is_dir():
            raise FileNotFoundError(bucket.name)
        (bucket / UPLOADS).mkdir(exist_ok=True)
        self._parts = bucket / UPLOADS / f"{os.getpid()}.{next(_numbers)}"
        self._parts.touch()

    def _upload_chunk(self, final: bool = False) -> bool:
        self.buffer.seek(0)
        with self._parts.open("ab") as file:
            file.write(self.buffer.read())
        if final:
            self.commit()
        return True

    def commit(self) -> None:
        _put(self._parts, self.path, only_new="x" in self.mode)

    def discard(self) -> None:
        parts = getattr(self, "_parts", None)
        if parts is not None:
            parts.unlink(missing_ok=True)
        self.buffer = None


def _put(fresh: Path, path: str, *, only_new: bool) -> None:
    target = place_of(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if only_new:
        try:
            os.link(fresh, target)
        finally:
            fresh.unlink()
    else:
        os.replace(fresh, target)


class Objects(AbstractFileSystem):
    """What a client of the store offers."""

    protocol = ("s3", "s3a")
    cachable = False
    puts_only_new = True

    def __init__(self, *args: Any, config_kwargs: Any = None, **keywords: Any) -> None:
        super().__init__(*args, **keywords)

    def _open(self, path: str, mode: str = "rb", block_size: Any = "default", **keywords: Any) -> Any:
        if "x" in mode and not self.puts_only_new:
            raise NotImplementedError("exclusive creation")
        return _Upload(self, path, mode, block_size=block_size, **keywords)

    def info(self, path: str, **keywords: Any) -> dict[str, Any]:
        place = place_of(self._strip_protocol(path))
        try:
            status = place.stat()
        except OSError as error:
            raise FileNotFoundError(path) from error
        if place.is_dir():
            if not any(item.is_file() for item in place.rglob("*")):
                raise FileNotFoundError(path)
            return {"name": self._strip_protocol(path), "size": 0, "type": "directory"}
        tag = f"{status.st_ino}-{status.st_mtime_ns}"
        return {"name": self._strip_protocol(path), "size": status.st_size, "type": "file", "ETag": tag}

    def ls(self, path: str, detail: bool = True, **keywords: Any) -> list[Any]:
        plain = self._strip_protocol(path).rstrip("/")
        place = place_of(plain)
        if place.is_file():
            found = [self.info(plain)]
        else:
            found = []
            for item in sorted(place.iterdir()) if place.is_dir() else []:
                try:
                    found.append(self.info(f"{plain}/{item.name}"))
                except FileNotFoundError:  # gone meanwhile, or a folder in which there is nothing
                    continue
            if not found:
                raise FileNotFoundError(path)
        return found if detail else [item["name"] for item in found]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **keywords: Any) -> bytes:
        place = place_of(self._strip_protocol(path))
        if not place.is_file():
            raise FileNotFoundError(path)
        return place.read_bytes()[start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **keywords: Any) -> None:
        if mode == "create" and not self.puts_only_new:
            raise NotImplementedError("exclusive creation")
        upload = _Upload(self, self._strip_protocol(path), "wb")
        upload._initiate_upload()
        upload._parts.write_bytes(value)
        upload.closed = True
        _put(upload._parts, upload.path, only_new=mode == "create")

    def rm_file(self, path: str) -> None:
        place = place_of(self._strip_protocol(path))
        if not place.is_file():
            raise FileNotFoundError(path)
        place.unlink()

    def cp_file(self, path1: str, path2: str, **keywords: Any) -> None:
        self.pipe_file(path2, self.cat_file(path1))

    def invalidate_cache(self, path: str | None = None) -> None:
        pass


class WeakObjects(Objects):
    """A store that cannot put an object only where there is none."""

    protocol = ("az",)
    puts_only_new = False


def register() -> None:
    """Have this process reach the store."""
    for kind in (Objects, WeakObjects):
        for name in kind.protocol:
            fsspec.register_implementation(name, kind, clobber=True)


@contextmanager
def bucket(scheme: str) -> Iterator[str]:
    """The URL of a bucket that is there for the block, and that this process reaches within it."""
    with mock.patch.dict(_registry), tempfile.TemporaryDirectory(dir=BUCKETS, prefix="shardwise-bucket-") as folder:
        register()
        yield f"{scheme}://{Path(folder).name}"


def behind(url: str) -> Path:
    """The folder in which the objects of a URL lie."""
    return place_of(url.partition("://")[2])


def clear(url: str) -> None:
    """Remove all that begins so."""
    shutil.rmtree(behind(url), ignore_errors=True)
