"""Writes and reads files of ``torch.save``, and writes folders of ``torch.distributed.checkpoint``.

A whole state is in one file, a file for each rank, or a folder that counts when it has ``.metadata``.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.utils import serialization

from shardwise.core.errors import FormatError, ShardingError, StorageError
from shardwise.core.formatting import first_line
from shardwise.files.folders import temporary_folder
from shardwise.files.join_entries import METADATA
from shardwise.files.local_reader import LocalReader
from shardwise.files.local_writer import open_writer
from shardwise.files.storage import StorageWriter
from shardwise.files.torch_files import reject_others
from shardwise.fsdp.named_tensors import local_boxes, local_tensor
from shardwise.ranks.world import World
from shardwise.saving.commit import make_file
from shardwise.saving.commit_plan import WrittenFiles, temporary_name
from shardwise.saving.locked_folder import Saving
from shardwise.saving.rename_journal import number_of
from shardwise.transfer.distributed_chunks import (
    ChunkWriter,
    StatePath,
    build_metadata,
    chunk_views,
    data_file,
    flat_key,
    plan_tensors,
)
from shardwise.transfer.move import gather
from shardwise.transfer.tensor_metadata import describing_tensors, metadata_by_name

_TORCH_CONFIG: Any = serialization.config

_BUFFER_BYTES = 1 << 20
"""Smaller writes of ``torch.save`` are buffered."""


def write_whole_file(
    world: World,
    saving: Saving,
    name: str,
    tensors: Mapping[StatePath, torch.Tensor],
    objects: Mapping[StatePath, object],
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
    # One tensor under several paths has one key, that of its first path.
    first_keys: dict[int, str] = {}
    keys = {path: first_keys.setdefault(id(tensor), flat_key(path)) for path, tensor in tensors.items()}
    with world.collective("map the keys"):
        # Sorted, because ranks may have built their dicts in different orders, and gather() compares the order.
        unique: dict[str, torch.Tensor] = {}
        for path, key in sorted(keys.items(), key=itemgetter(1)):
            if unique.setdefault(key, tensors[path]) is not tensors[path]:
                raise ShardingError(f"{key}: two tensors have this name, with dots in other places. Rename one")
    full = gather(world, unique, "full", budget_bytes=budget_bytes, device=device)

    with world.broadcast("write the file") as exchange:
        if world.rank == 0:
            state = nest_values({**{path: full[key] for path, key in keys.items()}, **objects})
            exchange.local = WrittenFiles({name: write_torch_file(saving, name, state)})
    return sum(tensor.nbytes for tensor in unique.values()), exchange.result


def write_rank_files(world: World, saving: Saving, names: Sequence[str], state: Any) -> tuple[int, WrittenFiles]:
    """Write this rank's state into the file of its rank. Return the bytes of the file, and all files.

    Collective: yes.
    Memory: none, but for shards that are on an accelerator, which torch copies one by one into pinned memory.

    Raises:
        StorageError: a file could not be written, or another save writes there, or has since.
    """
    with world.all_gather("write the file") as exchange:
        exchange.local = write_torch_file(saving, names[world.rank], state)
    sizes: list[int] = exchange.result
    return sizes[world.rank], WrittenFiles(dict(zip(names, sizes, strict=True)))


def write_torch_file(saving: Saving, name: str, state: Any) -> int:
    """Write and sync a file under its temporary name, with ``torch.save``. Return its bytes. Collective: no.

    Raises:
        StorageError: it could not be written, or the folder is marked by another save.
    """
    saving.require()
    with open_writer(saving.folder) as writer:
        file = temporary_name(name, saving.save_id)
        try:
            # The size first: a file is created with its final size, so that a full disk is an error before the
            # write.
            nbytes = _measure_size(state)
            writer.create(file, nbytes)
            stream = _FileStream(writer, file)
            pinned = _TORCH_CONFIG.patch("save.use_pinned_memory_for_d2h", True)
            with io.BufferedWriter(stream, _BUFFER_BYTES) as buffered, pinned:
                torch.save(state, cast(IO[bytes], buffered))
        except (OSError, RuntimeError) as error:
            raise StorageError(f"{saving.folder}/{name}: writing it failed, {error}") from error
        if stream.position != nbytes:
            raise StorageError(
                f"{saving.folder}/{name}: torch.save wrote {stream.position} bytes instead of {nbytes}. The state "
                "must not change while it is saved"
            )
        writer.sync(file)
        writer.sync_names()
        return nbytes


def _measure_size(state: Any) -> int:
    """Return the bytes of the file that ``torch.save`` writes. Memory: none, because this writes a sparse file."""
    with temporary_folder() as folder:
        path = folder / "archive"  # the name that torch gives to archives without one
        with torch.serialization.skip_data():
            torch.save(state, path)
        return path.stat().st_size


class _FileStream(io.RawIOBase):
    """A file of a storage writer, written from its beginning to its end."""

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


def nest_values(values: Mapping[StatePath, object]) -> object:
    """Return values in dicts and lists. A number leads into a list if all numbers from 0 on are there."""
    # An empty path is the value itself. Otherwise values are grouped by their first key, and each group is
    # nested.
    if () in values:
        return values[()]
    inner: dict[str | int, dict[StatePath, object]] = {}
    for (first, *tail), value in ((list(path), value) for path, value in values.items()):
        inner.setdefault(first, {})[tuple(tail)] = value
    if all(isinstance(key, int) for key in inner) and sorted(inner) == list(range(len(inner))):
        return [nest_values(inner[number]) for number in range(len(inner))]
    return {key: nest_values(items) for key, items in inner.items()}


def flatten_values(value: Any, path: StatePath = (), *, as_text: bool = False) -> Iterator[tuple[StatePath, Any]]:
    """Yield the values in nested dicts and lists, with their paths. Inverse of :func:`nest_values`.

    Empty dicts, and lists without tensors or dicts, are values. ``as_text`` converts keys of dicts to strings.
    """
    # Only lists with tensors or dicts in them are entered. Others, such as betas, are values as they are.
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flatten_values(item, (*path, str(key) if as_text else key), as_text=as_text)
    elif isinstance(value, list) and _is_nest(value):
        for number, item in enumerate(value):
            yield from flatten_values(item, (*path, number), as_text=as_text)
    else:
        yield path, value


def _is_nest(value: object) -> bool:
    if isinstance(value, list):
        return any(isinstance(item, torch.Tensor) or _is_nest(item) for item in value)
    return isinstance(value, Mapping)


def load_value(content: bytes, what: str) -> Any:
    """Return a value that ``torch.save`` wrote. Its tensors are in host memory, wherever they were saved from.

    Raises:
        FormatError: it holds more than data.
    """
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises errors of many kinds for a damaged or malign file
        raise FormatError(f"{what}: cannot be read as plain data: {first_line(error)}") from error


def read_rank_file(world: World, folder: Path, names: Sequence[str]) -> Any:
    """Return the data that this rank wrote: plain data, tensors and DTensors.

    Tensors stay in the file until they are used.

    Collective: yes.

    Raises:
        ShardingError: the number of files is not that of ranks, or tensors contradict their placement.
        FormatError: a file holds more than data, or comes from FSDP1.
        StorageError: a file could not be read.
    """
    with world.collective("read the rank's file"):
        if len(names) != world.size:
            raise ShardingError(
                f"{folder}: {len(names)} ranks saved their shards, each into a file of its own, which cannot be "
                f"resharded to {world.size}. Load it on {len(names)} ranks (load_accelerate_model does) and "
                "save it in another form, or save with use_dcp=True"
            )
        # Each rank reads the file of its own number. DTensors in it are checked, because unpickling does not.
        file = folder / names[world.rank]
        state = load_plain(file)
        for path, tensor in flatten_values(state):
            if not isinstance(tensor, torch.Tensor):
                continue
            name = flat_key(path)
            if "flat_param" in name.rpartition(".")[2] or "._flat_param" in name:
                raise FormatError(
                    f"{file}: has {name}, a flattened run of several parameters without a list of them (FSDP1's "
                    "LOCAL_STATE_DICT). Load it with FSDP1 and save it with FULL_STATE_DICT or SHARDED_STATE_DICT"
                )
            _require_sound(tensor, f"{name} in {file}")
        return state


_OTHER_TORCH = (
    "written by a version of torch that pickles DTensors differently. Load it with that version, and save it as "
    "'sharded' or 'full'"
)


def load_plain(file: Path) -> Any:
    """Return the object in a ``torch.save`` file. Tensors are in host memory, read from the file as they are used.

    Raises:
        FormatError: it is no such file, is damaged, or holds more than data.
        StorageError: it could not be read.
    """
    with LocalReader(file.parent) as reader:
        # Common other files have messages of their own. torch's errors for them say little.
        reject_others(reader, file.name)
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise StorageError(f"{file}: reading it failed, {error.strerror}") from error
    except Exception as error:  # torch raises errors of many kinds for a damaged or malign file
        cause = first_line(error)
        if "ShardedTensor" in str(error):
            raise FormatError(
                f"{file}: holds tensors of FSDP1's own kind (ShardedTensor), which are read only where FSDP1 saved "
                "them. Save it with FULL_STATE_DICT, or with SHARDED_STATE_DICT into a folder"
            ) from error
        if "torch.distributed." in str(error):  # a class of DTensors that this torch does not have
            raise FormatError(
                f"{file}: torch {torch.__version__} cannot read its DTensors: they were {_OTHER_TORCH}"
            ) from error
        raise FormatError(f"{file}: cannot be read as plain data: {cause}") from error


def _require_sound(tensor: torch.Tensor, what: str) -> None:
    """Raise FormatError if a DTensor's local tensor contradicts its placement."""
    if not isinstance(tensor, DTensor):
        return
    try:
        # The boxes follow from mesh and placements, both of which come from the file, and must fit the local
        # tensor.
        boxes = local_boxes(tensor, what)
        local = local_tensor(tensor)
        is_sound = (
            type(local) is torch.Tensor
            and local.dtype == tensor.dtype
            and sum(piece.box.numel for piece in boxes) == local.numel()
            and (len(boxes) != 1 or tuple(local.shape) == boxes[0].box.sizes)
        )
    except ShardingError:
        raise
    except Exception as error:  # an untrusted file may have any object in place of a mesh
        raise FormatError(
            f"{what}: is not a valid DTensor ({type(error).__name__}: {error}). It is damaged, or {_OTHER_TORCH}"
        ) from error
    if not is_sound:
        raise FormatError(f"{what}: its local tensor contradicts its placement. The file is damaged")


def write_distributed_folder(
    world: World, saving: Saving, name: str, state: Mapping[str, Any], *, budget_bytes: int
) -> WrittenFiles:
    """Write nested dicts with DTensors, full tensors and other values into a folder of this name.

    It is in the locked folder, which every rank sees. The new files have other names than an older checkpoint's,
    which counts until ``.metadata`` replaces its own. Values that are not tensors are the first rank's.

    Collective: yes.
    Memory: half of ``budget_bytes``, and that only for tensors that are strided, or on an accelerator.

    Raises:
        RankMismatchError: ranks have different tensors.
        ShardingError: the ranks together do not hold all of a tensor, two tensors have one name, or ``.metadata``
            would be larger than readers accept.
        StorageError: the folder could not be written to, or another save writes there, or has since.
    """
    with world.collective("collect tensors"):
        # Only the first rank packs values that are not tensors: theirs are the ones that are saved.
        tensors, packed = _split_state(state, is_packed=world.rank == 0)
    by_key = {flat_key(path): tensor for path, tensor in tensors.items()}
    with describing_tensors(world) as exchange:
        exchange.local = metadata_by_name(by_key)
    boxes = exchange.result
    with world.collective("plan the tensors"):
        plan = plan_tensors(tensors, boxes, world.rank, world.size)
    number, folder = number_of(saving.save_id), Path(saving.folder, name)
    metadata_contents: list[bytes] = []  # on the first rank; empty on the others

    def describe(sizes: list[dict[StatePath, int]]) -> dict[str, int]:
        metadata_contents.append(build_metadata(plan, sizes, number))
        return {
            data_file(rank, number): plan.nbytes(rank) + sum(of_rank.values()) for rank, of_rank in enumerate(sizes)
        }

    # Each rank knows the sizes of all files, which the commit checks. The reduction runs on the first rank, for
    # which the others wait: nothing is written yet if ``.metadata`` is too large.
    files = world.all_reduce_object({path: len(value) for path, value in packed.items()}, describe)

    with world.collective("write local files"):
        saving.require()
        file, chunks = data_file(world.rank, number), plan.by_rank[world.rank]
        views = chunk_views(chunks, by_key, {key: local_tensor(tensor) for key, tensor in by_key.items()})
        with open_writer(folder) as writer:
            writer.create(file, files[file])
            ChunkWriter(writer, file, world.check).write(chunks, views, packed.values(), budget_bytes)
            writer.sync(file)
            writer.sync_names()

    with world.broadcast("write the metadata") as exchange:
        if world.rank == 0:
            with open_writer(folder) as writer:
                make_file(writer, temporary_name(METADATA, saving.save_id), metadata_contents[0])
                writer.sync_names()
            exchange.local = len(metadata_contents[0])
    metadata_file = {f"{name}/{METADATA}": exchange.result}
    return WrittenFiles(metadata_file, {f"{name}/{file}": nbytes for file, nbytes in files.items()})


def _split_state(
    state: Mapping[str, Any], *, is_packed: bool
) -> tuple[dict[StatePath, torch.Tensor], dict[StatePath, bytes]]:
    """Split a state into tensors and other values, by path. The latter are left out unless ``is_packed``.

    Raises:
        ShardingError: two of them have one name.
    """
    tensors: dict[StatePath, torch.Tensor] = {}
    packed: dict[StatePath, bytes] = {}
    keys: set[str] = set()
    for path, value in flatten_values(state, as_text=True):
        if isinstance(value, Mapping):
            continue  # an empty dict, which torch leaves out
        if (key := flat_key(path)) in keys:
            raise ShardingError(f"{key}: two values have this name, with dots in other places. Rename one")
        keys.add(key)
        if isinstance(value, torch.Tensor):
            tensors[path] = value
        elif is_packed:
            packed[path] = _pack(value)
    return tensors, packed


def _pack(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
