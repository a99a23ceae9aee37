"""Chooses which files of a hub repository are downloaded: those that will be read, one copy of the weights."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path

from shardwise.storage.repositories import AdapterFiles, ModelFiles, WantedFiles

_SMALL = ("*.json", "*.model", "*.txt", "*.jinja", "tokenizer*")
"""Indexes, configurations, tokenizers."""
_NEEDED = ("config.json", "adapter_config.json", "*.index.json", "*.index.*.json")
"""Those of them that a load reads."""
_CODE = "*.py"
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_MODEL = ("model.safetensors", "model.safetensors.index.json")
_TORCH = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_INDEX = re.compile(r".*\.(safetensors|bin)\.index(\.[^./]+)?\.json")
_SECOND_COPIES = ("consolidated*", "adapter_model*")
_MOST_CONFIG_BYTES = 10_000_000
_MOST_INDEX_BYTES = 100_000_000


def small_files(names: Collection[str], wanted: WantedFiles) -> list[str]:
    """The small files among ``names``, which lie in one folder; Python only where it is to be run."""
    patterns = (*_SMALL, _CODE) if isinstance(wanted, ModelFiles) and wanted.code else _SMALL
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def needed_files(names: Collection[str], wanted: WantedFiles) -> list[str]:
    """The small files without which nothing can be loaded."""
    patterns = (*_NEEDED, _CODE) if isinstance(wanted, ModelFiles) and wanted.code else _NEEDED
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def weights(names: Collection[str], folder: Path, wanted: WantedFiles, variant: str | None) -> list[str]:
    """The files of weights that a load will read, of those that there are.

    Args:
        names: what is in the folder of the repository.
        folder: where its small files are already.
        wanted: a model or an adapter.
        variant: as in the names of files.
    """
    there = set(names)

    def of(name: str) -> list[str]:
        """A file, or those that an index names."""
        if name not in there:
            return []
        if _INDEX.fullmatch(name) is None:
            return [name]
        return sorted(there.intersection(_named_by(folder / name)))

    safetensors = [name for name in sorted(there) if name.endswith(".safetensors")]
    adapters = [name for name in _ADAPTERS if name in there][:1]
    if isinstance(wanted, AdapterFiles):
        return adapters
    if variant is not None:
        names_of = (
            f"model.{variant}.safetensors",
            f"model.safetensors.index.{variant}.json",
            f"pytorch_model.{variant}.bin",
            f"pytorch_model.bin.index.{variant}.json",
        )
        choices = [of(name) for name in names_of]
    else:
        own = [name for name in safetensors if not any(fnmatchcase(name, copy) for copy in _SECOND_COPIES)]
        choices = [
            of(_weights_named_in(folder / "config.json")),
            *(of(name) for name in _MODEL),
            own,
            [name for name in safetensors if name not in adapters],
            *(of(name) for name in _TORCH),
            adapters,
        ]
    chosen = next(filter(None, choices), [])
    return [*chosen, *(name for name in wanted.extra if name in there and name not in chosen)]


def _named_by(index: Path) -> set[str]:
    weight_map = _content(index, _MOST_INDEX_BYTES).get("weight_map")
    values = weight_map.values() if isinstance(weight_map, dict) else ()
    return {name for name in values if isinstance(name, str)}


def _weights_named_in(config: Path) -> str:
    name = _content(config, _MOST_CONFIG_BYTES).get("transformers_weights")
    return name if isinstance(name, str) else ""


def _content(file: Path, most_bytes: int) -> dict[str, object]:
    """What a JSON file holds; nothing where it cannot be read, which whoever opens it afterwards will tell."""
    try:
        if file.stat().st_size > most_bytes:
            return {}
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
