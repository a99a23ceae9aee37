"""``merge_weights``: a checkpoint in parts, of training or of another format, written as the hub has it."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, assert_never

from transformers import PreTrainedConfig

from shardwise.engines import offline
from shardwise.engines.outline import ModelOptions, class_of, config_of
from shardwise.engines.save_options import in_bytes_of
from shardwise.errors import ConfigError, FormatError, StorageError
from shardwise.execution.outgoing import Outgoing
from shardwise.execution.place import Placer
from shardwise.execution.progress import ProgressBar
from shardwise.execution.sink import WrittenTensors
from shardwise.execution.torch_out import Levels, fingerprints_in, loaded, stream_torch_file
from shardwise.execution.world import World
from shardwise.formats import CheckpointIndex, holds_optimizer, open_checkpoint, open_state
from shardwise.formats.distributed import METADATA, read_metadata
from shardwise.layout import TensorKind
from shardwise.models import transformers_compat as compat
from shardwise.models.dtypes import to_torch
from shardwise.models.rules import assign_keys
from shardwise.planning import stored_tensors
from shardwise.planning.commit import look_at_folder
from shardwise.planning.save_plan import INDEX_FILE, Saved
from shardwise.report.merge_report import MergeWeightsReport
from shardwise.report.sizes import in_bytes
from shardwise.storage import (
    HubOptions,
    LocalReader,
    LocalWriter,
    OpenStorage,
    StorageReader,
    open_storage,
    resolve,
)
from shardwise.storage.names import shown
from shardwise.tensors import numel
from shardwise.verbs.reopen import verify

MAX_SHARD_SIZE = "50GB"


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


def merge_weights(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    file_format: Format = Safetensors(),
    afterwards: Afterwards = KeepSource(),
) -> MergeWeightsReport:
    """Write a checkpoint as safetensors files under the names of the hub.

    Whatever :func:`~shardwise.formats.open_checkpoint` reads: a folder of ``torch.distributed.checkpoint``, or one
    that has one for a model (accelerate's, a trainer's), files of ``torch.save``, safetensors. A folder with an
    optimizer's state becomes one file of ``torch.save``, ``optimizer.bin``.

    Args:
        checkpoint: a folder or a file.
        out: a folder, made where it is not there. A model in it is replaced once all is written.
        base: a folder, or hub id in the cache, with the model's config; by default the nearest ``config.json`` in
            the checkpoint's folder and the two above it. Its names are those of the outcome, if it has weights.
        dtype: of the outcome; by default each tensor keeps its own.
        max_shard_size: as in ``"5GB"``: of one file's tensors.
        file_format: ``TorchFile()`` writes ``pytorch_model.bin``.
        afterwards: whether the checkpoint is removed.

    Collective: no.
    Memory: about half a GiB beyond what importing torch and transformers takes, however large the model is.

    Raises:
        ConfigError: an argument or the config cannot be honoured.
        CoverageError: the checkpoint and the model of the config do not cover each other.
        FormatError, StorageError: a file contradicts its format, or cannot be read or written; or the outcome,
            read back, is not what was written.
    """
    start = time.perf_counter()
    given, target = Path(checkpoint).expanduser(), Path(out)
    if not given.exists():
        raise StorageError(f"{given}: no such file or folder; check the path")
    folder = given if given.is_dir() else given.parent
    max_shard_bytes = in_bytes_of(max_shard_size)
    with ExitStack() as stack:
        opened = open_storage(given)
        reader = stack.enter_context(opened.reader)
        is_optimizer = opened.file is None and holds_optimizer(reader)
        index = open_state(reader) if is_optimizer else open_checkpoint(reader, weights_name=opened.file)
        offline.require_other_folder(target, [folder, *_folders_of(folder, index)])
        _require_removable(afterwards, index)
        placer = stack.enter_context(offline.placer_of(reader, index))
        if is_optimizer:
            _require_as_stored(base=base, dtype=dtype)
            named = _as_optimizer(reader, index, placer)
            file_format = TorchFile()
        else:
            named = _named(folder, index, placer, base=base, dtype=dtype)
        companions: dict[str, bytes] = {}
        if named.folder is not None:
            companions = offline.companions_of(named.folder, folder)
            written_dtype = _written_dtype(named.outgoing, dtype)
            companions["config.json"] = offline.config_content(named.folder, dtype=written_dtype, untied=False)
        writer = stack.enter_context(offline.writer_to(target))
        match file_format:
            case Safetensors():
                streamed, files = offline.write_out(
                    writer,
                    named.outgoing,
                    named.parameters,
                    max_shard_bytes=max_shard_bytes,
                    companions=companions,
                    check=lambda _: None,
                    label="Merging",
                )
            case TorchFile():
                streamed = _write_torch_file(writer, named, max_shard_bytes, companions)
                files = (named.torch_file,)
            case _:
                assert_never(file_format)
        if named.folder is not None:
            offline.write_templates(target, offline.templates_of([folder, named.folder]))
    removed = ""
    if isinstance(afterwards, RemoveSource):
        _verify(target, streamed, named, file_format)
        removed = _remove(folder, index)
    return MergeWeightsReport(
        checkpoint=str(given),
        out=str(target),
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


# Names


@dataclass(frozen=True)
class _NamedOutputs:
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


def _named(
    folder: Path, index: CheckpointIndex, placer: Placer, *, base: str | os.PathLike[str] | None, dtype: str | None
) -> _NamedOutputs:
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


def _as_named(index: CheckpointIndex, placer: Placer, dtype: str | None, why: str) -> _NamedOutputs:
    """Every tensor as it is, under the name it has."""
    if dtype is not None:
        raise ConfigError(f"dtype={dtype!r} is applied as the model says, which is not known: {why}")
    outgoing = Outgoing({key: (item.dtype, item) for key, item in stored_tensors(index).items()}, placer)
    notes = (f"not taken along: {', '.join(map(shown, index.ignored[:5]))}",) if index.ignored else ()
    return _NamedOutputs(outgoing, f"the checkpoint's own ({why})", notes=notes)


def _as_optimizer(reader: StorageReader, index: CheckpointIndex, placer: Placer) -> _NamedOutputs:
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


def _require_as_stored(*, base: object, dtype: object) -> None:
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
) -> _NamedOutputs:
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
    return _NamedOutputs(outgoing, f"the hub's, by {folder / 'config.json'}", folder, parameters, notes)


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


def _written_dtype(outgoing: Outgoing, dtype: str | None) -> str | None:
    """What the config is to say: the dtype asked for, else that of most bytes."""
    if dtype is not None:
        return dtype.removeprefix("torch.")
    counts: Counter[str] = Counter()
    for _, stored, shape in outgoing.tensors():
        if stored.kind == "float" and stored.bits >= 16:
            counts[str(to_torch(stored)).removeprefix("torch.")] += numel(shape) * stored.itemsize
    return counts.most_common(1)[0][0] if counts else None


def _write_torch_file(
    writer: LocalWriter, named: _NamedOutputs, max_shard_bytes: int, companions: Mapping[str, bytes]
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


# Afterwards


def _folders_of(folder: Path, index: CheckpointIndex) -> list[Path]:
    """The folders in which the checkpoint's files lie."""
    return sorted({(folder / file).parent for file in index.files})


def _require_removable(afterwards: Afterwards, index: CheckpointIndex) -> None:
    if isinstance(afterwards, RemoveSource) and index.ignored:
        raise ConfigError(
            f"the checkpoint in {index.root} also holds {', '.join(map(shown, index.ignored[:5]))}, which would be "
            "lost with it; merge it without removing it"
        )


def _verify(out: Path, streamed: WrittenTensors, named: _NamedOutputs, file_format: Format) -> None:
    """Read everything that was written, as a stranger would.

    Raises:
        StorageError: naming what is not as it was written.
    """
    if isinstance(file_format, TorchFile):
        try:
            found = fingerprints_in(out, named.torch_file, named.places())
        except FormatError:
            found = {}  # not even its directory is
        damaged = [key for key, value in streamed.fingerprints.items() if found.get(key) != value]
        compared = len(found)
    else:
        report = verify(out)
        damaged, compared = list(report.damaged), report.compared
    if damaged or compared != len(streamed.fingerprints):
        raise StorageError(
            f"{out}: {', '.join(map(shown, damaged[:5])) or 'tensors'} are not read back as they were written, "
            "so the checkpoint they come from was not removed; check the disk"
        )


def _remove(folder: Path, index: CheckpointIndex) -> str:
    """Remove the checkpoint's own files, and its folders where nothing else is in them."""
    folders = _folders_of(folder, index)
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
