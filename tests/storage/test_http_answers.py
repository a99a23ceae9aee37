"""Answers that no good server gives, word by word, and the parts of which a request is made."""

from __future__ import annotations

import itertools
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import StorageError
from shardwise.storage.reading.http_answers import retry_after_s
from shardwise.storage.reading.remote_reader import RemoteReader, _pieces
from shardwise.storage.reading.transport import Retries

QUICK = Retries(attempts=2, first_wait_s=0.001, longest_wait_s=0.01, timeout_s=1.0)
STATE = b"HTTP/1.1 206 OK\r\nContent-Length: 1\r\nContent-Range: bytes 0-0/100\r\nETag: x\r\n\r\na"
CHUNKED = b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-9/100\r\nTransfer-Encoding: chunked\r\n\r\n"


class Script:
    """A server that gives one answer after the other, whatever it is asked, and then the last one for ever."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self._answers: Iterator[bytes] = iter(())
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def gives(self, answers: Sequence[bytes]) -> None:
        self._answers = itertools.chain(answers, itertools.repeat(answers[-1]))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self.asked.append(connection.recv(65536))
                connection.sendall(next(self._answers))


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()
    yield script
    script.close()


def refusal(script: Script, *answers: bytes, stop: int = 10) -> str:
    script.gives(answers)
    with RemoteReader(script.url, retries=QUICK) as reader, pytest.raises(StorageError) as caught:
        reader.read("a", 0, stop)
    return str(caught.value)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 206 OK\r\nContent-Length: 1\r\n\r\na",
        b"HTTP/1.1 206 OK\r\nContent-Length: 1\r\nContent-Range: bytes 0-0/*\r\n\r\na",
        b"HTTP/1.1 200 OK\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    ],
)
def test_a_server_that_does_not_tell_the_size(script: Script, answer: bytes) -> None:
    assert "does not tell the file's size" in refusal(script, answer)
    assert len(script.asked) == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"nonsense\r\n\r\n", "in 2 attempts .*BadStatusLine"),
        (b"", "in 2 attempts .*RemoteDisconnected"),
        (b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-9/100\r\nContent-Length: 9\r\n\r\n", "announces 9 bytes"),
        (
            CHUNKED + b"b\r\n01234567890\r\n0\r\n\r\n",
            "the body is longer than the 10 bytes asked for",
        ),
        (
            CHUNKED + b"5\r\n01234\r\n0\r\n\r\n",
            "in 2 attempts .*the body ended after 5 of 10 bytes",
        ),
        (
            b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-9/100\r\nContent-Encoding: gzip\r\n\r\n",
            "the server compresses the file",
        ),
        (b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-9/101\r\n\r\n", "100 bytes before, 101 now"),
        (b"HTTP/1.1 206 OK\r\n\r\n0123456789", "the server sends None"),
        (b"HTTP/1.1 416 No\r\n\r\n", "changed while it was being read"),
        (b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n", "status 302 leads nowhere"),
        (
            b"HTTP/1.1 302 Found\r\nLocation: ftp://elsewhere/a\r\nContent-Length: 0\r\n\r\n",
            "status 302 leads nowhere",
        ),
    ],
)
def test_an_answer_that_is_not_the_range_is_an_error(script: Script, answer: bytes, words: str) -> None:
    assert re.search(words, refusal(script, STATE, answer))


def test_chunks_that_make_up_the_range_are_the_range(script: Script) -> None:
    script.gives([STATE, CHUNKED + b"3\r\nabc\r\n7\r\ndefghij\r\n0\r\n\r\n"])
    with RemoteReader(script.url, retries=QUICK) as reader:
        assert reader.read("a", 0, 10) == b"abcdefghij"


def test_what_another_server_of_a_cluster_tells_in_another_way_is_not_compared(script: Script) -> None:
    head = b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-1/100\r\nLast-Modified: then\r\nContent-Length: 2\r\n\r\nab"
    script.gives([STATE, head])
    with RemoteReader(script.url, retries=QUICK) as reader:
        assert reader.read("a", 0, 2) == b"ab"


def test_what_is_asked(script: Script) -> None:
    script.gives([b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"])
    url = f"{script.url}/a folder?x=1&y=/2"
    with RemoteReader(url, retries=QUICK) as reader, pytest.raises(StorageError, match="no such file"):
        reader.size("b#c%.d/ä")
    lines = script.asked[0].decode().splitlines()
    assert lines[0] == "GET /a%20folder/b%23c%25.d/%C3%A4?x=1&y=/2 HTTP/1.1"
    assert "Range: bytes=0-0" in lines
    assert "Accept-Encoding: identity" in lines


def test_when_to_come_back() -> None:
    assert retry_after_s(None) is None
    assert retry_after_s("17") == 17
    assert retry_after_s("soon") is None
    assert retry_after_s("-5") is None
    in_a_minute = datetime.now(UTC) + timedelta(seconds=60)
    assert 55 < (retry_after_s(format_datetime(in_a_minute, usegmt=True)) or 0) <= 60
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=20),
    start=st.integers(0, 1000),
    request_bytes=st.integers(1, 100),
)
def test_requests_tile_the_range_in_order_and_are_about_equal(
    sizes: list[int], start: int, request_bytes: int
) -> None:
    nbytes = sum(sizes)
    content = bytes(number % 256 for number in range(nbytes))
    targets = [bytearray(size) for size in sizes]
    pieces = _pieces(start, [memoryview(target) for target in targets], request_bytes)
    lengths = [sum(part.nbytes for part in parts) for _, parts in pieces]
    assert [position for position, _ in pieces] == list(itertools.accumulate(lengths[:-1], initial=start))
    assert sum(lengths) == nbytes
    assert len(lengths) <= -(-nbytes // request_bytes)
    assert max(lengths) <= request_bytes
    assert all(length == lengths[0] for length in lengths[:-1])
    position = 0
    for _, parts in pieces:
        for part in parts:
            assert part.nbytes
            part[:] = content[position : position + part.nbytes]
            position += part.nbytes
    assert b"".join(targets) == content
