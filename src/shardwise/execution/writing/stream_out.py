"""Writes a save in one process, file after file, block after block, and commits it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import MappingProxyType

import torch

from shardwise.execution.writing.committing import begin_save, commit_save, undo_save
from shardwise.execution.writing.sink import Sink, WrittenTensors, write_extents
from shardwise.planning.saves.save_plan import Extent, Saved, SavePlan, extents
from shardwise.storage.contract import StorageWriter
from shardwise.tensors import Box

Part = tuple[str, Box]
"""A box of a tensor of the save, by its key."""

BLOCK_BYTES = 8 << 20
"""Of what is written at once. A few times this much is in memory."""

_KEPT_BYTES = 256 << 20
"""Written between two times that free memory is given back: memory that is given back has to be had anew."""


def stream_out(
    writer: StorageWriter,
    plan: SavePlan,
    values: Callable[[Sequence[Part]], Sequence[torch.Tensor]],
    *,
    companions: Mapping[str, bytes],
    check: Callable[[WrittenTensors], None],
    advance: Callable[[int], None],
    block_bytes: int = BLOCK_BYTES,
    leaders: Mapping[str, str] = MappingProxyType({}),
) -> WrittenTensors:
    """Write all files of a plan, then commit.

    Args:
        writer: to the folder of the save.
        plan: its files.
        values: the boxes asked for, each in the dtype of the plan, contiguous, on the CPU.
        companions: small files that belong to the save.
        check: called when all is written and nothing counts yet; what it raises gives the save up.
        advance: told of bytes as they are handed to the writer.
        block_bytes: of what is asked for, and written, at once.
        leaders: by key, another one's: tensors with one leader are asked for one right after the other, wherever
            they lie in a file, if the storage takes bytes in any order.

    What was there before counts until the commit ([Note: One commit]); a save that fails removes what it has
    written.

    Memory: four blocks, and what ``values`` takes.

    Raises:
        StorageError: something could not be written.
    """
    written = WrittenTensors(dict.fromkeys(plan.entries, 0))
    sink = Sink(writer, written.add, bytes_by_file=written.bytes_by_file)
    begun = begin_save(writer, plan)
    try:
        for file in plan.files:
            writer.create(file.name, file.nbytes)
            writer.write(file.name, 0, [memoryview(file.header)])
            places = [(entry.start, (entry.key, entry.dtype, entry.shape)) for entry in file.entries]
            if writer.policy.has_random_writes:
                places = _led(places, leaders)
            write = partial(write_extents, sink, file.name)
            write_ahead(write, places, values, advance=advance, block_bytes=block_bytes)
            writer.sync(file.name)
        check(written)
        commit_save(writer, plan, begun, companions, written.fingerprints)
    except BaseException:
        undo_save(writer, plan, begun)
        raise
    return written


def _led(places: Sequence[tuple[int, Saved]], leaders: Mapping[str, str]) -> list[tuple[int, Saved]]:
    """Tensors with one leader where the first of them was."""
    first: dict[str, int] = {}
    for number, (_, (key, _, _)) in enumerate(places):
        first.setdefault(leaders.get(key, key), number)
    return sorted(places, key=lambda place: first[leaders.get(place[1][0], place[1][0])])


def write_ahead(
    write: Callable[[Sequence[Extent], Sequence[torch.Tensor]], None],
    places: Iterable[tuple[int, Saved]],
    values: Callable[[Sequence[Part]], Sequence[torch.Tensor]],
    *,
    advance: Callable[[int], None],
    block_bytes: int = BLOCK_BYTES,
) -> None:
    """Write tensors to their places in a file, in the order of these; a block is written while the next is made.

    ``write`` puts boxes into the file. The other arguments are those of :func:`stream_out`, and of
    :func:`~shardwise.planning.saves.save_plan.extents`.

    Memory: four blocks, and what ``values`` takes.
    """
    pending: Future[None] | None = None
    kept = 0
    with ThreadPoolExecutor(1) as pool:
        for block in extents(places, block_bytes):
            tensors = values([(extent.key, extent.box) for extent in block])
            if pending is not None:
                pending.result()
            pending = pool.submit(write, block, tensors)
            nbytes = sum(tensor.nbytes for tensor in tensors)
            advance(nbytes)
            del tensors
            kept += nbytes
            if kept >= _KEPT_BYTES:
                _give_back()
                kept = 0
        if pending is not None:
            pending.result()


def _give_back() -> None:
    """Free memory to the system: what lasts lies between blocks that come and go, and would keep their holes."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
