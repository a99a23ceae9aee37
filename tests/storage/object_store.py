"""A file system of fsspec's that behaves as s3fs and gcsfs do: a file is an upload until its stream is closed."""

from __future__ import annotations

from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class Upload(AbstractBufferedFile):
    """Puts an object into the store when its last part is sent, and never before."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []
        self.fs.uploads.append(self)

    def _upload_chunk(self, final: bool = False) -> bool:
        self.fs.fail_at(self)
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.objects[self.path] = b"".join(self.parts)
            self.fs.uploads.remove(self)
        return True

    def discard(self) -> None:
        if self in self.fs.uploads:
            self.fs.uploads.remove(self)


class ObjectStore(AbstractFileSystem):
    """Objects by their full names; no folders, no renames. ``failure`` is raised where a part is sent."""

    protocol = "objects"
    objects: ClassVar[dict[str, bytes]] = {}
    uploads: ClassVar[list[Upload]] = []
    failure: ClassVar[Exception | None] = None

    @classmethod
    def contents(cls) -> dict[str, bytes]:
        return {path.rpartition("/")[2]: content for path, content in cls.objects.items()}

    def fail_at(self, upload: Upload) -> None:
        if self.failure is not None:
            raise self.failure

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **keywords: Any) -> Upload:
        assert mode == "wb"
        return Upload(self, path, mode, block_size=block_size)

    def ls(self, path: str, detail: bool = True, **keywords: Any) -> list[Any]:
        path = self._strip_protocol(path)
        found = [
            {"name": name, "size": len(content), "type": "file"}
            for name, content in self.objects.items()
            if name == path or name.rpartition("/")[0] == path
        ]
        if not found:
            raise FileNotFoundError(path)
        return found if detail else [entry["name"] for entry in found]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **keywords: Any) -> bytes:
        path = self._strip_protocol(path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path][start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **keywords: Any) -> None:
        if self.failure is not None:
            raise self.failure
        self.objects[self._strip_protocol(path)] = bytes(value)

    def cp_file(self, path1: str, path2: str, **keywords: Any) -> None:
        self.objects[self._strip_protocol(path2)] = self.cat_file(path1)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        raise AssertionError("a bucket would have been made")

    def _rm(self, path: str) -> None:
        self.objects.pop(self._strip_protocol(path), None)


fsspec.register_implementation("objects", ObjectStore, clobber=True)
