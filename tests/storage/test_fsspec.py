"""Storages that fsspec reads, whatever they raise."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from shardwise.errors import StorageError
from shardwise.storage.policies import OBJECT_STORE
from shardwise.storage.reading import fsspec_transport
from shardwise.storage.reading.remote_reader import RemoteReader
from shardwise.storage.reading.transport import Retries

CONTENT = bytes(range(256)) * 40
QUICK = Retries(attempts=3, first_wait_s=0.001, longest_wait_s=0.01, timeout_s=0.2)


class Faulty(MemoryFileSystem):
    """Raises, or returns other bytes, as often as it is told to."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    faults: ClassVar[Iterator[Callable[[bytes], bytes]]] = iter(())

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.replace("faulty://", "memory://"))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **keywords: Any) -> bytes:
        data = super().cat_file(path, start=start, end=end, **keywords)
        return next(type(self).faults, lambda data: data)(data)


class Slow(AsyncFileSystem):
    """Never comes back."""

    protocol = "slow"

    async def _info(self, path: str, **keywords: Any) -> dict[str, Any]:
        return {"name": path, "size": 100, "type": "file", "ETag": "x"}

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **k: Any) -> bytes:
        await asyncio.sleep(60)
        return b""


fsspec.register_implementation("faulty", Faulty, clobber=True)
fsspec.register_implementation("slow", Slow, clobber=True)


class Answered(Exception):
    """As aiohttp, gcsfs and botocore have them, each with its status at another place."""

    def __init__(self, text: str, **places: Any) -> None:
        super().__init__(text)
        for name, value in places.items():
            setattr(self, name, value)


def raising(error: Exception) -> Callable[[bytes], bytes]:
    def fault(data: bytes) -> bytes:
        raise error

    return fault


@pytest.fixture
def reader() -> Iterator[RemoteReader]:
    Faulty.store.clear()
    Faulty.faults = iter(())
    Faulty().pipe_file("/folder/a", CONTENT)
    with RemoteReader("faulty://folder", retries=QUICK, storage_options={"token": "tok_secret"}) as reader:
        yield reader


PASSING = [
    ConnectionResetError("reset"),
    TimeoutError("slow"),
    OSError("broken pipe somewhere"),
    Answered("503", status=503),
    Answered("slow down", code=429),
    Answered("internal", response=Answered("", status_code=500)),
    Answered("payload is not complete"),
]


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_what_passes_is_tried_again(reader: RemoteReader, error: Exception) -> None:
    Faulty.faults = iter([raising(error)] * 2)
    assert reader.read("a", 3, 50) == CONTENT[3:50]
    assert (reader.retried, reader.bytes_read) == (2, 47)


def test_a_short_body_is_tried_again_and_never_padded(reader: RemoteReader) -> None:
    Faulty.faults = iter([lambda data: data[:-1]])
    assert reader.read("a", 3, 50) == CONTENT[3:50]
    Faulty.faults = itertools.repeat(lambda data: b"")
    with pytest.raises(StorageError, match=r"bytes 3\.\.50 failed in 3 attempts .*ended after 0 of 47 bytes"):
        reader.read("a", 3, 50)


@pytest.mark.parametrize(
    ("error", "cause", "words"),
    [
        (FileNotFoundError("gone"), FileNotFoundError, "no such file"),
        (Answered("gone", status=404), FileNotFoundError, "no such file"),
        (PermissionError("forbidden"), PermissionError, "access is refused"),
        (Answered("forbidden", code=403), PermissionError, "access is refused"),
        (Answered("teapot", status=418), OSError, "the server answered 418"),
        (ValueError("bad bucket"), OSError, "bad bucket"),
        (NotImplementedError(), OSError, "the file system refuses"),
    ],
    ids=repr,
)
def test_what_will_not_pass_is_not_tried_again(
    reader: RemoteReader, error: Exception, cause: type[OSError], words: str
) -> None:
    Faulty.faults = itertools.repeat(raising(error))
    with pytest.raises(StorageError, match=f"a in faulty://folder: .*{words}") as caught:
        reader.read("a", 3, 50)
    assert type(caught.value.__cause__) is cause
    assert reader.retried == 0


def test_a_file_system_that_ignores_ranges_is_reported(reader: RemoteReader) -> None:
    Faulty.faults = itertools.repeat(lambda data: CONTENT)
    with pytest.raises(StorageError, match="the server ignores ranges"):
        reader.read("a", 3, 50)
    assert reader.retried == 0


def test_a_file_that_changes_is_noticed(reader: RemoteReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec_transport, "_RECHECK_S", 0.0)
    before = reader.identity("a")
    assert reader.read("a", 3, 50) == CONTENT[3:50]
    Faulty().pipe_file("/folder/a", bytes(len(CONTENT)))
    with pytest.raises(StorageError, match="changed while it was being read"):
        reader.read("a", 3, 50)
    assert reader.identity("a") != before


def test_a_file_that_became_shorter_is_noticed_at_once(reader: RemoteReader) -> None:
    reader.read("a", 3, 50)
    Faulty().pipe_file("/folder/a", CONTENT[:10])
    with pytest.raises(StorageError, match="changed while it was being read"):
        reader.read("a", 3, 50)


def test_a_folder_is_no_file(reader: RemoteReader) -> None:
    Faulty().pipe_file("/folder/sub/b", b"1")
    with pytest.raises(StorageError, match="sub in .*it is a folder") as caught:
        reader.size("sub")
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_read_that_never_ends_is_given_up() -> None:
    with (
        RemoteReader("slow://folder", retries=replace(QUICK, attempts=2)) as reader,
        pytest.raises(StorageError, match=r"bytes 0\.\.10 failed in 2 attempts .*nothing came in time"),
    ):
        reader.read("a", 0, 10)


def test_credentials_in_the_errors_of_others_are_not_shown(reader: RemoteReader) -> None:
    Faulty.faults = itertools.repeat(raising(OSError("GET https://h/x?token=tok_secret failed")))
    with pytest.raises(StorageError) as caught:
        reader.read("a", 3, 50)
    error: BaseException | None = caught.value
    while error is not None:
        assert "tok_secret" not in repr(error)
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize(
    ("url", "package", "command"),
    [
        ("s3://bucket/folder", "s3fs", r"pip install 'shardwise\[s3\]'"),
        ("gs://bucket/folder", "gcsfs", r"pip install 'shardwise\[gs\]'"),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_command(url: str, package: str, command: str) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(StorageError, match=f"{url}: .*needs {package}, .*{command}"):
        RemoteReader(url)


@pytest.mark.parametrize(
    ("info", "version"),
    [
        ({"ETag": '"abc"', "LastModified": 1}, 'ETag "abc"'),
        ({"generation": 17, "updated": "x"}, "generation 17"),
        ({"mtime": 5, "name": "x"}, "mtime 5"),
        ({"name": "x", "size": 5}, None),
    ],
)
def test_the_version_is_the_best_that_a_storage_tells(info: dict[str, Any], version: str | None) -> None:
    assert fsspec_transport._version(info) == version


def test_s3_keeps_as_many_connections_as_requests_are_in_flight() -> None:
    options = {"config_kwargs": {"read_timeout": 7}, "anon": True}
    tuned = fsspec_transport.tuned("s3", options, QUICK, OBJECT_STORE.concurrency)
    assert tuned["config_kwargs"] == {"max_pool_connections": 32, "connect_timeout": 0.2, "read_timeout": 7}
    assert tuned["anon"] is True
    assert options["config_kwargs"] == {"read_timeout": 7}
