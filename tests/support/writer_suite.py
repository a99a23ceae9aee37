"""Tests of the storage writer interface, for any writer. Needs pytest."""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from shardwise.core.errors import StorageError
from shardwise.files.storage import StorageWriter

_CONTENT = bytes(range(251)) * 80
_NBYTES = len(_CONTENT)
_OUTSIDE = ("/etc/passwd", "../a", "sub/../../a", "..\\a", "C:\\a", "a\0b", "", "./a", "sub/a", "sub/", "..", ".")


@dataclass(frozen=True, slots=True)
class WritableStorage:
    """An empty folder to write to.

    Attributes:
        open: opens a writer of it, another one at every call, as another process would.
        contents: what others see of it: every file and its bytes.
    """

    open: Callable[[], StorageWriter]
    contents: Callable[[], Mapping[str, bytes]]


def put(writer: StorageWriter, file: str, *parts: bytes) -> None:
    """Create, write and sync a file."""
    writer.create(file, sum(map(len, parts)))
    writer.write(file, 0, [memoryview(part) for part in parts])
    writer.sync(file)


def _views(parts: Sequence[bytes]) -> list[memoryview]:
    return [memoryview(part) for part in parts]


class StorageWriterSuite:
    """Tests of a :class:`~shardwise.storage.StorageWriter`; subclass it and say how a writer is made.

    ::

        class TestMyWriter(StorageWriterSuite):
            @pytest.fixture
            def storage(self, tmp_path: Path) -> WritableStorage:
                return WritableStorage(open=lambda: MyWriter(tmp_path), contents=lambda: ...)
    """

    @pytest.fixture
    def storage(self) -> WritableStorage:
        raise NotImplementedError("a subclass says how its writer is made, as a fixture named storage")

    def test_an_empty_folder_has_no_files(self, storage: WritableStorage) -> None:
        with storage.open() as writer:
            assert writer.list() == []
            assert writer.sizes() == {}
            assert writer.read("a") is None
            writer.sync_names()

    def test_written_bytes_can_be_read(self, storage: WritableStorage) -> None:
        with storage.open() as writer:
            put(writer, "b", _CONTENT)
            put(writer, "a", b"1")
            writer.sync_names()
            assert writer.list() == ["a", "b"]
            assert writer.sizes() == {"a": 1, "b": _NBYTES}
            assert writer.read("b") == _CONTENT
        assert storage.contents() == {"a": b"1", "b": _CONTENT}

    def test_an_empty_file_is_a_file(self, storage: WritableStorage) -> None:
        with storage.open() as writer:
            writer.create("empty", 0)
            writer.write("empty", 0, [])
            writer.write("empty", 0, [memoryview(b"")])
            writer.sync("empty")
        assert storage.contents() == {"empty": b""}

    def test_many_buffers_are_written_one_after_the_other(self, storage: WritableStorage) -> None:
        # More buffers than one system call takes, some of them empty, small and large in turn.
        sizes = [(index * 7) % 5 for index in range(3000)] + [400_000, 0, 17, 100_000, 1]
        parts = [os.urandom(size) for size in sizes]
        whole = b"".join(parts)
        with storage.open() as writer:
            writer.create("a", len(whole))
            for first in range(0, len(parts), 1601):
                writer.write("a", sum(sizes[:first]), _views(parts[first : first + 1601]))
            writer.sync("a")
        assert storage.contents() == {"a": whole}

    def test_views_of_other_items_and_several_dims_are_their_bytes(self, storage: WritableStorage) -> None:
        doubles: Any = memoryview(_CONTENT[:64]).cast("d")
        table = memoryview(_CONTENT[64:88]).cast("B").cast("B", (2, 3, 4))
        with storage.open() as writer:
            writer.create("a", 88)
            writer.write("a", 0, [doubles, table])
            writer.sync("a")
        assert storage.contents() == {"a": _CONTENT[:88]}

    def test_the_buffers_are_free_again_once_written(self, storage: WritableStorage) -> None:
        buffer = bytearray(_CONTENT)
        with storage.open() as writer:
            writer.create("a", 2 * _NBYTES)
            writer.write("a", 0, [memoryview(buffer)])
            buffer[:] = bytes(_NBYTES)
            writer.write("a", _NBYTES, [memoryview(buffer)])
            writer.sync("a")
        assert storage.contents() == {"a": _CONTENT + bytes(_NBYTES)}

    def test_an_existing_file_cannot_be_created(self, storage: WritableStorage) -> None:
        with storage.open() as writer:
            put(writer, "a", b"older")
        with storage.open() as writer, pytest.raises(StorageError, match=r"a in .*exists already"):
            writer.create("a", 3)
        assert storage.contents() == {"a": b"older"}

    def test_nothing_is_written_beyond_the_size(self, storage: WritableStorage) -> None:
        with storage.open() as writer:
            writer.create("a", 10)
            for start, nbytes in ((0, 11), (10, 1), (-1, 1), (2**62, 1), (11, 0)):
                with pytest.raises(StorageError, match=rf"a in .*bytes {start}\.\.{start + nbytes} .*10 bytes"):
                    writer.write("a", start, [memoryview(bytes(nbytes))])
            writer.write("a", 0, [memoryview(b"0123456789")])
            writer.sync("a")
        assert storage.contents() == {"a": b"0123456789"}

    def test_an_absent_file_is_not_written_to(self, storage: WritableStorage) -> None:
        with storage.open() as writer, pytest.raises(StorageError, match=r"absent in .*Create it first"):
            writer.write("absent", 0, [memoryview(b"1")])
        assert storage.contents() == {}

    def test_a_name_that_leads_out_of_the_root_is_refused(self, storage: WritableStorage) -> None:
        asks: list[Callable[[StorageWriter, str], object]] = [
            lambda writer, name: writer.read(name),
            lambda writer, name: writer.create(name, 1),
            lambda writer, name: writer.write(name, 0, [memoryview(b"1")]),
            lambda writer, name: writer.sync(name),
            lambda writer, name: writer.rename(name, "b"),
            lambda writer, name: writer.rename("a", name),
            lambda writer, name: writer.replace(name, b"1"),
            lambda writer, name: writer.remove(name),
        ]
        with storage.open() as writer:
            put(writer, "a", b"1")
            for name, ask in itertools.product(_OUTSIDE, asks):
                with pytest.raises(StorageError, match="refused as a file name"):
                    ask(writer, name)
        assert storage.contents() == {"a": b"1"}

    def test_unusual_names_are_fine(self, storage: WritableStorage) -> None:
        names = [".metadata", "100%", "a[1]*", "model..v1.safetensors", "with space", "ä+&="]
        with storage.open() as writer:
            for name in names:
                put(writer, name, b"1")
                writer.replace(name, b"22")
                assert writer.read(name) == b"22"
            assert writer.list() == names
        assert storage.contents() == dict.fromkeys(names, b"22")
        with storage.open() as writer:
            for name in names:
                writer.remove(name)
        assert storage.contents() == {}

    def test_replacing_makes_or_replaces_a_file(self, storage: WritableStorage) -> None:
        with storage.open() as writer:
            writer.replace("a", b"first")
            assert storage.contents() == {"a": b"first"}
            writer.replace("a", b"the second one")
            assert storage.contents() == {"a": b"the second one"}
            writer.replace("a", b"")
            assert writer.read("a") == b""
        assert storage.contents() == {"a": b""}

    def test_removing(self, storage: WritableStorage) -> None:
        with storage.open() as writer:
            put(writer, "a", b"1")
            put(writer, "b", b"2")
            writer.remove("a")
            writer.remove("a")
            writer.remove("never")
            writer.sync_names()
            assert writer.list() == ["b"]
            put(writer, "a", b"another")
        assert storage.contents() == {"a": b"another", "b": b"2"}

    def test_a_file_on_its_way_can_be_removed_and_made_again(self, storage: WritableStorage) -> None:
        with storage.open() as writer:
            writer.create("a", 10)
            writer.write("a", 0, [memoryview(b"01234")])
            writer.remove("a")
            assert storage.contents() == {}
            put(writer, "a", b"another")
        assert storage.contents() == {"a": b"another"}

    def test_renaming_takes_the_place_of_what_was_there(self, storage: WritableStorage) -> None:
        with storage.open() as writer:
            writer.replace("b", b"older")
            put(writer, "a", b"1")
            writer.replace("c", b"22")
            writer.rename("a", "b")
            assert storage.contents() == {"b": b"1", "c": b"22"}
            writer.rename("c", "d")
            assert storage.contents() == {"b": b"1", "d": b"22"}
            with pytest.raises(StorageError, match=r"absent in .*no such file"):
                writer.rename("absent", "b")
        assert storage.contents() == {"b": b"1", "d": b"22"}

    def test_a_removed_file_is_not_renamed(self, storage: WritableStorage) -> None:
        with storage.open() as writer, storage.open() as another:
            writer.replace("b", b"older")
            put(writer, "a", b"1")
            another.remove("a")
            with pytest.raises(StorageError, match=r"a in .*"):
                writer.rename("a", "b")
        assert storage.contents() == {"b": b"older"}

    def test_a_closed_writer_refuses_and_may_be_closed_again(self, storage: WritableStorage) -> None:
        writer = storage.open()
        put(writer, "a", b"1")
        writer.close()
        writer.close()
        asks: list[Callable[[], object]] = [
            lambda: writer.create("b", 1),
            lambda: writer.write("a", 0, [memoryview(b"2")]),
            lambda: writer.sync("a"),
            lambda: writer.rename("a", "b"),
            lambda: writer.replace("a", b"2"),
            lambda: writer.remove("a"),
            lambda: writer.read("a"),
            writer.list,
            writer.sizes,
            writer.sync_names,
        ]
        for ask in asks:
            with pytest.raises(StorageError, match="closed"):
                ask()
        assert storage.contents() == {"a": b"1"}

    def test_ranges_are_written_in_any_order(self, storage: WritableStorage) -> None:
        with storage.open() as writer:
            writer.create("a", _NBYTES)
            starts = range(0, _NBYTES, 777)
            for start in [*starts[1::2], *reversed(starts[::2])]:
                writer.write("a", start, [memoryview(_CONTENT)[start : start + 777]])
            writer.sync("a")
        assert storage.contents() == {"a": _CONTENT}

    def test_several_writers_fill_one_file(self, storage: WritableStorage) -> None:
        with storage.open() as creator, storage.open() as second, storage.open() as third:
            creator.create("a", _NBYTES)
            for number, writer in enumerate((third, creator, second)):
                for start in range(number * 100, _NBYTES, 300):
                    writer.write("a", start, [memoryview(_CONTENT)[start : start + 100]])
            for writer in (creator, second, third):
                writer.sync("a")
        assert storage.contents() == {"a": _CONTENT}

    def test_many_threads_fill_one_file_and_sync_it_meanwhile(self, storage: WritableStorage) -> None:
        with storage.open() as writer, ThreadPoolExecutor(8) as pool:
            writer.create("a", _NBYTES)

            def fill(start: int) -> None:
                writer.write("a", start, [memoryview(_CONTENT)[start : start + 100]])
                if start % 300 == 0:
                    writer.sync("a")

            list(pool.map(fill, range(0, _NBYTES, 100)))
            writer.sync("a")
        assert storage.contents() == {"a": _CONTENT}
