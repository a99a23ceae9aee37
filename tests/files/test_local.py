"""Local files: short reads, descriptors, links, permissions."""

import errno
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
from tests.files.conftest import raising
from tests.support.files import open_descriptors
from tests.support.local_ranks import LIMIT_S

from shardwise.core.errors import StorageError
from shardwise.files import local_reader
from shardwise.files.local_reader import LocalReader
from shardwise.files.storage import LOCAL, NETWORK_FILE_SYSTEM, ReadPolicy

CONTENT = bytes(range(251)) * 60
preadv = os.preadv


def write(folder: Path, count: int) -> list[str]:
    names = [f"f{number:03}" for number in range(count)]
    for number, name in enumerate(names):
        (folder / name).write_bytes(bytes([number]) * 100)
    return names


@pytest.mark.parametrize("most", [1, 7, 100, 4096])
def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    short = mock.Mock(side_effect=lambda descriptor, given, at: preadv(descriptor, [given[0][:most]], at))
    monkeypatch.setattr(os, "preadv", short)
    buffers = [bytearray(size) for size in (3, 0, 1000, 5, 250, 2000)]
    with LocalReader(tmp_path) as reader:
        reader.read_vectored("a", 17, [memoryview(buffer) for buffer in buffers])
        assert reader.reads == short.call_count
    assert b"".join(buffers) == CONTENT[17 : 17 + 3258]
    assert short.call_count >= 3258 / most


def test_a_read_is_at_most_the_limit_of_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    spy = mock.Mock(side_effect=preadv)
    monkeypatch.setattr(os, "preadv", spy)
    monkeypatch.setattr(local_reader, "CALL_BYTES", 1000)
    monkeypatch.setattr(local_reader, "CALL_BUFFERS", 8)
    buffers = [bytearray(3) for _ in range(500)] + [bytearray(5000)]
    with LocalReader(tmp_path) as reader:
        reader.read_vectored("a", 0, [memoryview(buffer) for buffer in buffers])
    assert b"".join(buffers) == CONTENT[:6500]
    asked = [call.args[1] for call in spy.call_args_list]
    assert max(map(len, asked)) == 8
    assert max(sum(buffer.nbytes for buffer in given) for given in asked) == 1000


def test_an_input_output_error_names_file_and_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    monkeypatch.setattr(os, "preadv", raising(errno.EIO))
    with LocalReader(tmp_path) as reader, pytest.raises(StorageError, match=r"a in .* byte 40 .*errno 5"):
        reader.read("a", 40, 50)


def test_a_denied_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    with LocalReader(tmp_path) as reader:
        monkeypatch.setattr(os, "open", raising(errno.EACCES))
        for ask in (lambda: reader.size("a"), lambda: reader.read("a", 0, 1)):
            with pytest.raises(StorageError, match=r"a in .*permission denied") as caught:
                ask()
            assert isinstance(caught.value.__cause__, PermissionError)


def test_a_file_that_shrinks_while_it_is_read_is_truncated(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    with LocalReader(tmp_path) as reader:
        assert reader.size("a") == len(CONTENT)
        os.truncate(tmp_path / "a", 1000)
        with pytest.raises(StorageError, match=r"a in .* bytes 500\.\.2000 .* ends at byte 1000"):
            reader.read_into("a", 500, memoryview(bytearray(1500)))


def test_the_root_must_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    for root in (tmp_path / "absent", tmp_path / "a"):
        with pytest.raises(StorageError, match="no such directory"):
            LocalReader(root)


def test_a_relative_root_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "a").write_bytes(b"1")
    monkeypatch.chdir(tmp_path)
    with LocalReader("here") as reader:
        monkeypatch.chdir("/")
        assert reader.read("a", 0, 1) == b"1"
        assert reader.root == str(tmp_path / "here")


def test_folders_and_pipes_are_not_files(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with LocalReader(tmp_path) as reader:
        before = open_descriptors()
        for name in ("folder", "pipe"):
            with pytest.raises(StorageError, match=f"{name} in .*not a regular file"):
                reader.size(name)
        assert open_descriptors() == before
        assert reader.list() == []


def test_links_are_followed_out_of_the_root(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "b10b").write_bytes(CONTENT)
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/b10b")
    with LocalReader(tmp_path / "snapshot") as reader:
        assert reader.list() == ["model.safetensors"]
        assert reader.size("model.safetensors") == len(CONTENT)
        assert reader.read("model.safetensors", 3, 9) == CONTENT[3:9]


def test_a_link_to_nothing_is_explained(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("../blobs/pruned")
    with LocalReader(tmp_path) as reader:
        assert reader.list() == []
        with pytest.raises(StorageError, match=r"a link to \.\./blobs/pruned") as caught:
            reader.size("a")
        assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_hidden_folders_are_not_listed_but_hidden_files_are(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"")
    (tmp_path / ".metadata").write_bytes(b"")
    with LocalReader(tmp_path) as reader:
        assert reader.list() == [".metadata"]


def test_a_name_that_no_file_system_takes_is_refused(tmp_path: Path) -> None:
    with LocalReader(tmp_path) as reader, pytest.raises(StorageError, match=r"\\ud800.*cannot be encoded"):
        reader.size("\ud800")


def test_descriptors_are_bounded_and_closed(tmp_path: Path) -> None:
    names = write(tmp_path, 50)
    before = open_descriptors()
    with LocalReader(tmp_path, max_open_files=4) as reader:
        for _ in range(2):
            for number, name in enumerate(names):
                assert reader.read(name, 0, 100) == bytes([number]) * 100
                assert open_descriptors() <= before + 4
        assert reader.files_opened == 100
    assert open_descriptors() == before


def test_a_descriptor_in_use_survives_eviction_and_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = write(tmp_path, 4)
    started, go_on = threading.Event(), threading.Event()

    def slow(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            started.set()
            assert go_on.wait(LIMIT_S)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)
    before = open_descriptors()
    reader = LocalReader(tmp_path, max_open_files=1)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(reader.read, names[0], 0, 100)
        started.wait()
        for name in names[1:]:
            reader.read(name, 0, 100)  # evicts what is idle
        reader.close()
        go_on.set()
        assert reading.result() == bytes(100)
    assert open_descriptors() == before


def test_many_threads_and_few_descriptors(tmp_path: Path) -> None:
    names = write(tmp_path, 16)
    before = open_descriptors()
    with LocalReader(tmp_path, max_open_files=2) as reader, ThreadPoolExecutor(8) as pool:
        jobs = [number % 16 for number in range(800)]
        results = list(pool.map(lambda number: reader.read(names[number], 0, 100), jobs))
        assert results == [bytes([number]) * 100 for number in jobs]
        assert reader.reads == 800
        assert open_descriptors() <= before + 2
    assert open_descriptors() == before


def _rewrite(path: Path) -> None:
    later = path.stat().st_mtime_ns + 10_000_000
    path.write_bytes(bytes(len(CONTENT)))
    os.utime(path, ns=(later, later))


def _truncate(path: Path) -> None:
    status = path.stat()
    os.truncate(path, len(CONTENT) - 1)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _replace(path: Path) -> None:
    status = path.stat()
    fresh = path.with_name("fresh")
    fresh.write_bytes(bytes(len(CONTENT)))
    os.utime(fresh, ns=(status.st_atime_ns, status.st_mtime_ns))
    fresh.replace(path)


@pytest.mark.parametrize("policy", [LOCAL, NETWORK_FILE_SYSTEM])
@pytest.mark.parametrize("change", [_rewrite, _truncate, _replace])
def test_a_file_changed_while_it_is_read_has_another_identity(
    tmp_path: Path, change: Callable[[Path], None], policy: ReadPolicy
) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    with LocalReader(tmp_path, policy=policy) as reader:
        before = reader.identity("a")
        reader.read("a", 0, 100)
        change(tmp_path / "a")
        reader.read("a", 100, 200)
        assert reader.identity("a") != before


def test_a_file_replaced_before_it_was_read_is_distinguished_from_its_successor(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    with LocalReader(tmp_path) as reader, LocalReader(tmp_path) as later:
        reader.read("a", 0, 100)
        _replace(tmp_path / "a")
        assert "replaced by" in reader.identity("a")
        assert reader.identity("a") != later.identity("a")


def test_a_file_removed_while_it_is_read_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    with LocalReader(tmp_path) as reader:
        reader.read("a", 0, 100)
        (tmp_path / "a").unlink()
        with pytest.raises(StorageError, match="a in .*no such file") as caught:
            reader.identity("a")
        assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_the_identity_on_a_network_file_system_holds_nothing_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    status = (tmp_path / "a").stat()
    with LocalReader(tmp_path, policy=NETWORK_FILE_SYSTEM) as reader:
        assert reader.identity("a") == f"{len(CONTENT)} bytes, changed at {status.st_mtime_ns} ns"
