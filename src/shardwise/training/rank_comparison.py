"""Compares what the ranks of a launcher train: each has read a configuration and rows of its own."""

import dataclasses
import hashlib
import json
import re
from typing import Any, Final

import datasets

from shardwise.files.urls import without_secrets
from shardwise.ranks.call_arguments import comparing_arguments
from shardwise.ranks.world import World
from shardwise.training.dataset_loading import AnyDataset
from shardwise.training.dataset_preparation import without_decoding
from shardwise.training.trl_objects import TrlArguments

_NOT_COMPARED: Final = frozenset({"local_rank", "logging_dir", "hub_token"})
"""Arguments that differ between ranks or hosts, and secrets."""

_SHOWN_CHARACTERS: Final = 60


def effective_settings(arguments: TrlArguments) -> dict[str, str]:
    """Return all settings of a training, defaults included, which also depend on versions and the environment."""
    values: dict[str, Any] = dataclasses.asdict(arguments.own)
    for part in (arguments.script, arguments.model, arguments.mixture, arguments.training):
        values |= {field.name: getattr(part, field.name, None) for field in dataclasses.fields(part)}
    return {key: str(mask_secrets(value)) for key, value in values.items() if key not in _NOT_COMPARED}


def mask_secrets(value: Any) -> Any:
    """Return a value of a configuration without credentials in URLs."""
    if isinstance(value, str):
        return without_secrets(value) if "://" in value else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {key: mask_secrets(one) for key, one in value.items()}
    return [mask_secrets(one) for one in value] if isinstance(value, list) else value


def require_same_rows(split: str, dataset: AnyDataset | None) -> None:
    """Require that all ranks have the same rows. Collective: yes.

    Rows with one fingerprint of ``datasets`` are the same. It may differ for equal rows (files of other dates,
    functions that cannot be hashed), and then all rows are compared.

    Raises:
        RankMismatchError: naming what differs.
    """
    if dataset is None:
        return
    what = f"the dataset {split!r}"
    with World.current(call="train") as world:
        with comparing_arguments(world, what) as exchange:
            exchange.local = _describe(dataset)
        if not isinstance(dataset, datasets.Dataset):
            return  # a stream is compared in its first row, and ranks notice when its rows end in different steps
        # Reading all rows is slow, and rarely needed.
        if world.all_reduce_object(dataset._fingerprint, world.find_mismatched):
            with comparing_arguments(world, what) as exchange:
                exchange.local = {"rows": _digest(dataset)}


def _describe(dataset: AnyDataset) -> dict[str, str]:
    facts = {
        "columns": str(dataset.column_names),
        "first row": _shorten(next(iter(without_decoding(dataset)), None)),
    }
    if isinstance(dataset, datasets.Dataset):
        last = without_decoding(dataset.select([len(dataset) - 1]))
        facts |= {"number of rows": str(len(dataset)), "last row": _shorten(next(iter(last)))}
    return facts


def _shorten(row: object) -> str:
    """Format a row by its beginning and a digest."""
    text = re.sub(r" at 0x[0-9a-fA-F]+>", ">", repr(row))  # streamed images that have been decoded
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}... with digest {hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _digest(dataset: datasets.Dataset) -> str:
    """Return a digest of all rows."""
    digest = hashlib.sha256()
    for rows in without_decoding(dataset.with_format(None)).iter(batch_size=1000):
        digest.update(json.dumps(rows, default=repr, sort_keys=True).encode())
    return digest.hexdigest()
