"""Files of ``torch.save``: the byte ranges of their tensors, and the files of a checkpoint.

Such a file is a zip archive: ``data.pkl`` is a pickle of the object, with a persistent id for every storage, and
``data/<id>`` is the memory of that storage. :mod:`shardwise.files.pickles` reads the pickle without executing it.
Source of the layout: torch's ``serialization.py`` and ``caffe2/serialize/inline_container.cc``.

``zipfile`` reads the directory. It does not report the offset of a member's bytes, which is computed here. The
archive may be a part of a larger file.
"""

import io
import re
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, NoReturn

from shardwise.core.errors import FormatError
from shardwise.core.tensors import ByteRange, Strided
from shardwise.files import checkpoint_index, join_entries
from shardwise.files.checkpoint_index import CheckpointFormat, FileSelection, FormatFaults, IndexSoFar, each, listed
from shardwise.files.join_entries import MAX_DEPTH, Chunk, FoundTensor, KeyPath, StoredView
from shardwise.files.pickles import Other, PickledTensor, Record, read_pickle
from shardwise.files.storage import StorageReader
from shardwise.files.urls import shown

_WEIGHTS: Final = (".bin", ".pt", ".pth")
_INDEX_ENDING: Final = ".bin.index.json"
_INDEX_NAME = re.compile(r".*\.bin\.index(\.[^./]+)?\.json")
"""Index files by name, those of a variant too."""
_VERL = "verl: python -m verl.model_merger merge --backend fsdp --local_dir FOLDER --target_dir OUT"
_OF_TRAINERS: Final = {
    re.compile(r"pytorch_model_fsdp.*_rank\d+\.bin"): "contain local shards without their positions. "
    "load_accelerate_model and accelerate load them on the same number of ranks. For any other number, "
    "load them this way and save in another form (use_dcp=True)",
    re.compile(r"\w+_world_size_\d+_rank_\d+\.pt"): "contain the shards of one rank each. Merge them, and pass the "
    f"result ({_VERL})",
    re.compile(r"zero_to_fp32\.py|\w*zero_pp_rank_\d+_\w+\.pt"): "DeepSpeed's, whose files hold shards of "
    "ranks. Run zero_to_fp32.py in the folder that has it (python zero_to_fp32.py . OUT --safe_serialization), "
    "copy config.json to OUT, and pass OUT",
    re.compile(r"latest_checkpointed_iteration\.txt"): "Megatron's or verl's, whose folders hold shards of ranks. "
    f"Write a model of the hub's layout, and pass it (Megatron: Megatron Bridge. {_VERL})",
}
"""What to do with files of trainers that hold no whole model, by their names."""


class _TorchFiles(CheckpointFormat):
    usual = ("pytorch_model.bin", "pytorch_model.bin.index.json")
    endings = (*_WEIGHTS, _INDEX_ENDING)

    def is_named(self, name: str) -> bool:
        return name.endswith(_WEIGHTS) or _INDEX_NAME.fullmatch(name) is not None

    def select(self, reader: StorageReader, name: str, faults: FormatFaults) -> FileSelection:
        if _INDEX_NAME.fullmatch(name):
            return join_entries.select_indexed(reader, name, _WEIGHTS[0], "indexed torch files", faults)
        return FileSelection("torch file", [name])

    def hints(self, names: Sequence[str]) -> list[str]:
        sentences: list[str] = []
        remaining = list(names)
        for pattern, advice in _OF_TRAINERS.items():
            of_trainer = [name for name in remaining if pattern.fullmatch(name)]
            if of_trainer:
                sentences.append(f"{listed(map(shown, of_trainer))}: {advice}")
            remaining = [name for name in remaining if name not in of_trainer]
        files = [name for name in remaining if name.endswith(_WEIGHTS)]
        if files:
            sentences.append(f"{listed(map(shown, files))}: if one of them holds the model, pass its path")
        return sentences

    def read(
        self, reader: StorageReader, selection: FileSelection, index: IndexSoFar, faults: FormatFaults
    ) -> None:
        files = selection.files
        contents: list[TorchFileContents] = join_entries.read_each(reader, files, read_torch_file, faults)
        choice = join_entries.choose_model([tensor.path for item in contents for tensor in item.tensors])
        if choice is None:
            raise join_entries.no_model(reader, " and ".join(map(shown, files)))
        for item in contents:
            index.files[item.file] = item.file_nbytes
            join_entries.add_ignored(item.others, choice, index)
            index.keys[item.file] = join_entries.add_tensors(item.tensors, choice, index, faults)


FORMAT: Final[CheckpointFormat] = _TorchFiles()


MAX_DIRECTORY_BYTES = 16_000_000
"""Limit on the size of a directory, that of two hundred thousand members."""

_LOCAL = struct.Struct("<4s5H3L2H")
_ENCRYPTED, _UTF_8 = 0x1, 0x800
_WHOLE_READ_BYTES = 16 * 1024
_END_READ_BYTES = 4 * 1024

_ZIP_ERRORS = (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError, OverflowError, EOFError, OSError)
"""Errors of zipfile for invalid directories."""


class FileWindow(io.RawIOBase):
    """A range of a file as a file object. Its beginning and end are cached, since most reads are there."""

    def __init__(self, reader: StorageReader, file: str, start: int, stop: int) -> None:
        self._reader = reader
        self.file = file
        self.start = start
        self.nbytes = stop - start
        self._at = 0
        # Two reads for most archives: the directory is at the end, the pickle at the beginning.
        ends = [(self.nbytes - _END_READ_BYTES, self.nbytes), (0, _END_READ_BYTES)]
        ranges = [(0, self.nbytes)] if self.nbytes <= _WHOLE_READ_BYTES else ends
        self._cached = [(first, reader.read(file, start + first, start + last)) for first, last in ranges]

    def read_range(self, start: int, stop: int) -> bytes:
        """Read bytes, counted from the start of the range. The caller has checked that they are in it."""
        for first, content in self._cached:
            if first <= start and stop <= first + len(content):
                return content[start - first : stop - first]
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
        available = max(0, self.nbytes - self._at)
        nbytes = available if nbytes < 0 else min(nbytes, available)
        if nbytes > MAX_DIRECTORY_BYTES:
            raise ValueError(f"its directory has {nbytes} bytes, {MAX_DIRECTORY_BYTES} is the limit")
        self._at += nbytes
        return self.read_range(self._at - nbytes, self._at)


class Archive:
    """The members of a zip archive, and their byte ranges. ``what`` names it in messages."""

    def __init__(self, window: FileWindow, what: str) -> None:
        self._window = window
        self.what = what
        self._ends: dict[str, int] = {}
        """Offset of the next member, or of the directory, by name of a member."""
        self.members = self._directory()

    def byte_range(self, name: str) -> ByteRange:
        """Return the byte range of a member's content in the archive.

        Raises :class:`FormatError` if it does not exist, is compressed or encrypted, or overlaps another.
        """
        # Three facts must agree: the directory, the local header before the member, and the place of the next
        # member.
        member = self.members.get(name)
        if member is None:
            self.refuse(f"it has no member {shown(name)}")
        if member.flag_bits & _ENCRYPTED:
            self.refuse(f"its member {shown(name)} is encrypted")
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            self.refuse(
                f"its member {shown(name)} is compressed",
                remedy="Write it with torch.save, which does not compress",
            )
        # Only the local header has its size: its extra field may differ from that in the directory.
        encoding = "utf-8" if member.flag_bits & _UTF_8 else "cp437"
        encoded = member.orig_filename.encode(encoding)
        stop, end = member.header_offset + _LOCAL.size + len(encoded), self._ends[name]
        if stop > end:
            self.refuse(f"its member {shown(name)} overlaps the next one")
        local = self._window.read_range(member.header_offset, stop)
        signature, _, flags, method, *_, name_length, extra_length = _LOCAL.unpack_from(local)
        is_sound = (signature, method, flags & _ENCRYPTED, name_length) == (b"PK\3\4", 0, 0, len(encoded))
        if not is_sound or local[_LOCAL.size :] != encoded:
            self.refuse(f"its directory and its member {shown(name)} contradict each other")
        start = stop + extra_length
        if start + member.file_size > end:
            self.refuse(f"its member {shown(name)} overlaps the next one")
        return ByteRange(self._window.start + start, self._window.start + start + member.file_size)

    def content(self, name: str, *, max_nbytes: int) -> bytes:
        """Read a small member."""
        location = self.byte_range(name)
        if location.nbytes > max_nbytes:
            self.refuse(f"its member {shown(name)} has {location.nbytes} bytes, {max_nbytes} is the limit")
        return self._window.read_range(location.start - self._window.start, location.stop - self._window.start)

    def refuse(self, cause: str, *, remedy: str = "") -> NoReturn:
        """Raise a FormatError that names the archive."""
        advice = remedy or "It is damaged or incomplete. Download or write it again"
        raise FormatError(f"{self.what}: {cause}. {advice}")

    def _directory(self) -> dict[str, zipfile.ZipInfo]:
        try:
            with zipfile.ZipFile(self._window) as archive:
                members, end = archive.infolist(), archive.start_dir
        except _ZIP_ERRORS as error:
            self.refuse(f"it does not end in the directory of a zip archive ({str(error)[:200]!a})")
        if not members:
            self.refuse("it has no members")
        members.sort(key=attrgetter("header_offset"))
        # Members must not reach into the next one. The directory itself does not say where a member ends.
        for member, following in zip(members, [*(item.header_offset for item in members[1:]), end], strict=True):
            if not 0 <= member.header_offset < end:
                self.refuse(f"its member {shown(member.filename)} is not before the directory")
            if member.filename in self._ends:
                self.refuse(f"it has the member {shown(member.filename)} twice")
            self._ends[member.filename] = following
        return {member.filename: member for member in members}


MAX_PICKLE_BYTES = 100_000_000
"""Limit on the size of a pickle, the same as that of the header of a safetensors file."""

_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."


@dataclass(frozen=True, slots=True)
class TorchFileContents:
    """Tensors of a file, and the path and type name of every other value."""

    file: str
    file_nbytes: int
    tensors: tuple[FoundTensor, ...]
    others: tuple[tuple[KeyPath, str], ...]


def read_torch_file(reader: StorageReader, file: str) -> TorchFileContents:
    """Return the tensors of ``file``, from its directory and its pickle, without reading elements.

    Raises :class:`FormatError` for an invalid file or objects that are not data,
    :class:`~shardwise.core.errors.StorageError` for bytes that cannot be read.
    """
    what = shown(file)
    file_nbytes = reader.size(file)
    window = FileWindow(reader, file, 0, file_nbytes)
    _require_archive(window, what)
    archive = TorchArchive(window, what, {})
    tensors, others = _walk(archive.value, archive.pickle_nbytes, what)
    # Each storage once. Over a network, the local headers of all are requested concurrently.
    names = list(dict.fromkeys(tensor.storage.name for _, tensor in tensors))
    places = dict(zip(names, each(reader, archive.storage_range, names), strict=True))
    located: list[FoundTensor] = []
    for path, tensor in tensors:
        view = archive.tensor_view(tensor, places[tensor.storage.name], ".".join(path))
        located.append(FoundTensor(path, tensor.dtype, view.shape, (Chunk((0,) * len(view.shape), view),)))
    return TorchFileContents(file, file_nbytes, tuple(located), tuple(others))


class _RecordedWindow(FileWindow):
    """A window that records what is read, with its place."""

    def __init__(self, reader: StorageReader, file: str, location: ByteRange) -> None:
        super().__init__(reader, file, location.start, location.stop)
        self.recorded: list[tuple[int, bytes]] = []

    def read_range(self, start: int, stop: int) -> bytes:
        content = super().read_range(start, stop)
        self.recorded.append((start, content))
        return content


@dataclass
class KnownArchives:
    """What has been read of archives of tensors of one form.

    Attributes:
        pickles: the values of their pickles.
        last: place, all that was read, and tensor of the last one that was parsed.
    """

    pickles: dict[bytes, object] = field(default_factory=dict)
    last: tuple[ByteRange, list[tuple[int, bytes]], StoredView] | None = None


def read_torch_tensor(
    reader: StorageReader, file: str, location: ByteRange, known: KnownArchives, *, what: str
) -> StoredView:
    """Return the tensor that was saved by itself in a range of a file."""
    window = _RecordedWindow(reader, file, location)
    if known.last is not None:
        place, recorded, view = known.last
        # A parse depends on the size and on what it reads alone, so that an equal archive has the same result.
        if place.nbytes == location.nbytes and all(
            window.read_range(start, start + len(content)) == content for start, content in recorded
        ):
            return view.shifted(file, location.start - place.start)
        window.recorded.clear()
    archive = TorchArchive(window, what, known.pickles)
    tensor = archive.value
    if not isinstance(tensor, PickledTensor):
        archive.refuse(f"it holds a {_kind(tensor)}, not a tensor")
    view = archive.tensor_view(tensor, archive.storage_range(tensor.storage.name), "the tensor")
    known.last = location, window.recorded, view
    return view


class TorchArchive(Archive):
    """An archive of ``torch.save``.

    ``value`` is the saved object, which is also put into ``cache``.
    """

    def __init__(self, window: FileWindow, what: str, cache: dict[bytes, object]) -> None:
        super().__init__(window, what)
        self._file = window.file
        # The folder in an archive has any name, that of the file as a rule.
        name = next((name for name in self.members if name.endswith("/data.pkl") and name.count("/") == 1), None)
        if name is None:
            self.refuse("it is a zip archive, but not one of torch.save", remedy="Save the model's state dict")
        self._folder = name.removesuffix("data.pkl")
        if f"{self._folder}constants.pkl" in self.members:
            self.refuse("it is a TorchScript program", remedy="Save the model's state dict with torch.save")
        order = f"{self._folder}byteorder"
        if order in self.members and self.content(order, max_nbytes=16) != b"little":
            self.refuse("its numbers are not little-endian", remedy="Save it again on a little-endian machine")
        pickle = self.content(name, max_nbytes=MAX_PICKLE_BYTES)
        self.pickle_nbytes = len(pickle)
        if pickle not in cache:
            cache[pickle] = read_pickle(pickle, what=f"{what}: {name}")
        self.value = cache[pickle]

    def storage_range(self, name: str) -> ByteRange:
        """Return the byte range of a storage."""
        return self.byte_range(f"{self._folder}data/{name}")

    def tensor_view(self, tensor: PickledTensor, place: ByteRange, name: str) -> StoredView:
        """Return a tensor as a view of its own bytes if they are contiguous, otherwise of its storage."""
        # The storage as the pickle has it must be the member as the archive has it.
        nbytes = tensor.storage.nbytes
        if nbytes != place.nbytes:
            self.refuse(f"{shown(name)}: its storage has {place.nbytes} bytes, not {nbytes}")
        strided, itemsize = tensor.strided, tensor.dtype.itemsize
        fault = join_entries.find_strided_obstacle(strided, place.nbytes // itemsize)
        if fault is not None:
            self.refuse(f"{shown(name)}: {fault}", remedy="Save a contiguous copy of it (tensor.clone())")
        if strided.numel == 0 or strided.is_contiguous:
            start = place.start
            if strided.numel:  # the offset of an empty tensor may be anywhere, also behind its storage
                start += strided.offset * itemsize
            bytes_of_view = ByteRange(start, start + strided.numel * itemsize)
            return StoredView(self._file, bytes_of_view, tensor.dtype, Strided.contiguous(strided.sizes))
        whole = place.nbytes // itemsize * itemsize
        return StoredView(self._file, ByteRange(place.start, place.start + whole), tensor.dtype, strided)


def reject_others(reader: StorageReader, file: str) -> None:
    """Raise :class:`FormatError` for common files that are not archives of ``torch.save``."""
    _require_archive(FileWindow(reader, file, 0, reader.size(file)), shown(file))


def _require_archive(window: FileWindow, what: str) -> None:
    first = window.read_range(0, min(window.nbytes, checkpoint_index.FIRST_BYTES))
    checkpoint_index.reject_pointer(first, what)
    if first.startswith(_LEGACY):
        raise FormatError(
            f"{what}: it is in the format that torch wrote before 1.6, which cannot be read in parts. Load it once "
            "and write it again: torch.save(torch.load(file, weights_only=True), file)"
        )


def _walk(
    value: object, max_items: int, what: str
) -> tuple[list[tuple[KeyPath, PickledTensor]], list[tuple[KeyPath, str]]]:
    """Return every tensor with its path, and the path and type of all other values.

    A pickle needs more than a byte for every item, unless its dicts contain each other. So the size of the pickle
    limits the number of items.
    """
    if isinstance(value, PickledTensor):
        raise FormatError(f"{what}: it holds one tensor without a name. Save a state dict")
    if not isinstance(value, dict):
        raise FormatError(f"{what}: it holds a {_kind(value)}, not a state dict. Save model.state_dict()")
    tensors: list[tuple[KeyPath, PickledTensor]] = []
    others: list[tuple[KeyPath, str]] = []
    stack: list[tuple[KeyPath, object]] = [((), value)]
    visited = 0
    while stack:
        # Without recursion, because the nesting is untrusted. In the order of the dicts, as items are pushed in
        # reverse.
        path, item = stack.pop()
        visited += 1
        if len(path) > MAX_DEPTH or visited > max_items:
            raise FormatError(f"{what}: its dicts are nested too deeply. Save model.state_dict()")
        if isinstance(item, PickledTensor):
            tensors.append((path, item))
        elif isinstance(item, dict):
            members = [(_component(key), member) for key, member in item.items()]
            stack += [((*path, name), member) for name, member in reversed(members)]
        elif isinstance(item, list | tuple) and any(
            isinstance(member, PickledTensor | dict | list | tuple) for member in item
        ):
            stack += [((*path, str(number)), member) for number, member in reversed(list(enumerate(item)))]
        else:
            others.append((path, _kind(item)))
    return tensors, others


def _component(key: object) -> str:
    if isinstance(key, str | int):
        return str(key)
    return f"<{_kind(key)}>"


def _kind(value: object) -> str:
    if isinstance(value, Other):
        return value.kind
    if isinstance(value, Record):
        return "object"
    return "dict" if isinstance(value, dict) else type(value).__name__
