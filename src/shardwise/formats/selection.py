"""Which files of a folder are the checkpoint, and what their index file says."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, NoReturn

from shardwise.errors import FormatError, StorageError
from shardwise.formats.distributed import METADATA, SUFFIX
from shardwise.formats.faults import LISTED, FormatFaults, listed
from shardwise.formats.strict_json import parse_object
from shardwise.storage.contract import CannotListError, StorageReader
from shardwise.storage.names import shown, why_unsafe
from shardwise.storage.reading.local import LocalReader

MAX_INDEX_BYTES = 100_000_000
"""The longest index file that is read, the same as the longest header."""

Layout = Literal[
    "indexed",
    "single file",
    "several files without an index",
    "torch file",
    "indexed torch files",
    "torch distributed checkpoint",
]

_SINGLE_FILE = "model.safetensors"
_USUAL_INDEX = "model.safetensors.index.json"
_TORCH_FILE = "pytorch_model.bin"
_TORCH_INDEX = "pytorch_model.bin.index.json"
_USUAL = (_SINGLE_FILE, _USUAL_INDEX, _TORCH_FILE, _TORCH_INDEX)
_WEIGHTS = ".safetensors"
_INDEX = ".safetensors.index.json"
_TORCH_WEIGHTS = (".bin", ".pt", ".pth")
_TORCH_INDEXES = ".bin.index.json"
_MODEL_FOLDERS = ("pytorch_model_fsdp_*", "model", "distributed_checkpoint")
_OPTIMIZER_FOLDERS = "optim*"
_INDEXES = re.compile(r".*\.(?P<kind>safetensors|bin)\.index(\.[^./]+)?\.json")
"""Index files by name, those of a variant too."""
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d{1,9})-of-(?P<total>\d{1,9})\.safetensors")
_OF_ONE_RANK = re.compile(r"pytorch_model_fsdp.*_rank\d+\.bin")
_NAME_IT = f"the *{_WEIGHTS}, *.bin, *.pt or *.index.json file"


@dataclass(frozen=True)
class FileSelection:
    """The files to open, and what the index file says about them; of a distributed checkpoint, its folder."""

    layout: Layout
    files: Sequence[str]
    weight_map: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""


def is_there(reader: StorageReader, name: str) -> bool:
    """Whether the storage has this file."""
    try:
        reader.size(name)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return False
        raise
    return True


def variant_in(reader: StorageReader, variant: str) -> str:
    """The file, or the index, of a variant: ``model.fp16.safetensors``, ``model.safetensors.index.fp16.json``, ...

    Raises :class:`FormatError` where there is none.
    """
    for name in variant_names(variant):
        if is_there(reader, name):
            return name
    try:
        there = [name for name in reader.list() if name.endswith((_WEIGHTS, _TORCH_WEIGHTS[0], ".json"))]
    except CannotListError:
        there = []
    raise FormatError(
        f"{reader.root}: no weights of the variant {variant!r}; looked for {', '.join(variant_names(variant))}; "
        f"there are {listed(map(shown, there)) or 'none that it tells of'}"
    )


def variant_names(variant: str) -> tuple[str, ...]:
    """The names that the weights of a variant may have, first choice first."""
    return (
        f"model.{variant}.safetensors",
        f"model.safetensors.index.{variant}.json",
        f"pytorch_model.{variant}.bin",
        f"pytorch_model.bin.index.{variant}.json",
    )


def select(reader: StorageReader, weights_name: str | None, faults: FormatFaults) -> FileSelection:
    """Choose the files, in the order of :func:`shardwise.formats.open_checkpoint`.

    Raises :class:`FormatError` where nothing can be chosen; what is wrong with the choice is added to ``faults``.
    """
    if weights_name is not None:
        return _select_named(reader, weights_name, faults)
    try:
        everything = reader.list()
    except CannotListError:
        return _select_probed(reader, faults)
    names = [name for name in everything if "/" not in name]
    for name in _USUAL:
        if name in names:
            return _select_named(reader, name, faults)
    indexes = _without_side_files(name for name in names if name.endswith(_INDEX))
    if len(indexes) > 1:
        raise FormatError(
            f"{reader.root}: several index files and no {_USUAL_INDEX}: {listed(indexes)}; "
            "pass the one that is meant as weights_name, or its path"
        )
    if indexes:
        return _select_indexed(reader, indexes[0], faults)
    files = _without_side_files(name for name in names if name.endswith(_WEIGHTS))
    if files:
        _check_numbering(files, faults)
        return FileSelection("single file" if len(files) == 1 else "several files without an index", files)
    return _select_distributed(reader, everything)


def _select_probed(reader: StorageReader, faults: FormatFaults) -> FileSelection:
    """By their usual names, one after the other, where the storage does not tell which files it has."""
    refusal: StorageError | None = None
    for name in (*_USUAL, METADATA):
        try:
            if is_there(reader, name):
                return _select_named(reader, name, faults)
        except StorageError as error:
            # An object store that must not tell which files it has refuses those it does not have.
            if not isinstance(error.__cause__, PermissionError):
                raise
            refusal = refusal or error
    if refusal is not None:
        raise refusal
    raise FormatError(
        f"{reader.root}: no weights found\n"
        f"  looked for: {', '.join(_USUAL)}, {METADATA}; for others the storage would have to list its files\n"
        f"Check the URL, or name the file: the URL of {_NAME_IT} itself, or weights_name=..."
    )


def _select_named(reader: StorageReader, name: str, faults: FormatFaults) -> FileSelection:
    is_distributed = name.rpartition("/")[2] == METADATA
    index = _INDEXES.fullmatch(name)
    if not is_distributed and index is None and not name.endswith((_WEIGHTS, *_TORCH_WEIGHTS)):
        raise FormatError(
            f"{shown(name)} in {reader.root}: this layout is not supported for loading; "
            f"name a file that ends in {_WEIGHTS}, {_INDEX}, .bin, .pt, .pth or {_TORCH_INDEXES}"
        )
    if not is_there(reader, name):
        raise FormatError(
            f"{shown(name)} in {reader.root}: no such file, but it is asked for by name; "
            "check weights_name (transformers_weights in config.json), or download the file"
        )
    if is_distributed:
        return FileSelection("torch distributed checkpoint", [], folder=name.removesuffix(METADATA))
    if index is not None:
        return _select_indexed(reader, name, faults)
    return FileSelection("single file" if name.endswith(_WEIGHTS) else "torch file", [name])


def _without_side_files(names: Iterable[str]) -> list[str]:
    """Without adapters, and without "consolidated" files where they are a second copy of the weights."""
    kept = [name for name in names if not fnmatchcase(name, "adapter_model*")]
    return [name for name in kept if not fnmatchcase(name, "consolidated*")] or kept


def _check_numbering(files: Sequence[str], faults: FormatFaults) -> None:
    """Where files are numbered "-00002-of-00003" and no index says which there are, none may be missing."""
    found: dict[tuple[str, int], set[int]] = defaultdict(set)
    for file in files:
        match = _NUMBERED.fullmatch(file)
        if match:
            found[match["stem"], int(match["total"])].add(int(match["number"]))
    for (stem, total), numbers in found.items():
        first = 0 if 0 in numbers else 1
        # The total is a stranger's number: look no further than what is there plus what is listed.
        looked_at = range(first, first + min(total, len(numbers) + LISTED))
        absent = [number for number in looked_at if number not in numbers]
        if absent:
            faults.add(
                "incomplete sets of numbered files",
                f"{shown(stem)}-*-of-{total:05d}{_WEIGHTS}: {len(numbers)} of {total} are there, "
                f"missing are the numbers {listed(str(number) for number in absent)}",
            )


def _nothing_there(root: str, names: Sequence[str]) -> FormatError:
    lines = [
        f"{root}: no weights found",
        f"  looked for: {', '.join(_USUAL)}, another *{_INDEX}, *{_WEIGHTS}, {METADATA}",
        f"  files there: {listed(map(shown, names)) or 'none'}",
    ]
    if any(fnmatchcase(name, "adapter_model*") for name in names):
        lines.append("  There is an adapter without its base model; open the base model's folder.")
    of_ranks = [name for name in names if _OF_ONE_RANK.fullmatch(name)]
    if of_ranks:
        lines.append(
            f"  {listed(map(shown, of_ranks))}: what each rank held, without a word of what belongs where. "
            "load_accelerate_model loads them on as many ranks, and so does accelerate; for any other number, load "
            "them so and save in another form (use_dcp=True)."
        )
    torch_files = [name for name in names if name.endswith(_TORCH_WEIGHTS) and name not in of_ranks]
    if torch_files:
        lines.append(
            f"  {listed(map(shown, torch_files))}: if one of them holds the model, pass its path, or its name as "
            "weights_name."
        )
    others = [name for name in names if name.endswith(".gguf")]
    if others:
        lines.append(f"  {listed(map(shown, others))}: this layout is not supported for loading.")
    return FormatError("\n".join([*lines, "Check the path, or save the model as safetensors files."]))


# Folders of torch.distributed.checkpoint


def _select_distributed(reader: StorageReader, names: Sequence[str]) -> FileSelection:
    layout: Layout = "torch distributed checkpoint"
    if METADATA in names:
        return FileSelection(layout, [])
    here = [name for name in names if "/" not in name]
    models = [
        folder
        for folder in distributed_folders(names)
        if any(fnmatchcase(folder, pattern) for pattern in _MODEL_FOLDERS)
    ]
    if len(models) == 1:
        return FileSelection(layout, [], folder=f"{models[0]}/")
    chunks = [name for name in names if name.endswith(SUFFIX) and name.count("/") <= 1]
    if not chunks and not distributed_folders(names):
        raise _nothing_there(reader.root, here)
    if any("/" not in name for name in chunks):
        text = (
            f"{reader.root}: there are {sum('/' not in name for name in chunks)} {SUFFIX} files, but no "
            f"{METADATA}, which says what is in them and is written last, by rank 0"
        )
        remedy = f"copy {METADATA} here from the machine of rank 0, or take a save that was completed"
    else:
        text = f"{reader.root}: no weights found, but folders of torch.distributed.checkpoint"
        remedy = f"the folders with {SUFFIX} files lack their {METADATA}: take a save that was completed"
    raise FormatError(f"{text}\n{where_models_are(reader, names) or remedy}")


def distributed_folders(names: Iterable[str]) -> list[str]:
    """Folders, one level down, that hold a distributed checkpoint."""
    found = (name.removesuffix(f"/{METADATA}") for name in names if name.endswith(f"/{METADATA}"))
    return sorted(folder for folder in found if "/" not in folder)


def where_models_are(reader: StorageReader, names: Iterable[str] = ()) -> str:
    """A sentence on the distributed checkpoints inside the folder and beside it; empty when there are none."""
    folders = [f"{reader.root}/{folder}" for folder in distributed_folders(names)] + _beside(reader)
    optimizers = [folder for folder in folders if fnmatchcase(Path(folder).name, _OPTIMIZER_FOLDERS)]
    models = [folder for folder in folders if folder not in optimizers]
    if models:
        also = f" ({listed(map(shown, optimizers))}: an optimizer's state)" if optimizers else ""
        return f"pass the folder of the model: {' or '.join(map(shown, models[:LISTED]))}{also}"
    if optimizers:
        return (
            f"{listed(map(shown, optimizers))}: an optimizer's state; the model's folder is not beside it. That "
            "path works for merge_weights (optimizer.bin), and for load_accelerate_optimizer"
        )
    return ""


def _beside(reader: StorageReader) -> list[str]:
    """Folders beside a local one that hold a distributed checkpoint."""
    if not isinstance(reader, LocalReader):
        return []
    root = Path(reader.root).absolute()
    try:
        return sorted(
            str(place) for place in root.parent.iterdir() if place != root and (place / METADATA).is_file()
        )
    except OSError:
        return []


# The index file


def _select_indexed(reader: StorageReader, name: str, faults: FormatFaults) -> FileSelection:
    nbytes = reader.size(name)
    if nbytes > MAX_INDEX_BYTES:
        _refuse_index(reader, name, f"it has {nbytes} bytes, {MAX_INDEX_BYTES} is the limit")
    content = parse_object(reader.read(name, 0, nbytes), what=f"{shown(name)} in {reader.root}")
    weight_map = _weight_map(reader, name, content.get("weight_map"), faults)
    metadata = content.get("metadata")
    if not isinstance(metadata, dict):
        metadata = {}
    texts = {key: text if isinstance(text, str) else json.dumps(text) for key, text in metadata.items()}
    layout: Layout = "indexed" if _is_of_safetensors(name) else "indexed torch files"
    return FileSelection(layout, sorted(set(weight_map.values())), weight_map, texts)


def _weight_map(reader: StorageReader, name: str, value: object, faults: FormatFaults) -> dict[str, str]:
    """The index's map of keys to files, without the files that must not be opened; those are faults."""
    if not isinstance(value, dict):
        _refuse_index(reader, name, "it has no object named weight_map")
    if not value:
        _refuse_index(reader, name, "its weight_map is empty")
    for key, file in value.items():
        if not isinstance(file, str):
            faults.add(f"keys without a file in {shown(name)}", f"{shown(key)}: {shown(repr(file))}, not a string")
    suffix = _WEIGHTS if _is_of_safetensors(name) else _TORCH_WEIGHTS[0]
    mapped = {key: file for key, file in value.items() if isinstance(file, str)}
    unsafe = {file: why for file in mapped.values() if (why := _why_not_opened(file, suffix)) is not None}
    for file, why in sorted(unsafe.items()):
        faults.add(f"file names refused in {shown(name)}", f"{shown(file)}: {why}")
    return {key: file for key, file in mapped.items() if file not in unsafe}


def _is_of_safetensors(index: str) -> bool:
    match = _INDEXES.fullmatch(index)
    return match is not None and match["kind"] == "safetensors"


def _why_not_opened(file: str, suffix: str) -> str | None:
    if not file.endswith(suffix):
        return f"it does not end in {suffix}"
    return why_unsafe(file)


def _refuse_index(reader: StorageReader, name: str, cause: str) -> NoReturn:
    raise FormatError(f"{shown(name)} in {reader.root}: {cause}; download or write the index again")
