"""The directory of an archive, field by field: written by hand, sound and lying."""

import struct
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.memory_storage import MemoryReader

from shardwise.core.errors import FormatError
from shardwise.files import torch_files
from shardwise.files.torch_files import Archive, FileWindow

FULL_16, FULL_32 = 0xFFFF, 0xFFFFFFFF


@dataclass(frozen=True)
class Entry:
    """A member, and what its two headers say of it; ``large`` puts its sizes into a zip64 field."""

    name: bytes
    content: bytes
    local_extra: bytes = b""
    large: bool = False
    extra: bytes = b""
    method: int = 0
    flags: int = 0
    disk: int = 0
    local_name: bytes | None = None
    local_flags: int = 0
    signature: bytes = b"PK\1\2"


@dataclass(frozen=True)
class Zip:
    """An archive; what is None is as it should be."""

    entries: tuple[Entry, ...]
    zip64: bool = False
    more: bytes = b""  # after the last entry of the directory, and counted to it
    count: int | None = None
    saturated: bool = True
    before_locator: bytes = b""
    small: dict[int, int] = field(default_factory=dict)
    large: dict[int, int] = field(default_factory=dict)
    disks: int = 1

    def made(self) -> bytes:
        content, directory = b"", b""
        for entry in self.entries:
            start, nbytes = len(content), len(entry.content)
            name = entry.name if entry.local_name is None else entry.local_name
            facts = (b"PK\3\4", 20, entry.local_flags, entry.method, 0, 0, 0, nbytes, nbytes)
            content += struct.pack("<4s5H3L2H", *facts, len(name), len(entry.local_extra))
            content += name + entry.local_extra + entry.content
            extra, sizes = entry.extra, (nbytes, nbytes, start)
            if entry.large:
                extra += struct.pack("<HH3Q", 1, 24, *sizes)
                sizes = (FULL_32,) * 3
            said = (entry.signature, 20, 20, entry.flags, entry.method, 0, 0, 0, sizes[1], sizes[0])
            lengths = (len(entry.name), len(extra), 0)
            directory += (
                struct.pack("<4s6H3L5H2L", *said, *lengths, entry.disk, 0, 0, sizes[2]) + entry.name + extra
            )
        directory += self.more
        count = len(self.entries) if self.count is None else self.count
        numbers = [0, 0, count, count, len(directory), len(content)]
        end = len(content) + len(directory)
        made = content + directory
        if self.zip64:
            large = [self.large.get(i, value) for i, value in enumerate(numbers)]
            made += struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, *large) + self.before_locator
            made += struct.pack("<4sLQL", b"PK\6\7", 0, end, self.disks)
            if self.saturated:
                numbers = [FULL_16] * 4 + [FULL_32] * 2
        small = [self.small.get(i, value) for i, value in enumerate(numbers)]
        return made + struct.pack("<4s4H2LH", b"PK\5\6", *small, 0)


TWO = Zip((Entry(b"a/one", b"first"), Entry("a/zwölf".encode(), b"the second", flags=0x800)))


def opened(content: bytes, before: int = 0, after: int = 0) -> tuple[Archive, bytes]:
    """The archive, as a part of a larger file."""
    whole = b"x" * before + content + b"y" * after
    part = FileWindow(MemoryReader({"f": whole}), "f", before, before + len(content))
    return Archive(part, "the file"), whole


def first_of(content: bytes) -> bytes:
    archive, _ = opened(content)
    return archive.content(next(iter(archive.members)), max_nbytes=1000)


def refusal(made: Zip | bytes) -> str:
    """Of the archive, or of its first member."""
    with pytest.raises(FormatError, match="^the file: ") as caught:
        first_of(made if isinstance(made, bytes) else made.made())
    return str(caught.value)


@pytest.mark.parametrize("zip64", [False, True])
@pytest.mark.parametrize(("before", "after"), [(0, 0), (7, 0), (3, 30_000), (20_000, 1)])
def test_members_and_their_bytes(zip64: bool, before: int, after: int) -> None:
    entries = tuple(replace(entry, large=zip64, local_extra=b"FB" + bytes(5)) for entry in TWO.entries)
    archive, whole = opened(replace(TWO, entries=entries, zip64=zip64).made(), before, after)
    assert list(archive.members) == ["a/one", "a/zwölf"]
    for entry in entries:
        name = entry.name.decode()
        where = archive.byte_range(name)
        assert whole[where.start : where.stop] == entry.content
        assert archive.content(name, max_nbytes=10) == entry.content
        assert archive.members[name].file_size == len(entry.content)
    with pytest.raises(FormatError, match=r"its member a/one has 5 bytes, 4 is the limit"):
        archive.content("a/one", max_nbytes=4)
    with pytest.raises(FormatError, match=r"the file: it has no member b. It is damaged or incomplete"):
        archive.byte_range("b")


@pytest.mark.parametrize("nbytes", [0, 100, 5_000, 9_000, 16_000, 40_000])
def test_archives_of_every_size(nbytes: int) -> None:
    """However much of it is kept from the first read, what is read is what is there."""
    content = bytes(range(256)) * (nbytes // 256 + 1)
    made = Zip((Entry(b"a/one", content[:nbytes]), Entry(b"a/two", b"end"))).made()
    archive, whole = opened(made, before=11)
    assert archive.content("a/one", max_nbytes=nbytes) == content[:nbytes]
    where = archive.byte_range("a/two")
    assert whole[where.start : where.stop] == b"end"


class Counting(MemoryReader):
    """Notes what it is asked for."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(files)
        self.asked = 0

    def read(self, file: str, start: int, stop: int) -> bytes:
        self.asked += 1
        return super().read(file, start, stop)


@pytest.mark.parametrize(("nbytes", "reads", "more"), [(16 * 1024, 1, 1), (16 * 1024 + 1, 2, 3)])
def test_a_small_archive_is_read_at_once_and_of_a_large_one_its_ends(nbytes: int, reads: int, more: int) -> None:
    content = bytes(range(251)) * 100
    reader = Counting({"f": content})
    part = FileWindow(reader, "f", 5, 5 + nbytes)
    assert reader.asked == reads
    for start, stop in ((0, 10), (4090, 4096), (nbytes - 4096, nbytes - 4000), (nbytes - 3, nbytes), (0, 0)):
        assert part.read_range(start, stop) == content[5 + start : 5 + stop]
    assert reader.asked == reads
    assert part.read_range(4090, 4097) == content[5 + 4090 : 5 + 4097]
    assert reader.asked == more


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (replace(TWO, count=3, more=b"m" * 46), "does not end in the directory"),
        (replace(TWO, small={4: 1}), "does not end in the directory"),
        (replace(TWO, small={5: 10**6}), "a/one is not before the directory"),
        (replace(TWO, zip64=True, large={4: 1}), "does not end in the directory"),
        (replace(TWO, zip64=True, disks=2), "does not end in the directory"),
        (replace(TWO, entries=()), "it has no members"),
        (replace(TWO, entries=(replace(TWO.entries[0], flags=1),)), "a/one is encrypted"),
        (replace(TWO, entries=(replace(TWO.entries[0], local_flags=1),)), "contradict each other"),
        (replace(TWO, entries=(replace(TWO.entries[0], method=8),)), "a/one is compressed"),
        (replace(TWO, entries=(replace(TWO.entries[0], local_name=b"a/two"),)), "contradict each other"),
        (replace(TWO, entries=(replace(TWO.entries[0], local_name=b"a/on"),)), "contradict each other"),
        (b"", "does not end in the directory of a zip archive"),
        (bytes(21), "does not end in the directory of a zip archive"),
        (bytes(22), "does not end in the directory of a zip archive"),
    ],
)
def test_an_archive_that_lies(made: Zip | bytes, words: str) -> None:
    assert words in refusal(made)


def test_only_files_that_are_too_large_have_another_error() -> None:
    """One field of three in 64 bits: the others are as they stand."""
    content = bytearray(Zip((Entry(b"a/one", b"first", extra=struct.pack("<HHQ", 1, 8, 5)),)).made())
    struct.pack_into("<L", content, content.rfind(b"PK\1\2") + 24, FULL_32)  # the size unpacked
    archive, _ = opened(bytes(content))
    assert archive.content("a/one", max_nbytes=9) == b"first"


@given(st.integers(0, 80))
def test_a_member_ends_where_the_next_begins(longer: int) -> None:
    content = bytearray(TWO.made())
    at = content.find(b"PK\1\2")
    struct.pack_into("<LL", content, at + 20, 5 + longer, 5 + longer)
    if longer:
        assert "a/one overlaps the next one" in refusal(bytes(content))
    else:
        assert opened(bytes(content))[0].content("a/one", max_nbytes=9) == b"first"


def test_the_last_member_ends_at_the_directory() -> None:
    made = Zip((Entry(b"a/one", b"first"),)).made()
    for field_at, value in ((20, 6), (24, 6)):
        content = bytearray(made)
        at = content.find(b"PK\1\2")
        struct.pack_into("<L", content, at + field_at, value)
        assert "is compressed" in refusal(bytes(content)), "the two sizes differ"
    content = bytearray(made)
    struct.pack_into("<H", content, 28, 1)  # the extra field of the local header
    assert "a/one overlaps the next one" in refusal(bytes(content))
    content = bytearray(made)
    struct.pack_into("<L", content, content.find(b"PK\1\2") + 42, content.find(b"PK\1\2"))
    assert "a/one is not before the directory" in refusal(bytes(content))
    struct.pack_into("<L", content, content.find(b"PK\1\2") + 42, content.find(b"PK\1\2") - 1)
    assert "a/one overlaps the next one" in refusal(bytes(content))


def test_directories_that_are_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    made = TWO.made()
    nbytes = made.rfind(b"PK\5\6") - made.find(b"PK\1\2")
    monkeypatch.setattr(torch_files, "MAX_DIRECTORY_BYTES", nbytes)
    assert len(opened(made)[0].members) == 2
    monkeypatch.setattr(torch_files, "MAX_DIRECTORY_BYTES", nbytes - 1)
    assert f"its directory has {nbytes} bytes, {nbytes - 1} is the limit" in refusal(made)
