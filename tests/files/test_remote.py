"""Faults between a reader and a server."""

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.support.http_store import (
    Disturbance,
    HttpStore,
    IgnoreRange,
    Redirect,
    Reset,
    Shift,
    Stall,
    Status,
    Truncate,
)
from tests.support.local_ranks import LIMIT_S

from shardwise.core.errors import ConfigError, StorageError
from shardwise.files.objects import RemoteReader
from shardwise.files.storage import OBJECT_STORE

CONTENT = bytes(range(251)) * 400
NBYTES = len(CONTENT)
_WAITS = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=10), "base": 2}
QUICK: dict[str, Any] = {"retry_config": {"max_retries": 3, "backoff": _WAITS}}


FILES = {"a": CONTENT, "sub/b": b"other", "empty": b""}


@pytest.fixture
def store() -> Iterator[HttpStore]:
    with HttpStore(FILES) as store:
        yield store


def reader_of(store: HttpStore, **client: object) -> RemoteReader:
    return RemoteReader(store.url, storage_options={**QUICK, "client_options": client})


def refusal(reader: RemoteReader, start: int = 100, stop: int = 5000) -> StorageError:
    with pytest.raises(StorageError) as caught:
        reader.read("a", start, stop)
    return caught.value


def patiences(fault: Disturbance) -> Iterator[tuple[dict[str, str], AbstractContextManager[None]]]:
    """Timeouts of clients, and what a failure with them is worth.

    Where waiting is what is tested they are short. Too short, perhaps, for answers of a busy machine: then the next
    one is tried.
    """
    if isinstance(fault, Stall):
        for read_timeout in ("250ms", "3s"):
            yield {"read_timeout": read_timeout}, suppress(AssertionError, StorageError)
        yield {"read_timeout": "30s"}, nullcontext()
    else:
        yield {}, nullcontext()


@pytest.mark.parametrize(
    "fault",
    [
        *[Status(code) for code in (408, 429, 500, 502, 503, 504)],
        Stall(LIMIT_S, after_bytes=100),
        Stall(LIMIT_S),
        Truncate(100),
        Truncate(0),
        Reset(0),
        Reset(100),
        Reset(),
    ],
    ids=str,
)
def test_transient_errors_are_retried(fault: Disturbance) -> None:
    for client, outcome in patiences(fault):
        with outcome, HttpStore(FILES) as store, reader_of(store, **client) as reader:
            assert reader.size("a") == NBYTES
            store.inject(fault, times=2)
            assert reader.read("a", 100, 5000) == CONTENT[100:5000]
            assert reader.reads == 1
            assert store.counters.requests == 4
            break


def test_looking_at_a_file_is_tried_again_too(store: HttpStore) -> None:
    store.inject(Status(503), times=2)
    with reader_of(store) as reader:
        assert reader.size("a") == NBYTES


def test_a_connection_that_the_server_ended_while_idle_is_no_failure(store: HttpStore) -> None:
    with reader_of(store) as reader:
        reader.read("a", 0, 10)
        store.hang_up()
        assert reader.read("a", 0, 10) == CONTENT[:10]


@pytest.mark.parametrize("fault", [Status(500), Status(429), Stall(LIMIT_S, 10), Truncate(17), Reset(0)], ids=str)
def test_errors_that_last_are_reported(fault: Disturbance) -> None:
    for client, outcome in patiences(fault):
        with outcome, HttpStore(FILES) as store, reader_of(store, **client) as reader:
            reader.size("a")
            store.inject(fault)
            error = refusal(reader)
            assert store.counters.requests == 5
            break
    assert re.match(
        rf"a in {store.url}: reading bytes 100\.\.5000 failed, .*Check the URL, the network", str(error)
    )
    assert type(error.__cause__) is OSError
    assert "Debug" not in str(error)


@pytest.mark.parametrize(
    ("code", "cause", "words"),
    [
        (401, PermissionError, "Pass credentials by storage_options"),
        (403, PermissionError, "Pass credentials by storage_options"),
        (404, FileNotFoundError, "no such file"),
        (400, OSError, "400 Bad Request"),
    ],
)
def test_permanent_errors_are_not_retried(store: HttpStore, code: int, cause: type[OSError], words: str) -> None:
    with reader_of(store) as reader:
        reader.size("a")
        store.inject(Status(code))
        error = refusal(reader)
    assert type(error.__cause__) is cause
    assert words in str(error)
    assert store.counters.requests == 2


def test_a_link_signed_for_reads_only_has_the_size(store: HttpStore) -> None:
    store.inject(Status(403), times=1)
    with reader_of(store) as reader:
        assert reader.size("a") == NBYTES
    assert [request.method for request in store.log] == ["HEAD", "GET"]


# What is not the file


@pytest.mark.parametrize("content", [bytes(NBYTES), CONTENT[:-1], CONTENT + b"1", CONTENT[:50]])
def test_a_file_that_changes_while_it_is_read_is_noticed(store: HttpStore, content: bytes) -> None:
    with reader_of(store) as reader:
        before = reader.identity("a")
        reader.read("a", 0, 100)
        store.replace("a", content)
        if len(content) >= 5000:  # else the server has no such range
            assert "the file changed while it was being read" in str(refusal(reader))
        assert reader.identity("a") != before
        refusal(reader)  # and it stays so: what was read before is of another file
    with reader_of(store) as another:
        assert another.read("a", 0, another.size("a")) == content


def test_a_file_that_disappears_is_not_there(store: HttpStore) -> None:
    with reader_of(store) as reader:
        reader.size("a")
        store.replace("a", None)
        assert isinstance(refusal(reader).__cause__, FileNotFoundError)


def test_a_server_that_ignores_ranges_is_reported(store: HttpStore) -> None:
    store.inject(IgnoreRange())
    with reader_of(store) as reader:
        assert reader.size("a") == NBYTES
        assert "Range request not supported" in str(refusal(reader))
        # A file that is asked for as a whole is what comes.
        assert reader.read("a", 0, NBYTES) == CONTENT
        assert reader.read("sub/b", 0, 5) == b"other"


def test_another_range_than_the_one_requested_is_reported(store: HttpStore) -> None:
    with reader_of(store) as reader:
        reader.size("a")
        store.inject(Shift(3))
        assert "Requested 100..5000, got 103..5003" in str(refusal(reader))


def test_the_user_is_not_sent_where_a_redirect_leads(store: HttpStore) -> None:
    with HttpStore({}) as front:
        front.inject(Redirect(store.url.replace("127.0.0.1", "localhost")))
        url = front.url.replace("//", "//alice:hunter22@")
        with RemoteReader(url, storage_options=QUICK) as reader:
            assert reader.read("a", 5, 50) == CONTENT[5:50]
    assert {request.headers["authorization"] for request in front.log} == {"Basic YWxpY2U6aHVudGVyMjI="}
    assert not any("authorization" in request.headers for request in store.log)


def test_a_circle_of_redirects_ends(store: HttpStore) -> None:
    store.inject(Redirect(store.url))
    with reader_of(store) as reader:
        refusal(reader)


# Many at once


def test_requests_in_flight_are_bounded_however_many_threads_read() -> None:
    with (
        HttpStore({"a": CONTENT}, latency_s=0.005) as store,
        RemoteReader(store.url, concurrency=3) as reader,
        ThreadPoolExecutor(6) as pool,
    ):
        results = list(pool.map(lambda _: reader.read("a", 0, NBYTES), range(12)))
    assert results == [CONTENT] * 12
    assert store.counters.most_at_once <= 3


def test_a_closed_reader_begins_no_more_requests(store: HttpStore) -> None:
    store.inject(Stall(LIMIT_S))
    reader = RemoteReader(store.url, policy=replace(OBJECT_STORE, concurrency=1))
    reader.size("a")
    with ThreadPoolExecutor(3) as pool:
        reading = [pool.submit(reader.read, "a", 0, 100) for _ in range(3)]
        while store.counters.requests < 2:
            threading.Event().wait(0.005)
        reader.close()
        store.go_on.set()
        refused = [isinstance(each.exception(), StorageError) for each in reading]
    assert sum(refused) == 2


# Credentials

SECRETS = ("hunter22", "alice", "X-Amz-Signature", "deadbeef", "tok_123")


@pytest.mark.parametrize("fault", [None, Status(403), Status(404), Status(400), Status(503), Reset()], ids=str)
def test_credentials_are_sent_but_never_shown(store: HttpStore, fault: Disturbance | None) -> None:
    url = store.url.replace("//", "//alice:hunter22@") + "/?X-Amz-Signature=deadbeef"
    options = {**QUICK, "client_options": {"default_headers": {"X-Token": "tok_123"}}}
    with RemoteReader(url, storage_options=options) as reader:
        if fault is None:
            store.replace("a", b"")
        else:
            store.inject(fault)
        error: BaseException | None = refusal(reader)
        texts = [reader.root, repr(reader)]
        while error is not None:
            texts += [str(error), repr(error)]
            error = error.__cause__ or error.__context__
    assert [secret for secret in SECRETS if any(secret in text for text in texts)] == []
    headers = store.log[0].headers
    assert headers["authorization"] == "Basic YWxpY2U6aHVudGVyMjI="
    assert headers["x-token"] == "tok_123"


# Arguments


@pytest.mark.parametrize("url", ["http://", "https:///folder", "http://host:port/x"])
def test_a_url_without_a_server_is_refused(url: str) -> None:
    with pytest.raises(StorageError, match="reading https?:// failed, .*Check the URL"):
        RemoteReader(url)


def test_an_invalid_url_is_refused() -> None:
    with pytest.raises(StorageError, match="not a URL"):
        RemoteReader("models/llama")


def test_secrets_are_not_shown() -> None:
    options = {"secret_access_key": "hidden22", "nonsense": "x"}
    with pytest.raises(StorageError) as caught:
        RemoteReader("s3://user:hidden21@bucket/folder?sig=hidden23", storage_options=options)
    assert "hidden" not in str(caught.value)
    assert str(caught.value).startswith("s3://bucket/folder: ")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore.store", None)
    with pytest.raises(StorageError, match=r"reading s3:// needs obstore. .*shardwise\[remote\]"):
        RemoteReader("s3://bucket/folder")


@pytest.mark.parametrize("url", ["https://host/folder", "s3://bucket/folder", "memory://folder"])
def test_unknown_options_are_refused(url: str) -> None:
    with pytest.raises(StorageError, match="nonsense"):
        RemoteReader(url, storage_options={"nonsense": "x"})
    with pytest.raises(ConfigError, match="concurrency=0"):
        RemoteReader(url, concurrency=0)
