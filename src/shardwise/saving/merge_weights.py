"""Merges a sharded checkpoint into files under the names of the hub, or under its own if the model is unknown."""

import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from transformers import PreTrainedConfig

from shardwise.core.errors import ConfigError, FormatError, StorageError, answer_keywords
from shardwise.core.formatting import in_bytes
from shardwise.core.layout import TensorKind
from shardwise.core.save_reports import MergeWeightsReport
from shardwise.core.tensors import ByteRange, numel, parse_size, row_blocks
from shardwise.files.checkpoint_index import CheckpointIndex, with_keys, without_wrappers
from shardwise.files.distributed import LAYOUT, holds_optimizer, open_state, read_metadata
from shardwise.files.join_entries import METADATA
from shardwise.files.local_reader import LocalReader, OpenStorage, open_storage
from shardwise.files.local_writer import LocalWriter
from shardwise.files.open_checkpoint import open_checkpoint
from shardwise.files.remote import resolve
from shardwise.files.storage import StorageReader
from shardwise.files.stored_tensors import stored_tensors
from shardwise.files.torch_files import TorchFileContents, read_torch_file
from shardwise.files.urls import HubOptions, shown
from shardwise.fsdp.torch_private import to_torch
from shardwise.loading.meta_model import ModelOptions, get_model_class, load_config, outline
from shardwise.models import pretrained
from shardwise.models.pretrained import assign_keys, progress_bar, rename_keys
from shardwise.ranks.call_arguments import check_options, get_hints
from shardwise.ranks.world import World
from shardwise.saving import offline
from shardwise.saving.commit import commit_written
from shardwise.saving.commit_plan import WrittenFiles, get_folder_state, temporary_name
from shardwise.saving.offline import config_content, read_companions, read_templates, write_templates
from shardwise.saving.plan import INDEX_FILE, Saved
from shardwise.saving.prepare import MAX_SHARD_SIZE
from shardwise.saving.rename_journal import journal_folder, lists_in, locked_and_clean
from shardwise.saving.saved_trees import read_objects
from shardwise.saving.stream_out import TensorsToSave
from shardwise.saving.torch_saves import Levels, flattened, load_plain, nested
from shardwise.saving.verify import verify_files
from shardwise.saving.write import WrittenTensors
from shardwise.transfer.read import ReadExecutor, storage_bytes

Format: TypeAlias = Literal["safetensors", "bin"]


_BLOCK_ELEMENTS = 8 << 20
"""The most elements of a tensor that are in memory while a file of ``torch.save`` is written."""


OPTIMIZER_FILE = "optimizer.bin"


_OF_AN_ADAPTER = ".lora_"
"""Of names that PEFT gives to what it adds."""


@dataclass(frozen=True)
class NamedOutputs:
    """Outputs by name, and the folder of the config that determined the names.

    For a ``torch.save`` file: its name, the path of the tensors in it, and its other content.
    """

    to_save: TensorsToSave
    names: str
    folder: Path | None = None
    parameters: int = 0
    notes: tuple[str, ...] = ()
    torch_file: str = "pytorch_model.bin"
    nest: Mapping[str, Levels] = field(default_factory=dict)
    objects: Mapping[Levels, object] = field(default_factory=dict)

    def places(self) -> dict[Levels, Saved]:
        """Return the tensors by their paths in a ``torch.save`` file."""
        return {self.nest.get(item[0], (item[0],)): item for item in self.to_save.tensors()}


@answer_keywords(
    save_path="Pass out=...",
    output_path="Pass out=...",
    safe_serialization='Pass file_format="bin" for pytorch_model.bin',
    remove_checkpoint_dir="Pass remove_source=...",
    model_path="Pass base=...",
)
def merge_weights(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    key_mapping: Mapping[str, str] | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    file_format: Format = "safetensors",
    remove_source: bool = False,
) -> MergeWeightsReport:
    """Write a checkpoint as safetensors files under the names of the hub.

    Whatever ``open_checkpoint`` reads: a folder of ``torch.distributed.checkpoint``, or one
    that has one for a model (accelerate's, a trainer's), files of ``torch.save``, safetensors. A folder with an
    optimizer's state becomes one file of ``torch.save``, ``optimizer.bin``.

    Args:
        checkpoint: a folder or a file.
        out: a folder, created if missing. A model in it is replaced once all is written.
        base: a folder, or hub id in the cache, with the model's config. Default: the nearest ``config.json`` in the
            checkpoint's folder and the two above it. Its names are those of the outcome, if it has weights.
        dtype: of the output. By default each tensor keeps its own.
        key_mapping: regex to replacement, applied to the checkpoint's keys before the model's own renames.
        max_shard_size: as in ``"5GB"``: of one file's tensors.
        file_format: ``"bin"`` writes ``pytorch_model.bin``.
        remove_source: remove the checkpoint's files once the outcome has been read back and is the same.

    Collective: no. Memory: about half a GiB in addition to importing torch and transformers, for any model size.

    Raises:
        ConfigError: an argument or the config cannot be honored.
        KeyMismatchError: the checkpoint and the model of the config do not cover each other.
        FormatError, StorageError: a file contradicts its format or cannot be read or written, or the output read
            back differs.
    """
    check_options(get_hints(merge_weights), {"file_format": file_format, "remove_source": remove_source})
    checkpoint, out, limit = Path(checkpoint).expanduser(), Path(out).expanduser(), parse_size(max_shard_size)
    start = time.perf_counter()
    with ExitStack() as stack:
        reader, index, is_optimizer = _open(checkpoint, stack)
        folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
        offline.require_other_folder(out, [folder, *_checkpoint_folders(folder, index)])
        if remove_source and index.ignored:
            raise ConfigError(
                f"the checkpoint in {index.root} also holds {', '.join(map(shown, index.ignored[:5]))}, which "
                "would be lost with it. Merge it without removing it"
            )
        executor = offline.create_executor(reader, index)
        if is_optimizer:
            named, file_format = optimizer_outputs(reader, index, executor, (base, dtype, key_mapping)), "bin"
        else:
            named = named_outputs(folder, index, executor, base=base, dtype=dtype, key_mapping=key_mapping or {})
        companions = _companions(named, folder, dtype)
        streamed, files = _write(named, companions, file_format, out, limit)
        if named.folder is not None:
            write_templates(out, read_templates([folder, named.folder]))
    removed = ""
    if remove_source:
        _read_back(out, streamed, named, file_format)
        removed = _remove(folder, index)
    return MergeWeightsReport(
        checkpoint=str(checkpoint),
        out=str(out),
        layout=index.layout,
        names=named.names,
        tensors=len(streamed.fingerprints),
        nbytes=streamed.nbytes,
        files=files,
        companions=tuple(sorted(companions)),
        verified=len(streamed.fingerprints) if removed else 0,
        removed=removed,
        notes=named.notes,
        seconds=time.perf_counter() - start,
    )


def _open(checkpoint: Path, stack: ExitStack) -> tuple[StorageReader, CheckpointIndex, bool]:
    """Open a checkpoint. The last value is True for the state of an optimizer."""
    if not checkpoint.exists():
        raise StorageError(f"{checkpoint}: no such file or folder. Check the path")
    if lists_in(folder := journal_folder(checkpoint)):
        raise StorageError(
            f"{folder}: its last save was interrupted between its commit and its renames. Load it with "
            "load_state, load_accelerate_model or load_accelerate_optimizer, and save it again"
        )
    opened = open_storage(checkpoint)
    reader = stack.enter_context(opened.reader)
    is_optimizer = opened.file is None and holds_optimizer(reader)
    index = open_state(reader) if is_optimizer else open_checkpoint(reader, weights_name=opened.file)
    return reader, index, is_optimizer


def _companions(named: NamedOutputs, folder: Path, dtype: str | None) -> dict[str, bytes]:
    """Return the small files of the output. Empty if the model is unknown."""
    if named.folder is None:
        return {}
    config = config_content(named.folder, dtype=offline.written_dtype(named.to_save, dtype), untied=False)
    return {**read_companions(named.folder, folder), "config.json": config}


def _write(
    named: NamedOutputs, companions: Mapping[str, bytes], file_format: Format, out: Path, max_shard_bytes: int
) -> tuple[WrittenTensors, tuple[str, ...]]:
    """Write and commit the files. Return also their names."""
    with LocalWriter(out) as writer:
        if file_format == "bin":
            return _write_torch_file(writer, named, max_shard_bytes, companions), (named.torch_file,)
        return offline.write_out(
            writer,
            named.to_save,
            named.parameters,
            max_shard_bytes=max_shard_bytes,
            companions=companions,
        )


def _write_torch_file(
    writer: LocalWriter, named: NamedOutputs, max_shard_bytes: int, companions: Mapping[str, bytes]
) -> WrittenTensors:
    places = named.places()
    nbytes = sum(numel(shape) * dtype.itemsize for _, dtype, shape in places.values())
    if nbytes > max_shard_bytes:
        raise ConfigError(
            f"{named.torch_file} would have {in_bytes(nbytes)}, and max_shard_size is {in_bytes(max_shard_bytes)}. "
            "A file of torch.save is written in one piece: raise max_shard_size, or write safetensors files"
        )
    if named.torch_file != OPTIMIZER_FILE and (
        others := get_folder_state(writer.list(), writer.read(INDEX_FILE)).weights
    ):
        raise ConfigError(
            f"{writer.root} has {sorted(others)[0]}, which is read before any {named.torch_file}. Name "
            "another folder"
        )
    named.to_save.require_bounded()
    written = WrittenTensors(bytes_by_file={named.torch_file: nbytes})
    with (
        progress_bar("Merging", nbytes, enabled=True) as bar,
        locked_and_clean(World(0, 1), writer.root) as saving,
    ):
        file = temporary_name(named.torch_file, saving.save_id)
        contents = _write_around_tensors(writer, file, named)
        starts = {item.path: item.chunks[0].view.range.start for item in contents.tensors}
        for way, (key, _, shape) in places.items():
            at = 0
            written.fingerprints[key] = 0
            for box in row_blocks(shape, _BLOCK_ELEMENTS):
                content = storage_bytes(named.to_save.values([(key, box)])[0])
                writer.write(file, starts[tuple(map(str, way))] + at, [content])
                written.add(key, at, content)
                at += content.nbytes
                bar.update(content.nbytes)
        writer.sync(file)
        writer.sync_names()
        commit_written(saving.locked, WrittenFiles({named.torch_file: contents.file_nbytes}), [], companions)
    return written


def _write_around_tensors(writer: LocalWriter, file: str, named: NamedOutputs) -> TorchFileContents:
    """Create the file with all of ``torch.save``'s content except for the elements of tensors. Return their places.

    ``torch.save`` writes a sparse file of untouched memory in a temporary folder.
    """
    places = named.places()
    empty = {way: torch.empty(shape, dtype=to_torch(dtype)) for way, (_, dtype, shape) in places.items()}
    with tempfile.TemporaryDirectory() as folder:
        sparse = Path(folder, named.torch_file)
        with torch.serialization.skip_data():
            torch.save(nested({**empty, **named.objects}), sparse)
        with LocalReader(folder) as reader:
            contents = read_torch_file(reader, named.torch_file)
        writer.create(file, contents.file_nbytes)
        ranges = [chunk.view.range for item in contents.tensors for chunk in item.chunks]
        ends = ByteRange(contents.file_nbytes, contents.file_nbytes)
        with sparse.open("rb") as content:
            start = 0
            for data in [*sorted(ranges, key=attrgetter("start")), ends]:
                if start < data.start:
                    content.seek(start)
                    writer.write(file, start, [memoryview(content.read(data.start - start))])
                start = max(start, data.stop)
    return contents


def _checkpoint_folders(folder: Path, index: CheckpointIndex) -> list[Path]:
    """Return the folders of the checkpoint's files."""
    return sorted({(folder / file).parent for file in index.files})


def _remove(folder: Path, index: CheckpointIndex) -> str:
    """Remove the checkpoint's own files, and its folders if they are then empty."""
    folders = _checkpoint_folders(folder, index)
    files = [folder / file for file in index.files]
    if index.layout == LAYOUT:  # otherwise it is of another checkpoint
        files += [place / METADATA for place in folders if (place / METADATA).is_file()]
    try:
        # The metadata goes first, so that an interrupted removal leaves no folder that looks complete.
        for file in sorted(files, key=lambda file: file.name != METADATA):
            file.unlink()
        for place in folders:
            if not any(place.iterdir()):
                place.rmdir()
    except OSError as error:
        raise StorageError(
            f"{folder}: the outcome is whole, but removing the checkpoint failed, {error.strerror}. Remove it "
            "yourself"
        ) from error
    return f"{len(files)} files of {', '.join(map(str, folders))}"


def _read_back(out: Path, streamed: WrittenTensors, named: NamedOutputs, file_format: Format) -> None:
    """Read everything that was written, and compare it.

    Raises:
        StorageError: bytes differ from those written. The message names the tensor.
    """
    if file_format == "bin":
        damaged = _damaged_in(out / named.torch_file, streamed, named)
        compared = len(streamed.fingerprints)
    else:
        report = verify_files(out)
        damaged, compared = [*report.damaged, *report.damaged_files], report.compared
    if damaged or compared != len(streamed.fingerprints):
        raise StorageError(
            f"{out}: {', '.join(map(shown, damaged[:5])) or 'tensors'} differ when they are read back, "
            "so the checkpoint they come from was not removed. Check the disk"
        )


def _damaged_in(file: Path, streamed: WrittenTensors, named: NamedOutputs) -> list[str]:
    """Return the keys of tensors in a file of ``torch.save`` that differ from what was written."""
    try:
        tree = dict(flattened(load_plain(file)))
    except FormatError:
        return list(streamed.fingerprints)
    read = WrittenTensors()
    for way, (key, _, _) in named.places().items():
        if isinstance(tree.get(way), torch.Tensor):
            read.add(key, 0, storage_bytes(tree[way]))
    return [key for key, value in streamed.fingerprints.items() if read.fingerprints.get(key) != value]


def named_outputs(
    folder: Path,
    index: CheckpointIndex,
    executor: ReadExecutor,
    *,
    base: str | os.PathLike[str] | None,
    dtype: str | None,
    key_mapping: Mapping[str, str],
) -> NamedOutputs:
    """Return the hub's names if the model is known, otherwise those of the checkpoint, with the reason."""
    options = _options(dtype, key_mapping)
    config_folder = _config_folder(folder, base)
    if config_folder is None:
        why = f"no config.json in or above {folder}. Name the base (--base, base=) for the hub's"
        return _as_named(*_with_plain_keys(index, key_mapping), executor, dtype, why)
    try:
        config = load_config(config_folder, options)
        get_model_class(config_folder, config, options)
    except ConfigError as error:
        if base is not None:
            raise
        return _as_named(*_with_plain_keys(index, key_mapping), executor, dtype, str(error))
    return _as_on_hub(config_folder, config, index, executor, has_base=base is not None, options=options)


def _with_plain_keys(index: CheckpointIndex, key_mapping: Mapping[str, str]) -> tuple[CheckpointIndex, list[str]]:
    """Return a checkpoint of an unknown model with renamed keys, and notes."""
    if key_mapping:
        keys = rename_keys((item.key for item in index.tensors()), key_mapping)
        if repeated := [name for name, count in Counter(keys.values()).items() if count > 1]:
            raise ConfigError(f"key_mapping: gives the name {shown(repeated[0])} to several keys. Name them apart")
        index = with_keys(index, keys)
    return without_wrappers(index)


def _config_folder(folder: Path, base: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder of the model's config, or None."""
    if base is not None:
        found = resolve(base, HubOptions(local_files_only=True), download=False)
        found = found if found.is_dir() else found.parent
        if not (found / "config.json").is_file():
            raise ConfigError(f"{found}: there is no config.json. Pass a folder with the model's config")
        return found
    absolute = folder.absolute()
    places = [absolute, *absolute.parents[:2]]
    return next((place for place in places if (place / "config.json").is_file()), None)


def _as_named(
    index: CheckpointIndex, notes: list[str], executor: ReadExecutor, dtype: str | None, why: str
) -> NamedOutputs:
    """Return every tensor unchanged, under its own name."""
    if dtype is not None:
        raise ConfigError(f"dtype={dtype!r} depends on the model, which is unknown: {why}")
    to_save = TensorsToSave({key: (item.dtype, item) for key, item in stored_tensors(index).items()}, executor)
    if index.ignored:
        notes.append(f"not taken along: {', '.join(map(shown, index.ignored[:5]))}")
    adapted = sum(_OF_AN_ADAPTER in key for key in to_save.by_key)
    if adapted:
        notes.append(
            f"{adapted:,} of {len(to_save.by_key):,} tensors are an adapter's, and its base is not taken along: "
            "save_adapter writes it as PEFT does, merge-adapter writes the model that they make together"
        )
    return NamedOutputs(to_save, f"the checkpoint's own ({why})", notes=tuple(notes))


def optimizer_outputs(
    reader: StorageReader, index: CheckpointIndex, executor: ReadExecutor, others: tuple[object, ...]
) -> NamedOutputs:
    """Return the state of an optimizer in dicts and lists, as it was saved.

    Raises:
        ConfigError: another output is requested.
    """
    if any(others):
        raise ConfigError(
            "the state of an optimizer is written as it is stored. Leave out base, dtype and key_mapping"
        )
    metadata = read_metadata(reader)
    skipped = 1 if _is_wrapped(metadata.levels.values()) else 0
    nest = {".".join(path): metadata.levels[path][skipped:] for path in metadata.tensors}
    objects = {way[skipped:]: value for way, value in read_objects(reader, metadata).items()}
    named = _as_named(index, [], executor, None, "an optimizer's state")
    return replace(named, torch_file=OPTIMIZER_FILE, nest=nest, objects=objects)


def _is_wrapped(paths: Iterable[Levels]) -> bool:
    """Return whether all is in one dict, as accelerate saves it: ``{"optimizer": {"state": ...}}``."""
    found = list(paths)
    inner = {path[1] for path in found if len(path) > 1}
    return (
        len({path[0] for path in found}) == 1
        and inner <= {"state", "param_groups"}
        and all(len(path) > 1 for path in found)
    )


def _options(dtype: str | None, key_mapping: Mapping[str, str]) -> ModelOptions:
    options = ModelOptions(key_mapping=key_mapping)
    return options if dtype is None else ModelOptions(**options, dtype=dtype)


def _as_on_hub(
    folder: Path,
    config: PreTrainedConfig,
    index: CheckpointIndex,
    executor: ReadExecutor,
    *,
    has_base: bool,
    options: ModelOptions,
) -> NamedOutputs:
    """Return the model's tensors as the hub has them."""
    built = outline(folder, config, index, options)
    source = offline.bind_offline(config, index, built, executor)
    if "dtype" not in options:
        source = source.as_stored()
    of_model = built.transforms[len(options["key_mapping"]) :]  # renames by the caller are not undone
    if has_base and (transforms := _used_for(folder, config, source)):
        pretrained.record_conversions(source.built.model, transforms)
    elif any(item.was_used() for item in of_model):
        pretrained.record_conversions(source.built.model, of_model)
    outputs = source.revert()
    parameters = sum(tensor.numel for tensor in source.layout.tensors if tensor.kind is TensorKind.PARAMETER)
    to_save = TensorsToSave(offline.merged_outputs(source, outputs, source.by_every_name()), executor)
    return NamedOutputs(to_save, f"the hub's, by {folder / 'config.json'}", folder, parameters, tuple(source.notes))


def _used_for(folder: Path, config: PreTrainedConfig, source: offline.OfflineModel) -> list[Any]:
    """Return the conversions used for the base's own weights. Empty if it has no weights under such names."""
    try:
        with LocalReader(folder) as reader:
            keys = [item.key for item in offline.read_index(OpenStorage(reader, None), config).tensors()]
    except (FormatError, StorageError):
        return []
    model = source.built.model
    transforms = pretrained.get_conversion_transforms(model, None)
    names = {name: tensor for tensor in source.layout.saved() for name in tensor.names}
    assign_keys(model, keys, names, transforms)
    return transforms if any(item.was_used() for item in transforms) else []
