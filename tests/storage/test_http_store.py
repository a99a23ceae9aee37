"""The store that tests and benchmarks read from: as fast, slow and faulty as it is asked to be."""

from __future__ import annotations

import http.client
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.harness import HttpStore, HttpStoreProcess
from tests.harness.http_store import Status

from shardwise.storage.remote import RemoteReader

CONTENT = bytes(range(256)) * 4


def ask(
    store: HttpStore | HttpStoreProcess, path: str, byte_range: str | None = None, method: str = "GET"
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection(urlsplit(store.url).netloc, timeout=10)
    try:
        connection.request(method, path, headers={"Range": byte_range} if byte_range else {})
        response = connection.getresponse()
        return response.status, response.read(), {name.lower(): value for name, value in response.getheaders()}
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("byte_range", "status", "start", "stop"),
    [
        (None, 200, 0, 1024),
        ("bytes=0-0", 206, 0, 1),
        ("bytes=5-99", 206, 5, 100),
        ("bytes=1000-", 206, 1000, 1024),
        ("bytes=-24", 206, 1000, 1024),
        ("bytes=-5000", 206, 0, 1024),
        ("bytes=1000-9999", 206, 1000, 1024),
        ("bytes=1024-1030", 416, 0, 0),
        ("bytes=9-5", 416, 0, 0),
        ("bytes=-", 416, 0, 0),
        ("lines=1-2", 416, 0, 0),
    ],
)
def test_ranges(byte_range: str | None, status: int, start: int, stop: int) -> None:
    with HttpStore({"f/a": CONTENT}) as store:
        answered, body, headers = ask(store, "/f/a?query=ignored", byte_range)
    assert (answered, body) == (status, CONTENT[start:stop])
    if status == 206:
        assert headers["content-range"] == f"bytes {start}-{stop - 1}/1024"
    if status == 416:
        assert headers["content-range"] == "bytes */1024"


def test_other_methods_and_files() -> None:
    with HttpStore({"a b": CONTENT}) as store:
        assert ask(store, "/a%20b", method="HEAD")[:2] == (200, b"")
        assert ask(store, "/a%20b", method="POST")[0] == 405
        assert ask(store, "/absent")[0] == 404
        assert [(request.method, request.status) for request in store.log] == [
            ("HEAD", 200),
            ("POST", 405),
            ("GET", 404),
        ]


def test_a_folder_is_served_and_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "a").write_bytes(CONTENT)
    (tmp_path / "secret").write_bytes(b"x")
    with HttpStore(tmp_path / "inside") as store:
        status, body, headers = ask(store, "/a")
        assert (status, body) == (200, CONTENT)
        assert ask(store, "/../secret")[0] == 404
        assert ask(store, "/%2e%2e/secret")[0] == 404
        (tmp_path / "inside" / "a").unlink()
        (tmp_path / "inside" / "a").write_bytes(CONTENT)
        assert ask(store, "/a")[2]["etag"] != headers["etag"]


def test_faults_are_met_in_turn_and_only_where_they_belong() -> None:
    with HttpStore({"a": CONTENT, "b": CONTENT}) as store:
        store.inject(Status(503), file="a", skip=1, times=2)
        store.inject(Status(429, retry_after_s=7), file="a", skip=1)
        assert [ask(store, "/a")[0] for _ in range(5)] == [200, 503, 503, 429, 429]
        assert ask(store, "/b")[0] == 200
        assert ask(store, "/a")[2]["retry-after"] == "7"


def test_bandwidth_is_what_was_asked_for() -> None:
    nbytes = 2_000_000
    buffers = [bytearray(nbytes) for _ in range(3)]
    with HttpStore({"a": bytes(nbytes)}, bytes_per_s=20e6) as store, RemoteReader(store.url) as reader:
        reader.size("a")
        begun = time.monotonic()
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda buffer: reader.read_into("a", 0, memoryview(buffer)), buffers))
        seconds = time.monotonic() - begun
    # 0.3 s, of which the first 20 ms may come at once; a busy machine takes longer, but none is faster.
    assert 0.27 <= seconds < 0.6


def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    with HttpStoreProcess(tmp_path, latency_s=0.001) as store:
        assert ask(store, "/a", "bytes=5-9")[:2] == (206, CONTENT[5:10])
        assert store.counters.requests == 1
    with pytest.raises(ConnectionRefusedError):
        ask(store, "/a")
    store.close()


def test_a_process_that_cannot_start_is_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="exit code 1"):
        HttpStoreProcess(tmp_path, bytes_per_s=-1)


def test_nothing_is_left_of_a_closed_store() -> None:
    before = threading.active_count()
    store = HttpStore({"a": CONTENT})
    connection = http.client.HTTPConnection(urlsplit(store.url).netloc)
    connection.request("GET", "/a")
    connection.getresponse().read()
    store.close()
    store.close()
    connection.close()
    assert threading.active_count() == before
