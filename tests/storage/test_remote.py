"""What can go wrong between a reader and a server, and what becomes of it."""

from __future__ import annotations

import re
import threading
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

import pytest
from tests.harness import HttpStore
from tests.harness.http_store import (
    Disturbance,
    IgnoreRange,
    Redirect,
    Reset,
    Shift,
    Stall,
    Status,
    Truncate,
)

from shardwise.errors import ConfigError, StorageError
from shardwise.storage.policies import OBJECT_STORE
from shardwise.storage.reading import remote_reader as remote
from shardwise.storage.reading import transport as retries
from shardwise.storage.reading.remote_reader import RemoteReader
from shardwise.storage.reading.transport import Retries

CONTENT = bytes(range(251)) * 400
NBYTES = len(CONTENT)
QUICK = Retries(attempts=4, first_wait_s=0.001, longest_wait_s=0.01, timeout_s=10.0)
IMPATIENT = replace(QUICK, timeout_s=0.25)


@pytest.fixture
def store() -> Iterator[HttpStore]:
    with HttpStore({"a": CONTENT, "sub/b": b"other"}) as store:
        yield store


def reader_of(store: HttpStore, *, pieces: int = 1, quick: Retries = QUICK, **options: object) -> RemoteReader:
    """A reader that asks for the whole file in so many requests."""
    policy = replace(OBJECT_STORE, request_bytes=-(-NBYTES // pieces))
    return RemoteReader(store.url, policy=policy, retries=quick, **options)  # type: ignore[arg-type]


def patience_for(fault: Disturbance) -> Retries:
    """Long enough for a machine that is busy with other things, but where waiting is what is tested."""
    return IMPATIENT if isinstance(fault, Stall) else QUICK


def refusal(reader: RemoteReader, start: int = 100, stop: int = 5000) -> StorageError:
    with pytest.raises(StorageError) as caught:
        reader.read("a", start, stop)
    return caught.value


# What passes


@pytest.mark.parametrize(
    "fault",
    [
        *[Status(code) for code in (408, 429, 500, 502, 503, 504)],
        Stall(30, after_bytes=100),
        Stall(30),
        Truncate(100),
        Truncate(0),
        Reset(0),
        Reset(100),
    ],
    ids=str,
)
def test_what_passes_is_tried_again(store: HttpStore, fault: Disturbance) -> None:
    with reader_of(store, quick=patience_for(fault)) as reader:
        assert reader.size("a") == NBYTES
        store.inject(fault, times=2)
        assert reader.read("a", 100, 5000) == CONTENT[100:5000]
        assert (reader.retried, reader.reads, reader.bytes_read) == (2, 4, 4900)
    assert store.counters.requests == 4


@pytest.mark.parametrize("fault", [Status(503), Stall(30), Reset(0)], ids=str)
def test_looking_at_a_file_is_tried_again_too(store: HttpStore, fault: Disturbance) -> None:
    store.inject(fault, times=2)
    with reader_of(store, quick=patience_for(fault)) as reader:
        assert reader.size("a") == NBYTES
        assert (reader.retried, reader.reads) == (2, 3)


def test_only_the_request_that_failed_is_made_again(store: HttpStore) -> None:
    with reader_of(store, pieces=5) as reader:
        reader.size("a")
        store.inject(Status(503), skip=2, times=1)
        assert reader.read("a", 0, NBYTES) == CONTENT
        assert (reader.reads, reader.retried) == (1 + 5 + 1, 1)


def test_a_connection_that_the_server_ended_while_idle_is_no_failure(store: HttpStore) -> None:
    with reader_of(store) as reader:
        reader.read("a", 0, 10)
        store.hang_up()
        assert reader.read("a", 0, 10) == CONTENT[:10]
        assert reader.retried == 0
    assert store.counters.connections == 2


def test_a_server_that_resets_in_place_of_answering_is_tried_again_on_fresh_connections(store: HttpStore) -> None:
    with reader_of(store) as reader:
        reader.size("a")
        store.inject(Reset(), times=3)
        assert reader.read("a", 0, 10) == CONTENT[:10]
        assert reader.retried == 2  # the first reset may have been that of an idle connection
        store.inject(Reset())
        assert "4 attempts" in str(refusal(reader))


def test_connections_are_used_again(store: HttpStore) -> None:
    with reader_of(store) as reader:
        for _ in range(10):
            reader.read("a", 0, 1000)
    assert (store.counters.requests, store.counters.connections) == (11, 1)


# What does not pass


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (Status(500), "the server answered 500 Internal Server Error"),
        (Status(429), "the server answered 429 Too Many Requests"),
        (Stall(30, after_bytes=10), r"nothing came for 0\.25 s"),
        (Truncate(17), "the body ended after 17 of 4900 bytes"),
        (Reset(0), "the connection failed"),
    ],
    ids=str,
)
def test_what_lasts_is_told_with_everything_one_needs(store: HttpStore, fault: Disturbance, cause: str) -> None:
    with reader_of(store, quick=patience_for(fault)) as reader:
        reader.size("a")
        store.inject(fault)
        error = refusal(reader)
        assert reader.reads == 1 + QUICK.attempts
    expected = rf"a in {store.url}: bytes 100\.\.5000 failed in 4 attempts over .* s, at last because {cause}"
    assert re.search(expected, str(error)), str(error)
    assert "Retries(attempts=..., timeout_s=...)" in str(error)
    assert isinstance(error.__cause__, OSError)
    assert store.counters.requests == 1 + QUICK.attempts


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (401, PermissionError),
        (403, PermissionError),
        (404, FileNotFoundError),
        (410, FileNotFoundError),
        (400, OSError),
    ],
)
def test_what_will_not_pass_is_not_tried_again(store: HttpStore, code: int, cause: type[OSError]) -> None:
    store.inject(Status(code))
    with reader_of(store) as reader:
        error = refusal(reader)
        assert (reader.reads, reader.retried) == (1, 0)
    assert type(error.__cause__) is cause
    assert f"a in {store.url}" in str(error)
    assert str(code) in str(error)
    assert store.counters.requests == 1


def test_refused_access_asks_for_credentials(store: HttpStore) -> None:
    store.inject(Status(403))
    with reader_of(store) as reader:
        assert "pass credentials that may read it (storage_options)" in str(refusal(reader))


def test_nobody_listens() -> None:
    with HttpStore({}) as gone:
        pass
    with reader_of(gone) as reader:
        error = refusal(reader)
    assert "4 attempts" in str(error)
    assert "ConnectionRefusedError" in str(error)


def test_one_attempt_is_one_attempt(store: HttpStore) -> None:
    store.inject(Status(503))
    with reader_of(store, quick=replace(QUICK, attempts=1)) as reader:
        assert "failed in 1 attempt over" in str(refusal(reader))
    assert store.counters.requests == 1


def test_bytes_that_trickle_in_are_given_up(store: HttpStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_SLOWEST_BYTES_PER_S", 1e9)
    monkeypatch.setattr("shardwise.storage.reading.http_transport._RECEIVE_BYTES", 1000)
    with (
        HttpStore({"a": CONTENT}, bytes_per_s=100_000) as slow,
        reader_of(slow, quick=replace(IMPATIENT, attempts=2)) as reader,
    ):
        begun = time.monotonic()
        error = refusal(reader, 0, NBYTES)
        assert time.monotonic() - begun < 1.5  # the whole would take a second per attempt
    assert "of 100400 bytes came in time" in str(error)


# Waiting


def test_the_server_says_when_to_come_back(store: HttpStore) -> None:
    with reader_of(store, quick=replace(QUICK, longest_wait_s=5.0)) as reader:
        reader.size("a")
        store.inject(Status(429, retry_after_s=1), times=1)
        begun = time.monotonic()
        reader.read("a", 0, 10)
        assert 1.0 <= time.monotonic() - begun < 2.0


def test_a_server_that_says_tomorrow_is_not_believed(store: HttpStore) -> None:
    with reader_of(store) as reader:
        reader.size("a")
        store.inject(Status(503, retry_after_s=86400), times=1)
        begun = time.monotonic()
        reader.read("a", 0, 10)
        assert time.monotonic() - begun < 1.0


def test_waits_grow_and_are_bounded() -> None:
    patience = Retries(first_wait_s=0.5, longest_wait_s=20.0)
    assert [patience.wait_s(failures, 1.0) for failures in (1, 2, 3, 6, 7, 2000)] == [0.5, 1, 2, 16, 20, 20]
    assert [patience.wait_s(3, chance) for chance in (0.0, 0.25, 0.5)] == [0, 0.5, 1]
    assert patience.wait_s(1, 1.0, retry_after_s=3) == 3
    assert patience.wait_s(1, 1.0, retry_after_s=300) == 20


@pytest.mark.parametrize(
    ("field", "value"),
    [("attempts", 0), ("first_wait_s", -1.0), ("longest_wait_s", float("nan")), ("timeout_s", 0.0)],
)
def test_a_number_out_of_bounds_is_named(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        replace(QUICK, **{field: value})


# What is not the file


@pytest.mark.parametrize("content", [bytes(NBYTES), CONTENT[:-1], CONTENT + b"1", CONTENT[:50]])
def test_a_file_that_changes_while_it_is_read_is_noticed(store: HttpStore, content: bytes) -> None:
    with reader_of(store) as reader:
        before = reader.identity("a")
        reader.read("a", 0, 100)
        store.replace("a", content)
        requests = store.counters.requests
        error = refusal(reader)
        assert "the file changed while it was being read" in str(error)
        assert store.counters.requests == requests + 1  # once is enough
        assert reader.identity("a") != before
        refusal(reader)  # and it stays so: what was read before is of another file
    with reader_of(store) as another:
        assert another.read("a", 0, another.size("a")) == content


def test_a_file_that_changes_in_the_middle_of_one_call_is_noticed(store: HttpStore) -> None:
    with HttpStore({"a": CONTENT}, latency_s=0.005) as slow, reader_of(slow, pieces=40, concurrency=1) as reader:
        reader.size("a")
        changer = threading.Timer(0.05, slow.replace, ("a", bytes(NBYTES)))
        changer.start()
        error = refusal(reader, 0, NBYTES)
        changer.join()
        assert "changed while it was being read" in str(error)
        assert slow.counters.requests < 40


def test_a_file_that_disappears_is_not_there(store: HttpStore) -> None:
    with reader_of(store) as reader:
        reader.size("a")
        store.replace("a", None)
        assert isinstance(refusal(reader).__cause__, FileNotFoundError)


def test_a_server_that_ignores_ranges_is_reported(store: HttpStore) -> None:
    store.inject(IgnoreRange())
    with reader_of(store) as reader:
        assert reader.size("a") == NBYTES
        error = refusal(reader)
        assert "the server ignores Range" in str(error)
        assert reader.retried == 0
        # A small file is asked for as a whole, and then that is what comes.
        assert reader.read("a", 0, NBYTES) == CONTENT
        assert reader.read("sub/b", 0, 5) == b"other"


def test_another_range_than_the_one_asked_for_is_reported(store: HttpStore) -> None:
    with reader_of(store) as reader:
        reader.size("a")
        store.inject(Shift(3))
        assert "asked for bytes 100-4999, the server sends bytes 103-5002" in str(refusal(reader))


# Redirects


def test_redirects_are_followed_remembered_and_given_no_credentials(store: HttpStore) -> None:
    with HttpStore({}) as front:
        front.inject(Redirect(store.url))
        with reader_of(front, storage_options={"headers": {"Authorization": "Bearer abc", "X-Key": "k"}}) as reader:
            for _ in range(3):
                assert reader.read("a", 5, 50) == CONTENT[5:50]
    assert [request.headers["authorization"] for request in front.log] == ["Bearer abc"]
    assert len(store.log) == 4
    assert not any({"authorization", "x-key"} & set(request.headers) for request in store.log)


def test_a_link_that_expires_is_asked_for_again(store: HttpStore) -> None:
    with HttpStore({}) as front, reader_of(front) as reader:
        front.inject(Redirect(store.url))
        reader.read("a", 5, 50)
        store.inject(Status(403), times=1)
        assert reader.read("a", 5, 50) == CONTENT[5:50]
        assert front.counters.requests == 2


def test_a_circle_of_redirects_ends(store: HttpStore) -> None:
    store.inject(Redirect(store.url))
    with reader_of(store) as reader:
        assert "more than 8 redirects" in str(refusal(reader))


def test_a_proxy_is_asked_in_the_place_of_the_server(store: HttpStore) -> None:
    options = {"proxy": store.url.replace("//", "//alice:hunter22@"), "headers": {"X-Key": "k"}}
    with RemoteReader("http://nowhere.invalid/", storage_options=options, retries=QUICK) as reader:
        assert reader.read("a", 5, 50) == CONTENT[5:50]
        assert reader.read("sub/b", 0, 5) == b"other"
    headers = store.log[0].headers
    assert headers["host"] == "nowhere.invalid:80"
    assert headers["proxy-authorization"] == "Basic YWxpY2U6aHVudGVyMjI="
    assert headers["x-key"] == "k"


def test_a_proxy_that_is_spoken_to_otherwise_is_refused() -> None:
    with pytest.raises(StorageError, match=r"https://proxy: .*write http://host:port"):
        RemoteReader("http://host", storage_options={"proxy": "https://proxy"})


# Many at once


def test_requests_in_flight_are_bounded_however_many_threads_read() -> None:
    with HttpStore({"a": CONTENT}, latency_s=0.005) as store, reader_of(store, pieces=10, concurrency=3) as reader:
        with ThreadPoolExecutor(6) as pool:
            results = list(pool.map(lambda _: reader.read("a", 0, NBYTES), range(6)))
        assert results == [CONTENT] * 6
        assert store.counters.most_at_once == 3
        assert store.counters.connections == 3  # each carries one request at a time


def test_a_long_range_is_asked_for_in_requests_of_equal_size(store: HttpStore) -> None:
    with reader_of(store, pieces=4) as reader:
        reader.size("a")
        reader.read("a", 1, NBYTES)
    asked = sorted((request.start, request.stop) for request in store.log[1:])
    assert [stop - start for start, stop in asked] == [25100, 25100, 25100, 25099]
    assert [start for start, _ in asked[1:]] == [stop for _, stop in asked[:-1]]


def test_a_request_that_fails_ends_its_call_but_not_before_the_others_are_done() -> None:
    buffer = bytearray(NBYTES)
    with HttpStore({"a": CONTENT}, latency_s=0.01) as store, reader_of(store, pieces=8, concurrency=2) as reader:
        reader.size("a")
        store.inject(Status(400), skip=1, times=1)
        with pytest.raises(StorageError, match="400 Bad Request"):
            reader.read_into("a", 0, memoryview(buffer))
        left = bytes(buffer)
        time.sleep(0.05)
        assert bytes(buffer) == left  # nobody writes to it any more
    assert 1 + 2 <= store.counters.requests <= 1 + 5


def test_a_request_that_fails_ends_the_others_in_their_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.storage.reading.http_transport._RECEIVE_BYTES", 1000)
    with HttpStore({"a": CONTENT}, bytes_per_s=50_000) as store, reader_of(store, pieces=2) as reader:
        reader.size("a")
        store.inject(Status(400), skip=1, times=1)
        begun = time.monotonic()
        assert "400 Bad Request" in str(refusal(reader, 0, NBYTES))
        assert time.monotonic() - begun < 0.7  # the other half takes a second


def test_an_interrupted_call_leaves_nobody_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def interrupted(requests: Sequence[Future[None]]) -> object:
        calls.append(len(requests))
        if len(calls) == 1:
            while store.counters.requests < 2:  # until one is under way
                time.sleep(0.005)
            raise KeyboardInterrupt
        return wait(requests)

    monkeypatch.setattr(remote, "wait", interrupted)
    buffer = bytearray(NBYTES)
    with HttpStore({"a": CONTENT}, latency_s=0.05) as store, reader_of(store, pieces=2) as reader:
        reader.size("a")
        with pytest.raises(KeyboardInterrupt):
            reader.read_into("a", 0, memoryview(buffer))
        left = bytes(buffer)
        time.sleep(0.2)
        assert bytes(buffer) == left
        assert reader.read("a", 0, NBYTES) == CONTENT


def test_memory_is_bounded() -> None:
    nbytes = 24 << 20
    with HttpStore({"a": bytes(nbytes)}) as store:
        policy = replace(OBJECT_STORE, request_bytes=4 << 20, concurrency=4)
        whole, rows = bytearray(nbytes), [bytearray(1000) for _ in range(5000)]
        with RemoteReader(store.url, policy=policy) as reader:
            reader.size("a")
            views = [memoryview(row) for row in rows]
            tracemalloc.start()
            reader.read_into("a", 0, memoryview(whole))
            reader.read_vectored("a", 7, views)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    # 4 requests, each with a stage of 256 KiB, and some memoryviews.
    assert peak < 4 << 20


# Closing


@pytest.mark.parametrize("fault", [Stall(30), Status(503)], ids=str)
def test_closing_ends_what_waits(store: HttpStore, fault: Disturbance) -> None:
    patient = Retries(attempts=100, first_wait_s=60, longest_wait_s=60, timeout_s=0.3)
    reader = reader_of(store, quick=patient)
    reader.size("a")
    store.inject(fault)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(reader.read, "a", 0, 100)
        while store.counters.requests < 2:
            time.sleep(0.005)
        begun = time.monotonic()
        reader.close()
        with pytest.raises(StorageError, match="the reader is closed"):
            reading.result(10)
        assert time.monotonic() - begun < 2


# Credentials

SECRETS = ("hunter22", "alice", "X-Amz-Signature", "deadbeef", "tok_123")


@pytest.mark.parametrize("fault", [None, Status(403), Status(404), Status(400), Status(503), Reset()], ids=str)
def test_credentials_are_sent_but_never_shown(store: HttpStore, fault: Disturbance | None) -> None:
    url = store.url.replace("//", "//alice:hunter22@") + "/?X-Amz-Signature=deadbeef"
    options = {"headers": {"X-Token": "tok_123"}}
    with RemoteReader(url, retries=QUICK, storage_options=options) as reader:
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
    with pytest.raises(StorageError, match="write it as https://host/folder"):
        RemoteReader(url)


def test_what_is_no_url_is_refused() -> None:
    with pytest.raises(StorageError, match="not a URL"):
        RemoteReader("models/llama")


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="anon.*it takes headers, ssl_context and proxy"):
        RemoteReader("https://host/folder", storage_options={"anon": True})
    with pytest.raises(ConfigError, match="ssl_context is a bool"):
        RemoteReader("https://host/folder", storage_options={"ssl_context": False})
    with pytest.raises(ConfigError, match="concurrency=0"):
        RemoteReader("https://host/folder", concurrency=0)
