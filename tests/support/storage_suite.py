"""Tests of the storage reader interface, for any reader. Needs pytest."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar, TypeAlias

import pytest

from shardwise.core.errors import StorageError
from shardwise.files.storage import CannotListError, StorageReader

MakeReader: TypeAlias = Callable[[Mapping[str, bytes]], StorageReader]
"""Puts files where a reader finds them, in place of those of an earlier call, and opens a reader of them."""

_CONTENT = bytes(range(256)) * 40
_NBYTES = len(_CONTENT)


class StorageReaderSuite:
    """Tests of a :class:`~shardwise.storage.StorageReader`; subclass it and say how a reader is made.

    ::

        class TestMyReader(StorageReaderSuite):
            @pytest.fixture
            def make_reader(self, tmp_path: Path) -> MakeReader:
                def make(files: Mapping[str, bytes]) -> MyReader: ...
                return make

    ``can_list`` is False for storages whose ``list`` raises CannotListError.
    """

    can_list: ClassVar[bool] = True

    @pytest.fixture
    def make_reader(self) -> MakeReader:
        raise NotImplementedError("a subclass says how its reader is made, as a fixture named make_reader")

    def test_lists_files_and_those_of_subfolders(self, make_reader: MakeReader) -> None:
        with make_reader({"b": b"", "a": b"", "sub/deeper/c": b""}) as reader:
            if self.can_list:
                assert reader.list() == ["a", "b", "sub/deeper/c"]
                return
            with pytest.raises(CannotListError):
                reader.list()

    def test_size_is_in_bytes(self, make_reader: MakeReader) -> None:
        with make_reader({"a": _CONTENT, "empty": b"", "sub/one": b"1"}) as reader:
            assert [reader.size(name) for name in ("a", "empty", "sub/one")] == [_NBYTES, 0, 1]

    @pytest.mark.parametrize(
        ("start", "stop"), [(0, 0), (0, 1), (7, 5000), (0, _NBYTES), (_NBYTES - 1, _NBYTES), (_NBYTES, _NBYTES)]
    )
    def test_reads_exactly_the_range(self, make_reader: MakeReader, start: int, stop: int) -> None:
        with make_reader({"a": _CONTENT}) as reader:
            assert reader.read("a", start, stop) == _CONTENT[start:stop]
            whole = bytearray(b"\xee" * (stop - start + 20))
            reader.read_into("a", start, memoryview(whole)[10 : 10 + stop - start])
            assert bytes(whole) == b"\xee" * 10 + _CONTENT[start:stop] + b"\xee" * 10

    def test_reads_nothing_of_an_empty_file(self, make_reader: MakeReader) -> None:
        with make_reader({"empty": b""}) as reader:
            assert reader.read("empty", 0, 0) == b""
            with pytest.raises(StorageError, match=r"empty .*truncated"):
                reader.read("empty", 0, 1)

    def test_fills_a_view_of_other_items_in_the_middle_of_a_buffer(self, make_reader: MakeReader) -> None:
        with make_reader({"a": _CONTENT}) as reader:
            whole = bytearray(48)
            doubles: Any = memoryview(whole)[8:40].cast("d")
            reader.read_into("a", 3, doubles)
            assert bytes(whole) == bytes(8) + _CONTENT[3:35] + bytes(8)

    def test_scatters_one_range_into_many_buffers(self, make_reader: MakeReader) -> None:
        # More buffers than one system call takes, some of them empty, of many sizes.
        sizes = [(index * 7) % 5 for index in range(3000)]
        buffers = [bytearray(size) for size in sizes]
        with make_reader({"a": _CONTENT}) as reader:
            reader.read_vectored("a", 11, [memoryview(buffer) for buffer in buffers])
        assert b"".join(buffers) == _CONTENT[11 : 11 + sum(sizes)]
        assert [len(buffer) for buffer in buffers] == sizes

    def test_reads_nothing_for_no_buffers(self, make_reader: MakeReader) -> None:
        with make_reader({"a": _CONTENT}) as reader:
            reader.read_vectored("a", 5, [])
            reader.read_into("a", 5, memoryview(bytearray()))
            reader.read_vectored("a", 5, [memoryview(bytearray())] * 3)

    @pytest.mark.parametrize(("start", "nbytes"), [(0, _NBYTES + 1), (_NBYTES - 1, 2), (_NBYTES, 1), (99999, 1)])
    def test_a_range_past_the_end_names_file_and_numbers(
        self, make_reader: MakeReader, start: int, nbytes: int
    ) -> None:
        expected = rf"weights .*bytes {start}\.\.{start + nbytes} .*truncated"
        with make_reader({"weights": _CONTENT}) as reader:
            with pytest.raises(StorageError, match=expected):
                reader.read_into("weights", start, memoryview(bytearray(nbytes)))
            with pytest.raises(StorageError, match=expected):
                reader.read("weights", start, start + nbytes)

    def test_an_absurd_range_is_refused_without_allocating_it(self, make_reader: MakeReader) -> None:
        with make_reader({"a": _CONTENT}) as reader, pytest.raises(StorageError, match="truncated"):
            reader.read("a", 0, 2**62)

    @pytest.mark.parametrize(("start", "stop"), [(-1, 5), (6, 5)])
    def test_an_impossible_range_is_refused(self, make_reader: MakeReader, start: int, stop: int) -> None:
        with make_reader({"a": _CONTENT}) as reader, pytest.raises(StorageError):
            reader.read("a", start, stop)

    def test_an_absent_file_has_file_not_found_as_its_cause(self, make_reader: MakeReader) -> None:
        asks: list[Callable[[StorageReader], object]] = [
            lambda reader: reader.size("absent"),
            lambda reader: reader.identity("absent"),
            lambda reader: reader.read("absent", 0, 1),
            lambda reader: reader.read_into("absent", 0, memoryview(bytearray(1))),
        ]
        with make_reader({"a": _CONTENT}) as reader:
            for ask in asks:
                with pytest.raises(StorageError, match=r"absent .*no such file") as caught:
                    ask(reader)
                assert isinstance(caught.value.__cause__, FileNotFoundError)

    @pytest.mark.parametrize(
        "name",
        ["/etc/passwd", "../a", "sub/../../a", "..\\a", "C:a", "\\\\server\\share", "a\0b", "", "./a", "sub//a"],
    )
    def test_a_name_that_could_leave_the_root_is_refused(self, make_reader: MakeReader, name: str) -> None:
        asks: list[Callable[[StorageReader], object]] = [
            lambda reader: reader.size(name),
            lambda reader: reader.identity(name),
            lambda reader: reader.read(name, 0, 1),
        ]
        with make_reader({"a": _CONTENT, "sub/a": _CONTENT}) as reader:
            for ask in asks:
                with pytest.raises(StorageError, match="refused as a file name"):
                    ask(reader)

    @pytest.mark.parametrize("name", ["model..v1.safetensors", ".metadata", "with space", "100%", "a#b?c", "ä+&="])
    def test_unusual_names_are_fine(self, make_reader: MakeReader, name: str) -> None:
        with make_reader({name: b"1", "other": b"22"}) as reader:
            assert reader.read(name, 0, reader.size(name)) == b"1"

    def test_the_identity_of_an_untouched_file_stays(self, make_reader: MakeReader) -> None:
        with make_reader({"a": _CONTENT, "b": b"other"}) as reader:
            before = reader.identity("a")
            assert before
            reader.read("a", 0, 100)
            reader.identity("b")
            assert reader.identity("a") == before

    def test_the_identity_of_another_content_is_another(self, make_reader: MakeReader) -> None:
        with make_reader({"a": _CONTENT}) as reader:
            before = reader.identity("a")
        with make_reader({"a": bytes(_NBYTES)}) as reader:
            assert reader.identity("a") != before

    def test_a_closed_reader_refuses_and_may_be_closed_again(self, make_reader: MakeReader) -> None:
        reader = make_reader({"a": _CONTENT})
        assert reader.read("a", 0, 1) == b"\0"
        reader.close()
        reader.close()
        for ask in (lambda: reader.read("a", 0, 1), lambda: reader.size("a"), lambda: reader.identity("a")):
            with pytest.raises(StorageError, match=r"a in .*closed"):
                ask()

    def test_many_threads_fill_one_buffer(self, make_reader: MakeReader) -> None:
        whole = bytearray(_NBYTES)
        with make_reader({"a": _CONTENT}) as reader, ThreadPoolExecutor(8) as pool:

            def fill(start: int) -> None:
                reader.read_into("a", start, memoryview(whole)[start : start + 512])

            list(pool.map(fill, range(0, _NBYTES, 512)))
        assert whole == _CONTENT

    def test_nothing_is_written_to_disk(self, make_reader: MakeReader) -> None:
        with make_reader({"a": _CONTENT}) as reader, _files_opened_for_writing() as opened:
            reader.size("a")
            reader.identity("a")
            reader.read("a", 0, _NBYTES)
            reader.read_vectored("a", 0, [memoryview(bytearray(100)) for _ in range(3)])
        assert opened == []


_watched: list[list[str]] = []
_is_hooked: list[bool] = []


@contextmanager
def _files_opened_for_writing() -> Iterator[list[str]]:
    """The names of all files that this process opens for writing meanwhile."""
    if not _is_hooked:
        sys.addaudithook(_note_writing)
        _is_hooked.append(True)
    opened: list[str] = []
    _watched.append(opened)
    try:
        yield opened
    finally:
        _watched.remove(opened)


def _note_writing(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not _watched:
        return
    path, mode, flags = arguments
    is_writing = (
        any(letter in mode for letter in "wax+") if isinstance(mode, str) else flags & (os.O_WRONLY | os.O_RDWR)
    )
    if is_writing and path not in (os.devnull, os.devnull.encode()):
        for opened in _watched:
            opened.append(str(path))
