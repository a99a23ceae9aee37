"""Large writes that bypass the page cache."""

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.files.conftest import raising
from tests.support.writer_suite import put

from shardwise.core.errors import StorageError
from shardwise.files import direct_io, local_writer
from shardwise.files.local_writer import LocalWriter
from shardwise.files.storage import DISK_WRITES

BLOCK = direct_io.BLOCK_BYTES
pwritev = os.pwritev


@given(st.lists(st.binary(max_size=3 * BLOCK), max_size=8), st.integers(0, 3 * BLOCK))
def test_put_together(parts: list[bytes], start: int) -> None:
    block = memoryview(bytearray(2 * BLOCK))
    found = [
        (at, bytes(part)) for at, part in direct_io.assemble([memoryview(part) for part in parts], start, block)
    ]
    assert b"".join(part for _, part in found) == b"".join(parts)
    assert [at for at, _ in found[1:]] == [at + len(part) for at, part in found[:-1]]
    assert all(at % BLOCK == 0 for at, _ in found[1:])
    assert all(part for _, part in found)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a file can be written to around the page cache; there, blocks are put together in small steps."""
    monkeypatch.setattr(direct_io, "_STEP_BYTES", 4 * BLOCK)
    monkeypatch.setattr(local_writer, "MIN_DIRECT_BYTES", 2 * BLOCK)
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(BLOCK))
    with probe.open("rb+") as opened:
        descriptor = direct_io.open_direct(opened.fileno())
    probe.unlink()
    if descriptor is None:
        pytest.skip("no O_DIRECT here")
    os.close(descriptor)
    return tmp_path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int, int]]:
    """Whether around the page cache, where, and how much, by call."""
    found: list[tuple[bool, int, int]] = []

    def spy(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = pwritev(descriptor, buffers, offset)
        found.append((is_around(descriptor), offset, count))
        return count

    monkeypatch.setattr(os, "pwritev", spy)
    return found


def is_around(descriptor: int) -> bool:
    import fcntl

    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.mark.parametrize(
    ("start", "sizes"),
    [
        (0, [20 * BLOCK]),
        (1, [20 * BLOCK]),
        (BLOCK - 1, [1, 3 * BLOCK, 5, 0, 9 * BLOCK + 17, 100]),
        (7, [3] * (5 * BLOCK)),
        (3 * BLOCK, [2 * BLOCK]),
    ],
)
def test_whole_blocks_go_around_and_the_rest_does_not(
    folder: Path, calls: list[tuple[bool, int, int]], start: int, sizes: list[int]
) -> None:
    parts = [os.urandom(size) for size in sizes]
    content = b"".join(parts)
    stop = start + len(content)
    with LocalWriter(folder, policy=DISK_WRITES) as writer:
        writer.create("a", stop + 100)
        writer.write("a", start, [memoryview(part) for part in parts])
        writer.write("a", stop, [memoryview(b"x" * 100)])
        writer.sync("a")
    assert (folder / "a").read_bytes() == bytes(start) + content + b"x" * 100
    first, last = -(-start // BLOCK) * BLOCK, stop // BLOCK * BLOCK
    assert sum(count for is_so, _, count in calls if is_so) == last - first
    assert all(at % BLOCK == count % BLOCK == 0 for is_so, at, count in calls if is_so)
    assert not [at for is_so, at, _ in calls if not is_so and first <= at < last]


def test_few_bytes_wait_for_the_sync(folder: Path, calls: list[tuple[bool, int, int]]) -> None:
    content = bytearray(os.urandom(2 * BLOCK - 1))
    written = bytes(content)
    with LocalWriter(folder, policy=DISK_WRITES) as writer:
        writer.create("a", 2 * BLOCK)
        writer.write("a", 1, [memoryview(content)])
        content[:] = bytes(len(content))  # the caller's again
        assert calls == []
        writer.sync("a")
        assert calls == [(False, 1, 2 * BLOCK - 1)]
    assert (folder / "a").read_bytes() == b"\0" + written


def test_much_that_is_little_does_not_wait(
    folder: Path, calls: list[tuple[bool, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_writer, "MAX_DEFERRED_BYTES", 100)
    content = os.urandom(1000)
    with LocalWriter(folder, policy=DISK_WRITES) as writer:
        writer.create("a", 1000)
        for at in range(0, 1000, 40):
            writer.write("a", at, [memoryview(content[at : at + 40])])
        assert len(calls) == 24
        writer.sync("a")
    assert (folder / "a").read_bytes() == content


def test_a_tail_that_cannot_be_written_fails_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalWriter(folder, policy=DISK_WRITES) as writer:
        writer.create("a", 5)
        writer.write("a", 0, [memoryview(b"12345")])
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwritev", raising(errno.EIO))
            with pytest.raises(StorageError, match=r"writing at byte 0 failed, input/output error"):
                writer.sync("a")
        with pytest.raises(StorageError, match="could not be synced before"):
            writer.sync("a")


def test_a_policy_that_is_not_direct_never_goes_around(folder: Path, calls: list[tuple[bool, int, int]]) -> None:
    with LocalWriter(folder, policy=replace(DISK_WRITES, is_direct=False)) as writer:
        put(writer, "a", bytes(20 * BLOCK))
    assert [call[0] for call in calls] == [False]


def test_where_a_file_cannot_be_opened_so_it_is_written_as_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch, calls: list[tuple[bool, int, int]]
) -> None:
    monkeypatch.setattr(local_writer, "open_direct", lambda descriptor: None)
    content = os.urandom(20 * BLOCK)
    with LocalWriter(folder, policy=DISK_WRITES) as writer:
        put(writer, "a", content)
        put(writer, "b", content)
    assert (folder / "a").read_bytes() == (folder / "b").read_bytes() == content
    assert not any(call[0] for call in calls)


def test_a_file_that_another_save_has_replaced_is_not_written(folder: Path) -> None:
    with LocalWriter(folder, policy=DISK_WRITES) as writer:
        writer.create("a", 20 * BLOCK)
        (folder / "a").unlink()
        (folder / "a").write_bytes(b"another")
        writer.write("a", 0, [memoryview(bytes(20 * BLOCK))])
        writer.sync("a")
    assert (folder / "a").read_bytes() == b"another"


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_direct_writes_that_are_refused_are_written_through_the_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    asked = 0

    def refuse(descriptor: int, *arguments: Any) -> int:
        nonlocal asked
        if is_around(descriptor):
            asked += 1
            if asked > 1:
                raise OSError(code, os.strerror(code))
        return pwritev(descriptor, *arguments)

    monkeypatch.setattr(os, "pwritev", refuse)
    content = os.urandom(20 * BLOCK + 5)
    with LocalWriter(folder, policy=DISK_WRITES) as writer:
        put(writer, "a", content)
        put(writer, "b", content)
    assert (folder / "a").read_bytes() == (folder / "b").read_bytes() == content
    assert asked == 2  # nor is it tried again


def test_a_fault_on_the_way_around_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, *arguments: Any) -> int:
        if is_around(descriptor):
            raise OSError(errno.EIO, "broken")
        return pwritev(descriptor, *arguments)

    monkeypatch.setattr(os, "pwritev", fail)
    with LocalWriter(folder, policy=DISK_WRITES) as writer:
        writer.create("a", 20 * BLOCK)
        with pytest.raises(StorageError, match=r"a in .*writing at byte 0 failed, broken \(errno 5\)"):
            writer.write("a", 0, [memoryview(bytes(20 * BLOCK))])


@pytest.mark.parametrize("most", [100, 512, BLOCK, 3 * BLOCK])
def test_short_writes_are_continued(folder: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    def short(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if not is_around(descriptor):
            return pwritev(descriptor, buffers, offset)
        # A disk takes whole blocks; what it tells may be less than that.
        return min(most, pwritev(descriptor, buffers, offset))

    monkeypatch.setattr(os, "pwritev", short)
    content = os.urandom(11 * BLOCK)
    with LocalWriter(folder, policy=DISK_WRITES) as writer:
        put(writer, "a", content)
    assert (folder / "a").read_bytes() == content
