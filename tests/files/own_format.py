"""A format of one's own, as small as it can be: bytes in one file, and a list of what they are in another."""

import json
from collections.abc import Sequence
from typing import Final

from shardwise.core.errors import FormatError
from shardwise.core.tensors import DType
from shardwise.files.checkpoint_index import CheckpointFormat, FileSelection, FormatFaults, IndexSoFar, TensorEntry
from shardwise.files.storage import StorageReader

LIST: Final = "tensors.list"
BYTES: Final = "tensors.bytes"


class _ListedBytes:
    usual = ()
    probed = (LIST,)
    endings = (LIST,)
    looked_for = (LIST,)

    def is_named(self, name: str) -> bool:
        return name == LIST

    def select(self, reader: StorageReader, name: str, faults: FormatFaults) -> FileSelection:
        return FileSelection("listed bytes", [name])

    def find(self, reader: StorageReader, names: Sequence[str], faults: FormatFaults) -> FileSelection | None:
        return self.select(reader, LIST, faults) if LIST in names else None

    def hints(self, names: Sequence[str]) -> list[str]:
        return [f"{BYTES} lacks its {LIST}."] if BYTES in names else []

    def read(
        self, reader: StorageReader, selection: FileSelection, index: IndexSoFar, faults: FormatFaults
    ) -> None:
        nbytes = index.files[BYTES] = reader.size(BYTES)
        for line in reader.read(LIST, 0, reader.size(LIST)).splitlines():
            key, label, shape, start, stop = json.loads(line)
            if not 0 <= start <= stop <= nbytes:
                faults.add_error(selection.layout, FormatError(f"{key} ends at byte {stop} of {nbytes}"))
                continue
            dtype = next(item for item in DType if item.label == label)
            index.entries[key] = TensorEntry(key, dtype, tuple(shape), BYTES, start, stop)


FORMAT: Final[CheckpointFormat] = _ListedBytes()
