"""Opens files of a model or an adapter again, and compares them with what was recorded when they were saved."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from dataclasses import dataclass

from shardwise.engines.forecasting import forecast_of
from shardwise.errors import FormatError
from shardwise.execution.reading.workers import Workers
from shardwise.formats.checkpoint_index import CheckpointIndex, TensorEntry
from shardwise.formats.opening import open_checkpoint
from shardwise.formats.peft_adapter import ADAPTER_WEIGHTS, is_training_file, training_beside
from shardwise.planning.saves import fingerprints
from shardwise.planning.saves.fingerprints import RecordedSave
from shardwise.planning.saves.save_plan import ADAPTER, MODEL
from shardwise.report.verify_report import ReopenReport
from shardwise.storage.contract import StorageReader
from shardwise.storage.reading.opening import open_storage
from shardwise.tensors.fingerprint import MODULUS, fingerprint

_BLOCK_BYTES = 8 << 20
_CONFIG = "config.json"


def verify_files(directory: str | os.PathLike[str]) -> ReopenReport:
    """Open a model or an adapter again, and compare it with what was recorded when it was saved.

    The headers and the index must agree, every tensor that the model of ``config.json`` needs must be there, and
    the fingerprints of the tensors' bytes must be those in ``model.fingerprints.json``, which ``save`` writes (of
    an adapter ``adapter_model.fingerprints.json``). Without a config the second is passed over; without recorded
    fingerprints the third. Small files beside the weights that are not what was saved are told as changed.

    Collective: no. Memory: a few blocks of 8 MiB.

    Raises:
        FormatError: the files contradict their format or each other.
        CoverageError: the model needs other tensors.
        StorageError: bytes could not be read.
    """
    start = time.perf_counter()
    with open_storage(directory).reader as reader:
        adapter = _adapter_in(reader)
        training = None if adapter is None else training_beside(reader, adapter)
        index = open_checkpoint(reader, weights_name=adapter, extra_files=[training] if training else [])
        model_class = ""
        if _CONFIG in reader.list():
            model_class = forecast_of(directory, 1, {"device": "cpu"}).model_class
        found = _compare(reader, index)
    return ReopenReport(
        checkpoint=index.root,
        files=len(index.files),
        tensors=len(index.entries),
        nbytes=index.nbytes,
        model_class=model_class,
        compared=found.compared,
        damaged=found.damaged,
        seconds=time.perf_counter() - start,
        holds="an adapter of PEFT's; whether it fits a base is told when it is loaded" if adapter else "",
        changed=found.changed,
    )


def _adapter_in(reader: StorageReader) -> str | None:
    """The file of an adapter that lies there by itself."""
    names = [name for name in reader.list() if "/" not in name]
    others = [
        name
        for name in names
        if (name.endswith(".safetensors") and not is_training_file(name)) or name.startswith("pytorch_model")
    ]
    if set(others) - set(ADAPTER_WEIGHTS):
        return None
    return next((name for name in ADAPTER_WEIGHTS if name in names), None)


@dataclass(frozen=True, slots=True)
class _Compared:
    """How many tensors have a recorded fingerprint, the keys of those that have another one, and small files."""

    compared: int = 0
    damaged: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()


def _compare(reader: StorageReader, index: CheckpointIndex) -> _Compared:
    saves = [save for stem in (MODEL, ADAPTER) for save in _recorded(reader, fingerprints.file_beside(stem))]
    candidates = [save for save in saves if dict(save.files) == dict(index.files)]
    if not candidates:
        return _Compared()
    found = _fingerprints(reader, index)
    # While a save is committed, two saves may be on record, of the same sizes even; small files are of either.
    differing = [
        tuple(sorted(key for key in {*found, *save.tensors} if found.get(key) != save.tensors.get(key)))
        for save in candidates
    ]
    beside = {name for save in saves for name in save.beside}
    present = set(reader.list())
    changed = [
        name if name in present else f"{name} (it is gone)"
        for name in sorted(beside)
        if name not in present or _digest(reader, name) not in {save.beside.get(name) for save in saves}
    ]
    return _Compared(len(found), min(differing, key=lambda keys: len(keys)), tuple(changed))


def _recorded(reader: StorageReader, file: str) -> list[RecordedSave]:
    if file not in reader.list():
        return []
    nbytes = reader.size(file)
    if nbytes > fingerprints.MAX_BYTES:
        raise FormatError(f"{file} in {reader.root} has {nbytes} bytes, more than any save writes; remove it")
    return fingerprints.from_bytes(reader.read(file, 0, nbytes))


def _digest(reader: StorageReader, file: str) -> str:
    found, nbytes = hashlib.sha256(), reader.size(file)
    for start in range(0, nbytes, _BLOCK_BYTES):
        found.update(reader.read(file, start, min(start + _BLOCK_BYTES, nbytes)))
    return found.hexdigest()


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
