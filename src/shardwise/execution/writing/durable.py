"""Makes what the code of others has written last, and be seen by whoever counts on it: it is written once more."""

from __future__ import annotations

import os

from shardwise.errors import StorageError
from shardwise.planning.saves.commit import on_its_way
from shardwise.storage.contract import StorageWriter
from shardwise.storage.names import shown

_BLOCK_BYTES = 8 << 20


def write_again(writer: StorageWriter, file: str, token: str) -> None:
    """Put a copy in the place of a file in a local folder, in one step. Memory: a block.

    Raises:
        StorageError: it cannot be read or written, or changes meanwhile.
    """
    folder, slash, name = file.rpartition("/")
    fresh = f"{folder}{slash}{on_its_way(name, token)}"
    copy_in(writer, os.path.join(writer.root, file), fresh)
    writer.rename(fresh, file)


def copy_in(writer: StorageWriter, source: str, file: str) -> int:
    """Write a file of this machine into a folder under this name, and sync it; its bytes. Memory: a block.

    Raises:
        StorageError: it cannot be read or written, or changes meanwhile.
    """
    try:
        with open(source, "rb") as opened:
            nbytes = os.fstat(opened.fileno()).st_size
            writer.create(file, nbytes)
            position = 0
            while block := opened.read(_BLOCK_BYTES):
                writer.write(file, position, [memoryview(block)])
                position += len(block)
    except OSError as error:
        raise StorageError(f"{shown(source)}: reading it again failed, {error.strerror or error}") from error
    if position != nbytes:
        raise StorageError(f"{shown(source)}: was cut short while it was saved; save again")
    writer.sync(file)
    return nbytes
