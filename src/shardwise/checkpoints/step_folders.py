"""Folder of checkpoints with one folder for each step: complete steps, opening, reading and verifying.

[Note: When a checkpoint is complete] The files of step 120 are written into ``step-120``. The last file is
``.metadata``, without which readers of ``torch.distributed.checkpoint`` find nothing. One rename puts it in place
after everything else is durable. So a folder with a ``.metadata`` is complete, and one without is invisible to any
reader: a checkpoint in progress, or the remains of one. A checkpoint is removed in reverse order: first
``.metadata``, durably, then the rest.
"""

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from shardwise.checkpoints.header import (
    HEADER,
    MAX_HEADER_BYTES,
    CheckedReader,
    CheckpointHeader,
    content_nbytes,
)
from shardwise.checkpoints.trainer_folders import (
    HEADER_FILE,
    MODEL_ALONE,
    STATE_FOLDER,
    TrainerHeader,
    find_newest,
)
from shardwise.core.errors import ConfigError, FormatError, StorageError
from shardwise.core.expression import Expression
from shardwise.core.save_reports import ReopenReport
from shardwise.core.tensors import gaps
from shardwise.files.checkpoint_index import CheckpointIndex
from shardwise.files.distributed import MAX_METADATA_BYTES, ChunkPlace, open_state, parse_metadata
from shardwise.files.join_entries import METADATA, KeyPath
from shardwise.files.local_reader import LocalReader
from shardwise.files.local_writer import open_writer
from shardwise.files.storage import INCOMPLETE, StorageWriter, read_limited
from shardwise.files.stored_tensors import stored_tensors
from shardwise.files.urls import is_url
from shardwise.saving.rename_journal import remove_pending
from shardwise.saving.verify import verify_files
from shardwise.transfer.fingerprints import digest
from shardwise.transfer.memory import gc_disabled
from shardwise.transfer.workers import WorkerPool

_STEP = re.compile(r"step-(0|[1-9][0-9]{0,15})")
_DATA = re.compile(r"__[0-9]+_[0-9]+\.distcp")
_INTERIM = re.compile(rf"\.(?:{re.escape(METADATA)}|{re.escape(HEADER)})(?:\.[0-9a-f]+)?{re.escape(INCOMPLETE)}")


def step_folder_name(step: int) -> str:
    """Return the name of the folder of a step."""
    return f"step-{step}"


def require_local(directory: str | os.PathLike[str]) -> Path:
    """Return the absolute path of the folder of checkpoints.

    Raises:
        ConfigError: the path is a URL.
        StorageError: the path is a file.
    """
    if is_url(directory):
        raise ConfigError(f"{os.fspath(directory)}: is a URL. Pass a folder that all ranks see")
    root = Path(os.path.abspath(os.path.expanduser(directory)))
    if os.path.lexists(root) and not root.is_dir():
        raise StorageError(f"{root}: is a file. Pass a folder for checkpoints")
    return root


def steps_in(root: Path) -> list[int]:
    """Return the steps with a complete checkpoint, in order.

    Raises:
        StorageError: the folder cannot be listed.
    """
    folders = _step_folders(root)
    # Not Path.is_file(), which raises for a folder that cannot be entered.
    return [
        step for step, path in folders.items() if os.path.isfile(path / METADATA) and os.path.isfile(path / HEADER)
    ]


def incomplete_steps(root: Path) -> list[int]:
    """Return the steps with an incomplete checkpoint, an empty folder, or one that cannot be entered, in order.

    A folder with the ``.metadata`` of another writer is in neither list: it is not read, and not removed.

    Raises:
        StorageError: the folder cannot be listed.
    """
    return [step for step, path in _step_folders(root).items() if not os.path.isfile(path / METADATA)]


def _may_enter(folder: Path) -> bool:
    """Return False for a folder that may hold a complete checkpoint, because its files cannot be looked up."""
    try:
        os.stat(folder / METADATA)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _step_folders(root: Path) -> dict[int, Path]:
    """Return the folders ``step-N`` by step, in order. Folders that are links are left out."""
    folders: dict[int, Path] = {}
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                name = _STEP.fullmatch(entry.name)
                if name and entry.is_dir(follow_symlinks=False):
                    folders[int(name[1])] = Path(entry.path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StorageError(f"{root}: looking for checkpoints failed, {error.strerror}. Check the folder") from error
    return dict(sorted(folders.items()))


def find_latest(root: Path) -> int | None:
    """Return the newest step with all files in their recorded sizes, or None.

    A checkpoint with missing or truncated files cannot be restored, so the previous one is used.
    """
    for step in reversed(steps_in(root)):
        if is_complete_folder(root / step_folder_name(step)):
            return step
    return None


def is_complete_folder(folder: Path) -> bool:
    """Return whether all recorded files of a checkpoint exist in their recorded sizes."""
    try:
        if (folder / HEADER).stat().st_size > MAX_HEADER_BYTES:
            return False
        header = CheckpointHeader.from_bytes((folder / HEADER).read_bytes(), HEADER)
        for file, nbytes in header.files.items():
            if _DATA.fullmatch(file) is None or (folder / file).stat().st_size != nbytes:
                return False
    except (OSError, FormatError):
        return False
    return True


def remove(root: Path, steps: Sequence[int]) -> list[int]:
    """Remove the checkpoints of these steps, complete or not. Return the steps whose folders are gone.

    The file that commits a checkpoint is removed first. Files of others stay.

    Raises:
        StorageError: a file cannot be removed.
    """
    removed: list[int] = []
    for step in steps:
        with open_writer(root / step_folder_name(step)) as writer:
            _remove_files(writer)
        if _remove_folder(root, step):
            removed.append(step)
    return removed


def remove_incomplete_steps(root: Path) -> None:
    """Remove the remains of checkpoints that were never completed.

    Raises:
        StorageError: a file cannot be removed.
    """
    for step in incomplete_steps(root):
        remove_incomplete(root, step)


def remove_incomplete(root: Path, step: int) -> None:
    """Remove the checkpoint of a step unless it is committed.

    The file that could still commit it is removed first, in case its writer resumes.

    Raises:
        StorageError: a file cannot be removed.
    """
    with open_writer(root / step_folder_name(step)) as writer:
        # A writer that resumes cannot commit any more. Only then is it certain whether it has.
        remove_pending(writer, [name for name in writer.list() if _INTERIM.fullmatch(name)])
        if METADATA not in writer.list():
            _remove_files(writer)
    _remove_folder(root, step)


def _remove_folder(root: Path, step: int) -> bool:
    try:
        (root / step_folder_name(step)).rmdir()
    except OSError:  # not empty: it has files of others
        return False
    return True


def _remove_files(writer: StorageWriter) -> None:
    names = writer.list()
    # First, and durably: a crash after it leaves an incomplete checkpoint, and none with missing files.
    if METADATA in names:
        writer.remove(METADATA)
        writer.sync_names()
    for name in names:
        if name in (METADATA, HEADER) or _DATA.fullmatch(name) or _INTERIM.fullmatch(name):
            writer.remove(name)
    writer.sync_names()


@dataclass(frozen=True)
class OpenCheckpoint:
    """A complete checkpoint whose header and ``.metadata`` have been read. The same on every rank.

    Attributes:
        objects: places of the values that are not tensors.
        shapes: shapes of the tensors.
    """

    folder: Path
    header: CheckpointHeader
    index: CheckpointIndex
    objects: Mapping[KeyPath, ChunkPlace]
    shapes: Mapping[KeyPath, tuple[int, ...]]

    def reader(self) -> CheckedReader:
        """Open the files. All bytes that are read are compared with checksums."""
        return CheckedReader(self.folder, self.header.checksums, self.header.files, self._describe)

    def require_gaps(self, reader: CheckedReader, rank: int, world_size: int) -> None:
        """Compare this rank's share of the bytes between tensors (headers, values, padding) with checksums.

        Raises:
            FormatError: a byte is damaged.
        """
        runs: dict[str, list[tuple[int, int]]] = {file: [] for file in self.header.files}
        for entry in self.index.entries.values():
            runs[entry.file].append((entry.start, entry.stop))
        ranges: list[tuple[str, int, int]] = []
        for file, nbytes in sorted(self.header.files.items()):
            ranges += ((file, start, stop) for start, stop in gaps(runs[file], content_nbytes(nbytes)))
        # Adjacent ones, so that a rank opens few files, and reads the checksums of few: ranks 0 and 1 of two have
        # ranges 0 to 4 and 5 to 9 of ten.
        first, last = (len(ranges) * each // world_size for each in (rank, rank + 1))
        for file, start, stop in ranges[first:last]:
            reader.require(file, start, stop)

    def _describe(self, file: str, start: int, stop: int) -> str:
        keys: list[str] = []
        for key, entry in self.index.entries.items():
            if entry.file == file and entry.start < stop and entry.stop > start:
                keys.append(key)
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        return f"{keys[0]}{more}" if keys else "a value"

    @cached_property
    def expressions(self) -> dict[str, Expression]:
        """Expressions of the tensors, by key."""
        return stored_tensors(self.index)

    @property
    def model(self) -> dict[str, str]:
        """Keys of the model's tensors, by FQN."""
        return {path[1]: ".".join(path) for path in self.shapes if path[0] == "model"}

    @property
    def components(self) -> set[str]:
        """Names of the components in addition to the model."""
        components = {path[0] for path in [*self.objects, *self.shapes]} - {"model", "optimizer"}
        has_groups = any(path[:2] == ("optimizer", "param_groups") for path in self.objects)
        return components | ({"optimizers"} if has_groups else set())


def resolve(root: Path, requested: int | None) -> tuple[int, tuple[int, ...]]:
    """Return the step of the requested checkpoint (None: the newest), and the later ones that were skipped.

    Skipped are checkpoints with missing or truncated files, and folders that may not be entered.

    Raises:
        StorageError: there is no complete checkpoint.
    """
    steps = steps_in(root)
    incomplete = incomplete_steps(root)
    closed = [step for step in incomplete if not _may_enter(root / step_folder_name(step))]
    # A requested step is opened even if files are missing: opening it raises the error that names them.
    if requested is not None:
        if requested in steps:
            return requested, ()
        _require_open(root, [step for step in closed if step == requested])
        saved = f"Saved steps: {', '.join(map(str, steps))}" if steps else "There is none"
        cause = " (one was begun there, and never completed)" if requested in incomplete else ""
        raise StorageError(f"{root}: no complete checkpoint of step {requested}{cause}. {saved}")
    if not steps:
        _require_open(root, closed)
        cause = f"; step {incomplete[-1]} was begun and never completed" if incomplete else ""
        raise StorageError(
            f"{root}: no complete checkpoint{cause}. Start the training from the beginning, or pass another folder"
        )
    newest = find_latest(root)
    if newest is None:
        return steps[-1], ()  # opening it raises the error that names the files
    return newest, tuple(step for step in sorted([*steps, *closed]) if step > newest)


def _require_open(root: Path, closed: Sequence[int]) -> None:
    if closed:
        raise StorageError(f"{root}: step {closed[-1]} may not be entered. Change the permissions of its folder")


@gc_disabled()
def open_checkpoint(root: Path, step: int) -> OpenCheckpoint:
    """Read the header of a checkpoint, and check that its files are the recorded ones. No pickle is executed.

    Raises:
        FormatError: the files contradict each other or their formats.
        StorageError: a file cannot be read.
    """
    folder = root / step_folder_name(step)
    opened = open_folder(folder)
    if opened.header.step != step:
        raise FormatError(f"{folder}/{HEADER}: is of step {opened.header.step}. The folder was renamed or mixed up")
    return opened


def open_folder(folder: Path) -> OpenCheckpoint:
    """Open the folder of one checkpoint, whatever its name, as :func:`open_checkpoint` does."""
    with LocalReader(folder) as reader:
        # The header is sealed. What it records makes every other file certain: .metadata by its digest, data files
        # by their sizes here, and by checksums as they are read.
        header = CheckpointHeader.from_bytes(read_limited(reader, HEADER, MAX_HEADER_BYTES), f"{folder}/{HEADER}")
        content = read_limited(reader, METADATA, MAX_METADATA_BYTES)
        if digest(content) != header.metadata_sha256:
            raise FormatError(
                f"{folder}/{METADATA}: is not the one recorded in {HEADER}. The folder mixes two checkpoints, or "
                "is damaged. Restore another one"
            )
        for file, nbytes in header.files.items():
            _require_size(reader, file, nbytes)
        metadata = parse_metadata(content, "", what=f"{folder}/{METADATA}")
        # Not every archive is read: a restore compares all bytes between tensors before it reads their elements.
        index = open_state(reader, metadata=metadata, is_sealed=True)
    # Every byte range must be of a recorded file, and before its checksums.
    places = [(entry.file, entry.stop) for entry in index.entries.values()]
    places += [(item.file, item.bytes.stop) for item in metadata.objects.values()]
    for file, stop in places:
        if file not in header.files or stop > header.files[file]:
            raise FormatError(f"{folder}/{METADATA}: lists bytes of {file} that {HEADER} does not. It is damaged")
        if stop > content_nbytes(header.files[file]):
            raise FormatError(f"{folder}/{METADATA}: names the checksums of {file}. It is damaged")
    shapes = {path: tensor.shape for path, tensor in metadata.tensors.items()}
    unknown = [path for path in shapes if not _is_tensor_path(path)]
    if unknown := [*unknown, *(path for path in metadata.objects if not _is_value_path(path))]:
        raise FormatError(f"{folder}/{METADATA}: has {'.'.join(unknown[0])}, which no checkpoint of shardwise has")
    return OpenCheckpoint(folder, header, index, metadata.objects, shapes)


def _is_tensor_path(path: KeyPath) -> bool:
    match path:
        case ("model", _) | ("optimizer", "state", _, _):
            return True
    return False


def _is_value_path(path: KeyPath) -> bool:
    match path:
        case ("optimizer", "param_groups", number, _):
            return number.isdecimal()
        case ("optimizer", "state", _, _) | ("optimizer", "param_groups"):
            return True
        case ("optimizer", "reduced", _) | ("schedulers",) | ("scaler",) | ("rng", _) | ("data", _):
            return True
    return False


def _require_size(reader: LocalReader, file: str, nbytes: int) -> None:
    try:
        size = reader.size(file)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise FormatError(
                f"{reader.root}/{file}: is missing. Copy it there too, or restore another checkpoint"
            ) from error
        raise
    if size != nbytes:
        raise FormatError(
            f"{reader.root}/{file}: has {size} bytes, and {nbytes} were written. It is damaged: copy it again, or "
            "restore another checkpoint"
        )


def verify(directory: str | os.PathLike[str]) -> ReopenReport:
    """Reopen a checkpoint and compare it with the record of its save.

    Of a model or an adapter, as :func:`save` and :func:`save_adapter` write them: the headers and the index must
    agree, every tensor that the model of ``config.json`` needs must be there, and the fingerprints of the bytes of
    tensors must be those that were recorded. Other small files that differ from the record are reported as changed.

    For a training run as a :class:`Checkpointer` writes it (a folder ``step-N``, or the folder of all, of which the
    newest is used), all bytes of all its files are compared.

    Of ``ShardwiseTrainer`` and ``shardwise train`` (a folder ``checkpoint-N``, or the folder of all without a model
    of its own, of which the newest complete one is used), both the model and the state of the training.

    Collective: no. Memory: a few blocks of 8 MiB.

    Raises:
        FormatError: the files contradict their format or each other.
        KeyMismatchError: the model needs other tensors.
        StorageError: bytes could not be read, or there is no complete checkpoint.
    """
    start = time.perf_counter()
    folder = _find_folder(directory)
    if folder is None:
        return verify_files(directory)
    opened = _open_training(folder)
    if opened is None:
        return verify_files(folder)
    header = opened.header
    components = ", ".join(["model", *sorted(opened.components)])
    # All blocks, also after a damaged one, so that the report has every one of them.
    with opened.reader() as reader:
        compared, damaged = len(reader.blocks), _find_damaged(reader)
    report = ReopenReport(
        checkpoint=str(opened.folder),
        files=len(header.files),
        tensors=len(opened.shapes),
        nbytes=opened.index.nbytes,
        model_class="",
        compared=compared,
        damaged=damaged,
        seconds=time.perf_counter() - start,
        holds=f"a training after {header.step} steps, saved by {header.world_size} ranks: {components}",
    )
    if not (folder / HEADER_FILE).is_file():
        return report
    model = verify_files(folder)
    return replace(
        model,
        files=model.files + report.files,
        tensors=model.tensors + report.tensors,
        nbytes=model.nbytes + report.nbytes,
        compared=model.compared + report.compared,
        damaged=(*model.damaged, *report.damaged),
        seconds=time.perf_counter() - start,
        holds="; ".join(filter(None, [model.holds, report.holds])),
    )


def _find_folder(directory: str | os.PathLike[str]) -> Path | None:
    """Return the folder itself, or a Trainer's newest checkpoint in it if it has no weights. None for others."""
    if is_url(directory):
        return None
    folder = Path(os.path.abspath(os.path.expanduser(directory)))
    if not folder.is_dir():
        return None
    for pattern in ("*.safetensors", "pytorch_model*.bin", "adapter_model*.bin"):
        if any(folder.glob(pattern)):
            return folder
    return find_newest(folder) or folder


def _open_training(folder: Path) -> OpenCheckpoint | None:
    """Open a training run's checkpoint, the newest in a folder of them, or a Trainer's. None for other folders."""
    if (folder / HEADER).is_file() and (folder / METADATA).is_file():
        return open_folder(folder)
    if (folder / HEADER_FILE).is_file():
        trainer = TrainerHeader.read(folder / HEADER_FILE)
        return None if trainer.holds == MODEL_ALONE else open_checkpoint(folder / STATE_FOLDER, trainer.step)
    if any(folder.glob("*.safetensors")) or not (steps := steps_in(folder) or incomplete_steps(folder)):
        return None
    # The newest one, even if a restore would skip it because files are missing: verify is to report that.
    return open_checkpoint(folder, resolve(folder, steps[-1])[0])


def _find_damaged(reader: CheckedReader) -> tuple[str, ...]:
    """Return the names of damaged blocks."""
    damaged: list[tuple[str, int]] = []

    def compare(block: tuple[str, int], _: None) -> None:
        if not reader.is_sound(*block):
            damaged.append(block)

    WorkerPool(compare, [None] * reader.policy.concurrency).run(reader.blocks)
    return tuple(reader.block_name(*block) for block in sorted(damaged))
