"""What a checkpoint in parts becomes: its tensors under the hub's names where the model is known, else its own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from shardwise.engines import offline
from shardwise.engines.outline import ModelOptions, class_of, config_of
from shardwise.errors import ConfigError, FormatError, StorageError
from shardwise.execution.reading import Placer
from shardwise.execution.stream_out import Outgoing
from shardwise.execution.torch_saves import Levels, read_objects
from shardwise.formats.contract import CheckpointIndex
from shardwise.formats.distributed import read_metadata
from shardwise.layout import TensorKind
from shardwise.models import pretrained
from shardwise.models.pretrained import assign_keys
from shardwise.planning.load_memory import stored_tensors
from shardwise.planning.save_plan import Saved
from shardwise.storage.contract import StorageReader
from shardwise.storage.names import HubOptions, shown
from shardwise.storage.reading import LocalReader, OpenStorage
from shardwise.storage.remote import resolve

OPTIMIZER_FILE = "optimizer.bin"

_OF_AN_ADAPTER = ".lora_"
"""Of names that PEFT gives to what it adds."""

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
        return _as_named(
            index,
            placer,
            dtype,
            f"no config.json in or above {folder}; name the base (--base, base=) for the hub's",
        )
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
    notes = [f"not taken along: {', '.join(map(shown, index.ignored[:5]))}"] if index.ignored else []
    adapted = sum(_OF_AN_ADAPTER in key for key in outgoing.made)
    if adapted:
        notes.append(
            f"{adapted:,} of {len(outgoing.made):,} tensors are an adapter's, and its base is not taken along: "
            "save_adapter writes it as PEFT does, merge-adapter writes the model that they make together"
        )
    return NamedOutputs(outgoing, f"the checkpoint's own ({why})", notes=tuple(notes))


def optimizer_outputs(
    reader: StorageReader, index: CheckpointIndex, placer: Placer, *, base: object, dtype: object
) -> NamedOutputs:
    """The state of an optimizer in dicts and lists, as it was saved.

    Raises:
        ConfigError: it is asked to be something else.
    """
    if base is not None or dtype is not None:
        raise ConfigError("the state of an optimizer is written as it is stored; leave out base and dtype")
    metadata = read_metadata(reader)
    skipped = 1 if _is_wrapped(metadata.levels.values()) else 0
    nest = {".".join(path): metadata.levels[path][skipped:] for path in metadata.tensors}
    objects = {way[skipped:]: value for way, value in read_objects(reader, metadata).items()}
    named = _as_named(index, placer, None, "an optimizer's state")
    return replace(named, torch_file=OPTIMIZER_FILE, nest=nest, objects=objects)


def _is_wrapped(paths: Iterable[Levels]) -> bool:
    """Whether all is in one dict, as accelerate saves it: {"optimizer": {"state": ..., "param_groups": ...}}."""
    found = list(paths)
    inner = {path[1] for path in found if len(path) > 1}
    return (
        len({path[0] for path in found}) == 1
        and inner <= {"state", "param_groups"}
        and all(len(path) > 1 for path in found)
    )


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
        pretrained.record_conversions(source.built.model, transforms)
    elif any(item.was_used() for item in source.built.transforms):
        pretrained.record_conversions(source.built.model, source.built.transforms)
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
    transforms = pretrained.conversion_transforms(model, None)
    names = {name: tensor for tensor in source.layout.saved() for name in tensor.names}
    assign_keys(model, keys, names, transforms)
    return transforms if any(item.was_used() for item in transforms) else []
