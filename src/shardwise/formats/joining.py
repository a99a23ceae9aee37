"""What formats have in common when they read: many files at once, their index, tensors put together of parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NoReturn, TypeVar

from shardwise.errors import FormatError, StorageError
from shardwise.formats.checkpoint_index import (
    CheckpointIndex,
    Composed,
    ComposedPart,
    Joined,
    TensorEntry,
    View,
    Whole,
)
from shardwise.formats.contract import FileSelection, FormatFaults, IndexSoFar
from shardwise.formats.nested_dicts import FoundTensor, Path, StoredView, WrapperChoice, tiling
from shardwise.formats.strict_json import parse_object
from shardwise.storage.contract import StorageReader
from shardwise.storage.names import shown, why_unsafe
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


def beside(first: CheckpointIndex, second: CheckpointIndex, folder: str) -> CheckpointIndex:
    """Both as one: the files and the keys of the second have names that begin with ``folder`` and a slash."""

    def inside(name: str) -> str:
        return f"{folder}/{name}"

    entries = {
        inside(key): replace(entry, key=inside(key), file=inside(entry.file))
        for key, entry in second.entries.items()
    }
    composed = {inside(key): replace(item, part=_moved(item.part, inside)) for key, item in second.composed.items()}
    return replace(
        first,
        files={**first.files, **{inside(file): nbytes for file, nbytes in second.files.items()}},
        entries={**first.entries, **entries},
        composed={**first.composed, **composed},
    )


def _moved(part: ComposedPart, inside: Callable[[str], str]) -> ComposedPart:
    match part:
        case Whole(key) | View(key):
            return replace(part, key=inside(key))
        case Joined(parts):
            return replace(part, parts=tuple(_moved(inner, inside) for inner in parts))
        case _:
            return part.moved(inside)


MAX_INDEX_BYTES = 100_000_000
"""The longest index file that is read, the same as the longest header."""


def select_indexed(
    reader: StorageReader, name: str, suffix: str, layout: str, faults: FormatFaults
) -> FileSelection:
    """The files that an index names, each of which must end in ``suffix``."""
    nbytes = reader.size(name)
    if nbytes > MAX_INDEX_BYTES:
        _refuse_index(reader, name, f"it has {nbytes} bytes, {MAX_INDEX_BYTES} is the limit")
    content = parse_object(reader.read(name, 0, nbytes), what=f"{shown(name)} in {reader.root}")
    weight_map = _weight_map(reader, name, content.get("weight_map"), suffix, faults)
    metadata = content.get("metadata")
    if not isinstance(metadata, dict):
        metadata = {}
    texts = {key: text if isinstance(text, str) else json.dumps(text) for key, text in metadata.items()}
    return FileSelection(layout, sorted(set(weight_map.values())), weight_map, texts)


def _weight_map(
    reader: StorageReader, name: str, value: object, suffix: str, faults: FormatFaults
) -> dict[str, str]:
    """The index's map of keys to files, without the files that must not be opened; those are faults."""
    if not isinstance(value, dict):
        _refuse_index(reader, name, "it has no object named weight_map")
    if not value:
        _refuse_index(reader, name, "its weight_map is empty")
    for key, file in value.items():
        if not isinstance(file, str):
            faults.add(f"keys without a file in {shown(name)}", f"{shown(key)}: {shown(repr(file))}, not a string")
    mapped = {key: file for key, file in value.items() if isinstance(file, str)}
    unsafe = {file: why for file in mapped.values() if (why := _why_not_opened(file, suffix)) is not None}
    for file, why in sorted(unsafe.items()):
        faults.add(f"file names refused in {shown(name)}", f"{shown(file)}: {why}")
    return {key: file for key, file in mapped.items() if file not in unsafe}


def _why_not_opened(file: str, suffix: str) -> str | None:
    if not file.endswith(suffix):
        return f"it does not end in {suffix}"
    return why_unsafe(file)


def _refuse_index(reader: StorageReader, name: str, cause: str) -> NoReturn:
    raise FormatError(f"{shown(name)} in {reader.root}: {cause}; download or write the index again")
