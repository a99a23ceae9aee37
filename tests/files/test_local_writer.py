"""Writing to a disk: short writes, full disks, links, crashes."""

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tests.files.conftest import mounted, raising
from tests.support.files import open_descriptors, small_file_system
from tests.support.writer_suite import put

from shardwise.core.errors import StorageError
from shardwise.files import local_reader
from shardwise.files.local_writer import LocalWriter, open_writer
from shardwise.files.storage import DISK_WRITES, LOCAL_WRITES, NETWORK_FILE_SYSTEM_WRITES

CONTENT = bytes(range(251)) * 60
pwritev = os.pwritev


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with small_file_system(tmp_path / "disk", "1m") as folder:
        yield folder


def test_a_write_that_ends_during_a_sync_waits_for_the_next_sync(tmp_path: Path) -> None:
    class Synced(LocalWriter):
        def _defer(self, file: str, *others: Any) -> None:
            self.sync(file)  # as another thread may, between the beginning and the end of a write
            super()._defer(file, *others)

    with Synced(tmp_path, policy=DISK_WRITES) as writer:
        put(writer, "a", CONTENT)
    assert (tmp_path / "a").read_bytes() == CONTENT


# ── calls that do less than asked ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("most", [1, 7, 100, 4096])
def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    short = mock.Mock(side_effect=lambda descriptor, given, at: pwritev(descriptor, [given[0][:most]], at))
    monkeypatch.setattr(os, "pwritev", short)
    parts = [CONTENT[:size] for size in (3, 0, 1000, 5, 250, 2000)]
    with LocalWriter(tmp_path) as writer:
        put(writer, "a", *parts)
    assert (tmp_path / "a").read_bytes() == b"".join(parts)
    assert short.call_count >= 3258 / most


def test_one_call_never_brings_more_than_linux_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = mock.Mock(side_effect=pwritev)
    monkeypatch.setattr(os, "pwritev", spy)
    monkeypatch.setattr(local_reader, "CALL_BYTES", 1000)
    monkeypatch.setattr(local_reader, "CALL_BUFFERS", 8)
    parts = [CONTENT[3 * n : 3 * n + 3] for n in range(500)] + [CONTENT[1500:6500]]
    with LocalWriter(tmp_path, policy=LOCAL_WRITES) as writer:
        put(writer, "a", *parts)
    assert (tmp_path / "a").read_bytes() == CONTENT[:6500]
    asked = [call.args[1] for call in spy.call_args_list]
    assert max(map(len, asked)) == 8
    assert max(sum(buffer.nbytes for buffer in given) for given in asked) == 1000


def test_a_file_system_that_takes_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *arguments: 0)
    with LocalWriter(tmp_path) as writer, pytest.raises(StorageError, match=r"a in .* at byte 0 failed, .*nothing"):
        put(writer, "a", CONTENT)


# ── room on the disk ──────────────────────────────────────────────────────────────────────────────


def test_space_is_set_aside_when_a_file_is_created(tmp_path: Path) -> None:
    with LocalWriter(tmp_path) as writer:
        writer.create("a", 1 << 20)
        status = (tmp_path / "a").stat()
        assert (status.st_size, status.st_blocks * 512) == (1 << 20, 1 << 20)


def test_a_full_disk_is_reported_when_a_file_is_created(small_disk: Path) -> None:
    with LocalWriter(small_disk) as writer:
        put(writer, "a", CONTENT)
        before = open_descriptors()
        words = r"b in .*2\.00 MiB failed, no space left on device .*Free some space"
        with pytest.raises(StorageError, match=words):
            writer.create("b", 2 << 20)
        assert open_descriptors() == before
        assert writer.list() == ["a"]
        put(writer, "b", CONTENT)


def test_a_full_disk_leaves_the_older_file(small_disk: Path) -> None:
    with LocalWriter(small_disk) as writer:
        writer.replace("index", b"older")
        with pytest.raises(StorageError, match=r"index in .*no space left on device"):
            writer.replace("index", bytes(2 << 20))
        assert writer.read("index") == b"older"
        assert writer.list() == ["index"]


class CannotSetAside:
    """A C library on a file system without fallocate."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        ctypes.set_errno(0)

    def fallocate(self, *arguments: Any) -> int:
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1


def test_where_no_space_can_be_set_aside_a_full_disk_is_reported_by_the_write(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", CannotSetAside)
    with LocalWriter(small_disk) as writer:
        writer.create("a", 2 << 20)
        assert (small_disk / "a").stat().st_size == 2 << 20
        with pytest.raises(StorageError, match=r"a in .*writing at byte \d+ failed, no space left on device"):
            writer.write("a", 0, [memoryview(bytes(2 << 20))])


def test_an_interrupted_setting_aside_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    class Interrupted(CannotSetAside):
        def fallocate(self, *arguments: Any) -> int:
            calls.append(1)
            ctypes.set_errno(errno.EINTR)
            return -1 if len(calls) < 3 else 0

    monkeypatch.setattr(ctypes, "CDLL", Interrupted)
    with LocalWriter(tmp_path) as writer:
        writer.create("a", 10)
    assert len(calls) == 3


# ── refusals of the system ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.EACCES, "permission denied .*Change the permissions"),
        (errno.EROFS, "read-only file system .*save elsewhere"),
        (errno.ENOSPC, "no space left on device .*Free some space"),
        (errno.EIO, r"input/output error \(errno 5\). Check the file system"),
    ],
)
@pytest.mark.parametrize("call", ["open", "pwritev", "fdatasync", "rename", "unlink"])
def test_errors_of_the_system_name_file_cause_and_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, words: str
) -> None:
    asks: dict[str, Callable[[LocalWriter], object]] = {
        "open": lambda writer: writer.create("b", 1),
        "pwritev": lambda writer: writer.write("a", 0, [memoryview(b"1")]),
        "fdatasync": lambda writer: writer.sync("a"),
        "rename": lambda writer: writer.replace("a", b"1"),
        "unlink": lambda writer: writer.remove("a"),
    }
    with LocalWriter(tmp_path, policy=LOCAL_WRITES) as writer:
        writer.create("a", 1)
        monkeypatch.setattr(os, call, raising(code))
        with pytest.raises(StorageError, match=rf"[ab] in .* failed, {words}") as caught:
            asks[call](writer)
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == code


def test_a_sync_that_failed_is_not_made_good_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalWriter(tmp_path) as writer:
        writer.create("a", 1)
        with monkeypatch.context() as patched:
            patched.setattr(os, "fdatasync", raising(errno.EIO))
            with pytest.raises(StorageError, match="syncing it failed"):
                writer.sync("a")
        asks: list[Callable[[], object]] = [
            lambda: writer.sync("a"),
            lambda: writer.write("a", 0, [memoryview(b"1")]),
            lambda: writer.rename("a", "b"),
        ]
        for ask in asks:
            with pytest.raises(StorageError, match=r"a in .*could not be synced before"):
                ask()
        writer.remove("a")
        put(writer, "a", CONTENT)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_sync_folders_is_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    with LocalWriter(tmp_path) as writer:
        put(writer, "a", CONTENT)
        monkeypatch.setattr(os, "fsync", raising(code))
        writer.rename("a", "b")
        writer.sync_names()
        monkeypatch.setattr(os, "fsync", raising(errno.EIO))
        with pytest.raises(StorageError, match="syncing its names failed"):
            writer.sync_names()


def test_a_root_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "gone").symlink_to("nowhere")
    for name in ("file", "gone"):
        with pytest.raises(StorageError, match=f"{name}: is a file"):
            LocalWriter(tmp_path / name)
    with LocalWriter(tmp_path / "file" / "below") as writer, pytest.raises(StorageError, match="not a directory"):
        writer.create("a", 1)


def test_folders_and_pipes_are_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = open_descriptors()
    with LocalWriter(tmp_path) as writer:
        for name in ("folder", "pipe"):
            with pytest.raises(StorageError, match=f"{name} in "):
                writer.write(name, 0, [memoryview(b"1")])
        with pytest.raises(StorageError, match="pipe in .*not a regular file"):
            writer.read("pipe")
        with pytest.raises(StorageError, match="folder in .*is a directory"):
            writer.replace("folder", b"1")
        assert writer.list() == ["pipe"]
        assert open_descriptors() == before


# ── links ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """A folder of the hub's cache: names that are links to blobs elsewhere."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "b10b").write_bytes(b"of the cache")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "a").symlink_to("../blobs/b10b")
    (tmp_path / "snapshot" / "gone").symlink_to("../blobs/pruned")
    return tmp_path / "snapshot"


def test_nothing_is_written_through_a_link(cached: Path) -> None:
    with LocalWriter(cached) as writer:
        assert writer.read("a") == b"of the cache"
        assert writer.list() == ["a", "gone"]
        with pytest.raises(StorageError, match="a in .*a symbolic link"):
            writer.write("a", 0, [memoryview(b"1")])
        for name in ("a", "gone"):
            with pytest.raises(StorageError, match=f"{name} in .*exists already"):
                writer.create(name, 1)
        writer.replace("a", b"mine")
        put(writer, "b", CONTENT)
        writer.rename("b", "gone")
    assert not (cached / "a").is_symlink()
    assert (cached / "a").read_bytes() == b"mine"
    assert (cached / "gone").read_bytes() == CONTENT
    wanted = {"b10b": b"of the cache"}
    assert {path.name: path.read_bytes() for path in (cached.parent / "blobs").iterdir()} == wanted


def test_removing_a_link_leaves_what_it_leads_to(cached: Path) -> None:
    with LocalWriter(cached) as writer:
        writer.remove("a")
        writer.remove("gone")
    assert list(cached.iterdir()) == []
    assert (cached.parent / "blobs" / "b10b").read_bytes() == b"of the cache"


# ── permissions, policies, descriptors ────────────────────────────────────────────────────────────


def test_permissions_are_those_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with LocalWriter(tmp_path) as writer:
            put(writer, "a", CONTENT)
            writer.replace("b", b"1")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in "ab"] == [0o640, 0o640]


@pytest.mark.parametrize(
    ("kind", "policy"), [("nfs4", NETWORK_FILE_SYSTEM_WRITES), ("ext4", DISK_WRITES), ("tmpfs", LOCAL_WRITES)]
)
def test_a_folder_is_written_as_its_file_system_likes(
    kind: str, policy: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted(tmp_path, kind, monkeypatch)
    with LocalWriter(tmp_path / "not" / "yet") as writer:
        assert writer.policy == policy
    with LocalWriter(tmp_path, policy=NETWORK_FILE_SYSTEM_WRITES) as writer:
        assert writer.policy is NETWORK_FILE_SYSTEM_WRITES


def test_a_descriptor_is_kept_until_the_sync_and_not_inherited(tmp_path: Path) -> None:
    before = open_descriptors()
    with LocalWriter(tmp_path) as writer:
        for number in range(5):
            writer.create(f"f{number}", 10)
            writer.write(f"f{number}", 0, [memoryview(b"1")])
        assert open_descriptors() == before + 5
        assert not any(os.get_inheritable(opened.descriptor) for opened in writer._files.values())
        for number in range(4):
            writer.sync(f"f{number}")
        assert open_descriptors() == before + 1
    assert open_descriptors() == before


def test_writes_during_a_sync_are_synced_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fdatasync = os.fdatasync
    with LocalWriter(tmp_path) as writer:
        writer.create("a", 2)

        def meanwhile(descriptor: int) -> None:
            synced.append(descriptor)
            fdatasync(descriptor)
            if len(synced) == 1:
                writer.write("a", 1, [memoryview(b"2")])

        monkeypatch.setattr(os, "fdatasync", meanwhile)
        for _ in range(3):
            writer.sync("a")
    assert len(synced) == 2


def test_files_are_synced_before_they_are_renamed(tmp_path: Path) -> None:
    with LocalWriter(tmp_path) as writer:
        writer.create("a", 1)
        with pytest.raises(StorageError, match="a in .*must be synced before it is renamed to b"):
            writer.rename("a", "b")


# ── sudden ends ───────────────────────────────────────────────────────────────────────────────────


def traced(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    """Notes in ``calls`` what is synced and renamed, by name."""

    def spy(call: str) -> Callable[..., Any]:
        real = getattr(os, call)

        def noting(target: Any, *others: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else target
            name = os.path.basename(path)
            calls.append(f"{call} {'interim' if name.endswith('.incomplete') else name}")
            return real(target, *others)

        return noting

    for call in ("fsync", "fdatasync", "rename", "unlink"):
        monkeypatch.setattr(os, call, spy(call))


def test_everything_durable_is_synced_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    traced(monkeypatch, calls)
    folder = tmp_path / "new" / "root"
    with LocalWriter(folder) as writer:
        put(writer, "a", CONTENT)
        assert calls == [f"fsync {tmp_path.parent.name}", f"fsync {tmp_path.name}", "fsync new", "fdatasync a"]
        calls.clear()
        writer.rename("a", "b")
        assert calls == ["rename a", "fsync root"]
        calls.clear()
        writer.replace("b", b"1")
        assert calls == ["fsync interim", "rename interim", "fsync root"]
        calls.clear()
        writer.remove("b")
        writer.sync_names()
        assert calls == ["unlink b", "fsync root"]


# ── from a target to a writer ─────────────────────────────────────────────────────────────────────


def test_a_path_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for target in (tmp_path / "new", str(tmp_path / "new"), "~/new"):
        with open_writer(target) as writer:
            assert isinstance(writer, LocalWriter)
            assert writer.root == os.fspath(tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("hf://organization/name", r"hf://organization/name: the hub is not written to. .*upload it \(hf upload"),
        ("https://user:hidden@host/folder", "https://host/folder: a URL cannot be written to"),
        ("s3://user:hidden@bucket/x", "s3://bucket/x: .* Save to a folder and upload it, or mount the bucket"),
        ("memory://folder", "a URL cannot be written to"),
        ("file:///folder", "Pass the path without file://"),
    ],
)
def test_a_url_is_refused(target: str, words: str) -> None:
    with pytest.raises(StorageError, match=words) as caught:
        open_writer(target)
    assert "hidden" not in str(caught.value)
