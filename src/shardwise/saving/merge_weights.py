"""Merges a sharded checkpoint into files under the names of the hub, or under its own if the model is unknown."""

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from transformers import PreTrainedConfig

from shardwise.core.errors import ConfigError, FormatError, StorageError
from shardwise.core.formatting import in_bytes
from shardwise.core.layout import TensorKind
from shardwise.core.save_reports import MergeWeightsReport
from shardwise.core.tensors import gaps, numel, parse_size, row_blocks
from shardwise.files.checkpoint_index import DISTRIBUTED, CheckpointIndex, with_keys, without_wrappers
from shardwise.files.distributed import holds_optimizer, open_state, read_metadata
from shardwise.files.folders import temporary_folder
from shardwise.files.join_entries import METADATA
from shardwise.files.local_reader import LocalReader, OpenStorage, open_storage
from shardwise.files.local_writer import LocalWriter
from shardwise.files.open_checkpoint import dequantize_index, open_checkpoint
from shardwise.files.remote import resolve
from shardwise.files.storage import StorageReader
from shardwise.files.stored_tensors import stored_tensors
from shardwise.files.torch_files import TorchFileContents, read_torch_file
from shardwise.files.urls import HubOptions, shown
from shardwise.fsdp.torch_private import to_torch
from shardwise.loading.meta_model import ModelOptions, build_meta_model, get_model_class, load_config
from shardwise.loading.plan import OF_AN_ADAPTER
from shardwise.models import pretrained
from shardwise.models.pretrained import assign_keys, rename_keys
from shardwise.ranks.call_arguments import check_options, get_hints
from shardwise.ranks.world import World
from shardwise.saving import merge_steps
from shardwise.saving.commit import commit_written, replace_templates
from shardwise.saving.commit_plan import WrittenFiles, get_folder_state, temporary_name
from shardwise.saving.plan import INDEX_FILE, TensorToSave
from shardwise.saving.prepare import MAX_SHARD_SIZE, find_main_dtype
from shardwise.saving.rename_journal import journal_folder, lock_and_clean_up, read_journals
from shardwise.saving.saved_trees import read_objects
from shardwise.saving.stream_out import TensorsToSave
from shardwise.saving.torch_saves import load_plain, nest_values
from shardwise.saving.verify import verify_files
from shardwise.saving.write import WrittenTensors
from shardwise.transfer.distributed_chunks import StatePath, flat_key
from shardwise.transfer.progress import progress_bar
from shardwise.transfer.read import ReadExecutor, storage_bytes

Format: TypeAlias = Literal["safetensors", "bin"]


_BLOCK_ELEMENTS = 8 << 20
"""The most elements of a tensor that are in memory while a file of ``torch.save`` is written."""


OPTIMIZER_FILE = "optimizer.bin"


@dataclass(frozen=True)
class NamedOutputs:
    """Outputs by name, and the folder of the config that determined the names. ``untied``: its ties are given up.

    For a ``torch.save`` file: its name, the path of the tensors in it, and its other content.
    """

    to_save: TensorsToSave
    names: str
    folder: Path | None = None
    parameters: int = 0
    notes: tuple[str, ...] = ()
    untied: bool = False
    torch_file: str = "pytorch_model.bin"
    nest: Mapping[str, StatePath] = field(default_factory=dict)
    objects: Mapping[StatePath, object] = field(default_factory=dict)

    def places(self) -> dict[StatePath, TensorToSave]:
        """Return the tensors by their paths in a ``torch.save`` file."""
        return {self.nest.get(item[0], (item[0],)): item for item in self.to_save.tensors()}

    def tensors_in_objects(self) -> dict[StatePath, torch.Tensor]:
        """Return the tensors inside of other values, such as betas in a tuple, by their paths."""
        tensors: dict[StatePath, torch.Tensor] = {}
        for path, value in self.objects.items():
            tensors |= _find_tensors(value, path)
        return tensors


def _find_tensors(value: Any, path: StatePath = ()) -> Iterator[tuple[StatePath, torch.Tensor]]:
    """Yield the tensors in nested dicts, lists and tuples, with their paths."""
    if isinstance(value, torch.Tensor):
        yield path, value.detach()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _find_tensors(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _find_tensors(item, (*path, number))


def merge_weights(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
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
        dtype: of the output. By default (None or "auto") each tensor keeps its own.
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
    dtype = None if dtype in (None, "auto") else str(dtype).removeprefix("torch.")
    start = time.perf_counter()
    with ExitStack() as stack:
        # 1. Open the checkpoint.
        reader, index, is_optimizer = _open(checkpoint, stack)
        folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
        merge_steps.require_other_folder(out, [folder, *_checkpoint_folders(folder, index)])
        # 2. Choose the names, refuse what cannot be carried out, and write.
        executor = merge_steps.create_executor(reader, index)
        if is_optimizer:
            outputs = name_optimizer_outputs(reader, index, executor, (base, dtype, key_mapping))
            file_format = "bin"
        else:
            outputs = name_outputs(folder, index, executor, base=base, dtype=dtype, key_mapping=key_mapping or {})
        # Of the dequantized checkpoint, whose scales of activations are not written.
        if remove_source and (ignored := outputs.to_save.executor.index.ignored):
            raise ConfigError(
                f"the checkpoint in {index.root} also holds {', '.join(map(shown, ignored[:5]))}, which "
                "would be lost with it. Merge it without removing it"
            )
        companions, templates = _companions(outputs, folder, dtype)
        written, files = _write(outputs, companions, file_format, out, limit)
        replace_templates(out, templates)
    removed = ""
    if remove_source:
        # After the readers are closed, and from the files: a comparison with memory would miss a disk that loses
        # data.
        _read_back(out, written, outputs, file_format)
        removed = _remove(folder, index)
    return MergeWeightsReport(
        checkpoint=str(checkpoint),
        out=str(out),
        layout=index.layout,
        names=outputs.names,
        tensors=len(written.fingerprints),
        nbytes=written.nbytes,
        files=files,
        companions=tuple(sorted(companions)),
        verified=len(written.fingerprints) if removed else 0,
        removed=removed,
        notes=outputs.notes,
        seconds=time.perf_counter() - start,
    )


def _open(checkpoint: Path, stack: ExitStack) -> tuple[StorageReader, CheckpointIndex, bool]:
    """Open a checkpoint. The last value is True for the state of an optimizer."""
    if not checkpoint.exists():
        raise StorageError(f"{checkpoint}: no such file or folder. Check the path")
    # Files that a journal lists still have temporary names, so the folder is a mix of two saves.
    if read_journals(folder := journal_folder(checkpoint)):
        raise StorageError(
            f"{folder}: its last save was interrupted between its commit and its renames. Load it with "
            "load_state, load_accelerate_model or load_accelerate_optimizer, and save it again"
        )
    opened = open_storage(checkpoint)
    reader = stack.enter_context(opened.reader)
    is_optimizer = opened.file is None and holds_optimizer(reader)
    index = open_state(reader) if is_optimizer else open_checkpoint(reader, weights_name=opened.file)
    return reader, index, is_optimizer


def _companions(
    outputs: NamedOutputs, folder: Path, dtype: str | None
) -> tuple[dict[str, bytes], dict[str, bytes] | None]:
    """Return the small files of the output and its additional chat templates. Empty if the model is unknown."""
    if outputs.folder is None:
        return {}, None
    if dtype is None and (main := find_main_dtype(outputs.to_save.tensors())) is not None:
        dtype = str(to_torch(main)).removeprefix("torch.")
    config = merge_steps.parse_config(outputs.folder)
    files, templates = merge_steps.read_companions(outputs.folder, [*_nearest_folders(folder), outputs.folder])
    files["config.json"] = merge_steps.config_content(config, dtype=dtype, untied=outputs.untied)
    return files, templates


def _nearest_folders(folder: Path) -> list[Path]:
    """Return a folder and the two above it: trainers write checkpoints one or two folders below the config."""
    absolute = folder.absolute()
    return [absolute, *absolute.parents[:2]]


def _write(
    outputs: NamedOutputs, companions: Mapping[str, bytes], file_format: Format, out: Path, max_shard_bytes: int
) -> tuple[WrittenTensors, tuple[str, ...]]:
    """Write and commit the files. Return also their names."""
    with LocalWriter(out) as writer:
        if file_format == "bin":
            return _write_torch_file(writer, outputs, max_shard_bytes, companions), (outputs.torch_file,)
        with merge_steps.write_out(
            writer, outputs.to_save, outputs.parameters, max_shard_bytes=max_shard_bytes, companions=companions
        ) as written:
            return written


def _write_torch_file(
    writer: LocalWriter, outputs: NamedOutputs, max_shard_bytes: int, companions: Mapping[str, bytes]
) -> WrittenTensors:
    tensors = outputs.places()
    # Refused before the folder is locked: a file that is too large, or one that would never be read.
    nbytes = sum(numel(shape) * dtype.itemsize for _, dtype, shape in tensors.values())
    if nbytes > max_shard_bytes:
        other = "" if outputs.torch_file == OPTIMIZER_FILE else ", or write safetensors files"
        raise ConfigError(
            f"{outputs.torch_file}: would have {in_bytes(nbytes)}, more than max_shard_size="
            f"{in_bytes(max_shard_bytes)}. Pass a larger max_shard_size{other}"
        )
    if outputs.torch_file != OPTIMIZER_FILE and (
        others := get_folder_state(writer.list(), writer.read(INDEX_FILE)).weights
    ):
        raise ConfigError(
            f"{writer.root}: has {sorted(others)[0]}, which is read instead of {outputs.torch_file}. Pass another "
            "output folder"
        )
    outputs.to_save.require_bounded()
    written = WrittenTensors(bytes_by_file=Counter({outputs.torch_file: nbytes}))
    with (
        progress_bar("Merging", nbytes, enabled=True) as bar,
        lock_and_clean_up(World(0, 1), writer.root) as saving,
    ):
        file = temporary_name(outputs.torch_file, saving.save_id)
        # The archive's own bytes come first, because its layout says where the elements of each tensor go.
        contents = _write_around_tensors(writer, file, outputs)
        # Then the elements, block by block, at the places that torch.save left for them.
        starts = {item.path: item.chunks[0].view.range.start for item in contents.tensors}
        for path, (key, _, shape) in tensors.items():
            position = 0
            written.fingerprints[key] = 0
            for box in row_blocks(shape, _BLOCK_ELEMENTS):
                content = storage_bytes(outputs.to_save.values([(key, box)])[0])
                writer.write(file, starts[tuple(map(str, path))] + position, [content])
                written.add(key, position, content)
                position += content.nbytes
                bar.update(content.nbytes)
        # Tensors in tuples are not entries of a distributed checkpoint, but torch.save left places for them, too.
        for path, tensor in outputs.tensors_in_objects().items():
            key, start = flat_key(path), starts.get(tuple(map(str, path)))
            if start is None or not tensor.is_contiguous():
                raise FormatError(
                    f"{shown(key)}: is a strided, sparse or quantized tensor inside of another value, which is not "
                    "merged. Save a contiguous copy of it (tensor.clone())"
                )
            writer.write(file, start, [storage_bytes(tensor)])
            written.add(key, 0, storage_bytes(tensor))
        # Durable under its temporary name before the rename commits it.
        writer.sync(file)
        writer.sync_names()
        commit_written(saving.locked, WrittenFiles({outputs.torch_file: contents.file_nbytes}), [], companions)
    return written


def _write_around_tensors(writer: LocalWriter, file: str, outputs: NamedOutputs) -> TorchFileContents:
    """Create the file with all of ``torch.save``'s content except for the elements of tensors. Return their places.

    ``torch.save`` writes a sparse file of untouched memory in a temporary folder.
    """
    tensors = outputs.places()
    empty = {
        path: torch.empty(shape, dtype=to_torch(dtype), device="cpu") for path, (_, dtype, shape) in tensors.items()
    }
    with temporary_folder() as folder:
        sparse = folder / outputs.torch_file
        with torch.serialization.skip_data():
            torch.save(nest_values({**empty, **outputs.objects}), sparse)
        with LocalReader(folder) as reader:
            contents = read_torch_file(reader, outputs.torch_file)
        writer.create(file, contents.file_nbytes)
        # Copy what lies between the tensors. Their own bytes are holes in the sparse file.
        ranges = [chunk.view.range for item in contents.tensors for chunk in item.chunks]
        with sparse.open("rb") as content:
            for start, stop in gaps([(data.start, data.stop) for data in ranges], contents.file_nbytes):
                content.seek(start)
                writer.write(file, start, [memoryview(content.read(stop - start))])
    return contents


def _checkpoint_folders(folder: Path, index: CheckpointIndex) -> list[Path]:
    """Return the folders of the checkpoint's files."""
    return sorted({(folder / file).parent for file in index.files})


def _remove(folder: Path, index: CheckpointIndex) -> str:
    """Remove the checkpoint's own files, and its folders if they are then empty."""
    folders = _checkpoint_folders(folder, index)
    naming: list[Path] = []  # of the layout of this checkpoint: others are of another one
    try:
        if index.layout == DISTRIBUTED:
            naming = [inner / METADATA for inner in folders if (inner / METADATA).is_file()]
        elif index.layout.startswith("indexed"):
            indexes = folder.glob("*.index*.json")
            naming = [file for file in indexes if get_folder_state(index.files, file.read_bytes()).listed]
        files = [*naming, *(folder / file for file in index.files)]
        # What names the others first, so that an interrupted removal leaves no folder that looks complete.
        for file in files:
            file.unlink()
        for inner in folders:
            if not any(inner.iterdir()):
                inner.rmdir()
    except OSError as error:
        raise StorageError(
            f"{folder}: the merge is complete, but removing the checkpoint failed, {error.strerror}. Remove it by "
            "hand"
        ) from error
    return f"{len(files)} files of {', '.join(map(str, folders))}"


def _read_back(out: Path, written: WrittenTensors, outputs: NamedOutputs, file_format: Format) -> None:
    """Read everything that was written, and compare it.

    Raises:
        StorageError: bytes differ from those written. The message names the tensor.
    """
    if file_format == "bin":
        damaged = _find_damaged(out / outputs.torch_file, written, outputs)
        compared = len(written.fingerprints)
    else:
        report = verify_files(out)
        damaged, compared = [*report.damaged, *report.damaged_files], report.compared
    if damaged or compared != len(written.fingerprints):
        raise StorageError(
            f"{out}: {', '.join(map(shown, damaged[:5])) or 'tensors'} differ from what was written, so the "
            "checkpoint was not removed. Check the disk"
        )


def _find_damaged(file: Path, written: WrittenTensors, outputs: NamedOutputs) -> list[str]:
    """Return the keys of tensors in a file of ``torch.save`` that differ from what was written."""
    try:
        tree = dict(_find_tensors(load_plain(file)))
    except FormatError:
        return list(written.fingerprints)
    # By path: a tensor that is gone, or is no tensor any more, has no fingerprint and counts as damaged.
    read = WrittenTensors()
    keys = {path: key for path, (key, _, _) in outputs.places().items()}
    for path, key in {**keys, **{path: flat_key(path) for path in outputs.tensors_in_objects()}}.items():
        if path in tree:
            read.add(key, 0, storage_bytes(tree[path]))
    return [key for key, value in written.fingerprints.items() if read.fingerprints.get(key) != value]


def name_outputs(
    folder: Path,
    index: CheckpointIndex,
    executor: ReadExecutor,
    *,
    base: str | os.PathLike[str] | None,
    dtype: str | None,
    key_mapping: Mapping[str, str],
) -> NamedOutputs:
    """Return the hub's names if the model is known, otherwise those of the checkpoint, with the reason."""
    options = ModelOptions(key_mapping=key_mapping)
    if dtype is not None:
        options["dtype"] = dtype
    # Without a config, or with one of an unknown class, there are no names of the hub. With a base, that is an
    # error.
    config_folder = _config_folder(folder, base)
    if config_folder is None:
        why = f"no config.json in or above {folder}. Name the base (--base, base=) for the hub's"
        return _keep_names(*_rename_keys(index, key_mapping), executor, dtype, why)
    try:
        config = load_config(config_folder, options)
        get_model_class(config_folder, config, options)
    except ConfigError as error:
        if base is not None:
            raise
        return _keep_names(*_rename_keys(index, key_mapping), executor, dtype, str(error))
    # The model's tensors as the hub has them, dequantized.
    index = dequantize_index(executor.reader, index)
    executor = merge_steps.create_executor(executor.reader, index)
    built = build_meta_model(config_folder, config, index, options)
    source = merge_steps.bind_offline(config, index, built, executor)
    if dtype is None:
        source = source.as_stored()
    # The form of the base's own weights decides, or else that of this checkpoint: experts one by one, or fused.
    of_model = built.transforms[len(key_mapping) :]  # renames by the caller are not undone
    if base is not None and (transforms := _find_conversions(config_folder, config, source)):
        pretrained.record_conversions(source.built.model, transforms)
    elif any(item.was_used() for item in of_model):
        pretrained.record_conversions(source.built.model, of_model)
    outputs = source.revert()
    parameters = sum(tensor.numel for tensor in source.layout.tensors if tensor.kind is TensorKind.PARAMETER)
    to_save = TensorsToSave(merge_steps.substitute_outputs(source, outputs, source.by_every_name()), executor)
    names = f"the hub's, by {config_folder / 'config.json'}"
    return NamedOutputs(to_save, names, config_folder, parameters, tuple(source.notes), source.is_untied())


def _rename_keys(index: CheckpointIndex, key_mapping: Mapping[str, str]) -> tuple[CheckpointIndex, list[str]]:
    """Return a checkpoint of an unknown model with renamed keys, and notes."""
    # Two keys with one name would overwrite each other without an error.
    if key_mapping:
        keys = rename_keys((item.key for item in index.tensors()), key_mapping)
        if repeated := [name for name, count in Counter(keys.values()).items() if count > 1]:
            raise ConfigError(f"key_mapping: gives the name {shown(repeated[0])} to several keys. Name them apart")
        index = with_keys(index, keys)
    return without_wrappers(index)


def _config_folder(folder: Path, base: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder of the model's config, or None."""
    if base is not None:
        path = resolve(base, HubOptions(local_files_only=True), download=False)
        path = path if path.is_dir() else path.parent
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path}: there is no config.json. Pass a folder with the model's config")
        return path
    return next((path for path in _nearest_folders(folder) if (path / "config.json").is_file()), None)


def _keep_names(
    index: CheckpointIndex, notes: list[str], executor: ReadExecutor, dtype: str | None, why: str
) -> NamedOutputs:
    """Return every tensor unchanged, under its own name."""
    if dtype is not None:
        raise ConfigError(f"dtype={dtype!r} depends on the model, which is unknown: {why}")
    to_save = TensorsToSave({key: (item.dtype, item) for key, item in stored_tensors(index).items()}, executor)
    if index.ignored:
        notes.append(f"not taken along: {', '.join(map(shown, index.ignored[:5]))}")
    adapted = sum(OF_AN_ADAPTER in key for key in to_save.by_key)
    if adapted:
        notes.append(
            f"{adapted:,} of {len(to_save.by_key):,} tensors are an adapter's, and its base is not taken along: "
            "save_adapter writes it as PEFT does, merge-adapter writes the model that they make together"
        )
    return NamedOutputs(to_save, f"the checkpoint's own ({why})", notes=tuple(notes))


def name_optimizer_outputs(
    reader: StorageReader, index: CheckpointIndex, executor: ReadExecutor, others: tuple[object, ...]
) -> NamedOutputs:
    """Return the state of an optimizer in dicts and lists, as it was saved.

    Raises:
        ConfigError: another output is requested.
    """
    if any(others):
        raise ConfigError("base, dtype, key_mapping: an optimizer's state is written unchanged. Leave them out")
    # The levels of the metadata tell numbers of lists from keys of dicts, which the joined keys do not.
    metadata = read_metadata(reader)
    skipped = 1 if _is_wrapped(metadata.levels.values()) else 0
    nest = {".".join(path): metadata.levels[path][skipped:] for path in metadata.tensors}
    objects = {levels[skipped:]: value for levels, value in read_objects(reader, metadata).items()}
    outputs = _keep_names(index, [], executor, None, "an optimizer's state")
    return replace(outputs, torch_file=OPTIMIZER_FILE, nest=nest, objects=objects)


def _is_wrapped(paths: Iterable[StatePath]) -> bool:
    """Return whether all is in one dict, as accelerate saves it: ``{"optimizer": {"state": ...}}``."""
    all_paths = list(paths)
    inner = {path[1] for path in all_paths if len(path) > 1}
    return (
        len({path[0] for path in all_paths}) == 1
        and inner <= {"state", "param_groups"}
        and all(len(path) > 1 for path in all_paths)
    )


def _find_conversions(folder: Path, config: PreTrainedConfig, source: merge_steps.OfflineModel) -> list[Any]:
    """Return the conversions used for the base's own weights. Empty if it has no weights under such names."""
    try:
        with LocalReader(folder) as reader:
            keys = [item.key for item in merge_steps.open_index(OpenStorage(reader, None), config).tensors()]
    except (FormatError, StorageError):
        return []
    model = source.built.model
    transforms = pretrained.get_conversion_transforms(model, None)
    # Assigning the base's keys marks the transforms that they need, which is all that is wanted here.
    names = {name: tensor for tensor in source.layout.saved() for name in tensor.names}
    assign_keys(model, keys, names, transforms)
    return transforms if any(item.was_used() for item in transforms) else []
