"""The directory of a zip archive whose members are stored as they are: which bytes are whose.

Source of the rules: PKWARE's APPNOTE 6.3.10, sections 4.3 to 4.5. Read is what torch writes: one disk, no
encryption, no comment at the end. The archive may be a part of a larger file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from shardwise.errors import FormatError
from shardwise.storage.contract import StorageReader
from shardwise.storage.names import shown
from shardwise.tensors import ByteRange

MAX_DIRECTORY_BYTES = 100_000_000
"""The longest directory that is read: of a million members."""

_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_MEMBER = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_SATURATED_16, _SATURATED_32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED = 1
_AT_ONCE_BYTES = 16 * 1024
_ENDS_BYTES = 4 * 1024


@dataclass(frozen=True, slots=True)
class Member:
    """A file in the archive, as the directory tells of it. ``header`` is where its local header begins."""

    name: str
    header: int
    nbytes: int
    packed_nbytes: int
    method: int
    flags: int


class FileWindow:
    """A range of a file, its beginning and end kept: most questions are about those."""

    def __init__(self, reader: StorageReader, file: str, start: int, stop: int) -> None:
        self._reader = reader
        self.file = file
        self.start = start
        self.nbytes = stop - start
        self._kept: list[tuple[int, bytes]] = []
        if self.nbytes <= _AT_ONCE_BYTES:
            self._keep(0, self.nbytes)
        else:
            self._keep(self.nbytes - _ENDS_BYTES, self.nbytes)
            self._keep(0, _ENDS_BYTES)

    def read(self, start: int, stop: int) -> bytes:
        """Bytes counted from the beginning of the part; the caller has checked that they are in it."""
        for kept_from, kept in self._kept:
            if kept_from <= start and stop <= kept_from + len(kept):
                return kept[start - kept_from : stop - kept_from]
        return self._reader.read(self.file, self.start + start, self.start + stop)

    def _keep(self, start: int, stop: int) -> None:
        self._kept.append((start, self._reader.read(self.file, self.start + start, self.start + stop)))


class Archive:
    """The members of an archive by name, and where their bytes lie. ``what`` names it in messages."""

    def __init__(self, part: FileWindow, what: str) -> None:
        self._part = part
        self.what = what
        self._rooms: dict[str, int] = {}  # where what follows a member begins
        self.members = self._directory()

    def bytes_of(self, name: str) -> ByteRange:
        """Where in the file the content of a member lies, as it is.

        Raises :class:`FormatError` where there is none, or it is packed, encrypted, or runs into another.
        """
        member = self.members.get(name)
        if member is None:
            self.refuse(f"it has no member {shown(name)}")
        if member.flags & _ENCRYPTED:
            self.refuse(f"its member {shown(name)} is encrypted")
        if member.method != 0 or member.packed_nbytes != member.nbytes:
            self.refuse(
                f"its member {shown(name)} is compressed", remedy="torch.save does not compress: write it with that"
            )
        # The size of the local header is told only there: its extra field may differ from the directory's.
        length, room = _LOCAL.size + len(name.encode()), self._rooms[name]
        if member.header + length > room:
            self.refuse(f"its member {shown(name)} runs into what follows it")
        local = self._part.read(member.header, member.header + length)
        signature, _, flags, method, _, _, _, _, _, name_length, extra_length = _LOCAL.unpack_from(local)
        if (
            signature != b"PK\3\4"
            or method != 0
            or flags & _ENCRYPTED
            or name_length != length - _LOCAL.size
            or local[_LOCAL.size :] != name.encode()
        ):
            self.refuse(f"its directory and its member {shown(name)} contradict each other")
        start = member.header + length + extra_length
        if start + member.nbytes > room:
            self.refuse(f"its member {shown(name)} runs into what follows it")
        return ByteRange(self._part.start + start, self._part.start + start + member.nbytes)

    def content(self, name: str, *, max_nbytes: int) -> bytes:
        """The bytes of a small member."""
        where = self.bytes_of(name)
        if where.nbytes > max_nbytes:
            self.refuse(f"its member {shown(name)} has {where.nbytes} bytes, {max_nbytes} is the limit")
        return self._part.read(where.start - self._part.start, where.stop - self._part.start)

    def refuse(self, cause: str, *, remedy: str = "") -> NoReturn:
        """Raise a FormatError that names the archive."""
        advice = remedy or "it is damaged or incomplete: download or write it again"
        raise FormatError(f"{self.what}: {cause}; {advice}")

    def _directory(self) -> Mapping[str, Member]:
        count, start, stop = self._directory_place()
        if not count:
            self.refuse("it has no members")
        if stop - start > MAX_DIRECTORY_BYTES:
            self.refuse(f"its directory has {stop - start} bytes, {MAX_DIRECTORY_BYTES} is the limit")
        if count * _MEMBER.size > stop - start:
            self.refuse(f"its directory of {stop - start} bytes cannot hold the {count} members it announces")
        content = self._part.read(start, stop)
        found: list[Member] = []
        position = 0
        for _ in range(count):
            member, position = self._member(content, position, start)
            found.append(member)
        if position != len(content):
            self.refuse("its directory is longer than its members")
        return self._by_name(found, start)

    def _directory_place(self) -> tuple[int, int, int]:
        """(members, first byte, end) of the directory."""
        end = self._part.nbytes - _END.size
        if end < 0:
            self.refuse(f"it has {self._part.nbytes} bytes, too few for an archive")
        signature, disk, first_disk, here, count, nbytes, start, comment = _END.unpack(
            self._part.read(end, end + _END.size)
        )
        if signature != b"PK\5\6" or comment:
            self.refuse("it does not end in the directory of a zip archive")
        small = (disk, first_disk, here, count, nbytes, start)
        locator = end - _LOCATOR.size
        place = b"" if locator < 0 else self._part.read(locator, end)
        if place[:4] == b"PK\6\7":
            _, _, end, disks = _LOCATOR.unpack(place)
            if disks > 1 or end + _END_64.size != locator:
                self.refuse("its zip64 directory is not where it is said to be")
            signature, _, _, _, *large = _END_64.unpack(self._part.read(end, locator))
            if signature != b"PK\6\6":
                self.refuse("its zip64 directory is not where it is said to be")
            limits = (_SATURATED_16,) * 4 + (_SATURATED_32,) * 2
            if any(a not in (b, limit) for a, b, limit in zip(small, large, limits, strict=True)):
                self.refuse("its two directories contradict each other")
            disk, first_disk, here, count, nbytes, start = large
        if disk or first_disk or here != count:
            self.refuse("it is spread over several disks")
        if start + nbytes != end:
            self.refuse(f"its directory, bytes {start} to {start + nbytes}, does not end where it should, at {end}")
        return count, start, start + nbytes

    def _member(self, content: bytes, position: int, directory: int) -> tuple[Member, int]:
        if position + _MEMBER.size > len(content):
            self.refuse("its directory ends in the middle")
        signature, _, _, flags, method, _, _, _, packed, nbytes, *lengths, disk, _, _, header = _MEMBER.unpack_from(
            content, position
        )
        position += _MEMBER.size
        stop = position + sum(lengths)
        if signature != b"PK\1\2" or stop > len(content):
            self.refuse("its directory is damaged")
        try:
            name = content[position : position + lengths[0]].decode("utf-8")
        except UnicodeDecodeError:
            self.refuse("the name of a member is not UTF-8")
        extra = content[position + lengths[0] : position + lengths[0] + lengths[1]]
        large = self._zip64(extra, sum(size == _SATURATED_32 for size in (nbytes, packed, header)))
        nbytes, packed, header = (
            next(large) if size == _SATURATED_32 else size for size in (nbytes, packed, header)
        )
        if disk or header >= directory:
            self.refuse(f"its member {shown(name)} is not before the directory")
        return Member(name, header, nbytes, packed, method, flags), stop

    def _zip64(self, extra: bytes, wanted: int) -> Iterator[int]:
        """The sizes that did not fit into 32 bits."""
        position, kind, length = 0, 0, 0
        while wanted and kind != 1 and position + length + 4 <= len(extra):
            position += length
            kind, length = struct.unpack_from("<HH", extra, position)
            position += 4
        if wanted and (kind != 1 or not wanted * 8 <= length <= len(extra) - position):
            self.refuse("a size of more than 32 bits is missing")
        return iter(struct.unpack_from(f"<{wanted}Q", extra, position) if wanted else ())

    def _by_name(self, found: list[Member], directory: int) -> dict[str, Member]:
        ordered = sorted(found, key=lambda member: member.header)
        starts = [member.header for member in ordered[1:]] + [directory]
        by_name: dict[str, Member] = {}
        for member, room in zip(ordered, starts, strict=True):
            if member.name in by_name:
                self.refuse(f"it has the member {shown(member.name)} twice")
            by_name[member.name] = member
            self._rooms[member.name] = room
        return by_name
