"""Opens an adapter in a PEFT folder, as a small checkpoint beside its base."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import FormatError
from shardwise.formats.checkpoint_index import CheckpointIndex
from shardwise.formats.joining import beside
from shardwise.formats.peft_adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from shardwise.planning.loads.stored import stored_tensors
from shardwise.storage.names import HubOptions
from shardwise.storage.reading.local import LocalReader
from shardwise.storage.reading.opening import OpenStorage
from shardwise.tuning import configs
from shardwise.tuning.lora import Adapter

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
    return OpenAdapter(folder, configs.config_in(str(folder)), OpenStorage(LocalReader(folder), file))


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
