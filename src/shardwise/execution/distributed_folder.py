"""A sharded state becomes a folder of ``torch.distributed.checkpoint``, which begins to count in one step."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from shardwise.errors import StorageError
from shardwise.execution.world import World
from shardwise.formats.distributed import METADATA
from shardwise.storage import INCOMPLETE, LocalWriter


def write_distributed_folder(world: World, folder: Path, state: Mapping[str, Any]) -> int:
    """Write a nest of dicts with DTensors, whole tensors and other values; an older folder is replaced.

    All is written beside ``folder``, which every rank sees, under another name. So what was there before counts
    until the new one is complete. The bytes of the new files are returned.

    Collective: yes; torch's own collectives, too.
    Memory: one tensor at a time is copied, where it is on an accelerator.

    Raises:
        StorageError: the folder could not be written.
    """
    token = world.from_first(lambda: f".{folder.name}.{secrets.token_hex(4)}{INCOMPLETE}")
    fresh = folder.parent / token
    try:
        world.together(lambda: _make(world, fresh))
        world.together(lambda: _require_shared(fresh))
        world.together(lambda: _write(world, fresh, folder, state))
        return world.from_first(lambda: _finish(fresh, folder))
    except BaseException:
        if world.rank == 0:
            with contextlib.suppress(OSError):
                shutil.rmtree(fresh)
        raise


def _make(world: World, fresh: Path) -> None:
    """The first rank makes the folder."""
    if world.rank == 0:
        try:
            fresh.mkdir(parents=True)
        except OSError as error:
            raise StorageError(f"{fresh}: making it failed, {error.strerror}") from error


def _require_shared(fresh: Path) -> None:
    """This rank sees the folder that the first one has made."""
    if not fresh.is_dir():
        raise StorageError(f"{fresh.parent}: is not shared by all ranks; save to a folder that they all see")


def _write(world: World, fresh: Path, folder: Path, state: Mapping[str, Any]) -> None:
    """Write this rank's part of the state; a failure names the folder that is to be. Collective: torch's own."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one process will do
            save(
                dict(state),
                storage_writer=FileSystemWriter(fresh),
                planner=DefaultSavePlanner(),
                process_group=world.group,
                no_dist=not dist.is_initialized(),
            )
    except CheckpointException as error:
        causes = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
        raise StorageError(f"{folder}: writing it failed, {causes}") from error


def _finish(fresh: Path, folder: Path) -> int:
    """Let the complete folder take its place; the bytes of its files."""
    if not (fresh / METADATA).is_file():
        raise StorageError(f"{fresh}: its {METADATA} was not written")
    _sync_names(fresh)
    nbytes = sum(file.stat().st_size for file in fresh.iterdir())
    _take_place(fresh, folder)
    return nbytes


def _take_place(fresh: Path, folder: Path) -> None:
    """Give the new folder its name. A crash in between leaves the older one beside it, and its name says so."""
    older = fresh.with_name(fresh.name.replace(INCOMPLETE, ".older"))
    try:
        if folder.exists():
            folder.rename(older)
        fresh.rename(folder)
        _sync_names(folder.parent)
        if older.exists():
            shutil.rmtree(older)
    except OSError as error:
        with contextlib.suppress(OSError):
            if older.exists() and not folder.exists():
                older.rename(folder)
        raise StorageError(f"{folder}: taking its place failed, {error.strerror}") from error


def _sync_names(folder: Path) -> None:
    with LocalWriter(folder) as writer:
        writer.sync_names()
