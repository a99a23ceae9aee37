"""The file beside an adapter that has the state of its training: what it is called, and who names it.

[Note: Named by the adapter] An adapter counts by one file, ``adapter_model.safetensors``. The metadata in the
header of that file name the one with the training, which has a name that no other save has. So the step after
which the adapter counts is that after which its training does; whatever else replaces the adapter names no
training, or its own.
"""

from __future__ import annotations

import re
from typing import Final

from shardwise.errors import FormatError
from shardwise.formats.safetensors_header import FileHeader, read_header
from shardwise.storage.contract import StorageReader
from shardwise.storage.names import shown

TRAINING_KEY: Final = "shardwise.training"
"""In the metadata of an adapter's file, the name of that of its training; in those of the latter, JSON."""

_NAME = re.compile(r"adapter_training\.[0-9a-f]{8}\.safetensors")


def training_file(token: str) -> str:
    """What the file is called of the save with this token."""
    return f"adapter_training.{token}.safetensors"


def is_training_file(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def named_training(adapter: FileHeader) -> str | None:
    """The file of the training that an adapter's file names; None where it names none.

    Raises:
        FormatError: it names something else.
    """
    name = adapter.metadata.get(TRAINING_KEY)
    if name is not None and not is_training_file(name):
        raise FormatError(
            f"{shown(adapter.file)}: its header names {shown(name)} as the state of its training, which is no name "
            "of one; the file is damaged or forged: save the adapter again"
        )
    return name


def training_beside(reader: StorageReader, adapter: str) -> str | None:
    """The file with the training of an adapter, which is in the file of this name; None where there is none.

    Raises:
        FormatError: the adapter's file is none, or names a training that is not there.
        StorageError: it could not be read.
    """
    name = named_training(read_header(reader, adapter)) if adapter.endswith(".safetensors") else None
    if name is not None and name not in reader.list():
        raise FormatError(
            f"{name} is not in {reader.root}, and {shown(adapter)} names it as the state of its training; copy it "
            "there, too, or take the matrices alone (of a bank, load(..., state=MatricesOnly()))"
        )
    return name
