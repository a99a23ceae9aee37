"""Compares saved files with the checksums that were recorded when they were saved."""

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import attrgetter

import torch

from shardwise.core.consents import Consent, Ignore
from shardwise.core.errors import ConfigError, FormatError, KeyMismatchError
from shardwise.core.layout import Origin
from shardwise.core.save_reports import ReopenReport
from shardwise.files.checkpoint_index import CheckpointIndex, TensorEntry
from shardwise.files.local_reader import open_storage
from shardwise.files.open_checkpoint import open_checkpoint, read_object
from shardwise.files.peft_adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, find_training_file, is_training_file
from shardwise.files.storage import StorageReader
from shardwise.files.urls import shown
from shardwise.fsdp.named_tensors import build_layout, collect_tensors
from shardwise.loading.from_pretrained import open_model
from shardwise.loading.meta_model import build_meta_model, prepare_for_training
from shardwise.loading.plan import plan_load
from shardwise.loading.prepare import get_rules
from shardwise.ranks.world import World
from shardwise.saving.plan import ADAPTER, MODEL
from shardwise.saving.write import WrittenTensors
from shardwise.transfer import fingerprints
from shardwise.transfer.fingerprints import RecordedSave
from shardwise.transfer.workers import WorkerPool

_VERIFIED_BYTES = 8 << 20
_CONFIG_FILE = "config.json"
_SHOWN = 8


def verify_files(directory: str | os.PathLike[str]) -> ReopenReport:
    """Reopen a model or an adapter, and compare it with the record of its save.

    The headers and the index must agree, every tensor that the model of ``config.json`` needs must be there (others
    are reported), and the fingerprints of the tensors' bytes must be those in ``model.fingerprints.json``, which
    ``save`` writes (of an adapter ``adapter_model.fingerprints.json``), as must the digests of headers, of the
    record itself and of an adapter's config. The second check is skipped without a config of a known model, the
    third without recorded checksums. Other small files that differ from the record are reported as changed.

    Collective: no. Memory: a few blocks of 8 MiB.

    Raises:
        FormatError: the files contradict their format or each other.
        KeyMismatchError: the model needs other tensors.
        StorageError: bytes could not be read.
    """
    start = time.perf_counter()
    opened = open_storage(directory)
    with opened.reader as reader:
        # What there is: an adapter without a model, or the weights that the config names.
        adapter = _find_adapter(reader) if opened.file is None else None
        training = None if adapter is None else find_training_file(reader, adapter)
        config = read_object(reader, _CONFIG_FILE) if adapter is None else {}
        weights_name = opened.file or adapter or config.get("transformers_weights")
        extra_files = [training] if training else []
        index = open_checkpoint(reader, weights_name=weights_name, extra_files=extra_files)
        coverage = _Coverage("there is no config.json" if adapter is None else "")
        if adapter is None and _CONFIG_FILE in reader.list():
            coverage = _find_coverage(directory, config)
        comparison = _compare_files(reader, index)
    return ReopenReport(
        checkpoint=index.root,
        files=len(index.files),
        tensors=len(index.entries),
        nbytes=index.nbytes,
        model_class=coverage.model_class,
        unknown=coverage.unknown,
        unexpected=coverage.unexpected,
        compared=comparison.compared,
        damaged=comparison.damaged,
        damaged_files=comparison.damaged_files,
        seconds=time.perf_counter() - start,
        holds="an adapter of PEFT; a load checks whether it fits its base" if adapter else "",
        changed=comparison.changed,
    )


@dataclass(frozen=True, slots=True)
class _Coverage:
    """The class whose tensors are all there, with the keys of others, or the reason why no class is known."""

    unknown: str = ""
    model_class: str = ""
    unexpected: tuple[str, ...] = ()


def _find_coverage(directory: str | os.PathLike[str], config: Mapping[str, object]) -> _Coverage:
    """Match the tensors of a folder with the model of its config, without running code that is stored there.

    Raises:
        ConfigError: the config is no JSON object.
        KeyMismatchError: the model needs other tensors.
    """
    with ExitStack() as stack:
        try:
            located = open_model(World(0, 1), directory, {}, stack)
            stack.enter_context(torch.device("cpu"))
            built = build_meta_model(located.directory, located.config, located.index, {})
            # Declared ties that are stored twice are taken to be equal.
            built.equal_ties = frozenset(name for name, _ in built.ties_stored_twice())
            tuned = prepare_for_training(built, set(), {}, adapters={}, casts_to=None)
        except ConfigError as error:
            if not config:
                raise
            return _Coverage(str(error).partition(". ")[0])  # without what to pass to a load
        layout = build_layout(collect_tensors(tuned.model), Origin.INIT_WEIGHTS)
        consent = Consent(unexpected=Ignore())
        try:
            plan = plan_load(located.index, layout, tuned.bindings, get_rules(built.model), consent, remedies={})
        except KeyMismatchError as error:
            raise KeyMismatchError(f"{error}\nDownload or save it again, or the config of this model") from None
    return _Coverage("", type(built.model).__name__, tuple(map(shown, plan.unexpected_keys)))


def _find_adapter(reader: StorageReader) -> str | None:
    """Return the file of an adapter in a folder without weights of a model."""
    names = [name for name in reader.list() if "/" not in name]
    weights = {name for name in names if name.endswith(".safetensors") or name.startswith("pytorch_model")}
    if any(not is_training_file(name) for name in weights.difference(ADAPTER_WEIGHTS)):
        return None
    return next((name for name in ADAPTER_WEIGHTS if name in names), None)


@dataclass(frozen=True, slots=True)
class ComparedFiles:
    """Files compared with the record of their save.

    Attributes:
        compared: number of tensors that have a recorded fingerprint.
        damaged: keys of tensors that have another one now.
        damaged_files: descriptions of headers, records and adapter configs that differ from the record.
        changed: other small files that differ from the record.
    """

    compared: int = 0
    damaged: tuple[str, ...] = ()
    damaged_files: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    @property
    def faults(self) -> int:
        return len(self.damaged) + len(self.damaged_files)


def _compare_files(
    reader: StorageReader, index: CheckpointIndex, stems: Sequence[str] = (MODEL, ADAPTER)
) -> ComparedFiles:
    # Records of the model and of the adapter. A damaged record is reported, and its save counts as unrecorded.
    saves: list[RecordedSave] = []
    broken: list[str] = []
    for file in map(fingerprints.fingerprint_file, stems):
        recorded = _read_records(reader, file)
        saves += recorded or ()
        if recorded is None:
            broken.append(f"{file}: the record of fingerprints")
    candidates = [save for save in saves if index.files.items() <= save.files.items()]
    if not candidates:
        return ComparedFiles(damaged_files=tuple(broken))
    # During a commit, two saves may be on record, even of the same sizes. Small files are of either.
    files = _FilesAsRead.read(reader, index)
    best = min(map(files.compare, candidates), key=attrgetter("faults"))
    small_files = {name for save in saves for name in save.beside} - {ADAPTER_CONFIG}
    present = set(reader.list())
    changed: list[str] = []
    for name in sorted(small_files):
        if name not in present:
            changed.append(f"{name} (it is gone)")
        elif _compute_digest(reader, name) not in {save.beside.get(name) for save in saves}:
            changed.append(name)
    return replace(best, damaged_files=(*broken, *best.damaged_files), changed=tuple(changed))


@dataclass(frozen=True, slots=True)
class _FilesAsRead:
    """Fingerprints of tensors by key, digests of headers by file, and the digest of an adapter's config."""

    files: Mapping[str, int]
    tensors: Mapping[str, int]
    headers: Mapping[str, str]
    config: str

    @classmethod
    def read(cls, reader: StorageReader, index: CheckpointIndex) -> "_FilesAsRead":
        """Read all files."""
        # A header is what precedes the first tensor of a file.
        ends = dict(index.files)
        for entry in index.entries.values():
            ends[entry.file] = min(ends[entry.file], entry.start)
        headers = {file: fingerprints.digest(reader.read(file, 0, end)) for file, end in ends.items()}
        config = _compute_digest(reader, ADAPTER_CONFIG) if ADAPTER_CONFIG in reader.list() else "gone"
        return cls(dict(index.files), _compute_fingerprints(reader, index), headers, config)

    def compare(self, save: RecordedSave) -> ComparedFiles:
        # A record of more files than were opened also has tensors of the others, which are not missed.
        keys = {*self.tensors, *(save.tensors if self.files == dict(save.files) else ())}
        faults: list[str] = []
        if save.headers:  # records of earlier versions have none
            faults += [
                f"{file}: its header" for file, digest in self.headers.items() if save.headers.get(file) != digest
            ]
        if save.beside.get(ADAPTER_CONFIG, self.config) != self.config:
            faults.append(f"{ADAPTER_CONFIG}: edited, or damaged")
        damaged = tuple(sorted(key for key in keys if self.tensors.get(key) != save.tensors.get(key)))
        return ComparedFiles(len(self.tensors), damaged, tuple(faults))


def require_as_saved(reader: StorageReader, adapter: str, training: str | None) -> None:
    """Compare an adapter and its training state with the record of their save.

    An adapter without a record, as PEFT saves it, is accepted. A training state without one is not.

    Args:
        reader: of the folder.
        adapter: the name of the file with its matrices.
        training: the name of that with the state of its training, if it is to be compared, too.

    Memory: a few blocks of 8 MiB.

    Raises:
        FormatError: files are damaged or have no recorded checksums. The message names them.
        StorageError: bytes could not be read.
    """
    extra_files = [training] if training else []
    index = open_checkpoint(reader, weights_name=adapter, extra_files=extra_files)
    # Before anything of the adapter is used. Only the first faults are listed.
    comparison = _compare_files(reader, index, [ADAPTER])
    record = fingerprints.fingerprint_file(ADAPTER)
    if comparison.faults:
        files = {key: entry.file for key, entry in index.entries.items()}
        damaged = (f"{files.get(key, adapter)}: {shown(key)}" for key in comparison.damaged)
        faults = [*comparison.damaged_files, *damaged]
        more = [f"... and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        raise FormatError(
            f"{reader.root}: is not what was saved, and nothing of it has been loaded:\n  "
            + "\n  ".join([*faults[:_SHOWN], *more])
            + "\nThe disk, or what copied or edited the files, has changed them. Load another copy. To take an "
            f"adapter that was changed on purpose, remove {record}, and load it with training_state=False"
        )
    if training is not None and not comparison.compared:
        raise FormatError(
            f"{training} in {reader.root}: {record} has no checksums of it, by which damage would be found. Copy "
            "that file there, too. Of a save by an earlier version, which recorded none, take the matrices alone, "
            "with training_state=False"
        )


def _read_records(reader: StorageReader, file: str) -> list[RecordedSave] | None:
    """Return the records of saves in this file, or None if it is damaged."""
    if file not in reader.list():
        return []
    nbytes = reader.size(file)
    if nbytes > fingerprints.MAX_BYTES:
        raise FormatError(f"{file} in {reader.root} has {nbytes} bytes, more than any save writes. Remove it")
    return fingerprints.parse(reader.read(file, 0, nbytes))


def _compute_digest(reader: StorageReader, file: str) -> str:
    digest, nbytes = hashlib.sha256(), reader.size(file)
    for start in range(0, nbytes, _VERIFIED_BYTES):
        digest.update(reader.read(file, start, min(start + _VERIFIED_BYTES, nbytes)))
    return digest.hexdigest()


def _compute_fingerprints(reader: StorageReader, index: CheckpointIndex) -> dict[str, int]:
    # Blocks of all tensors, in any order: the fingerprint of a tensor is the sum over its blocks.
    read = WrittenTensors(dict.fromkeys(index.entries, 0))
    blocks: list[tuple[TensorEntry, int, int]] = []
    for entry in index.entries.values():
        for start in range(entry.start, entry.stop, _VERIFIED_BYTES):
            blocks.append((entry, start, min(start + _VERIFIED_BYTES, entry.stop)))

    def add(block: tuple[TensorEntry, int, int], memory: bytearray) -> None:
        entry, start, stop = block
        view = memoryview(memory)[: stop - start]
        reader.read_into(entry.file, start, view)
        read.add(entry.key, start - entry.start, view)

    memories = [bytearray(_VERIFIED_BYTES) for _ in range(reader.policy.concurrency)]
    WorkerPool(add, memories).run(blocks)
    return read.fingerprints
