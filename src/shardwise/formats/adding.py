"""What formats have in common when they read: many files at once, and tensors that are put together of parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shardwise.errors import FormatError, StorageError
from shardwise.formats.composed import Composed, ComposedPart, View, Whole
from shardwise.formats.contract import IndexSoFar
from shardwise.formats.entries import TensorEntry
from shardwise.formats.faults import FormatFaults
from shardwise.formats.found import FoundTensor, StoredView, tiling
from shardwise.formats.wrappers import Path, WrapperChoice
from shardwise.storage.contract import StorageReader
from shardwise.storage.names import shown
from shardwise.tensors import Box, ByteRange, Strided, numel

_HEADER_THREADS = 8

T = TypeVar("T")


def read_each(
    reader: StorageReader, files: Sequence[str], read: Callable[[StorageReader, str], T], faults: FormatFaults
) -> list[T]:
    """What is read of the sound files; the others are faults."""

    def attempt(file: str) -> T | FormatError | StorageError:
        try:
            return read(reader, file)
        except (FormatError, StorageError) as error:
            return error

    # Threads because of networks, where a checkpoint of hundreds of files is hundreds of waits.
    with ThreadPoolExecutor(max(_HEADER_THREADS, reader.policy.concurrency)) as pool:
        results = list(pool.map(attempt, files))
    sound: list[T] = []
    for result in results:
        if isinstance(result, FormatError | StorageError):
            faults.add_error("damaged files", result)
        else:
            sound.append(result)
    return sound


def add_ignored(others: Iterable[tuple[Path, str]], choice: WrapperChoice, found: IndexSoFar) -> None:
    """Note what is not loaded: an optimizer as a whole, all else one by one."""
    ignored = [f"{'.'.join(path)} (an optimizer's state)" for path in choice.others]
    ignored += [f"{'.'.join(path)} ({kind})" for path, kind in others if choice.key_of(path) is not None]
    found.ignored = list(dict.fromkeys([*found.ignored, *ignored]))


def add_tensors(
    tensors: Iterable[FoundTensor], choice: WrapperChoice, found: IndexSoFar, faults: FormatFaults
) -> set[str]:
    """Add entries and what is composed of them; the keys of the tensors."""
    found.wrapper = ".".join(choice.wrapper)
    keys: set[str] = set()
    for tensor in tensors:
        key = choice.key_of(tensor.path)
        if key is None:
            continue
        if key in keys or key in found.entries or key in found.composed:
            faults.add("keys held twice", f"{shown(key)}: at {shown('.'.join(tensor.path))}, and elsewhere")
            continue
        keys.add(key)
        add_tensor(key, tensor, found, faults)
    return keys


def add_tensor(key: str, tensor: FoundTensor, found: IndexSoFar, faults: FormatFaults) -> None:
    def enter(name: str, view: StoredView, shape: tuple[int, ...]) -> None:
        entry = TensorEntry(name, view.dtype, shape, view.file, view.range.start, view.range.stop)
        if found.entries.setdefault(name, entry) is not entry:
            faults.add("keys held twice", f"{shown(name)}: as a tensor, and as a part of one")

    def part(name: str, view: StoredView) -> ComposedPart:
        if view.is_whole:
            enter(name, view, view.shape)
            return Whole(name)
        name = f"{name} (storage)"
        enter(name, view, (view.range.nbytes // view.dtype.itemsize,))
        return View(name, view.strided)

    if not numel(tensor.shape) and tensor.chunks:
        nothing = tensor.chunks[0].view
        empty = ByteRange(nothing.range.start, nothing.range.start)
        enter(key, StoredView(nothing.file, empty, tensor.dtype, Strided.contiguous(tensor.shape)), tensor.shape)
        return
    chunks = [chunk for chunk in tensor.chunks if numel(chunk.view.shape)]  # a rank may have had none of it
    boxes = [Box(chunk.offsets, chunk.view.shape) for chunk in chunks]
    if len(boxes) == 1 and boxes[0] == Box.whole(tensor.shape):
        whole = part(key, chunks[0].view)
        if not isinstance(whole, Whole):
            found.composed[key] = Composed(tensor.dtype, tensor.shape, whole)
        return
    parts = [(box, part(_name(key, box), chunk.view)) for box, chunk in zip(boxes, chunks, strict=True)]
    tree = tiling(tensor.shape, parts)
    if tree is None:
        faults.add(
            "tensors whose chunks do not tile them",
            f"{shown(key)} of shape {tensor.shape}: {len(boxes)} chunks with holes or overlaps between them",
        )
        return
    found.composed[key] = Composed(tensor.dtype, tensor.shape, tree)


def _name(key: str, box: Box) -> str:
    """The key of a chunk, as it would be indexed: ``key[0:4, 8:16]``."""
    spans = ", ".join(f"{start}:{start + size}" for start, size in zip(box.offsets, box.sizes, strict=True))
    return f"{key}[{spans}]"
