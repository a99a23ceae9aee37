"""Loads and mixes the datasets of a training run.

``datasets`` reads, shuffles and caches, TRL mixes. This module adds local files by name, and the mixtures of the
alignment handbook and of open-r1.
"""

import copy
import errno
import glob
import json
import os.path
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import datasets

from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.files.urls import redact
from shardwise.training.arguments import ShardwiseArguments

AnyDataset: TypeAlias = datasets.Dataset | datasets.IterableDataset

_BUILDERS: Final = {
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
"""Builders of ``datasets`` by the suffix of a file."""

_NOT_WRITABLE: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT})


def load(
    script: Any, mixture: Any, own: ShardwiseArguments
) -> tuple[Mapping[str, AnyDataset], Mapping[str, AnyDataset]]:
    """Load the datasets of a configuration, by split: for training, and for evaluation.

    Args:
        script: ``dataset_name``, ``dataset_config``, ``dataset_streaming``. A name may also be a local file.
        mixture: ``datasets``, which replaces ``dataset_name``, ``streaming``, ``test_split_size``.
        own: ``dataset_mixer`` and ``dataset_mixture``, which replace both, and ``eval_dataset_name``.

    Raises:
        ConfigError: a dataset cannot be loaded, or settings contradict each other. The message names them.
    """
    splits = _load_splits(script, mixture, own)
    if not own.eval_dataset_name:
        return splits, splits
    evaluated = _read(own.eval_dataset_name, streaming=script.dataset_streaming)
    name = script.dataset_test_split
    # The only split of a local file is "train", which says nothing of its use.
    if name not in evaluated and len(evaluated) == 1:
        [rows] = evaluated.values()
        return splits, {name: rows}
    return splits, evaluated


def _load_splits(script: Any, mixture: Any, own: ShardwiseArguments) -> Mapping[str, AnyDataset]:
    if own.dataset_mixer:
        return _mix_shares(own)
    if own.dataset_mixture:
        return _mix_weighted(own.dataset_mixture, script.dataset_train_split)
    if mixture.datasets:
        names = ", ".join(str(entry.data_files or entry.path) for entry in mixture.datasets)
        # TRL reads each entry by its path. Of a local file that is the builder, and its name would be a pattern.
        for entry in mixture.datasets:
            if (builder := _call(entry.path, _find_builder, entry.path)) is not None:
                entry.path, entry.data_files = builder, glob.escape(entry.path)
        from trl.scripts.utils import get_dataset

        whole = copy.copy(mixture)
        whole.test_split_size = None  # TRL's split has no seed, so each rank would get a different one
        mixed: Mapping[str, AnyDataset] = _call(names, get_dataset, whole)
        if mixture.test_split_size is None:
            return mixed
        return _split(mixed, script.dataset_train_split, mixture.test_split_size)
    name = script.dataset_name
    if not name:
        raise ConfigError("dataset_name: is missing. Set it, or datasets")
    splits: Mapping[str, AnyDataset] = _read(name, script.dataset_config, streaming=script.dataset_streaming)
    if mixture.test_split_size is not None and "test" not in splits:
        return _split(splits, script.dataset_train_split, mixture.test_split_size)
    return splits


def _read(name: str, config: str | None = None, **keywords: Any) -> Any:
    """Read a local file, a folder or a dataset on the hub: its splits, or the one of ``split=``."""
    if any(Path(name, file).is_file() for file in ("state.json", "dataset_dict.json")):
        raise ConfigError(f"{name}: is a folder of save_to_disk. Save the rows by to_parquet, and name that file")
    if builder := _call(name, _find_builder, name):
        return _call(name, datasets.load_dataset, path=builder, data_files=glob.escape(name), **keywords)
    return _call(name, datasets.load_dataset, path=name, name=config, **keywords)


_MIXED_COLUMNS: Final = frozenset({"messages", "chosen", "rejected", "prompt", "completion", "label"})


def _mix_shares(own: ShardwiseArguments) -> Mapping[str, AnyDataset]:
    """Mix datasets as the alignment handbook does.

    Of each training split the first rows are used, as many as its share. Test splits are used whole. Both are
    shuffled with the seed 42, and have the columns of TRL's formats only.
    """
    mixer = own.dataset_mixer or {}
    configs = own.dataset_configs or [None] * len(mixer)
    parts: dict[str, list[Any]] = {"train": [], "test": []}
    for (name, share), config in zip(mixer.items(), configs, strict=True):
        for split in own.dataset_splits or ("train", "test"):
            rows = _read(name, config, split=split)
            rows = rows.select_columns([column for column in rows.column_names if column in _MIXED_COLUMNS])
            # Splits have names such as train_sft and test_prefs.
            if "train" in split:
                rows = rows.select(range(int(share * len(rows))))
            parts["train" if "train" in split else "test"].append(rows)
    mixed: dict[str, AnyDataset] = {}
    for split, of_split in parts.items():
        if of_split:
            mixed[split] = _call(", ".join(mixer), datasets.concatenate_datasets, of_split).shuffle(seed=42)
    return mixed


def _mix_weighted(mixture: Mapping[str, Any], train_split: str) -> Mapping[str, AnyDataset]:
    """Mix datasets as open-r1 does.

    Each is shuffled, if it has a weight, and its first rows are used, as many as that share of it. All are shuffled
    together, and ``test_split_size`` of them are for evaluation. ``seed`` is that of every step.
    """
    seed = mixture.get("seed") or 0
    parts = []
    for entry in mixture["datasets"]:
        rows = _read(entry["id"], entry.get("config"), split=entry.get("split") or "train")
        if entry.get("columns") is not None:
            rows = _call(entry["id"], rows.select_columns, entry["columns"])
        if (weight := entry.get("weight")) is not None:
            rows = rows.shuffle(seed=seed).select(range(int(len(rows) * weight)))
        parts.append(rows)
    names = ", ".join(entry["id"] for entry in mixture["datasets"])
    mixed = _call(names, datasets.concatenate_datasets, parts).shuffle(seed=seed)
    if (size := mixture.get("test_split_size")) is not None:
        return _split({train_split: mixed}, train_split, size, seed)
    return {train_split: mixed}


def _find_builder(name: str) -> str | None:
    """Return the builder for a local file, or None for a folder or a name on the hub.

    Raises:
        ConfigError: the file is empty.
    """
    file = Path(name)
    suffix = file.with_suffix("").suffix if file.suffix == ".gz" else file.suffix
    if not file.is_file():
        return None
    if not file.stat().st_size:
        raise ConfigError(f"{name}: is an empty file, without rows. Write rows, or leave it out")
    return _BUILDERS.get(suffix)


def _split(splits: Mapping[str, AnyDataset], name: str, size: float, seed: int = 0) -> Mapping[str, AnyDataset]:
    """Split the training rows into ``name`` and ``test``, alike on every rank."""
    if name not in splits:
        raise ConfigError(
            f"dataset_train_split: {name} is not a split of the dataset ({', '.join(splits)}). Set another"
        )
    train = splits[name]
    if isinstance(train, datasets.IterableDataset):
        raise ConfigError(
            "test_split_size: cannot split a streamed dataset. Set dataset_test_split, or do not stream"
        )
    try:
        parts = train.train_test_split(test_size=size, seed=seed)
    except ValueError as error:
        raise ConfigError(
            f"test_split_size: {size} cannot be used, {error} Write a fraction of the rows"
        ) from error
    return {name: parts["train"], "test": parts["test"]}


def _call(names: str, read: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    try:
        return read(*args, **keywords)
    except ShardwiseError:
        raise
    except Exception as error:  # of datasets, pyarrow, the hub: any
        cause = error.__cause__ or error
        if names.endswith(".jsonl") and os.path.isfile(names) and not isinstance(cause, OSError):
            _require_json_lines(Path(names))
        message = redact(f"{names}: cannot be loaded as a dataset, {str(cause) or repr(cause)}", names, {})
        remedy = "Check the name and the rows"
        missing = [name for name in names.split(", ") if not Path(name).exists()]
        if not Path(names).exists() and any(Path(name).suffix in _BUILDERS for name in missing):
            remedy = "There is no such file on this machine. Check the path"
        if isinstance(cause, OSError) and cause.errno in _NOT_WRITABLE:
            remedy = "If that is the cache of datasets, set another folder by env: {HF_DATASETS_CACHE: FOLDER}"
        raise ConfigError(f"{message}. {remedy}") from error


def _require_json_lines(file: Path) -> None:
    """Check that each line of a file that cannot be loaded is JSON. pyarrow counts rows within a block.

    Raises:
        ConfigError: naming the first line that is not.
    """
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                json.loads(line.strip() or b"{}")
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{file}: line {number} is not JSON. Write one object on each line") from error
