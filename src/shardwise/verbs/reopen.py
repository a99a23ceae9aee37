"""``verify``: a checkpoint on disk, opened again."""

from __future__ import annotations

import os
import threading
import time

from shardwise.errors import FormatError
from shardwise.execution.workers import Workers
from shardwise.formats import CheckpointIndex, TensorEntry, open_checkpoint
from shardwise.planning import fingerprints
from shardwise.planning.fingerprints import Recorded
from shardwise.report import ReopenReport
from shardwise.storage import StorageReader, open_storage
from shardwise.tensors.fingerprint import MODULUS, fingerprint
from shardwise.verbs.plan import plan

_BLOCK_BYTES = 8 << 20
_CONFIG = "config.json"


def verify(directory: str | os.PathLike[str]) -> ReopenReport:
    """Open a checkpoint again, and compare it with what was recorded when it was saved.

    The headers and the index must agree, every tensor that the model of ``config.json`` needs must be there, and
    the fingerprints of the tensors' bytes must be those in ``model.fingerprints.json``, which ``save`` writes.
    Without a config the second is passed over; without recorded fingerprints the third.

    Collective: no. Memory: a few blocks of 8 MiB.

    Raises:
        FormatError: the files contradict their format or each other.
        CoverageError: the model needs other tensors.
        StorageError: bytes could not be read.
    """
    start = time.perf_counter()
    with open_storage(directory).reader as reader:
        index = open_checkpoint(reader)
        model_class = ""
        if _CONFIG in reader.list():
            model_class = plan(directory, ranks=1, device="cpu").model_class
        compared, damaged = _compare(reader, index)
    return ReopenReport(
        checkpoint=index.root,
        files=len(index.files),
        tensors=len(index.entries),
        nbytes=index.nbytes,
        model_class=model_class,
        compared=compared,
        damaged=tuple(damaged),
        seconds=time.perf_counter() - start,
    )


def _compare(reader: StorageReader, index: CheckpointIndex) -> tuple[int, list[str]]:
    """How many tensors have a recorded fingerprint, and the keys of those that have another one."""
    candidates = [save for save in _recorded(reader) if dict(save.files) == dict(index.files)]
    if not candidates:
        return 0, []
    found = _fingerprints(reader, index)
    # While a save is committed, two saves of the same sizes may be on record.
    differing = [
        sorted(key for key in {*found, *save.tensors} if found.get(key) != save.tensors.get(key))
        for save in candidates
    ]
    return len(found), min(differing, key=len)


def _recorded(reader: StorageReader) -> list[Recorded]:
    if fingerprints.FINGERPRINTS_FILE not in reader.list():
        return []
    nbytes = reader.size(fingerprints.FINGERPRINTS_FILE)
    if nbytes > fingerprints.MAX_BYTES:
        raise FormatError(
            f"{fingerprints.FINGERPRINTS_FILE} in {reader.root} has {nbytes} bytes, more than "
            "any save writes; remove it"
        )
    return fingerprints.from_bytes(reader.read(fingerprints.FINGERPRINTS_FILE, 0, nbytes))


def _fingerprints(reader: StorageReader, index: CheckpointIndex) -> dict[str, int]:
    found = dict.fromkeys(index.entries, 0)
    lock = threading.Lock()
    blocks = [
        (entry, start, min(start + _BLOCK_BYTES, entry.stop))
        for entry in index.entries.values()
        for start in range(entry.start, entry.stop, _BLOCK_BYTES)
    ]

    def add(block: tuple[TensorEntry, int, int], memory: bytearray) -> None:
        entry, start, stop = block
        view = memoryview(memory)[: stop - start]
        reader.read_into(entry.file, start, view)
        part = fingerprint(view, start - entry.start)
        with lock:
            found[entry.key] = (found[entry.key] + part) % MODULUS

    memories = [bytearray(_BLOCK_BYTES) for _ in range(reader.policy.concurrency)]
    Workers(add, memories, lambda: None).run(blocks)
    return found
