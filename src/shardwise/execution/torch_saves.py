"""Writes and reads files of ``torch.save``, and writes folders of ``torch.distributed.checkpoint``.

A whole state is in one file, a file for each rank, or a folder that counts when it has ``.metadata``.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

import torch
from torch.distributed.tensor import DTensor

from shardwise.errors import FormatError, ShardingError, StorageError
from shardwise.execution.committing import make_file
from shardwise.execution.distributed_chunks import (
    data_file,
    key_of,
    metadata_of,
    plan_tensors,
    views_of,
    write_chunks,
)
from shardwise.execution.locked_folder import Saving
from shardwise.execution.moving import gather
from shardwise.execution.rename_journal import number_of
from shardwise.execution.tensor_facts import TensorFacts, facts_of
from shardwise.execution.world import World
from shardwise.execution.write import Sink
from shardwise.formats.joining import METADATA
from shardwise.formats.torch_files import reject_others
from shardwise.models.view import local_boxes, local_tensor
from shardwise.planning.commit_plan import WrittenFiles, fresh
from shardwise.storage.contract import StorageWriter
from shardwise.storage.reading import LocalReader
from shardwise.storage.writing import open_writer

Levels: TypeAlias = tuple[str | int, ...]
"""The keys that lead to a value, through dicts and (by numbers) lists."""

Nest: TypeAlias = Mapping[Levels, object]
"""Values of nested dicts and lists, by the way to each."""

_SMALL_BYTES = 1 << 20
"""Smaller parts of a file are collected before they are written."""


def write_whole_file(
    world: World,
    saving: Saving,
    name: str,
    tensors: Mapping[Levels, torch.Tensor],
    objects: Nest,
    *,
    budget_bytes: int,
    device: torch.device,
) -> tuple[int, WrittenFiles]:
    """Gather tensors on the first rank, which writes them and other values into one file with ``torch.save``.

    ``tensors`` are the same on every rank. A tensor with several names is written once. ``objects`` are the first
    rank's. ``device`` holds staging memory. Return the bytes of the tensors, and the file.

    Collective: yes.
    Memory: on the first rank all tensors, on others ``budget_bytes``.

    Raises:
        RankMismatchError: ranks have different tensors.
        ShardingError: ranks do not have, together, all of a tensor, or two tensors have one name.
        StorageError: the file could not be written.
    """
    keys: dict[int, str] = {}
    key_of = {at: keys.setdefault(id(tensor), ".".join(map(str, at))) for at, tensor in tensors.items()}
    world.run_all(_require_apart, key_of, tensors)
    once = {key_of[at]: tensors[at] for at in sorted(tensors, key=key_of.__getitem__)}
    whole = gather(world, once, "full", budget_bytes=budget_bytes, device=device)

    def write() -> WrittenFiles:
        state = nested({**{at: whole[key] for at, key in key_of.items()}, **objects})
        return WrittenFiles({name: write_torch_file(saving, name, state)})

    written = world.broadcast(write)
    return sum(tensor.nbytes for tensor in once.values()), written if world.rank == 0 else WrittenFiles()


def _require_apart(key_of: Mapping[Levels, str], tensors: Mapping[Levels, torch.Tensor]) -> None:
    of: dict[str, int] = {}
    for at, key in key_of.items():
        if of.setdefault(key, id(tensors[at])) != id(tensors[at]):
            raise ShardingError(f"{key}: two tensors have this name, with dots in other places. Rename one")


def write_rank_files(world: World, saving: Saving, names: Sequence[str], state: Any) -> tuple[int, WrittenFiles]:
    """Write this rank's state into the file of its rank. Return the bytes of the file, and all files.

    Collective: yes.
    Memory: none, but for shards that are on an accelerator, which torch copies one by one.

    Raises:
        StorageError: a file could not be written, or somebody else writes there, or has since.
    """
    sizes = world.all_gather(write_torch_file, saving, names[world.rank], state)
    return sizes[world.rank], WrittenFiles(dict(zip(names, sizes, strict=True)) if world.rank == 0 else {})


def write_torch_file(saving: Saving, name: str, state: Any) -> int:
    """Write and sync a file under its temporary name, with ``torch.save``. Return its bytes. Collective: no.

    Raises:
        StorageError: it could not be written, or the folder is marked by another save.
    """
    saving.require()
    with open_writer(saving.folder) as writer:
        file = fresh(name, saving.save_id)
        try:
            nbytes = _size_of(state)
            writer.create(file, nbytes)
            stream = _FileStream(writer, file)
            with io.BufferedWriter(stream, _SMALL_BYTES) as buffered:
                torch.save(state, cast(IO[bytes], buffered))
        except (OSError, RuntimeError) as error:
            raise StorageError(f"{saving.folder}/{name}: writing it failed, {error}") from error
        if stream.position != nbytes:
            raise StorageError(
                f"{saving.folder}/{name}: torch.save wrote {stream.position} bytes, and {nbytes} when it was "
                "asked before. The state must not change while it is saved"
            )
        writer.sync(file)
        writer.sync_names()
        return nbytes


def _size_of(state: Any) -> int:
    """The bytes of the file that ``torch.save`` makes. Memory: none, because it writes a sparse file."""
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        place = Path(folder, "archive")  # the name that torch gives to archives without one
        with torch.serialization.skip_data():
            torch.save(state, place)
        return place.stat().st_size


class _FileStream(io.RawIOBase):
    """A file of a storage writer, written from its beginning on."""

    def __init__(self, writer: StorageWriter, file: str) -> None:
        super().__init__()
        self.position = 0
        self._writer = writer
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        self._writer.write(self._file, self.position, [view])
        self.position += view.nbytes
        return view.nbytes


def nested(values: Nest) -> object:
    """Return values in dicts and lists. A number leads into a list if all numbers from 0 on are there."""
    if () in values:
        return values[()]
    inner: dict[str | int, dict[Levels, object]] = {}
    for (first, *rest), value in ((list(path), value) for path, value in values.items()):
        inner.setdefault(first, {})[tuple(rest)] = value
    if all(isinstance(key, int) for key in inner) and sorted(inner) == list(range(len(inner))):
        return [nested(inner[number]) for number in range(len(inner))]
    return {key: nested(found) for key, found in inner.items()}


def flattened(value: Any, way: Levels = (), *, as_text: bool = False) -> Iterator[tuple[Levels, Any]]:
    """Return the values in nested dicts and lists by their paths. Inverse of :func:`nested`.

    Empty dicts, and lists without tensors or dicts, are values. ``as_text`` makes texts of the keys of dicts.
    """
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flattened(item, (*way, str(key) if as_text else key), as_text=as_text)
    elif isinstance(value, list) and _is_nest(value):
        for number, item in enumerate(value):
            yield from flattened(item, (*way, number), as_text=as_text)
    else:
        yield way, value


def _is_nest(value: object) -> bool:
    if isinstance(value, list):
        return any(isinstance(item, torch.Tensor) or _is_nest(item) for item in value)
    return isinstance(value, Mapping)


def loaded(content: bytes, what: str) -> Any:
    """Load a value that ``torch.save`` wrote.

    Raises:
        FormatError: it holds more than data.
    """
    try:
        return torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:  # torch raises errors of many kinds for a damaged or malign file
        raise FormatError(f"{what}: cannot be read as plain data: {str(error).splitlines()[0]}") from error


def read_rank_file(world: World, folder: Path, names: Sequence[str]) -> Any:
    """Return the data that this rank wrote: plain data, tensors and DTensors.

    Tensors stay in the file until they are used.

    Collective: yes.

    Raises:
        ShardingError: the number of files is not that of ranks, or tensors contradict their placement.
        FormatError: a file holds more than data, or comes from FSDP1.
        StorageError: a file could not be read.
    """

    def read() -> Any:
        if len(names) != world.size:
            raise ShardingError(
                f"{folder}: {len(names)} ranks saved what they held, each into a file of its own, and nothing says "
                f"how to deal it to {world.size}. Load it on {len(names)} ranks (load_accelerate_model does) and "
                "save it in another form, or save with use_dcp=True"
            )
        file = folder / names[world.rank]
        found = load_plain(file)
        tensors = [(way, value) for way, value in flattened(found) if isinstance(value, torch.Tensor)]
        for name, tensor in ((".".join(map(str, way)), value) for way, value in tensors):
            if "flat_param" in name.rpartition(".")[2] or "._flat_param" in name:
                raise FormatError(
                    f"{file}: has {name}, a flattened run of several parameters without a word of which (FSDP1's "
                    "LOCAL_STATE_DICT). Load it with FSDP1 and save it with FULL_STATE_DICT or SHARDED_STATE_DICT"
                )
            _require_sound(tensor, f"{name} in {file}")
        return found

    return world.run_all(read)


_OF_ANOTHER = (
    "Another version of torch wrote it, which pickles DTensors in its own way. Load it with that one, and save it "
    "as 'sharded' or 'full'"
)


def load_plain(file: Path, also: Sequence[Any] = ()) -> Any:
    """Return the object in a ``torch.save`` file. Tensors are in host memory, read from the file as they are used.

    ``also`` are functions and classes that are allowed in addition to torch's own.

    Raises:
        FormatError: it is no such file, is damaged, or holds more than data.
        StorageError: it could not be read.
    """
    with LocalReader(file.parent) as reader:
        reject_others(reader, file.name)
    try:
        with torch.serialization.safe_globals(list(also)):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise StorageError(f"{file}: reading it failed, {error.strerror}") from error
    except Exception as error:  # what torch raises for a damaged or malign file is of many kinds
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "ShardedTensor" in str(error):
            raise FormatError(
                f"{file}: holds tensors of FSDP1's own kind (ShardedTensor), which are read only where FSDP1 saved "
                "them. Save it with FULL_STATE_DICT, or with SHARDED_STATE_DICT into a folder"
            ) from error
        if "torch.distributed." in str(error):  # a part of a DTensor that this torch does not know, or not any more
            raise FormatError(
                f"{file}: torch {torch.__version__} cannot read its DTensors. {_OF_ANOTHER}"
            ) from error
        raise FormatError(f"{file}: cannot be read as plain data: {cause}") from error


def _require_sound(tensor: torch.Tensor, what: str) -> None:
    """Check that a DTensor has the local tensor of its placement."""
    if not isinstance(tensor, DTensor):
        return
    try:
        boxes = local_boxes(tensor, what)
        local = local_tensor(tensor)
        is_sound = (
            type(local) is torch.Tensor
            and local.dtype == tensor.dtype
            and sum(part.box.numel for part in boxes) == local.numel()
            and (len(boxes) != 1 or tuple(local.shape) == boxes[0].box.sizes)
        )
    except ShardingError:
        raise
    except Exception as error:  # of whatever a stranger wrote in place of a mesh
        raise FormatError(
            f"{what}: is not a valid DTensor ({type(error).__name__}: {error}): it is damaged. Or: {_OF_ANOTHER}"
        ) from error
    if not is_sound:
        raise FormatError(f"{what}: its local tensor is not what its placement says. The file is damaged")


def write_distributed_folder(
    world: World, saving: Saving, name: str, state: Mapping[str, Any], *, budget_bytes: int
) -> WrittenFiles:
    """Write a nest of dicts with DTensors, whole tensors and other values into a folder of this name.

    It is in the folder that is marked, which every rank sees. The new files have other names than an older
    checkpoint's, which counts until ``.metadata`` takes the place of its own. Values that are not tensors are the
    first rank's.

    Collective: yes.
    Memory: ``budget_bytes``, and that only for tensors that are strided, or on an accelerator.

    Raises:
        RankMismatchError: ranks have different tensors.
        ShardingError: the ranks together do not hold all of a tensor, or two tensors have one name.
        StorageError: the folder could not be written to, or somebody else writes there, or has since.
    """
    tensors: dict[Levels, torch.Tensor] = {}
    values: dict[Levels, bytes] = {}

    def look() -> dict[str, TensorFacts]:
        keys: set[str] = set()
        for way, value in flattened(state, as_text=True):
            if isinstance(value, Mapping):
                continue  # an empty dict; torch leaves it out
            if (key := key_of(way)) in keys:
                raise ShardingError(f"{key}: two values have this name, with dots in other places. Rename one")
            keys.add(key)
            if isinstance(value, torch.Tensor):
                tensors[way] = value
            elif world.rank == 0:
                values[way] = _packed(value)
        return {key_of(way): facts_of(tensor, key_of(way)) for way, tensor in tensors.items()}

    told = world.all_gather(look)
    shapes = {way: (tuple(tensor.shape), tensor.dtype) for way, tensor in tensors.items()}
    plan = world.run_all(plan_tensors, shapes, told)
    sizes = world.all_gather(lambda: {way: len(value) for way, value in values.items()})
    number, folder = number_of(saving.save_id), Path(saving.folder, name)
    files = {data_file(rank, number): plan.nbytes(rank) + sum(own.values()) for rank, own in enumerate(sizes)}

    def write_own() -> None:
        saving.require()
        file, chunks = data_file(world.rank, number), plan.by_rank[world.rank]
        by_key = {key_of(way): tensor for way, tensor in tensors.items()}
        views = views_of(chunks, by_key, {key: local_tensor(tensor) for key, tensor in by_key.items()})
        with open_writer(folder) as writer:
            writer.create(file, files[file])
            sink = Sink(writer, check=world.check)
            write_chunks(sink, file, chunks, views, list(values.values()), budget_bytes)
            writer.sync(file)
            writer.sync_names()

    def write_metadata() -> int:
        metadata = metadata_of(plan, sizes, partial(data_file, number=number))
        with open_writer(folder) as writer:
            make_file(writer, fresh(METADATA, saving.save_id), metadata)
            writer.sync_names()
        return len(metadata)

    world.run_all(write_own)
    named = {f"{name}/{METADATA}": world.broadcast(write_metadata)}
    return WrittenFiles(named, {f"{name}/{file}": nbytes for file, nbytes in files.items()})


def _packed(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
