"""What every storage reader promises, asked of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardwise.errors import StorageError
from shardwise.storage import LocalReader, MemoryReader, StorageReader

CONTENT = bytes(range(256)) * 40
MakeReader = Callable[[Mapping[str, bytes]], StorageReader]


@pytest.fixture(params=["local", "memory"])
def make_reader(request: pytest.FixtureRequest, tmp_path: Path) -> MakeReader:
    def local(files: Mapping[str, bytes]) -> StorageReader:
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return LocalReader(tmp_path)

    return local if request.param == "local" else MemoryReader


def test_it_is_a_storage_reader(make_reader: MakeReader) -> None:
    assert isinstance(make_reader({}), StorageReader)


def test_lists_files_and_those_of_subfolders(make_reader: MakeReader) -> None:
    with make_reader({"b": b"", "a": b"", "sub/deeper/c": b""}) as reader:
        assert reader.list() == ["a", "b", "sub/deeper/c"]


def test_size_is_in_bytes(make_reader: MakeReader) -> None:
    with make_reader({"a": CONTENT, "empty": b""}) as reader:
        assert (reader.size("a"), reader.size("empty")) == (len(CONTENT), 0)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 1), (7, 5000), (0, len(CONTENT)), (10240, 10240)])
def test_reads_exactly_the_range(make_reader: MakeReader, start: int, stop: int) -> None:
    with make_reader({"a": CONTENT}) as reader:
        assert reader.read("a", start, stop) == CONTENT[start:stop]
        buffer = bytearray(stop - start)
        reader.read_into("a", start, memoryview(buffer))
        assert bytes(buffer) == CONTENT[start:stop]


def test_fills_a_view_of_other_items_in_the_middle_of_a_buffer(make_reader: MakeReader) -> None:
    with make_reader({"a": CONTENT}) as reader:
        whole = bytearray(48)
        reader.read_into("a", 3, memoryview(whole)[8:40].cast("d"))
        assert bytes(whole) == bytes(8) + CONTENT[3:35] + bytes(8)


def test_fills_a_view_of_several_dims(make_reader: MakeReader) -> None:
    with make_reader({"a": CONTENT}) as reader:
        whole = bytearray(24)
        reader.read_into("a", 5, memoryview(whole).cast("B", (2, 3, 4)))
        assert bytes(whole) == CONTENT[5:29]


def test_scatters_one_range_into_many_buffers(make_reader: MakeReader) -> None:
    # More buffers than one system call takes, some of them empty, of many sizes.
    sizes = [(index * 7) % 5 for index in range(3000)]
    buffers = [bytearray(size) for size in sizes]
    with make_reader({"a": CONTENT}) as reader:
        reader.read_vectored("a", 11, [memoryview(buffer) for buffer in buffers])
    assert b"".join(buffers) == CONTENT[11 : 11 + sum(sizes)]
    assert [len(buffer) for buffer in buffers] == sizes


def test_reads_nothing_for_no_buffers(make_reader: MakeReader) -> None:
    with make_reader({"a": CONTENT}) as reader:
        reader.read_vectored("a", 5, [])
        reader.read_into("a", 5, memoryview(bytearray()))


@pytest.mark.parametrize(("start", "nbytes"), [(0, 10241), (10239, 2), (10240, 1), (99999, 1)])
def test_a_range_past_the_end_names_file_and_numbers(make_reader: MakeReader, start: int, nbytes: int) -> None:
    with make_reader({"weights": CONTENT}) as reader:
        with pytest.raises(StorageError, match=rf"weights .*bytes {start}\.\.{start + nbytes} .*truncated"):
            reader.read_into("weights", start, memoryview(bytearray(nbytes)))
        with pytest.raises(StorageError, match=rf"weights .*bytes {start}\.\.{start + nbytes} .*truncated"):
            reader.read("weights", start, start + nbytes)


def test_an_absurd_range_is_refused_without_allocating_it(make_reader: MakeReader) -> None:
    with make_reader({"a": CONTENT}) as reader, pytest.raises(StorageError, match="truncated"):
        reader.read("a", 0, 2**62)


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (6, 5)])
def test_an_impossible_range_is_refused(make_reader: MakeReader, start: int, stop: int) -> None:
    with make_reader({"a": CONTENT}) as reader, pytest.raises(StorageError):
        reader.read("a", start, stop)


def test_an_absent_file_has_file_not_found_as_its_cause(make_reader: MakeReader) -> None:
    with make_reader({"a": CONTENT}) as reader:
        for ask in (
            lambda: reader.size("absent"),
            lambda: reader.read("absent", 0, 1),
            lambda: reader.read_into("absent", 0, memoryview(bytearray(1))),
        ):
            with pytest.raises(StorageError, match="absent .*no such file") as caught:
                ask()
            assert isinstance(caught.value.__cause__, FileNotFoundError)


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../a",
        "sub/../../a",
        "sub/..",
        "..\\a",
        "C:\\a",
        "C:a",
        "\\\\server\\share",
        "a\0b",
        "",
        "./a",
        "sub//a",
        "sub/",
    ],
)
def test_a_name_that_could_leave_the_root_is_refused(make_reader: MakeReader, name: str) -> None:
    with make_reader({"a": CONTENT, "sub/a": CONTENT}) as reader:
        for ask in (lambda: reader.size(name), lambda: reader.read(name, 0, 1)):
            with pytest.raises(StorageError, match="refused as a file name"):
                ask()


def test_dots_inside_a_name_are_fine(make_reader: MakeReader) -> None:
    with make_reader({"model..v1.safetensors": b"1", ".metadata": b"22"}) as reader:
        assert (reader.size("model..v1.safetensors"), reader.size(".metadata")) == (1, 2)


def test_a_closed_reader_refuses_and_may_be_closed_again(make_reader: MakeReader) -> None:
    reader = make_reader({"a": CONTENT})
    assert reader.read("a", 0, 1) == b"\0"
    reader.close()
    reader.close()
    with pytest.raises(StorageError, match="a in .*closed"):
        reader.read("a", 0, 1)
    with pytest.raises(StorageError, match="a in .*closed"):
        reader.size("a")


def test_many_threads_get_their_own_bytes(make_reader: MakeReader) -> None:
    files = {f"f{number}": bytes([number]) * 5000 for number in range(20)}
    with make_reader(files) as reader, ThreadPoolExecutor(8) as pool:
        jobs = [(f"f{number % 20}", number % 20, number) for number in range(400)]
        results = pool.map(lambda job: set(reader.read(job[0], job[2], 5000)), jobs)
        assert list(results) == [{value} for _, value, _ in jobs]
