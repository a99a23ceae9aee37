"""Opens a checkpoint of any format: chooses its files, reads and validates their entries.

With a ``quantization_config``, the stored tensors are replaced by dequantized ones.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, TypeAlias

from shardwise.core.errors import FormatError, StorageError
from shardwise.core.lazy_exports import import_object
from shardwise.core.tensors import DType
from shardwise.files import checkpoint_index
from shardwise.files.checkpoint_index import (
    DISTRIBUTED,
    DISTRIBUTED_SAFETENSORS,
    MODELOPT_CONFIG,
    OF_RANKS,
    TRAINING_HEADER,
    CheckpointFormat,
    CheckpointIndex,
    FileSelection,
    FormatFaults,
    IndexSoFar,
    QuantizedForm,
)
from shardwise.files.local_reader import open_storage
from shardwise.files.storage import CannotListError, StorageReader
from shardwise.files.urls import is_url, shown

_SAFETENSORS: Final = "shardwise.files.safetensors_files:FORMAT"

FORMATS: Final[list[str]] = [
    _SAFETENSORS,
    "shardwise.files.torch_files:FORMAT",
    "shardwise.files.distributed:FORMAT",
]
"""The formats as ``package.module:name``, first choice first. Add your own format as a line."""

_MAX_IGNORED = 1000
_RECORD: Final = "model.fingerprints.json"
"""The record of checksums beside a model that shardwise saved."""
_CONSOLIDATED: Final = "model-00001-of-00001.safetensors"
"""The only file that an index names after transformers consolidated the files of ranks."""


def open_checkpoint(
    path: str | os.PathLike[str] | StorageReader,
    *,
    weights_name: str | None = None,
    extra_files: Sequence[str] = (),
) -> CheckpointIndex:
    """Find the files of a checkpoint and read their entries.

    ``path`` is a folder, a file of tensors, an index file, the URL of one of these, or a reader. In a folder the
    first of these is opened: ``weights_name`` (from ``config.transformers_weights``), the files of ranks of a
    distributed checkpoint of transformers (beside one of the next four they are an error, unless transformers
    consolidated them in place), ``model.safetensors``, ``model.safetensors.index.json``, ``pytorch_model.bin``,
    ``pytorch_model.bin.index.json``, the only other index of safetensors files, all safetensors files,
    ``.metadata`` of ``torch.distributed.checkpoint``, here or in the only folder with a name that accelerate gives
    to models. If the storage cannot list files, the usual names are tried. ``extra_files`` are safetensors files
    that are read as well, if they exist. Files named by an index are relative to the folder, as in transformers.

    Pickles are read without executing their code: see :mod:`shardwise.files.pickles`.

    Raises :class:`FormatError` with all faults of all files, or :class:`StorageError` if the only fault is that
    bytes could not be read.
    """
    if isinstance(path, StorageReader):
        return _open(path, weights_name, extra_files)
    place = path if is_url(path) else Path(path)
    opened = open_storage(place)
    with opened.reader:
        if opened.file is not None:
            if weights_name is not None:
                raise FormatError(
                    f"{opened.reader.root}/{shown(opened.file)}: is a file, and weights_name={weights_name!r} "
                    "names another. Pass one of the two"
                )
            weights_name = opened.file
        return open_checkpoint(opened.reader, weights_name=weights_name, extra_files=extra_files)


def _formats() -> Iterator[CheckpointFormat]:
    """Yield the formats lazily."""
    for place in FORMATS:
        checkpoint_format: CheckpointFormat = import_object(place)
        yield checkpoint_format


def _open(reader: StorageReader, weights_name: str | None, extra_files: Sequence[str]) -> CheckpointIndex:
    if not isinstance(weights_name, str | None):  # of an untrusted config
        raise FormatError(
            f"{reader.root}: transformers_weights is {weights_name!r}, not the name of a file. Correct config.json"
        )
    # 1. Choose the files. 2. Read their headers into one index, faults included. 3. Raise all faults at once.
    faults = FormatFaults(reader.root)
    chosen, selection = _select(reader, weights_name, faults)
    extras = [name for name in extra_files if may_be_read(reader, name)]
    safetensors: CheckpointFormat = import_object(_SAFETENSORS)
    index = IndexSoFar()
    # ``extras`` are safetensors files in any case, whatever the format of the weights.
    if chosen is safetensors:  # together, so that keys in both are found
        chosen.read(reader, replace(selection, files=[*extras, *selection.files]), index, faults)
    else:
        chosen.read(reader, selection, index, faults)
        safetensors.read(reader, FileSelection("", extras), index, faults)
    # Every key of the index file has to be in its file. Files may have further keys.
    for key, file in selection.weight_map.items():
        if file in index.keys and key not in index.keys[file]:
            faults.add("keys not in the file the index names", f"{shown(key)}: not in {shown(file)}")
    faults.raise_if_any()
    ignored = index.ignored[:_MAX_IGNORED]
    if len(index.ignored) > _MAX_IGNORED:
        ignored.append(f"... and {len(index.ignored) - _MAX_IGNORED} more")
    return CheckpointIndex(
        root=reader.root,
        files=dict(sorted(index.files.items())),
        entries=index.entries,
        metadata={**index.metadata, **selection.metadata},
        layout=selection.layout,
        composed=index.composed,
        wrapper=index.wrapper,
        ignored=tuple(ignored),
    )


def may_be_read(reader: StorageReader, name: str) -> bool:
    """Return whether an optional file exists. An object store may refuse access to files that it does not have."""
    try:
        return checkpoint_index.is_there(reader, name)
    except StorageError as error:
        if reader.policy.is_remote and isinstance(error.__cause__, PermissionError):
            return False
        raise


# Choosing files


def _usual() -> Iterator[str]:
    """Yield the usual names of all formats, first choice first."""
    return itertools.chain.from_iterable(item.usual for item in _formats())


def _select(
    reader: StorageReader, weights_name: str | None, faults: FormatFaults
) -> tuple[CheckpointFormat, FileSelection]:
    """Choose a format and its files, in the order of :func:`open_checkpoint`.

    Raises :class:`FormatError` if nothing can be chosen. Faults of the choice are added to ``faults``.
    """
    if weights_name is not None:
        return _select_named(reader, weights_name, faults)
    try:
        # A folder that can be listed: the usual names first, then what formats find among all names.
        names = reader.list()
    except CannotListError:
        return _select_probed(reader, faults)
    of_ranks = [name for name in names if OF_RANKS.fullmatch(name)]
    usual = next((name for name in _usual() if name in names), None)
    selected = None if usual is None else _select_named(reader, usual, faults)
    # transformers consolidates in place, into one file with an index. Beside any other weights, and beside a save
    # of ours that was killed before it had removed them, the files of ranks may be the older ones.
    if of_ranks and selected is not None and (selected[1].files != [_CONSOLIDATED] or _RECORD in names):
        raise FormatError(
            f"{reader.root}: has {usual} and a distributed checkpoint of transformers, {of_ranks[0]} and so on. "
            "Remove the one that you do not want, or pass the path of the file"
        )
    if of_ranks:
        return import_object(_SAFETENSORS), FileSelection(DISTRIBUTED_SAFETENSORS, of_ranks)
    if selected is not None:
        return selected
    for item in _formats():
        selection = item.find(reader, names, faults)
        if selection is not None:
            return item, selection
    raise _nothing_there(reader.root, names)


def _select_probed(reader: StorageReader, faults: FormatFaults) -> tuple[CheckpointFormat, FileSelection]:
    """Select a format by probing the usual file names, for a storage that cannot list files."""
    refusal: StorageError | None = None
    names = [*_usual(), *itertools.chain.from_iterable(item.probed for item in _formats())]
    for name in names:
        try:
            if checkpoint_index.is_there(reader, name):
                return _select_named(reader, name, faults)
        except StorageError as error:
            # An object store without the permission to list refuses files that it does not have.
            if not isinstance(error.__cause__, PermissionError):
                raise
            refusal = refusal or error
    if refusal is not None:
        raise refusal
    raise FormatError(
        f"{reader.root}: no weights found\n  looked for: {', '.join(names)}; for others the storage would have to "
        "list its files\nCheck the URL, or name the file: the URL of the *.safetensors, *.bin, *.pt or "
        "*.index.json file itself"
    )


def _select_named(reader: StorageReader, name: str, faults: FormatFaults) -> tuple[CheckpointFormat, FileSelection]:
    # The name decides the format, before the file is opened.
    chosen = next((item for item in _formats() if item.is_named(name)), None)
    if chosen is None:
        *endings, last = itertools.chain.from_iterable(item.endings for item in _formats())
        raise FormatError(
            f"{shown(name)} in {reader.root}: this layout is not supported for loading. "
            f"Name a file that ends in {', '.join(endings)} or {last}"
        )
    if not checkpoint_index.is_there(reader, name):
        raise FormatError(
            f"{shown(name)} in {reader.root}: no such file. Check the path (or transformers_weights in "
            "config.json), or download the file"
        )
    return chosen, chosen.select(reader, name, faults)


def _nothing_there(root: str, paths: Sequence[str]) -> FormatError:
    names = [path for path in paths if "/" not in path]
    of_tensors = [path for path in paths if any(item.is_named(path) for item in _formats())]
    folders = sorted({path.partition("/")[0] for path in of_tensors}.difference(names))
    looked_for = [*_usual(), *itertools.chain.from_iterable(item.looked_for for item in _formats())]
    lines = [
        f"{root}: no weights found",
        f"  looked for: {', '.join(looked_for)}",
        f"  files there: {checkpoint_index.listed(map(shown, names)) or 'none'}",
    ]
    if folders:
        inside = checkpoint_index.listed(map(shown, folders))
        lines.append(f"  folders there: {inside}: if one of them holds the model, pass its path")
    # Not listed by the storage: a folder of the hub's cache that was copied without what its links lead to.
    for link in sorted(Path(root).glob("*")):
        if link.is_symlink() and not os.path.exists(link):
            target = shown(os.readlink(link))
            lines.append(f"  {shown(link.name)}: a link to {target}, which is not there. Copy it by cp -L")
    if any(fnmatchcase(name, "adapter_model*") for name in names):
        lines.append(
            "  There is an adapter without its base model. Open the base's folder, or name the adapter's file"
        )
    lines += [f"  {hint}" for item in _formats() for hint in item.hints(names)]
    if others := [name for name in names if name.endswith(".gguf")]:
        lines.append(f"  {checkpoint_index.listed(map(shown, others))}: this layout is not supported for loading.")
    return FormatError("\n".join([*lines, "Check the path, or save the model as safetensors files"]))


_CONFIG: Final = "config.json"
_MAX_CONFIG_BYTES: Final = 16 << 20
_ELEMENT_DTYPES: Final = (DType.F8_E4M3, DType.F8_E5M2, DType.U8, DType.I8, DType.I32, DType.U32)

FormOf: TypeAlias = Callable[[Mapping[str, Any]], QuantizedForm]
"""Function that returns the form of a ``quantization_config``, or raises a ConfigError for an invalid one."""

_WITH_SCALES: Final = "shardwise.files.quantized:parse_form"

QUANTIZED: Final[dict[str, str]] = {
    "fp8": _WITH_SCALES,
    "fbgemm_fp8": _WITH_SCALES,
    "mxfp4": _WITH_SCALES,
    "compressed-tensors": _WITH_SCALES,
    "modelopt": _WITH_SCALES,
    "bitsandbytes": "shardwise.files.coded:bitsandbytes",
}
"""The :data:`FormOf` of each ``quant_method``, as ``package.module:name``. Add your own form as a line, and a new
kind of :class:`~shardwise.files.checkpoint_index.Coded` as a line in ``stored_tensors.NODES``."""


def find_form(config: Mapping[str, Any]) -> QuantizedForm:
    """Return the storage form of a ``quantization_config``.

    Raises:
        ConfigError: the kind is not supported, or the config is invalid.
    """
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in QUANTIZED:
        is_mlx = method is None and _is_of_mlx(config)
        raise checkpoint_index.unknown_form("MLX's form" if is_mlx else f"quant_method {shown(repr(method))}")
    form_of: FormOf = import_object(QUANTIZED[method])
    return form_of(config)


def _is_of_mlx(config: object) -> bool:
    """Return whether this is MLX's ``quantization``, which it also writes as ``quantization_config``."""
    return isinstance(config, Mapping) and {"bits", "group_size"} <= config.keys()


def find_quantization_config(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the ``quantization_config`` of a model's config, or of a part such as ``text_config``, or None.

    Raises:
        ConfigError: several parts have different ones.
    """
    # A model of several parts may have the config in one of them, or the same one in several.
    sections = [content, *(section for section in content.values() if isinstance(section, Mapping))]
    configs = [section.get("quantization_config") for section in sections]
    quantizations: list[Mapping[str, Any]] = [config for config in configs if isinstance(config, Mapping)]
    if any(config != quantizations[0] for config in quantizations):
        raise checkpoint_index.unknown_form("several quantization_configs that differ")
    return quantizations[0] if quantizations else None


def dequantize_index(reader: StorageReader, index: CheckpointIndex) -> CheckpointIndex:
    """Return a checkpoint with dequantized tensors if it is quantized, otherwise unchanged.

    The config is in ``config.json`` (see :func:`find_quantization_config`), or modelopt's ``hf_quant_config.json``.

    Raises:
        ConfigError, FormatError: the quantization is not supported, or tensors do not belong together.
        StorageError: the config cannot be read.
    """
    # Only a checkpoint with dtypes that codes have can be quantized.
    if not any(entry.dtype in _ELEMENT_DTYPES for entry in index.entries.values()):
        return index  # without opening a file
    model_config = read_object(reader, _CONFIG)
    config = find_quantization_config(model_config)
    # The config of mixed forms may leave out which layer has which.
    is_mixed = config is not None and config.get("quant_algo") == "MIXED_PRECISION"
    if (config is None or (is_mixed and "quantized_layers" not in config)) and (
        content := read_object(reader, MODELOPT_CONFIG)
    ):
        config = {"quant_method": "modelopt", **content}
    if config is None and _is_of_mlx(model_config.get("quantization")):
        config = model_config["quantization"]
    if config is None:
        return replace(index, quant_type=_trained_quant_type(reader)) if index.layout == DISTRIBUTED else index
    method = str(config.get("quant_method"))
    quant_type = str(config.get("bnb_4bit_quant_type", method))
    return replace(find_form(config).dequantize(reader, index), quantized=method, quant_type=quant_type)


def _trained_quant_type(reader: StorageReader) -> str:
    """Return the form of the 4-bit weights of a training's checkpoint, or "" if not one is recorded."""
    settings = read_object(reader, TRAINING_HEADER).get("adapter")
    forms = settings.get("base.quant_types") if isinstance(settings, dict) else None
    return str(forms[0]).lower() if isinstance(forms, list) and len(forms) == 1 else ""


def read_object(reader: StorageReader, name: str) -> dict[str, Any]:
    """Return the content of a small JSON file, or an empty dict if it is missing or invalid."""
    if not may_be_read(reader, name) or not 0 < (nbytes := reader.size(name)) <= _MAX_CONFIG_BYTES:
        return {}
    try:
        content = json.loads(reader.read(name, 0, nbytes))
    except (ValueError, RecursionError):
        return {}  # building the model raises the error
    return content if isinstance(content, dict) else {}
