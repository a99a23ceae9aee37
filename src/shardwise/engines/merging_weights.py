"""A checkpoint under the hub's names, or its own: what the outcome is made of, written, looked at again."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from transformers import PreTrainedConfig

from shardwise.engines import offline
from shardwise.engines.outline import ModelOptions, class_of, config_of
from shardwise.errors import ConfigError, FormatError, StorageError
from shardwise.execution.ranks.progress import ProgressBar
from shardwise.execution.ranks.world import World
from shardwise.execution.reading.outgoing import Outgoing
from shardwise.execution.reading.place import Placer
from shardwise.execution.writing.sink import WrittenTensors
from shardwise.execution.writing.torch_out import Levels, loaded, stream_torch_file
from shardwise.formats.checkpoint_index import CheckpointIndex
from shardwise.formats.distributed import METADATA, read_metadata
from shardwise.layout import TensorKind
from shardwise.models import transformers_compat as compat
from shardwise.models.dtypes import to_torch
from shardwise.models.rules import assign_keys
from shardwise.planning.loads.stored import stored_tensors
from shardwise.planning.saves.commit import look_at_folder
from shardwise.planning.saves.save_plan import INDEX_FILE, Saved
from shardwise.report.sizes import in_bytes
from shardwise.storage.contract import StorageReader
from shardwise.storage.hub import HubOptions, resolve
from shardwise.storage.names import shown
from shardwise.storage.reading.local import LocalReader
from shardwise.storage.reading.opening import OpenStorage
from shardwise.storage.writing.local_writer import LocalWriter
from shardwise.tensors import numel


@dataclass(frozen=True, slots=True)
class KeepSource:
    """The checkpoint stays as it is."""


@dataclass(frozen=True, slots=True)
class RemoveSource:
    """The checkpoint's files are removed once the outcome has been read back and found whole."""


Afterwards: TypeAlias = KeepSource | RemoveSource


@dataclass(frozen=True, slots=True)
class Safetensors:
    """Files of safetensors, with an index where there are several."""


@dataclass(frozen=True, slots=True)
class TorchFile:
    """One file of ``torch.save``."""


Format: TypeAlias = Safetensors | TorchFile


_OPTIMIZER_FILE = "optimizer.bin"


_MAX_OBJECT_BYTES = 64 << 20


_PARENTS = 2
"""How far up from a checkpoint its config is looked for."""


@dataclass(frozen=True)
class NamedOutputs:
    """What is to be written, under which names, and the folder of the config by which they were found.

    Of a file of ``torch.save``: its name, where in it the tensors are, and what else is in it.
    """

    outgoing: Outgoing
    names: str
    folder: Path | None = None
    parameters: int = 0
    notes: tuple[str, ...] = ()
    torch_file: str = "pytorch_model.bin"
    nest: Mapping[str, Levels] = field(default_factory=dict)
    objects: Mapping[Levels, object] = field(default_factory=dict)

    def places(self) -> dict[Levels, Saved]:
        """The tensors, by where they are in a file of ``torch.save``."""
        return {self.nest.get(item[0], (item[0],)): item for item in self.outgoing.tensors()}


def named_outputs(
    folder: Path, index: CheckpointIndex, placer: Placer, *, base: str | os.PathLike[str] | None, dtype: str | None
) -> NamedOutputs:
    """The hub's names where the model is known; else those of the checkpoint, with the reason."""
    config_folder = _config_folder(folder, base)
    if config_folder is None:
        return _as_named(index, placer, dtype, f"no config.json in or above {folder}; pass base= for the hub's")
    try:
        config = config_of(config_folder, _options(dtype))
        class_of(config_folder, config, _options(dtype))
    except ConfigError as error:
        if base is not None:
            raise
        return _as_named(index, placer, dtype, str(error))
    return _as_on_hub(config_folder, config, index, placer, has_base=base is not None, dtype=dtype)


def _config_folder(folder: Path, base: str | os.PathLike[str] | None) -> Path | None:
    """Where the model's config is; None where nothing tells."""
    if base is not None:
        found = resolve(base, HubOptions(local_files_only=True), download=False)
        found = found if found.is_dir() else found.parent
        if not (found / "config.json").is_file():
            raise ConfigError(f"{found}: there is no config.json; pass a folder that has the model's")
        return found
    absolute = folder.absolute()
    places = [absolute, *absolute.parents[:_PARENTS]]
    return next((place for place in places if (place / "config.json").is_file()), None)


def _as_named(index: CheckpointIndex, placer: Placer, dtype: str | None, why: str) -> NamedOutputs:
    """Every tensor as it is, under the name it has."""
    if dtype is not None:
        raise ConfigError(f"dtype={dtype!r} is applied as the model says, which is not known: {why}")
    outgoing = Outgoing({key: (item.dtype, item) for key, item in stored_tensors(index).items()}, placer)
    notes = (f"not taken along: {', '.join(map(shown, index.ignored[:5]))}",) if index.ignored else ()
    return NamedOutputs(outgoing, f"the checkpoint's own ({why})", notes=notes)


def _as_optimizer(reader: StorageReader, index: CheckpointIndex, placer: Placer) -> NamedOutputs:
    """The state of an optimizer in dicts and lists, as it was saved."""
    metadata = read_metadata(reader)
    skipped = 1 if _is_wrapped(metadata.levels.values()) else 0
    nest = {".".join(path): metadata.levels[path][skipped:] for path in metadata.tensors}
    objects: dict[Levels, object] = {}
    for path, place in metadata.objects.items():
        what = f"{shown('.'.join(path))} in {shown(place.file)} in {reader.root}"
        if place.bytes.nbytes > _MAX_OBJECT_BYTES:
            raise FormatError(f"{what}: has {place.bytes.nbytes} bytes, more than any setting of an optimizer")
        objects[metadata.levels[path][skipped:]] = loaded(
            reader.read(place.file, place.bytes.start, place.bytes.stop), what
        )
    named = _as_named(index, placer, None, "an optimizer's state")
    return replace(named, torch_file=_OPTIMIZER_FILE, nest=nest, objects=objects)


def _is_wrapped(paths: Iterable[Levels]) -> bool:
    """Whether all is in one dict, as accelerate saves it: {"optimizer": {"state": ..., "param_groups": ...}}."""
    found = list(paths)
    inner = {path[1] for path in found if len(path) > 1}
    return (
        len({path[0] for path in found}) == 1
        and inner <= {"state", "param_groups"}
        and all(len(path) > 1 for path in found)
    )


def require_as_stored(*, base: object, dtype: object) -> None:
    if base is not None or dtype is not None:
        raise ConfigError("the state of an optimizer is written as it is stored; leave out base and dtype")


def _options(dtype: str | None) -> ModelOptions:
    return ModelOptions() if dtype is None else ModelOptions(dtype=dtype)


def _as_on_hub(
    folder: Path,
    config: PreTrainedConfig,
    index: CheckpointIndex,
    placer: Placer,
    *,
    has_base: bool,
    dtype: str | None,
) -> NamedOutputs:
    """The model's tensors as the hub has them."""
    source = offline.read_source(folder, config, index, placer, _options(dtype))
    if dtype is None:
        source = source.as_stored()
    if has_base and (transforms := _used_for(folder, config, source)):
        compat.record_conversions(source.built.model, transforms)
    elif any(item.was_used() for item in source.built.transforms):
        compat.record_conversions(source.built.model, source.built.transforms)
    outputs = source.revert()
    parameters = sum(tensor.numel for tensor in source.layout.tensors if tensor.kind is TensorKind.PARAMETER)
    outgoing = Outgoing(offline.made_of(source, outputs, source.by_every_name()), placer)
    notes = (*source.notes, *offline.ties_undone(source))
    return NamedOutputs(outgoing, f"the hub's, by {folder / 'config.json'}", folder, parameters, notes)


def _used_for(folder: Path, config: PreTrainedConfig, source: offline.OfflineModel) -> list[Any]:
    """The conversions that loading the base's own weights takes; none where it has no weights under such names."""
    try:
        with LocalReader(folder) as reader:
            keys = [item.key for item in offline.index_of(OpenStorage(reader, None), config).tensors()]
    except (FormatError, StorageError):
        return []
    model = source.built.model
    transforms = compat.conversion_transforms(model, None)
    names = {name: tensor for tensor in source.layout.saved() for name in tensor.names}
    assign_keys(keys, names, transforms, compat.base_model_prefix(model))
    return transforms if any(item.was_used() for item in transforms) else []


def written_dtype(outgoing: Outgoing, dtype: str | None) -> str | None:
    """What the config is to say: the dtype asked for, else that of most bytes."""
    if dtype is not None:
        return dtype.removeprefix("torch.")
    counts: Counter[str] = Counter()
    for _, stored, shape in outgoing.tensors():
        if stored.kind == "float" and stored.bits >= 16:
            counts[str(to_torch(stored)).removeprefix("torch.")] += numel(shape) * stored.itemsize
    return counts.most_common(1)[0][0] if counts else None


def write_torch_file(
    writer: LocalWriter, named: NamedOutputs, max_shard_bytes: int, companions: Mapping[str, bytes]
) -> WrittenTensors:
    places = named.places()
    nbytes = sum(numel(shape) * dtype.itemsize for _, dtype, shape in places.values())
    if nbytes > max_shard_bytes:
        raise ConfigError(
            f"{named.torch_file} would have {in_bytes(nbytes)}, and max_shard_size is {in_bytes(max_shard_bytes)}; "
            "a file of torch.save is written in one piece: raise max_shard_size, or write safetensors files"
        )
    if named.torch_file != _OPTIMIZER_FILE and (
        others := look_at_folder(writer.list(), writer.read(INDEX_FILE)).weights
    ):
        raise ConfigError(
            f"{writer.root} has {sorted(others)[0]}, which is read before any {named.torch_file}; name "
            "another folder"
        )
    named.outgoing.require_bounded()
    with ProgressBar("Merging", World(0, 1), nbytes, enabled=True) as bar:
        return stream_torch_file(
            writer,
            named.torch_file,
            places,
            named.objects,
            named.outgoing.values,
            companions=companions,
            advance=bar.advance,
        )


def folders_of(folder: Path, index: CheckpointIndex) -> list[Path]:
    """The folders in which the checkpoint's files lie."""
    return sorted({(folder / file).parent for file in index.files})


def require_removable(afterwards: Afterwards, index: CheckpointIndex) -> None:
    if isinstance(afterwards, RemoveSource) and index.ignored:
        raise ConfigError(
            f"the checkpoint in {index.root} also holds {', '.join(map(shown, index.ignored[:5]))}, which would be "
            "lost with it; merge it without removing it"
        )


def remove_source(folder: Path, index: CheckpointIndex) -> str:
    """Remove the checkpoint's own files, and its folders where nothing else is in them."""
    folders = folders_of(folder, index)
    files = [folder / file for file in index.files]
    files += [place / METADATA for place in folders if (place / METADATA).is_file()]
    try:
        # What says how the others belong together goes first: the rest is then taken for what it is, a remainder.
        for file in sorted(files, key=lambda file: file.name != METADATA):
            file.unlink()
        for place in folders:
            if not any(place.iterdir()):
                place.rmdir()
    except OSError as error:
        raise StorageError(
            f"{folder}: the outcome is whole, but removing the checkpoint failed, {error.strerror}; remove it "
            "yourself"
        ) from error
    return f"{len(files)} files of {', '.join(map(str, folders))}"
