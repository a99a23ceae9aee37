"""Saves a file of ``torch.save`` for every rank, with what it holds: nothing is resharded."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.tensor import DTensor

from shardwise.errors import FormatError, PlacementError, StorageError
from shardwise.execution.ranks.world import World
from shardwise.execution.writing.committing import let_count, remove_unnamed
from shardwise.execution.writing.marked_folder import Marked, marked_by_first
from shardwise.execution.writing.saving_lock import Whose, new_token, require_lock, take_lock
from shardwise.formats.torch_file import refuse_others
from shardwise.models.view import local_boxes, local_tensor
from shardwise.planning.saves.commit import Commit, Publish, on_its_way
from shardwise.storage.contract import StorageWriter
from shardwise.storage.names import shown, why_not_plain
from shardwise.storage.reading.local import LocalReader
from shardwise.storage.writing.opening import open_writer

_FRESH = re.compile(r"\.(.+)\.[0-9a-f]{8}\.new")

_SMALL_BYTES = 1 << 20
"""What is smaller waits for more before it is written."""


def write_rank_files(
    world: World, folder: Path, names: Sequence[str], state: Any, is_one: Callable[[str], bool]
) -> int:
    """Write this rank's state, under the name of its rank; the bytes of the file.

    What an older save has left of more ranks, as ``is_one`` says of a name, is removed. Names are given, so files
    take them one by one. What takes its place in one step, when all files are whole, is a small file that lists the
    renames: before it is there the older save counts, from then on the new one. Whoever saves or loads here next
    carries out what a kill has left of them; another program would see some files of either save until then.

    Collective: yes.
    Memory: none, but for shards that are on an accelerator, which torch copies one by one.

    Raises:
        StorageError: a file could not be written, or somebody else writes there, or has since.
    """
    intent = _intent(names)

    def tidy(marked: Marked) -> None:
        """Finish what was left to rename, and remove what was left besides."""
        remove_unnamed(marked.writer, [name for name in marked.writer.list() if name.startswith(f".{intent}.")])
        if intent in marked.writer.list():
            _finish(marked.writer, intent, is_one)
        _remove_left(marked.writer, is_one)

    def undo(marked: Marked) -> None:
        """Unless it counts by now."""
        if marked.held.whose() is Whose.OURS and intent not in marked.writer.list():
            _remove_left(marked.writer, is_one)

    with marked_by_first(world, folder, tidy, undo) as saving:
        written: list[int] = []

        def write() -> int:
            written.append(_write_own(folder, names[world.rank], saving.token, state))
            return written[0]

        sizes = world.to_first(write)
        world.from_first(lambda: _commit(saving.marked, names, is_one, sizes))
    return written[0]


def finish_renames(folder: Path, names: Sequence[str], is_one: Callable[[str], bool]) -> None:
    """Carry out the renames that a save of these files left when it was killed, if it did.

    Collective: no; one rank does it.

    Raises:
        FormatError: what lists them makes no sense.
        StorageError: the folder cannot be written to, or a save is going on.
    """
    if not (folder / _intent(names)).is_file():
        return
    with open_writer(folder) as writer:
        held = take_lock(writer, new_token())
        try:
            _finish(writer, _intent(names), is_one)
        finally:
            held.release()
            writer.sync_names()


def _intent(names: Sequence[str]) -> str:
    """The name of the file that lists the renames of the files with these names."""
    return f".{names[0].removesuffix('.bin')}.renames.json"


def _fresh(name: str, token: str) -> str:
    """What a file is called until it is renamed: no name of what any save takes for left behind by itself."""
    return f".{name}.{token}.new"


def _write_own(folder: Path, name: str, token: str, state: Any) -> int:
    """Write and sync this rank's file; its bytes."""
    with open_writer(folder) as writer:
        require_lock(writer, token)
        file = _fresh(name, token)
        try:
            nbytes = _size_of(state)
            writer.create(file, nbytes)
            sink = _InOrder(writer, file)
            torch.save(state, cast(IO[bytes], sink))
            sink.flush()
        except (OSError, RuntimeError) as error:
            raise StorageError(f"{folder / name}: writing it failed, {error}") from error
        if sink.position != nbytes:
            raise StorageError(
                f"{folder / name}: torch.save wrote {sink.position} bytes, and {nbytes} when it was asked before; "
                "the state must not change while it is saved"
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


def _commit(marked: Marked, names: Sequence[str], is_one: Callable[[str], bool], sizes: Sequence[int]) -> None:
    """Let the new files count, and give them their names."""
    intent = _intent(names)
    ready = on_its_way(intent, marked.token)
    files = {_fresh(name, marked.token): nbytes for name, nbytes in zip(names, sizes, strict=True)}
    content = json.dumps({"token": marked.token, "names": list(names)}).encode()
    commit = Commit(
        files,
        steps=(Publish(ready, intent),),
        then={},  # not these, of which whoever has the folder by then may have given some their names
        ready={ready: content},
        says={intent: content},
        carried_out=frozenset({intent}),
        without=frozenset({ready}),
    )
    let_count(marked.writer, marked.held, commit, {})
    if marked.held.whose() is not Whose.ANOTHERS:  # who has the folder by now has found the list, and finishes it
        _finish(marked.writer, intent, is_one)
    marked.release()


def _remove_left(writer: StorageWriter, is_one: Callable[[str], bool]) -> None:
    """Files of saves like this one that nothing lists."""
    for name in writer.list():
        found = _FRESH.fullmatch(name)
        if found is not None and is_one(found[1]):
            writer.remove(name)


def _finish(writer: StorageWriter, intent: str, is_one: Callable[[str], bool]) -> None:
    """Give the files that are listed their names, and remove what an older save has of more ranks; when marked.

    Whoever has taken the folder over does the same meanwhile, and may be done first.
    """
    there = set(writer.list())
    if intent not in there:
        return  # somebody else has finished it
    token, names = _parsed(writer, intent, is_one)
    for name in names:
        fresh = _fresh(name, token)
        if fresh in there:
            try:
                writer.rename(fresh, name)
            except StorageError:
                if fresh in writer.list():
                    raise
        elif name not in there:
            raise FormatError(
                f"{intent} in {writer.root}: lists {shown(name)}, which is gone; remove that list, and save again"
            )
    if intent not in writer.list():
        return  # what is there by now may be of a newer save
    for name in there:
        if is_one(name) and name not in names:
            writer.remove(name)
    writer.sync_names()
    writer.remove(intent)
    writer.sync_names()


def _parsed(writer: StorageWriter, intent: str, is_one: Callable[[str], bool]) -> tuple[str, list[str]]:
    """The token and the names that a list of renames has: those of files of ranks, in this folder."""
    try:
        found = json.loads(writer.read(intent) or b"")
        token, names = found["token"], found["names"]
        if (
            re.fullmatch(r"[0-9a-f]{8}", token)
            and isinstance(names, list)
            and all(isinstance(name, str) and why_not_plain(name) is None and is_one(name) for name in names)
        ):
            return token, names
        cause: Exception | None = None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        cause = error
    raise FormatError(f"{intent} in {writer.root}: is no list of renames; it is damaged: remove it") from cause


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
