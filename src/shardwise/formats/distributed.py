"""A folder written by ``torch.distributed.checkpoint``: which chunk of which tensor lies at which bytes.

``.metadata`` is a pickle that lists the chunks of every tensor, and for each a file and a byte range, which
contains the chunk in ``torch.save``'s format. Source of the layout: torch's ``distributed/checkpoint/metadata.py``
and ``filesystem.py``.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Final, NoReturn

from shardwise.errors import FormatError, StorageError
from shardwise.formats import joining
from shardwise.formats.contract import (
    CheckpointFormat,
    CheckpointIndex,
    FileSelection,
    FormatFaults,
    IndexSoFar,
    each,
)
from shardwise.formats.pickles import DISTRIBUTED_METADATA, Record, read_pickle
from shardwise.formats.torch_files import read_torch_file, read_torch_tensor
from shardwise.storage.contract import StorageReader
from shardwise.storage.names import shown, unsafe_name_reason
from shardwise.tensors import Box, ByteRange, DType

SUFFIX = ".distcp"
MAX_METADATA_BYTES = 500_000_000
"""The longest metadata that is read: of some three million chunks."""


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """The bytes of a chunk."""

    file: str
    bytes: ByteRange


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor as listed in the metadata."""

    key: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[tuple[Box, ChunkPlace], ...]


@dataclass(frozen=True, slots=True)
class DistributedMetadata:
    """Content of a DCP folder: tensors by their keys, and the keys of all other values.

    A tensor under several names, all of the same bytes, is there once, under the first of them.

    ``objects`` are the places of values that are not tensors, in ``torch.save``'s format. ``levels`` are all
    original keys, with numbers for positions in lists.
    """

    tensors: Mapping[joining.KeyPath, SavedTensor]
    others: tuple[tuple[joining.KeyPath, str], ...]
    objects: Mapping[joining.KeyPath, ChunkPlace] = field(default_factory=dict)
    levels: Mapping[joining.KeyPath, tuple[str | int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DistributedFiles:
    """The model's tensors of a folder, and the files they lie in with their sizes."""

    files: Mapping[str, int]
    tensors: tuple[joining.FoundTensor, ...]
    choice: joining.WrapperChoice
    others: tuple[tuple[joining.KeyPath, str], ...]


def read_metadata(reader: StorageReader, folder: str = "") -> DistributedMetadata:
    """Read ``.metadata`` in ``folder``. See :func:`parse_metadata`."""
    file = f"{folder}{joining.METADATA}"
    what = f"{shown(file)} in {reader.root}"
    nbytes = reader.size(file)
    if nbytes > MAX_METADATA_BYTES:
        raise FormatError(f"{what}: it has {nbytes} bytes, {MAX_METADATA_BYTES} is the limit")
    return parse_metadata(reader.read(file, 0, nbytes), folder, what=what)


def read_distributed(
    reader: StorageReader,
    folder: str = "",
    choose: Callable[[Collection[joining.KeyPath]], joining.WrapperChoice | None] = joining.choose_model,
    metadata: DistributedMetadata | None = None,
) -> DistributedFiles | None:
    """Read the model in ``folder`` (empty, or ending in a slash) of a storage. None if it has an optimizer only.

    Read are the metadata, unless they are given, and of every chunk the directory of its archive.

    Raises :class:`FormatError` for contradictions or objects that are not data,
    :class:`~shardwise.errors.StorageError` for bytes that cannot be read.
    """
    file = f"{folder}{joining.METADATA}"
    what = f"{shown(file)} in {reader.root}"
    metadata = read_metadata(reader, folder) if metadata is None else metadata
    choice = choose(metadata.tensors)
    if choice is None:
        return None
    wanted = {path: tensor for path, tensor in metadata.tensors.items() if choice.key_of(path) is not None}
    files = _sizes(reader, wanted.values(), what)

    known: dict[bytes, object] = {}

    def read(item: tuple[SavedTensor, Box, ChunkPlace]) -> joining.Chunk:
        tensor, box, place = item
        named = f"{shown(tensor.key)} at {box.offsets} in {shown(place.file)}"
        view = read_torch_tensor(reader, place.file, place.bytes, known, what=named)
        if view.dtype is not tensor.dtype or view.shape != box.sizes:
            raise FormatError(
                f"{named}: it holds {view.dtype.label} {view.shape}, where the metadata has "
                f"{tensor.dtype.label} {box.sizes}. The folder mixes two saves, or is damaged. Write it again"
            )
        return joining.Chunk(box.offsets, view)

    jobs = [(tensor, box, place) for tensor in wanted.values() for box, place in tensor.chunks]
    chunks = iter(each(reader, read, jobs))
    tensors = [
        joining.FoundTensor(path, tensor.dtype, tensor.shape, tuple(next(chunks) for _ in tensor.chunks))
        for path, tensor in wanted.items()
    ]
    return DistributedFiles(files, tuple(tensors), choice, metadata.others)


def parse_metadata(content: bytes, folder: str, *, what: str) -> DistributedMetadata:
    """Parse the pickle ``.metadata``. ``what`` names it in messages.

    Raises :class:`FormatError` for the first fault found. The result is consistent: every chunk lies in its tensor,
    has a place, and names a file below ``folder``.
    """
    return _Parser(folder, what).parse(read_pickle(content, DISTRIBUTED_METADATA, what=what))


def _sizes(reader: StorageReader, tensors: Iterable[SavedTensor], what: str) -> dict[str, int]:
    """Return the files of the chunks by name, and check that every chunk ends within its file."""
    ends: dict[str, int] = {}
    for tensor in tensors:
        for _, place in tensor.chunks:
            ends[place.file] = max(ends.get(place.file, 0), place.bytes.stop)
    files = sorted(ends)

    def size(file: str) -> int | StorageError:
        try:
            return reader.size(file)
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return error
            raise

    found = dict(zip(files, each(reader, size, files), strict=True))
    missing = [file for file, nbytes in found.items() if isinstance(nbytes, StorageError)]
    if missing:
        some = ", ".join(map(shown, missing[:20])) + (", ..." if len(missing) > 20 else "")
        raise FormatError(
            f"{what}: {len(missing)} of {len(files)} files are missing: {some}. Every machine wrote its own: copy "
            "them all into one folder"
        )
    sizes = {file: nbytes for file, nbytes in found.items() if isinstance(nbytes, int)}
    for file, nbytes in sizes.items():
        if ends[file] > nbytes:
            raise FormatError(
                f"{what}: {shown(file)} ends after {nbytes} bytes, and a chunk in it at {ends[file]}. Copy it again"
            )
    return sizes


class _Parser:
    def __init__(self, folder: str, what: str) -> None:
        self.folder = folder
        self.what = what
        self.objects: dict[str, ChunkPlace] = {}

    def parse(self, root: object) -> DistributedMetadata:
        fields = self.fields(root, "Metadata")
        described = self.mapping(fields.get("state_dict_metadata"), "state_dict_metadata")
        places = self.places(self.mapping(fields.get("storage_data"), "storage_data"))
        paths = fields.get("planner_data")
        paths = paths if isinstance(paths, dict) else {}
        tensors: dict[joining.KeyPath, SavedTensor] = {}
        others: list[tuple[joining.KeyPath, str]] = []
        objects: dict[joining.KeyPath, ChunkPlace] = {}
        levels: dict[joining.KeyPath, tuple[str | int, ...]] = {}
        known: set[tuple[object, ...]] = set()
        for key, item in described.items():
            if not isinstance(key, str) or not isinstance(item, Record):
                self.refuse("state_dict_metadata is not by key")
            given = paths.get(key)
            path = self.path(key, given)
            if item.name.endswith(".TensorStorageMetadata"):
                tensor = self.tensor(key, item, places)
                place = tensor.dtype, tensor.shape, tensor.chunks
                if tensor.chunks and place in known:
                    continue
                known.add(place)
                tensors[path] = tensor
            else:
                others.append((path, "bytes"))
                if key in self.objects:
                    objects[path] = self.objects[key]
            is_named = isinstance(given, tuple) and tuple(map(str, given)) == path
            levels[path] = given if is_named and isinstance(given, tuple) else path
        return DistributedMetadata(tensors, tuple(others), objects, levels)

    def refuse(self, cause: str) -> NoReturn:
        raise FormatError(f"{self.what}: {cause}. It is damaged or of another format: write the checkpoint again")

    def fields(self, value: object, name: str) -> dict[object, object]:
        if not isinstance(value, Record) or not value.name.endswith(f".{name}"):
            self.refuse(f"it has no {name} where one belongs")
        return self.mapping(value.state, name)

    def mapping(self, value: object, name: str) -> dict[object, object]:
        if not isinstance(value, dict):
            self.refuse(f"{name} is not a dict")
        return value

    def sizes(self, value: object, name: str) -> tuple[int, ...]:
        if (
            not isinstance(value, tuple)
            or len(value) > joining.MAX_DIMS
            or not all(type(size) is int and 0 <= size < 2**63 for size in value)
        ):
            self.refuse(f"{name} is not a tuple of sizes")
        return value

    def places(self, stored: dict[object, object]) -> dict[tuple[str, tuple[int, ...]], ChunkPlace]:
        """Return the places of chunks by key and offsets."""
        found: dict[tuple[str, tuple[int, ...]], ChunkPlace] = {}
        by_file: dict[str, list[tuple[ByteRange, str, tuple[int, ...]]]] = defaultdict(list)
        for index, info in stored.items():
            where = self.fields(index, "MetadataIndex")
            key, offsets = where.get("fqn"), where.get("offset")
            if not isinstance(key, str):
                self.refuse("storage_data has an entry without a key")
            place = self.place(key, self.fields(info, "_StorageInfo"))
            spot = key, () if offsets is None else self.sizes(offsets, f"the offset of {shown(key)}")
            by_file[place.file].append((place.bytes, *spot))
            if offsets is None:  # bytes
                self.objects[key] = place
                continue
            if spot in found:
                self.refuse(f"{shown(key)} has two places for the chunk at {spot[1]}")
            found[spot] = place
        for file, ranges in by_file.items():
            ranges.sort()
            for (one, first, at), (two, second, also_at) in pairwise(ranges):
                if two.start < one.stop and (one, at) != (two, also_at):  # else one chunk under two names
                    self.refuse(f"{shown(first)} and {shown(second)} overlap in {shown(file)}")
        return found

    def place(self, key: str, info: dict[object, object]) -> ChunkPlace:
        file, start, nbytes = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(file, str):
            self.refuse(f"{shown(key)} is in no file")
        if (fault := unsafe_name_reason(file)) is not None:
            self.refuse(f"{shown(key)} is in the file {shown(file)}, which is refused: {fault}")
        if type(start) is not int or type(nbytes) is not int or start < 0 or nbytes < 0 or start + nbytes >= 2**63:
            self.refuse(f"{shown(key)} has no range of bytes in {shown(file)}")
        if info.get("transform_descriptors"):
            raise FormatError(
                f"{self.what}: {shown(key)} was saved through a transform (compression, encryption), and cannot be "
                "read in parts. Load it with torch.distributed.checkpoint and save it without"
            )
        return ChunkPlace(f"{self.folder}{file}", ByteRange(start, start + nbytes))

    def tensor(
        self, key: str, item: Record, places: Mapping[tuple[str, tuple[int, ...]], ChunkPlace]
    ) -> SavedTensor:
        fields = self.fields(item, "TensorStorageMetadata")
        shape = self.sizes(fields.get("size"), f"the size of {shown(key)}")
        dtype = self.dtype(key, fields.get("properties"))
        listed = fields.get("chunks")
        if not isinstance(listed, list):
            self.refuse(f"{shown(key)} has no list of chunks")
        chunks: dict[Box, ChunkPlace] = {}
        for chunk in listed:
            facts = self.fields(chunk, "ChunkStorageMetadata")
            offsets = self.sizes(facts.get("offsets"), f"the offsets of a chunk of {shown(key)}")
            sizes = self.sizes(facts.get("sizes"), f"the sizes of a chunk of {shown(key)}")
            box = Box(offsets, sizes) if len(offsets) == len(sizes) else None
            if box is None or not box.is_within(shape):
                self.refuse(f"{shown(key)} of shape {shape} has a chunk at {offsets} of sizes {sizes}")
            place = places.get((key, offsets))
            if place is None:
                self.refuse(f"{shown(key)} has no file for the chunk at {offsets}")
            chunks[box] = place
        return SavedTensor(key, dtype, shape, tuple(chunks.items()))

    def dtype(self, key: str, properties: object) -> DType:
        state = properties.state if isinstance(properties, Record) else None
        dtype = state[0] if isinstance(state, tuple) and state else None
        if not isinstance(dtype, DType):
            self.refuse(f"{shown(key)} has no properties, or no dtype that can be loaded")
        return dtype

    def path(self, key: str, given: object) -> joining.KeyPath:
        """Return the path of keys to a tensor.

        Recorded by the planner, which flattens nested dicts, otherwise the key alone.

        Joined by dots they are ``key``, so that no two tensors have one path.
        """
        if not isinstance(given, tuple) or not 0 < len(given) <= joining.MAX_DEPTH:
            return (key,)
        names = tuple(str(part) for part in given if isinstance(part, str | int))
        # What a planner of another kind says is not believed: joined, the names are the key.
        return names if ".".join(names) == key else (key,)


_LAYOUT: Final = "torch distributed checkpoint"
_MODEL_FOLDERS = ("pytorch_model_fsdp_*", "model", "distributed_checkpoint")


class _DistributedFolders(CheckpointFormat):
    probed = (joining.METADATA,)
    looked_for = (joining.METADATA,)

    def is_named(self, name: str) -> bool:
        return name.rpartition("/")[2] == joining.METADATA

    def select(
        self,
        reader: StorageReader,  # noqa: ARG002 - as any format
        name: str,
        faults: FormatFaults,  # noqa: ARG002
    ) -> FileSelection:
        return FileSelection(_LAYOUT, [], folder=name.removesuffix(joining.METADATA))

    def find(
        self,
        reader: StorageReader,
        names: Sequence[str],
        faults: FormatFaults,  # noqa: ARG002 - as any format
    ) -> FileSelection | None:
        if joining.METADATA in names:
            return FileSelection(_LAYOUT, [])
        models = [
            folder
            for folder in joining.distributed_folders(names)
            if any(fnmatchcase(folder, pattern) for pattern in _MODEL_FOLDERS)
        ]
        if len(models) == 1:
            return FileSelection(_LAYOUT, [], folder=f"{models[0]}/")
        chunks = [name for name in names if name.endswith(SUFFIX) and name.count("/") <= 1]
        if not chunks and not joining.distributed_folders(names):
            return None
        if any("/" not in name for name in chunks):
            text = (
                f"{reader.root}: there are {sum('/' not in name for name in chunks)} {SUFFIX} files, but no "
                f"{joining.METADATA}, which says what is in them and is written last, by rank 0"
            )
            remedy = f"copy {joining.METADATA} here from the machine of rank 0, or take a save that was completed"
        else:
            text = f"{reader.root}: no weights found, but folders of torch.distributed.checkpoint"
            remedy = (
                f"the folders with {SUFFIX} files lack their {joining.METADATA}: take a save that was completed"
            )
        raise FormatError(f"{text}\n{joining.where_models_are(reader, names) or remedy}")

    def read(
        self, reader: StorageReader, selection: FileSelection, found: IndexSoFar, faults: FormatFaults
    ) -> None:
        contents = read_distributed(reader, selection.folder)
        if contents is None:
            raise joining.no_model(reader, f"{selection.folder}{joining.METADATA}")
        found.files.update(contents.files)
        joining.add_ignored(contents.others, contents.choice, found)
        joining.add_tensors(contents.tensors, contents.choice, found, faults)


FORMAT: Final[CheckpointFormat] = _DistributedFolders()


def open_state(
    reader: StorageReader, file: str | None = None, metadata: DistributedMetadata | None = None
) -> CheckpointIndex:
    """All tensors of a folder of ``torch.distributed.checkpoint``, an optimizer's too, under whole paths.

    Or those of one ``file`` of ``torch.save``. The folder's ``metadata`` are read unless passed. Raises as
    :func:`open_checkpoint`.
    """
    faults, found = FormatFaults(reader.root), IndexSoFar()
    if file is not None:
        saved = read_torch_file(reader, file)
        found.files[saved.file] = saved.file_nbytes
        joining.add_tensors(saved.tensors, joining.WrapperChoice((), ()), found, faults)
        faults.raise_if_any()
        return CheckpointIndex(reader.root, found.files, found.entries, {}, "torch file", found.composed)
    metadata = read_metadata(reader) if metadata is None else metadata
    contents = read_distributed(reader, choose=lambda _: joining.WrapperChoice((), ()), metadata=metadata)
    assert contents is not None
    found.files.update(contents.files)
    for place in metadata.objects.values():
        found.files.setdefault(place.file, reader.size(place.file))
    joining.add_tensors(contents.tensors, contents.choice, found, faults)
    faults.raise_if_any()
    layout = "torch distributed checkpoint"
    return CheckpointIndex(reader.root, found.files, found.entries, {}, layout, found.composed)


def holds_optimizer(reader: StorageReader) -> bool:
    """Return whether a folder of ``torch.distributed.checkpoint`` has an optimizer's state and no model."""
    if joining.METADATA not in reader.list():
        return False
    tensors = read_metadata(reader).tensors
    return bool(tensors) and joining.choose_model(tensors) is None
