"""The directory of a zip archive whose members are stored as they are: which bytes are whose.

``zipfile`` reads the directory; where the bytes of a member lie, which it does not tell, is found out here. The
archive may be a part of a larger file.
"""

from __future__ import annotations

import io
import struct
import zipfile
from typing import NoReturn

from shardwise.errors import FormatError
from shardwise.storage.contract import StorageReader
from shardwise.storage.names import shown
from shardwise.tensors import ByteRange

MAX_DIRECTORY_BYTES = 16_000_000
"""The longest directory that is read: of two hundred thousand members."""

_LOCAL = struct.Struct("<4s5H3L2H")
_ENCRYPTED, _UTF_8 = 0x1, 0x800
_AT_ONCE_BYTES = 16 * 1024
_ENDS_BYTES = 4 * 1024

_LIES = (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError, OverflowError, EOFError, OSError)
"""What zipfile raises for directories that contradict themselves."""


class FileWindow(io.RawIOBase):
    """A range of a file, as a file; its beginning and end are kept, since most questions are about those."""

    def __init__(self, reader: StorageReader, file: str, start: int, stop: int) -> None:
        self._reader = reader
        self.file = file
        self.start = start
        self.nbytes = stop - start
        self._at = 0
        ends = [(self.nbytes - _ENDS_BYTES, self.nbytes), (0, _ENDS_BYTES)]
        kept = [(0, self.nbytes)] if self.nbytes <= _AT_ONCE_BYTES else ends
        self._kept = [(first, reader.read(file, start + first, start + last)) for first, last in kept]

    def read_range(self, start: int, stop: int) -> bytes:
        """Bytes counted from the beginning of the part; the caller has checked that they are in it."""
        for kept_from, kept in self._kept:
            if kept_from <= start and stop <= kept_from + len(kept):
                return kept[start - kept_from : stop - kept_from]
        return self._reader.read(self.file, self.start + start, self.start + stop)

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        at = (0, self._at, self.nbytes)[whence] + offset
        if at < 0:
            raise OSError("before the beginning")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def read(self, nbytes: int = -1) -> bytes:
        left = max(0, self.nbytes - self._at)
        nbytes = left if nbytes < 0 else min(nbytes, left)
        if nbytes > MAX_DIRECTORY_BYTES:
            raise ValueError(f"its directory has {nbytes} bytes, {MAX_DIRECTORY_BYTES} is the limit")
        self._at += nbytes
        return self.read_range(self._at - nbytes, self._at)


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
        if member.flag_bits & _ENCRYPTED:
            self.refuse(f"its member {shown(name)} is encrypted")
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            self.refuse(
                f"its member {shown(name)} is compressed", remedy="torch.save does not compress: write it with that"
            )
        # The size of the local header is told only there: its extra field may differ from the directory's.
        encoded = member.orig_filename.encode("utf-8" if member.flag_bits & _UTF_8 else "cp437")
        stop, room = member.header_offset + _LOCAL.size + len(encoded), self._rooms[name]
        if stop > room:
            self.refuse(f"its member {shown(name)} runs into what follows it")
        local = self._part.read_range(member.header_offset, stop)
        signature, _, flags, method, *_, name_length, extra_length = _LOCAL.unpack_from(local)
        if (signature, method, flags & _ENCRYPTED, name_length) != (b"PK\3\4", 0, 0, len(encoded)) or local[
            _LOCAL.size :
        ] != encoded:
            self.refuse(f"its directory and its member {shown(name)} contradict each other")
        start = stop + extra_length
        if start + member.file_size > room:
            self.refuse(f"its member {shown(name)} runs into what follows it")
        return ByteRange(self._part.start + start, self._part.start + start + member.file_size)

    def content(self, name: str, *, max_nbytes: int) -> bytes:
        """The bytes of a small member."""
        where = self.bytes_of(name)
        if where.nbytes > max_nbytes:
            self.refuse(f"its member {shown(name)} has {where.nbytes} bytes, {max_nbytes} is the limit")
        return self._part.read_range(where.start - self._part.start, where.stop - self._part.start)

    def refuse(self, cause: str, *, remedy: str = "") -> NoReturn:
        """Raise a FormatError that names the archive."""
        advice = remedy or "it is damaged or incomplete: download or write it again"
        raise FormatError(f"{self.what}: {cause}; {advice}")

    def _directory(self) -> dict[str, zipfile.ZipInfo]:
        try:
            with zipfile.ZipFile(self._part) as archive:
                found, end = archive.infolist(), archive.start_dir
        except _LIES as error:
            self.refuse(f"it does not end in the directory of a zip archive ({str(error)[:200]!a})")
        if not found:
            self.refuse("it has no members")
        found.sort(key=lambda member: member.header_offset)
        for member, following in zip(found, [*(item.header_offset for item in found[1:]), end], strict=True):
            if not 0 <= member.header_offset < end:
                self.refuse(f"its member {shown(member.filename)} is not before the directory")
            if member.filename in self._rooms:
                self.refuse(f"it has the member {shown(member.filename)} twice")
            self._rooms[member.filename] = following
        return {member.filename: member for member in found}
