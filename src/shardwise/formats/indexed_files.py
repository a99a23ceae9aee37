"""The index file of a checkpoint in several files: a map of keys to files, as transformers writes it."""

from __future__ import annotations

import json
from typing import NoReturn

from shardwise.errors import FormatError
from shardwise.formats.contract import FileSelection
from shardwise.formats.faults import FormatFaults
from shardwise.formats.strict_json import parse_object
from shardwise.storage.contract import StorageReader
from shardwise.storage.names import shown, why_unsafe

MAX_INDEX_BYTES = 100_000_000
"""The longest index file that is read, the same as the longest header."""


def select_indexed(
    reader: StorageReader, name: str, suffix: str, layout: str, faults: FormatFaults
) -> FileSelection:
    """The files that an index names, each of which must end in ``suffix``."""
    nbytes = reader.size(name)
    if nbytes > MAX_INDEX_BYTES:
        _refuse_index(reader, name, f"it has {nbytes} bytes, {MAX_INDEX_BYTES} is the limit")
    content = parse_object(reader.read(name, 0, nbytes), what=f"{shown(name)} in {reader.root}")
    weight_map = _weight_map(reader, name, content.get("weight_map"), suffix, faults)
    metadata = content.get("metadata")
    if not isinstance(metadata, dict):
        metadata = {}
    texts = {key: text if isinstance(text, str) else json.dumps(text) for key, text in metadata.items()}
    return FileSelection(layout, sorted(set(weight_map.values())), weight_map, texts)


def _weight_map(
    reader: StorageReader, name: str, value: object, suffix: str, faults: FormatFaults
) -> dict[str, str]:
    """The index's map of keys to files, without the files that must not be opened; those are faults."""
    if not isinstance(value, dict):
        _refuse_index(reader, name, "it has no object named weight_map")
    if not value:
        _refuse_index(reader, name, "its weight_map is empty")
    for key, file in value.items():
        if not isinstance(file, str):
            faults.add(f"keys without a file in {shown(name)}", f"{shown(key)}: {shown(repr(file))}, not a string")
    mapped = {key: file for key, file in value.items() if isinstance(file, str)}
    unsafe = {file: why for file in mapped.values() if (why := _why_not_opened(file, suffix)) is not None}
    for file, why in sorted(unsafe.items()):
        faults.add(f"file names refused in {shown(name)}", f"{shown(file)}: {why}")
    return {key: file for key, file in mapped.items() if file not in unsafe}


def _why_not_opened(file: str, suffix: str) -> str | None:
    if not file.endswith(suffix):
        return f"it does not end in {suffix}"
    return why_unsafe(file)


def _refuse_index(reader: StorageReader, name: str, cause: str) -> NoReturn:
    raise FormatError(f"{shown(name)} in {reader.root}: {cause}; download or write the index again")
