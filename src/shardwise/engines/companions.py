"""What lies beside a model's weights and comes along: configs, tokenizer, chat templates, code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardwise.errors import FormatError, StorageError
from shardwise.formats.contract import CheckpointIndex, parse_object
from shardwise.formats.joining import beside
from shardwise.formats.peft_adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from shardwise.planning.load_memory import stored_tensors
from shardwise.storage.names import HubOptions
from shardwise.storage.reading import LocalReader, OpenStorage
from shardwise.storage.writing import LocalWriter
from shardwise.tuning import peft_compat
from shardwise.tuning.lora import Adapter

_CONFIG = "config.json"
_TOKENIZER: Final = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "chat_template.*",
)
_BROUGHT_ALONG: Final = (*_TOKENIZER, "generation_config.json", "*processor_config.json")
_TEMPLATES = "additional_chat_templates"
_MAX_COMPANION_BYTES = 256 << 20


def companions_of(base: Path, own: Path | None = None) -> dict[str, bytes]:
    """The small files beside a model's weights, by name: configs, tokenizer, chat template, code it names.

    A folder ``own`` that has a tokenizer gives its own instead of the base's.
    """
    found = _files(base, _BROUGHT_ALONG)
    if own is not None and _files(own, ("tokenizer_config.json", "tokenizer.json", "tokenizer.model")):
        found = {name: content for name, content in found.items() if not _is_any(name, _TOKENIZER)}
        found |= _files(own, _TOKENIZER)
    config = _parsed_config(base)
    if "auto_map" in config:
        found |= _files(base, ("*.py",))
    return found


def config_content(folder: Path, *, dtype: str | None, untied: bool) -> bytes:
    """``config.json`` as it fits what is written: dtype, whether it is tied, usual names; of numbers."""
    content = _parsed_config(folder)
    content.pop("transformers_weights", None)
    parts = [content, *(value for value in content.values() if isinstance(value, dict))]
    for part in parts:
        part.pop("quantization_config", None)  # of what was read
        for name in ("dtype", "torch_dtype"):
            if dtype is not None and name in part:
                part[name] = dtype
        if untied and "tie_word_embeddings" in part:
            part["tie_word_embeddings"] = False
    if dtype is not None and "torch_dtype" not in content:
        content["dtype"] = dtype
    if untied:
        content["tie_word_embeddings"] = False
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"


def templates_of(folders: Sequence[Path]) -> dict[str, bytes]:
    """Further chat templates, from the first folder that has any."""
    for folder in folders:
        found = _files(folder / _TEMPLATES, ("*.jinja",))
        if found:
            return found
    return {}


def write_templates(out: Path, templates: Mapping[str, bytes]) -> None:
    """Further chat templates lie in a folder of their own."""
    if templates:
        with LocalWriter(out / _TEMPLATES) as writer:
            for name, content in templates.items():
                writer.replace(name, content)


def _parsed_config(folder: Path) -> dict[str, object]:
    content = _files(folder, (_CONFIG,)).get(_CONFIG)
    return {} if content is None else parse_object(content, what=f"{_CONFIG} in {folder}")


def _is_any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _files(folder: Path, patterns: Sequence[str]) -> dict[str, bytes]:
    """Regular files in a folder whose names match, in full; links are followed, as in the hub's cache."""
    if not folder.is_dir():
        return {}
    found: dict[str, bytes] = {}
    try:
        for place in sorted(folder.iterdir()):
            if _is_any(place.name, patterns) and place.is_file():
                if place.stat().st_size > _MAX_COMPANION_BYTES:
                    raise FormatError(f"{place}: is larger than any config or tokenizer; move it away")
                found[place.name] = place.read_bytes()
    except OSError as error:
        raise StorageError(f"{folder}: reading it failed, {error.strerror}; make it readable") from error
    return found


def small_file(path: Path) -> bytes:
    """The content of a config."""
    found = _files(path.parent, (path.name,))
    if path.name not in found:
        raise StorageError(f"{path}: no such file; check the path")
    return found[path.name]


if TYPE_CHECKING:
    from peft import LoraConfig


def beside_of(name: str) -> str:
    """What the names of an adapter's files and keys begin with, where they are beside those of its base."""
    return f"(adapter {name})"


def of_adapter(hub: HubOptions) -> HubOptions:
    """Where an adapter is found: another repository than its base, with revisions and folders of its own."""
    return replace(hub, revision=None, subfolder="", variant=None)


@dataclass(frozen=True, slots=True)
class OpenAdapter:
    """An adapter's folder: its config has been read, and its file of tensors been found."""

    folder: Path
    config: LoraConfig
    storage: OpenStorage


def weights_in(folder: Path) -> str:
    """The name of the file of tensors in the folder of an adapter.

    Raises:
        FormatError: it is not there, or no config is.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        raise FormatError(f"{folder}: there is no {ADAPTER_CONFIG}; pass the folder of an adapter that PEFT saved")
    file = next((name for name in ADAPTER_WEIGHTS if (folder / name).is_file()), None)
    if file is None:
        raise FormatError(f"{folder}: there is neither {' nor '.join(ADAPTER_WEIGHTS)}; save the adapter again")
    return file


def open_adapter(folder: Path) -> OpenAdapter:
    """Read the config, and find the file of tensors; whoever calls closes the reader.

    Raises:
        FormatError: a file is not there.
        ConfigError: it is no LoRA, or PEFT cannot read its config.
    """
    file = weights_in(folder)
    return OpenAdapter(folder, peft_compat.config_in(str(folder)), OpenStorage(LocalReader(folder), file))


def beside_adapter(
    base: CheckpointIndex, found: CheckpointIndex, opened: OpenAdapter, name: str
) -> tuple[CheckpointIndex, Adapter]:
    """The tensors of both as one checkpoint, and the adapter of this name with its own in that."""
    joined = beside(base, found, beside_of(name))
    prefix = f"{beside_of(name)}/"
    tensors = {
        key.removeprefix(prefix): expression
        for key, expression in stored_tensors(joined).items()
        if key.startswith(prefix)
    }
    return joined, Adapter(str(opened.folder), opened.config, tensors)
