"""Folders of ``torch.distributed.checkpoint``: the byte ranges of the chunks of each tensor.

``.metadata`` is a pickle that lists the chunks of every tensor, and for each a file and a byte range, which holds
the chunk in the format of ``torch.save``. Source of the layout: torch's ``distributed/checkpoint/metadata.py`` and
``filesystem.py``.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Final, NoReturn

from shardwise.core.errors import FormatError
from shardwise.core.tensors import Box, ByteRange, DType
from shardwise.files import checkpoint_index, join_entries
from shardwise.files.checkpoint_index import (
    DISTRIBUTED,
    CheckpointFormat,
    CheckpointIndex,
    FileSelection,
    FormatFaults,
    IndexSoFar,
)
from shardwise.files.join_entries import MAX_DEPTH, METADATA, Chunk, FoundTensor, KeyPath, StoredView, WrapperChoice
from shardwise.files.pickles import Record, are_sizes, read_pickle
from shardwise.files.storage import StorageReader, read_limited
from shardwise.files.torch_files import KnownArchives, read_torch_file, read_torch_tensor
from shardwise.files.urls import shown, unsafe_name_reason

SUFFIX = ".distcp"
MAX_METADATA_BYTES = 500_000_000
"""Limit on the size of ``.metadata``, that of some three to five million chunks."""


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """The file and the byte range of a chunk."""

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
    """Content of ``.metadata``.

    Attributes:
        tensors: tensors by path. One under several names, with the same bytes, is listed under the first name only.
        others: paths and kinds of all other values.
        objects: places of values that are not tensors, in the format of ``torch.save``.
        levels: original keys of each path, with integers for positions in lists.
    """

    tensors: Mapping[KeyPath, SavedTensor]
    others: tuple[tuple[KeyPath, str], ...]
    objects: Mapping[KeyPath, ChunkPlace]
    levels: Mapping[KeyPath, tuple[str | int, ...]]


def read_metadata(reader: StorageReader, folder: str = "") -> DistributedMetadata:
    """Read ``.metadata`` in ``folder``. See :func:`parse_metadata`."""
    file = f"{folder}{METADATA}"
    content = read_limited(reader, file, MAX_METADATA_BYTES)
    return parse_metadata(content, folder, what=f"{shown(file)} in {reader.root}")


def _add_chosen(
    reader: StorageReader,
    metadata: DistributedMetadata,
    choice: WrapperChoice,
    index: IndexSoFar,
    faults: FormatFaults,
    *,
    is_sealed: bool = False,
) -> None:
    """Add the chosen tensors. Reads the zip directory of every chunk, or see :func:`open_state` on ``is_sealed``.

    Raises:
        FormatError: the metadata and the files contradict each other, or a chunk holds objects that are not data.
        StorageError: bytes cannot be read.
    """
    chosen = {path: tensor for path, tensor in metadata.tensors.items() if choice.model_key(path) is not None}
    # Sizes first: a chunk beyond the end of its file is a fault, whatever the chunk holds.
    index.files.update(_sizes(reader, chosen.values(), faults))
    faults.raise_if_any()
    # Chunks of one form have equal pickles, and in shardwise's own checkpoints equal archives but for the elements.
    known: dict[tuple[DType, tuple[int, ...]], KnownArchives] = defaultdict(KnownArchives)

    def read(item: tuple[SavedTensor, Box, ChunkPlace]) -> StoredView:
        tensor, box, place = item
        name = f"{shown(tensor.key)} at {box.offsets} in {shown(place.file)}"
        form = known[tensor.dtype, box.sizes]
        view = read_torch_tensor(reader, place.file, place.bytes, form, what=name)
        if view.dtype is not tensor.dtype or view.shape != box.sizes:
            raise FormatError(
                f"{name}: it holds {view.dtype.label} {view.shape}, where the metadata has "
                f"{tensor.dtype.label} {box.sizes}. The folder mixes two saves, or is damaged. Write it again"
            )
        return view

    # All chunks of all tensors at once, because a remote storage reads them concurrently. File by file, because a
    # reader keeps some files open, and the chunks of one tensor are in the files of all ranks.
    jobs = [(tensor, box, place) for tensor in chosen.values() for box, place in tensor.chunks]
    order = sorted(range(len(jobs)), key=lambda number: (jobs[number][2].file, jobs[number][2].bytes))
    # In a sealed file, which one rank wrote, archives of one form differ in their elements only: one is read.
    forms: list[object] = list(range(len(jobs)))
    if is_sealed:
        forms = [(place.file, tensor.dtype, box.sizes, place.bytes.nbytes) for tensor, box, place in jobs]
    firsts: dict[object, int] = {}
    for number in order:
        firsts.setdefault(forms[number], number)
    read_views = checkpoint_index.each(reader, read, [jobs[number] for number in firsts.values()])
    views = dict(zip(firsts, read_views, strict=True))
    starts = {form: jobs[number][2].bytes.start for form, number in firsts.items()}
    chunks = (  # in the order of the jobs
        Chunk(box.offsets, views[form].shifted(place.file, place.bytes.start - starts[form]))
        for form, (_, box, place) in zip(forms, jobs, strict=True)
    )
    tensors: list[FoundTensor] = []
    for path, tensor in chosen.items():
        chunks_of_tensor = tuple(next(chunks) for _ in tensor.chunks)
        tensors.append(FoundTensor(path, tensor.dtype, tensor.shape, chunks_of_tensor))
    join_entries.add_tensors(tensors, choice, index, faults)


def parse_metadata(content: bytes, folder: str, *, what: str) -> DistributedMetadata:
    """Parse the pickle ``.metadata``. ``what`` names it in messages.

    Raises :class:`FormatError` for the first fault. In the result every chunk lies in its tensor, has a place, and
    names a file below ``folder``.
    """
    return _Parser(folder, what).parse(read_pickle(content, what=what))


def _sizes(reader: StorageReader, tensors: Iterable[SavedTensor], faults: FormatFaults) -> dict[str, int]:
    """Return the sizes of the chunks' files by name. Missing and truncated ones are added to ``faults``."""
    # The last byte that the metadata needs of each file.
    ends: dict[str, int] = {}
    for tensor in tensors:
        for _, place in tensor.chunks:
            ends[place.file] = max(ends.get(place.file, 0), place.bytes.stop)
    faults.missing = "missing files (every machine wrote its own: copy them all into one folder)"
    sizes = dict(join_entries.read_each(reader, sorted(ends), _read_size, faults))
    for file, nbytes in sizes.items():
        if ends[file] > nbytes:
            faults.add("damaged files", f"{shown(file)}: it has {nbytes} bytes, and a chunk ends at {ends[file]}")
    return sizes


def _read_size(reader: StorageReader, file: str) -> tuple[str, int]:
    return file, reader.size(file)


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
        tensors: dict[KeyPath, SavedTensor] = {}
        others: list[tuple[KeyPath, str]] = []
        objects: dict[KeyPath, ChunkPlace] = {}
        levels: dict[KeyPath, tuple[str | int, ...]] = {}
        places_seen: set[tuple[object, ...]] = set()
        for key, item in described.items():
            if not isinstance(key, str) or not isinstance(item, Record):
                self.refuse("state_dict_metadata is not by key")
            recorded = paths.get(key)
            path = self.path(key, recorded)
            if item.name == "TensorStorageMetadata":
                tensor = self.tensor(key, item, places)
                # Tied tensors are saved once, under two names with the same chunks. The first name counts.
                place = tensor.dtype, tensor.shape, tensor.chunks
                if tensor.chunks and place in places_seen:
                    continue
                places_seen.add(place)
                tensors[path] = tensor
            else:
                others.append((path, "bytes"))
                if key in self.objects:
                    objects[path] = self.objects[key]
            levels[path] = path
            # ``str`` of an item that is nested would not come to an end.
            if isinstance(recorded, tuple) and all(type(level) in (str, int) for level in recorded):
                levels[path] = recorded if tuple(map(str, recorded)) == path else path
        return DistributedMetadata(tensors, tuple(others), objects, levels)

    def refuse(self, cause: str) -> NoReturn:
        raise FormatError(f"{self.what}: {cause}. It is damaged or of another format: write the checkpoint again")

    def fields(self, value: object, name: str) -> dict[object, object]:
        if not isinstance(value, Record) or value.name != name:
            self.refuse(f"an object of class {name} is missing")
        return self.mapping(value.state, name)

    def mapping(self, value: object, name: str) -> dict[object, object]:
        if not isinstance(value, dict):
            self.refuse(f"{name} is not a dict")
        return value

    def sizes(self, value: object, name: str) -> tuple[int, ...]:
        if not are_sizes(value):
            self.refuse(f"{name} is not a tuple of sizes")
        return value

    def places(self, storage_data: dict[object, object]) -> dict[tuple[str, tuple[int, ...]], ChunkPlace]:
        """Return the places of chunks by key and offsets."""
        places: dict[tuple[str, tuple[int, ...]], ChunkPlace] = {}
        by_file: dict[str, list[tuple[ByteRange, str, tuple[int, ...]]]] = defaultdict(list)
        for index, info in storage_data.items():
            index_fields = self.fields(index, "MetadataIndex")
            key, offsets = index_fields.get("fqn"), index_fields.get("offset")
            if not isinstance(key, str):
                self.refuse("storage_data has an entry without a key")
            place = self.place(key, self.fields(info, "_StorageInfo"))
            chunk: tuple[str, tuple[int, ...]] = (key, ())
            if offsets is not None:
                chunk = key, self.sizes(offsets, f"the offset of {shown(key)}")
            by_file[place.file].append((place.bytes, *chunk))
            if offsets is None:  # bytes
                self.objects[key] = place
                continue
            if chunk in places:
                self.refuse(f"{shown(key)} has two places for the chunk at {chunk[1]}")
            places[chunk] = place
        for file, ranges in by_file.items():
            # Sorted by start, so that any overlap is one between neighbors.
            ranges.sort()
            for (one, first, at), (two, second, also_at) in pairwise(ranges):
                if two.start < one.stop and (one, at) != (two, also_at):  # otherwise one chunk with two names
                    self.refuse(f"{shown(first)} and {shown(second)} overlap in {shown(file)}")
        return places

    def place(self, key: str, info: dict[object, object]) -> ChunkPlace:
        file, start, nbytes = info.get("relative_path"), info.get("offset"), info.get("length")
        # The metadata is untrusted. A name may not leave the folder, and the sum of start and length must fit
        # 63 bits.
        if not isinstance(file, str):
            self.refuse(f"{shown(key)} has no file")
        if (fault := unsafe_name_reason(file)) is not None:
            self.refuse(f"{shown(key)} is in the file {shown(file)}, which is refused: {fault}")
        if type(start) is not int or type(nbytes) is not int or start < 0 or nbytes < 0 or start + nbytes >= 2**63:
            self.refuse(f"{shown(key)} has an invalid byte range in {shown(file)}")
        if info.get("transform_descriptors"):
            raise FormatError(
                f"{self.what}: {shown(key)} was saved through a transform (compression, encryption), and cannot be "
                "read in parts. Load it by torch.distributed.checkpoint and save it without transforms"
            )
        return ChunkPlace(f"{self.folder}{file}", ByteRange(start, start + nbytes))

    def tensor(
        self, key: str, item: Record, places: Mapping[tuple[str, tuple[int, ...]], ChunkPlace]
    ) -> SavedTensor:
        fields = self.fields(item, "TensorStorageMetadata")
        shape = self.sizes(fields.get("size"), f"the size of {shown(key)}")
        dtype = self.dtype(key, fields.get("properties"))
        described_chunks = fields.get("chunks")
        if not isinstance(described_chunks, list):
            self.refuse(f"{shown(key)} has no list of chunks")
        chunks: dict[Box, ChunkPlace] = {}
        for chunk in described_chunks:
            facts = self.fields(chunk, "ChunkStorageMetadata")
            offsets = self.sizes(facts.get("offsets"), f"the offsets of a chunk of {shown(key)}")
            sizes = self.sizes(facts.get("sizes"), f"the sizes of a chunk of {shown(key)}")
            # The chunk lies in the tensor, and has a place in a file. Whether chunks tile the tensor is checked
            # later.
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

    def path(self, key: str, recorded: object) -> KeyPath:
        """Return the path that the planner, which flattens nested dicts, has recorded for a key, or the key alone.

        A path joined by dots is its key, so that no two tensors have the same path.
        """
        if not isinstance(recorded, tuple) or not 0 < len(recorded) <= MAX_DEPTH:
            return (key,)
        names = tuple(str(item) for item in recorded if isinstance(item, str | int))
        return names if ".".join(names) == key else (key,)


_MODEL_FOLDERS = ("pytorch_model_fsdp_*", "model", "distributed_checkpoint")


class _DistributedFolders(CheckpointFormat):
    probed = (METADATA,)
    looked_for = (METADATA,)

    def is_named(self, name: str) -> bool:
        return name.rpartition("/")[2] == METADATA

    def select(self, _reader: StorageReader, name: str, _faults: FormatFaults) -> FileSelection:
        return FileSelection(DISTRIBUTED, [], folder=name.removesuffix(METADATA))

    def find(self, reader: StorageReader, names: Sequence[str], _faults: FormatFaults) -> FileSelection | None:
        if METADATA in names:
            return FileSelection(DISTRIBUTED, [])
        # No checkpoint at the top: that of the only folder with a model's name, or else an error that says what
        # is there.
        complete = join_entries.find_distributed_folders(names)
        models = [name for name in complete if any(fnmatchcase(name, pattern) for pattern in _MODEL_FOLDERS)]
        if len(models) == 1:
            return FileSelection(DISTRIBUTED, [], folder=f"{models[0]}/")
        chunks = [name for name in names if name.endswith(SUFFIX) and name.count("/") <= 1]
        if not chunks and not complete:
            return None
        folders = sorted({name.rpartition("/")[0] for name in chunks}.difference(complete))
        if not folders:
            text = f"{reader.root}: no weights found, but folders of torch.distributed.checkpoint"
            raise FormatError(f"{text}\n{join_entries.where_models_are(reader, names)}")
        top = [name for name in chunks if "/" not in name]
        there = f"there are {len(top)}" if top else f"{checkpoint_index.listed(map(shown, folders))}: there are"
        text = (
            f"{reader.root}: {there} {SUFFIX} files, but no {METADATA}, which describes them and is "
            "written last, by rank 0"
        )
        remedy = (
            f"copy {METADATA} {'here' if top else 'there'} from the machine of rank 0, or use a save that "
            "was completed"
        )
        raise FormatError(f"{text}\n{join_entries.where_models_are(reader, names, only_models=True) or remedy}")

    def read(
        self, reader: StorageReader, selection: FileSelection, index: IndexSoFar, faults: FormatFaults
    ) -> None:
        metadata = read_metadata(reader, selection.folder)
        choice = join_entries.choose_model(metadata.tensors)
        if choice is None:
            raise join_entries.no_model(reader, f"{selection.folder}{METADATA}")
        join_entries.add_ignored(metadata.others, choice, index)
        _add_chosen(reader, metadata, choice, index, faults)


FORMAT: Final[CheckpointFormat] = _DistributedFolders()


def open_state(
    reader: StorageReader,
    file: str | None = None,
    metadata: DistributedMetadata | None = None,
    *,
    is_sealed: bool = False,
) -> CheckpointIndex:
    """Return all tensors of a folder of ``torch.distributed.checkpoint``, an optimizer's too, under whole paths.

    Or those of one ``file`` of ``torch.save``. The folder's ``metadata`` are read unless passed. Raises as
    :func:`~shardwise.files.open_checkpoint.open_checkpoint`.

    ``is_sealed`` is for a folder that shardwise wrote, whose ``.metadata`` has been compared with a digest, and
    whose files the caller compares with checksums, those bytes too that are between tensors, before a value
    counts. Then one chunk of each dtype, shape and size is read in each file, and tells where the elements of all
    others begin.
    """
    faults, index, everything = FormatFaults(reader.root), IndexSoFar(), WrapperChoice()
    if file is not None:
        saved = read_torch_file(reader, file)
        index.files[saved.file] = saved.file_nbytes
        join_entries.add_tensors(saved.tensors, everything, index, faults)
    else:
        metadata = read_metadata(reader) if metadata is None else metadata
        _add_chosen(reader, metadata, everything, index, faults, is_sealed=is_sealed)
        # Files of values that are not tensors have to be removed and compared with the others.
        for place in metadata.objects.values():
            index.files.setdefault(place.file, reader.size(place.file))
    faults.raise_if_any()
    layout = DISTRIBUTED if file is None else "torch file"
    return CheckpointIndex(reader.root, index.files, index.entries, {}, layout, index.composed)


def holds_optimizer(reader: StorageReader) -> bool:
    """Return whether a folder of ``torch.distributed.checkpoint`` has an optimizer's state and no model."""
    if METADATA not in reader.list():
        return False
    tensors = read_metadata(reader).tensors
    return bool(tensors) and join_entries.choose_model(tensors) is None
