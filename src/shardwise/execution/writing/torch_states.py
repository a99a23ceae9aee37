"""Writes a sharded state in files of ``torch.save``: one of the whole, or one for each rank with what it holds."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.tensor import DTensor

from shardwise.errors import FormatError, PlacementError, StorageError
from shardwise.execution.moving.distribute import LocalTensor
from shardwise.execution.moving.reshard import Handover, facts_of, hand_over, held_by_rank, landing
from shardwise.execution.ranks.world import World
from shardwise.execution.writing.marked_folder import Saving
from shardwise.execution.writing.sink import Sink
from shardwise.execution.writing.torch_out import Levels, Nest, RoomyFile
from shardwise.formats.torch_file import refuse_others
from shardwise.layout import LocalBox
from shardwise.models.torch_words import from_torch, to_torch
from shardwise.models.view import local_boxes, local_tensor
from shardwise.planning.saves.commit import WrittenFiles, fresh
from shardwise.planning.saves.save_plan import Extent, Saved, extents
from shardwise.storage.contract import StorageWriter
from shardwise.storage.reading.local import LocalReader
from shardwise.storage.writing.opening import open_writer
from shardwise.tensors import Box, Strided


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
    """Write tensors, shards or whole, and other values into one file, which is to have this name.

    ``tensors`` are the same ones on every rank; one that is there twice is written once. ``objects`` are the first
    rank's. ``device`` is where staging lies. The bytes of the tensors are returned.

    Collective: yes.
    Memory: ``budget_bytes``.

    Raises:
        DisagreementError: ranks have different tensors.
        PlacementError: ranks do not have, together, all of a tensor, or a file cannot hold its dtype or its name.
        StorageError: the file could not be written.
    """
    keys: dict[int, str] = {}
    key_of = {at: keys.setdefault(id(tensor), ".".join(map(str, at))) for at, tensor in tensors.items()}
    world.together(lambda: _require_apart(key_of, tensors))
    once = {key_of[at]: tensors[at] for at in sorted(tensors, key=lambda at: key_of[at])}
    told = world.each(lambda: {key: facts_of(tensor, key) for key, tensor in once.items()})
    held = world.together(lambda: held_by_rank(once, told))
    saved = world.together(
        lambda: {
            at: (key_of[at], from_torch(tensor.dtype, key_of[at]), tuple(tensor.shape))
            for at, tensor in tensors.items()
        }
    )
    with ExitStack() as closing:

        def opened() -> RoomyFile | None:
            if world.rank:
                return None
            writer = closing.enter_context(open_writer(saving.folder))
            return RoomyFile(Sink(writer), fresh(name, saving.token))

        file = world.together(opened)
        nbytes = _write(world, file, saved, objects, once, held, budget_bytes, device)
        return nbytes, WrittenFiles({} if file is None else {name: file.nbytes})


def _write(
    world: World,
    file: RoomyFile | None,
    saved: Mapping[Levels, Saved],
    objects: Nest,
    once: Mapping[str, torch.Tensor],
    held: Mapping[str, tuple[tuple[Box, ...], ...]],
    budget_bytes: int,
    device: torch.device,
) -> int:
    places = world.from_first(lambda: [] if file is None else file.begin(saved, objects))
    for block in extents([(place.start, item) for place, item in places], budget_bytes // 2):
        _carry(world, file, block, once, held, budget_bytes // 2, device)
    world.together(lambda: None if file is None else file.sync())
    return sum(place.nbytes for place, _ in places)


def _require_apart(key_of: Mapping[Levels, str], tensors: Mapping[Levels, torch.Tensor]) -> None:
    of: dict[str, int] = {}
    for at, key in key_of.items():
        if of.setdefault(key, id(tensors[at])) != id(tensors[at]):
            raise PlacementError(f"{key}: two tensors have this name, with dots in other places; rename one")


def _carry(
    world: World,
    file: RoomyFile | None,
    block: Sequence[Extent],
    tensors: Mapping[str, torch.Tensor],
    held: Mapping[str, tuple[tuple[Box, ...], ...]],
    budget_bytes: int,
    device: torch.device,
) -> None:
    """Bring a block to the first rank, which writes it. Collective: yes."""
    arrived: list[torch.Tensor] = []

    def begin() -> list[Handover]:
        items: list[Handover] = []
        for extent in block:
            into, dtype = None, to_torch(extent.dtype)
            if file is not None:
                arrived.append(torch.empty(extent.box.sizes, dtype=dtype, device="cpu"))
                into = LocalTensor(arrived[-1], (LocalBox(extent.box, Strided.contiguous(extent.box.sizes)),))
            wanted = tuple((extent.box,) if rank == 0 else () for rank in range(world.size))
            mine = landing(tensors[extent.key], extent.key)
            name = f"{extent.key} at {extent.box.offsets}"
            items.append(Handover(name, dtype, held[extent.key], wanted, mine, into))
        return items

    hand_over(world, world.together(begin), budget_bytes=budget_bytes, device=device)
    world.together(lambda: None if file is None else file.write(block, arrived))


_SMALL_BYTES = 1 << 20
"""What is smaller waits for more before it is written."""


def write_rank_files(world: World, saving: Saving, names: Sequence[str], state: Any) -> tuple[int, WrittenFiles]:
    """Write this rank's state, which is to have the name of its rank; the bytes of the file.

    Collective: yes.
    Memory: none, but for shards that are on an accelerator, which torch copies one by one.

    Raises:
        StorageError: a file could not be written, or somebody else writes there, or has since.
    """
    written: list[int] = []

    def write() -> int:
        written.append(_write_own(saving, names[world.rank], state))
        return written[0]

    sizes = world.to_first(write)
    return written[0], WrittenFiles(dict(zip(names, sizes, strict=False)))  # the first rank alone is told


def _write_own(saving: Saving, name: str, state: Any) -> int:
    """Write and sync this rank's file; its bytes."""
    saving.require()
    with open_writer(saving.folder) as writer:
        file = fresh(name, saving.token)
        try:
            nbytes = _size_of(state)
            writer.create(file, nbytes)
            sink = _InOrder(writer, file)
            torch.save(state, cast(IO[bytes], sink))
            sink.flush()
        except (OSError, RuntimeError) as error:
            raise StorageError(f"{saving.folder}/{name}: writing it failed, {error}") from error
        if sink.position != nbytes:
            raise StorageError(
                f"{saving.folder}/{name}: torch.save wrote {sink.position} bytes, and {nbytes} when it was "
                "asked before; the state must not change while it is saved"
            )
        writer.sync(file)
        writer.sync_names()
        return nbytes


def _size_of(state: Any) -> int:
    """Of the file that ``torch.save`` makes of it. Memory: none; what it writes to find out is nearly all holes."""
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        place = Path(folder, "archive")  # as torch calls what has no name
        with torch.serialization.skip_data():
            torch.save(state, place)
        return place.stat().st_size


class _InOrder:
    """A file for ``torch.save`` whose bytes go to a writer, in order, small ones together."""

    def __init__(self, writer: StorageWriter, file: str) -> None:
        self.position = 0
        self._writer = writer
        self._file = file
        self._pending: list[bytes] = []
        self._pending_nbytes = 0

    def write(self, content: memoryview | bytes) -> int:
        view = memoryview(content).cast("B")
        if view.nbytes < _SMALL_BYTES:
            self._pending.append(bytes(view))  # torch uses its memory again
            self._pending_nbytes += view.nbytes
        if view.nbytes >= _SMALL_BYTES or self._pending_nbytes >= _SMALL_BYTES:
            self.flush()
        if view.nbytes >= _SMALL_BYTES:
            self._put([view])
        return view.nbytes

    def flush(self) -> None:
        if self._pending:
            self._put([memoryview(part) for part in self._pending])
            self._pending, self._pending_nbytes = [], 0

    def _put(self, parts: Sequence[memoryview]) -> None:
        self._writer.write(self._file, self.position, parts)
        self.position += sum(part.nbytes for part in parts)


def read_rank_file(world: World, folder: Path, names: Sequence[str]) -> Any:
    """What this rank wrote: plain data, tensors and DTensors; tensors lie in the file until they are used.

    Collective: yes.

    Raises:
        PlacementError: there are not as many files as ranks; tensors contradict their placement.
        FormatError: a file holds more than data, or comes from FSDP1.
        StorageError: a file could not be read.
    """

    def read() -> Any:
        if len(names) != world.size:
            raise PlacementError(
                f"{folder}: {len(names)} ranks saved what they held, each into a file of its own, and nothing says "
                f"how to deal it to {world.size}; load it on {len(names)} ranks (load_accelerate_model does) and "
                "save it in another form, or save with use_dcp=True"
            )
        file = folder / names[world.rank]
        found = load_plain(file)
        for name, tensor in _tensors(found):
            if "flat_param" in name.rpartition(".")[2] or "._flat_param" in name:
                raise FormatError(
                    f"{file}: has {name}, a flattened run of several parameters without a word of which (FSDP1's "
                    "LOCAL_STATE_DICT); load it with FSDP1 and save it with FULL_STATE_DICT or SHARDED_STATE_DICT"
                )
            _require_sound(tensor, f"{name} in {file}")
        return found

    return world.together(read)


_OF_ANOTHER = (
    "another version of torch wrote it, which pickles DTensors in its own way: load it with that one, and save it "
    "as DistributedFolder() or OneFile()"
)


def load_plain(file: Path, also: Sequence[Any] = ()) -> Any:
    """The object in a file of ``torch.save``; tensors in host memory, read from the file as they are used.

    ``also`` are functions and classes that it may name beside torch's own.

    Raises:
        FormatError: it is no such file, is damaged, or holds more than data.
        StorageError: it could not be read.
    """
    with LocalReader(file.parent) as reader:
        refuse_others(reader, file.name)
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
                "them; save it with FULL_STATE_DICT, or with SHARDED_STATE_DICT into a folder"
            ) from error
        if "torch.distributed." in str(error):  # a part of a DTensor that this torch does not know, or not any more
            raise FormatError(
                f"{file}: torch {torch.__version__} cannot read its DTensors; {_OF_ANOTHER}"
            ) from error
        raise FormatError(f"{file}: cannot be read as plain data: {cause}") from error


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _tensors(inner, f"{name}.{number}")


def _require_sound(tensor: torch.Tensor, what: str) -> None:
    """A DTensor has the local tensor that its placement says."""
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
    except PlacementError:
        raise
    except Exception as error:  # of whatever a stranger wrote in place of a mesh
        raise FormatError(
            f"{what}: is no sound DTensor ({type(error).__name__}: {error}): it is damaged, or {_OF_ANOTHER}"
        ) from error
    if not is_sound:
        raise FormatError(f"{what}: its local tensor is not what its placement says; the file is damaged")
