"""A file of ``torch.save`` for every rank, with what the rank holds: no word between ranks, and no resharding."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.errors import FormatError, PlacementError, StorageError
from shardwise.execution.world import World
from shardwise.formats.torch_file import refuse_others
from shardwise.models.view import local_boxes, local_tensor
from shardwise.storage import INCOMPLETE, LocalReader, LocalWriter


def write_rank_files(
    world: World, folder: Path, names: Sequence[str], state: Any, is_one: Callable[[str], bool]
) -> int:
    """Write this rank's state, under the name of its rank; the bytes of the file.

    What an older save has left of more ranks, as ``is_one`` says of a name, is removed once all have written. Files
    take their names one by one: a kill just then leaves some of either save.

    Collective: yes.
    Memory: none, but for shards that are on an accelerator, which torch copies one by one.

    Raises:
        StorageError: a file could not be written.
    """
    fresh = folder / f".{names[world.rank]}.{secrets.token_hex(4)}{INCOMPLETE}"

    def write() -> int:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open(fresh, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            return fresh.stat().st_size
        except (OSError, RuntimeError) as error:
            raise StorageError(f"{folder / names[world.rank]}: writing it failed, {error}") from error

    def rename() -> None:
        try:
            fresh.rename(folder / names[world.rank])
            if world.rank == 0:
                for file in folder.iterdir():
                    if is_one(file.name) and file.name not in names:
                        file.unlink()
            with LocalWriter(folder) as writer:
                writer.sync_names()
        except OSError as error:
            raise StorageError(f"{folder / names[world.rank]}: naming it failed, {error.strerror}") from error

    try:
        nbytes = world.together(write)
        world.together(rename)
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
    return nbytes


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
        raise FormatError(f"{what}: is no sound DTensor: {type(error).__name__}: {error}") from error
    if not is_sound:
        raise FormatError(f"{what}: its local tensor is not what its placement says; the file is damaged")
