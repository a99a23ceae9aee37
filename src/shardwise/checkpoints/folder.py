"""Folder of checkpoints with one folder for each step: complete steps, opening, reading and verifying.

[Note: When a checkpoint counts] The files of step 120 are written into ``step-120``. The last file is
``.metadata``. Readers of the ``torch.distributed.checkpoint`` format find nothing without it. One rename puts it in
place after everything else is durable. So a folder with a ``.metadata`` is complete, and one without is not there
for any reader: a checkpoint on its way, or one that was left. Removing a checkpoint goes the other way round: first
``.metadata``, for good, then the rest.
"""

import os
import re
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.checkpoints.facts import FACTS, MAX_FACTS_BYTES, CheckedReader, Facts, content_nbytes, digest, gaps
from shardwise.checkpoints.state import KeyPath
from shardwise.conversion.expression import Expression
from shardwise.engines.verifying import verify_files
from shardwise.errors import ConfigError, FormatError, StorageError
from shardwise.execution.memory import WorkerPool, collected_later
from shardwise.execution.rename_journal import remove_unnamed
from shardwise.execution.torch_saves import loaded
from shardwise.formats.contract import CheckpointIndex
from shardwise.formats.distributed import ChunkPlace, open_state, parse_metadata
from shardwise.formats.joining import METADATA
from shardwise.planning.load_memory import stored_tensors
from shardwise.report.save_reports import ReopenReport
from shardwise.storage.contract import INCOMPLETE, StorageReader, StorageWriter
from shardwise.storage.names import is_url
from shardwise.storage.reading import LocalReader
from shardwise.storage.writing import open_writer

_STEP = re.compile(r"step-(0|[1-9][0-9]{0,15})")
_DATA = re.compile(r"__[0-9]+_[0-9]+\.distcp")
_BESIDE = (METADATA, FACTS, "shardwise.fingerprints.json")  # the last is of earlier versions
_INTERIM = re.compile(rf"\.(?:{'|'.join(map(re.escape, _BESIDE))})(?:\.[0-9a-f]+)?{re.escape(INCOMPLETE)}")


def name_of(step: int) -> str:
    """The folder of a step."""
    return f"step-{step}"


def require_local(directory: str | os.PathLike[str]) -> Path:
    """The folder that checkpoints go to.

    Raises:
        ConfigError: it is a URL.
        StorageError: there is something that is no folder.
    """
    if is_url(directory):
        raise ConfigError(
            f"{os.fspath(directory)}: checkpoints are kept in a folder that all ranks see, not at a URL"
        )
    root = Path(os.path.abspath(directory))
    if os.path.lexists(root) and not root.is_dir():
        raise StorageError(f"{root}: is a file. Pass a folder for checkpoints")
    return root


def steps_in(root: Path) -> list[int]:
    """The steps of which there is a complete checkpoint, in order. Links are no checkpoints."""
    return folders_of(root, StepKind.COMPLETE)


def newest_in(root: Path) -> int | None:
    """Return the newest step with all files in their recorded sizes, or None.

    A checkpoint with missing or truncated files cannot be restored, so the previous one is used.
    """
    return next((step for step in reversed(steps_in(root)) if is_whole(root / name_of(step))), None)


def is_whole(place: Path) -> bool:
    """Return whether all recorded files of a checkpoint exist in their recorded sizes."""
    try:
        if (place / FACTS).stat().st_size > MAX_FACTS_BYTES:
            return False
        facts = Facts.from_bytes((place / FACTS).read_bytes(), FACTS)
        return all(
            _DATA.fullmatch(file) is not None and (place / file).stat().st_size == nbytes
            for file, nbytes in facts.files.items()
        )
    except (OSError, FormatError):
        return False


class StepKind(Enum):
    """The content of the folder of a step."""

    COMPLETE = "a complete checkpoint"
    LEFT = "one that was begun, or nothing"
    FOREIGN = "one in torch's format, without the facts of ours"


def folders_of(root: Path, kind: StepKind) -> list[int]:
    """Return the steps whose folders are of this kind, in order. Links are no checkpoints.

    Raises:
        StorageError: the folder cannot be listed.
    """
    found: list[int] = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                name = _STEP.fullmatch(entry.name)
                if name and entry.is_dir(follow_symlinks=False) and _kind_of(Path(entry.path)) is kind:
                    found.append(int(name[1]))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{root}: looking for checkpoints failed, {error.strerror}. Check the folder") from error
    return sorted(found)


def _kind_of(place: Path) -> StepKind:
    if not _is_file(place / METADATA):
        return StepKind.LEFT
    return StepKind.COMPLETE if _is_file(place / FACTS) else StepKind.FOREIGN


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def remove(root: Path, steps: Sequence[int]) -> list[int]:
    """Remove the checkpoints of these steps, complete or not, and nothing else. Return the removed steps.

    Raises:
        StorageError: a file cannot be removed.
    """
    return [step for step in steps if _removed(root / name_of(step), empty)]


def remove_left(root: Path) -> list[int]:
    """Remove the remains of checkpoints that were never completed. Return the removed steps.

    The file that could still commit one of them is removed first, in case its writer resumes. One that is complete
    by then stays.

    Raises:
        StorageError: a file cannot be removed.
    """
    return [step for step in folders_of(root, StepKind.LEFT) if _removed(root / name_of(step), _empty_left)]


def remove_own(root: Path, step: int) -> None:
    """Remove the files that a save has written for this step, unless it is committed.

    Raises:
        StorageError: a file cannot be removed.
    """
    _removed(root / name_of(step), _empty_left)


def _removed(folder: Path, emptied: Callable[[StorageWriter], None]) -> bool:
    with open_writer(folder) as writer:
        emptied(writer)
    try:
        folder.rmdir()
    except OSError:  # files of somebody else's
        return False
    return True


def _empty_left(writer: StorageWriter) -> None:
    remove_unnamed(writer, [name for name in writer.list() if _INTERIM.fullmatch(name)])
    if METADATA not in writer.list():
        empty(writer)


def empty(writer: StorageWriter) -> None:
    """Remove the files of checkpoints in a folder, complete or not. The file that commits one is removed first."""
    names = writer.list()
    if METADATA in names:
        writer.remove(METADATA)
        writer.sync_names()
    for name in names:
        if name in _BESIDE or _DATA.fullmatch(name) or _INTERIM.fullmatch(name):
            writer.remove(name)
    writer.sync_names()


@dataclass(frozen=True)
class Opened:
    """A complete checkpoint whose files have been looked at. The same on every rank.

    Attributes:
        objects: where values lie that are no tensors.
        shapes: of tensors.
    """

    folder: Path
    facts: Facts
    index: CheckpointIndex
    objects: Mapping[KeyPath, ChunkPlace]
    shapes: Mapping[KeyPath, tuple[int, ...]]

    def reader(self) -> CheckedReader:
        """Open the files. All bytes that are read are compared with their checksums."""
        return CheckedReader(self.folder, self.facts.checksums, self.facts.files, self._describe)

    def require_frames(self, reader: CheckedReader, part: int, parts: int) -> None:
        """Compare all that is no tensor's data (headers, values, padding), one part of it for each rank.

        Raises:
            FormatError: it is damaged.
        """
        runs: dict[str, list[tuple[int, int]]] = {}
        for entry in self.index.entries.values():
            runs.setdefault(entry.file, []).append((entry.start, entry.stop))
        frames = [
            (file, start, stop)
            for file in sorted(self.facts.checksums)
            for start, stop in gaps(runs.get(file, ()), content_nbytes(self.facts.files[file]))
        ]
        for file, start, stop in frames[part::parts]:
            reader.require(file, start, stop)

    def _describe(self, file: str, start: int, stop: int) -> str:
        found = [
            key
            for key, entry in self.index.entries.items()
            if entry.file == file and entry.start < stop and entry.stop > start
        ]
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        return f"{found[0]}{more}" if found else "a value"

    @cached_property
    def expressions(self) -> dict[str, Expression]:
        """Expression of each tensor, by key."""
        return stored_tensors(self.index)

    @property
    def model(self) -> dict[str, str]:
        """The key of each tensor of the model, by FQN."""
        return {path[1]: ".".join(path) for path in self.shapes if path[0] == "model"}

    @property
    def parts(self) -> set[str]:
        """Names of the parts that it has in addition to the model."""
        found = {path[0] for path in [*self.objects, *self.shapes]} - {"model", "optimizer"}
        return found | ({"optimizers"} if ("optimizer", "param_groups") in self.objects else set())


def resolve(root: Path, asked: int | None) -> tuple[int, tuple[int, ...]]:
    """Return the step of the requested checkpoint, and the later ones that were skipped.

    The latest is the newest of which no file is gone or cut.

    Raises:
        StorageError: there is none that is complete.
    """
    steps = steps_in(root)
    left, foreign = folders_of(root, StepKind.LEFT), folders_of(root, StepKind.FOREIGN)
    if asked is not None:
        if asked in steps:
            return asked, ()
        there = f"Saved steps: {', '.join(map(str, steps))}" if steps else "There is none"
        half = " (one was begun there, and never completed)" if asked in left else ""
        half = " (one is there that no Checkpointer saved)" if asked in foreign else half
        raise StorageError(f"{root}: no complete checkpoint of step {asked}{half}. {there}")
    if not steps:
        half = f"; step {left[-1]} was begun and never completed" if left else ""
        half += f"; that of step {foreign[-1]} was not saved by a Checkpointer" if foreign else ""
        raise StorageError(
            f"{root}: no complete checkpoint{half}. Start the training from the beginning, or pass another folder"
        )
    newest = newest_in(root)
    if newest is None:
        return steps[-1], ()  # of which it is told what is wrong
    return newest, tuple(step for step in steps if step > newest)


@collected_later()
def open_checkpoint(root: Path, step: int) -> Opened:
    """Read the header of a checkpoint, and check that its files are the recorded ones. Runs no pickle.

    Raises:
        FormatError: the files contradict each other or their formats.
        StorageError: a file cannot be read.
    """
    place = root / name_of(step)
    opened = open_folder(place)
    if opened.facts.step != step:
        raise FormatError(f"{place}/{FACTS}: is of step {opened.facts.step}. The folder was renamed or mixed up")
    return opened


def open_folder(place: Path) -> Opened:
    """The same of one checkpoint's own folder, whatever its name is."""
    with LocalReader(place) as reader:
        facts = Facts.from_bytes(_small(reader, FACTS, MAX_FACTS_BYTES), f"{place}/{FACTS}")
        content = reader.read(METADATA, 0, reader.size(METADATA))
        if digest(content) != facts.metadata_sha256:
            raise FormatError(
                f"{place}/{METADATA}: is not the one recorded in {FACTS}. The folder mixes two checkpoints, or "
                "is damaged. Restore another one"
            )
        for file, nbytes in facts.files.items():
            _require_size(reader, place, file, nbytes)
        metadata = parse_metadata(content, "", what=f"{place}/{METADATA}")
        index = open_state(reader, metadata=metadata)
    places = [(entry.file, entry.stop) for entry in index.entries.values()]
    places += [(item.file, item.bytes.stop) for item in metadata.objects.values()]
    for file, stop in places:
        if file not in facts.files or stop > facts.files[file]:
            raise FormatError(f"{place}/{METADATA}: lists bytes of {file} that {FACTS} does not. It is damaged")
        if facts.checksums and stop > content_nbytes(facts.files[file]):
            raise FormatError(f"{place}/{METADATA}: names the checksums of {file}. It is damaged")
    shapes = {path: tensor.shape for path, tensor in metadata.tensors.items()}
    if odd := [path for path in [*shapes, *metadata.objects] if not _is_known(path)]:
        raise FormatError(f"{place}/{METADATA}: has {'.'.join(odd[0])}, which no checkpoint of shardwise has")
    return Opened(place, facts, index, metadata.objects, shapes)


def _is_known(path: KeyPath) -> bool:
    match path:
        case ("model", _) | ("optimizer", "state", _, _) | ("optimizer", "param_groups"):
            return True
        case ("optimizer", "reduced", _):
            return True
        case ("schedulers",) | ("scaler",) | ("rng", _) | ("data", _):
            return True
        case _:
            return False


def _small(reader: LocalReader, file: str, most: int) -> bytes:
    nbytes = reader.size(file)
    if nbytes > most:
        raise FormatError(f"{reader.root}/{file}: has {nbytes} bytes, {most} is the limit")
    return reader.read(file, 0, nbytes)


def _require_size(reader: LocalReader, place: Path, file: str, nbytes: int) -> None:
    try:
        found = reader.size(file)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise FormatError(
                f"{place}/{file}: is missing. Copy it there too, or restore another checkpoint"
            ) from error
        raise
    if found != nbytes:
        raise FormatError(
            f"{place}/{file}: has {found} bytes, and {nbytes} were written. It is damaged: copy it again, or "
            "restore another checkpoint"
        )


def value_of(reader: StorageReader, opened: Opened, path: KeyPath) -> Any:
    """A value that is no tensor: plain data, read as such.

    Raises:
        FormatError: it is missing, or no plain data.
    """
    what = f"{'.'.join(path)} in {opened.folder}"
    place = opened.objects.get(path)
    if place is None:
        raise FormatError(f"{what}: is missing. Restore another checkpoint")
    content = reader.read(place.file, place.bytes.start, place.bytes.stop)
    return loaded(content, what)


def verify(directory: str | os.PathLike[str]) -> ReopenReport:
    """Reopen a checkpoint and compare it with the record of its save.

    Of a model or an adapter, as :func:`save` and :func:`save_adapter` write them: the headers and the index must
    agree, every tensor that the model of ``config.json`` needs must be there, and the fingerprints of the bytes of
    tensors must be those that were recorded. Other small files that differ from the record are reported as changed.

    For a training as a :class:`Checkpointer` writes it (a folder ``step-N``, or the folder of all, of which the
    newest is used), all bytes of all its files are compared.

    Collective: no. Memory: a few blocks of 8 MiB.

    Raises:
        FormatError: the files contradict their format or each other.
        KeyMismatchError: the model needs other tensors.
        StorageError: bytes could not be read, or there is no complete checkpoint.
    """
    start = time.perf_counter()
    opened = _of_a_training(directory)
    if opened is None:
        return verify_files(directory)
    facts = opened.facts
    parts = ", ".join(["model", *sorted(opened.parts)])
    with opened.reader() as reader:
        compared = len(reader.blocks)
    return ReopenReport(
        checkpoint=str(opened.folder),
        files=len(facts.files),
        tensors=len(opened.shapes),
        nbytes=opened.index.nbytes,
        model_class="",
        compared=compared,
        damaged=tuple(_damaged(opened)),
        seconds=time.perf_counter() - start,
        holds=f"a training after {facts.step} steps, saved by {facts.world_size} ranks: {parts}",
    )


def _of_a_training(directory: str | os.PathLike[str]) -> Opened | None:
    if is_url(directory):
        return None
    place = Path(os.path.abspath(directory))
    if (place / FACTS).is_file() and (place / METADATA).is_file():
        return open_folder(place)
    if not place.is_dir() or any(place.glob("*.safetensors")):
        return None
    if not (steps := steps_in(place) or folders_of(place, StepKind.LEFT)):
        return None
    # The newest, whether a restore would pass it over for what it has lost or not: that is what is asked.
    return open_checkpoint(place, resolve(place, steps[-1])[0])


def _damaged(opened: Opened) -> list[str]:
    """Describe the damaged blocks."""
    found: list[tuple[str, int]] = []
    with opened.reader() as reader:

        def compare(block: tuple[str, int], _: None) -> None:
            if not reader.is_sound(*block):
                found.append(block)

        WorkerPool(compare, [None] * reader.policy.concurrency).run(reader.blocks)
        return [reader.told(*block) for block in sorted(found)]
