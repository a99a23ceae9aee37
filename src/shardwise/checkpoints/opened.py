"""Opens a checkpoint in a folder and reads parts of it. Nothing is trusted, and no pickle is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.checkpoints import folder
from shardwise.checkpoints.checksums import CheckedReader, content_nbytes, digest, gaps
from shardwise.checkpoints.facts import FACTS, MAX_FACTS_BYTES, Facts
from shardwise.checkpoints.folder import StepKind, folders_of
from shardwise.checkpoints.state import KeyPath
from shardwise.conversion.expression import Expression
from shardwise.errors import FormatError, StorageError
from shardwise.execution.memory import collected_later
from shardwise.execution.torch_saves import loaded
from shardwise.formats.contract import CheckpointIndex
from shardwise.formats.distributed import ChunkPlace, open_state, parse_metadata
from shardwise.formats.joining import METADATA
from shardwise.planning.load_memory import stored_tensors
from shardwise.storage.contract import StorageReader
from shardwise.storage.reading import LocalReader


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
        """Open the files; all bytes that are read are compared with their checksums."""
        return CheckedReader(self.folder, self.facts.checksums, self.facts.files, self._describe)

    def require_frames(self, reader: CheckedReader, part: int, parts: int) -> None:
        """Compare all that is no tensor's data (headers, values, padding), one part of it for each rank.

        Raises:
            FormatError: it is not what was written.
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
        """What each tensor is made of, by key."""
        return stored_tensors(self.index)

    @property
    def model(self) -> dict[str, str]:
        """The key of each tensor of the model, by FQN."""
        return {path[1]: ".".join(path) for path in self.shapes if path[0] == "model"}

    @property
    def parts(self) -> set[str]:
        """What it has beside the model."""
        found = {path[0] for path in [*self.objects, *self.shapes]} - {"model", "optimizer"}
        return found | ({"optimizers"} if ("optimizer", "param_groups") in self.objects else set())


def resolve(root: Path, asked: int | None) -> tuple[int, tuple[int, ...]]:
    """The step of the checkpoint that is asked for, and the later ones that were passed over for it.

    The latest is the newest of which no file is gone or cut.

    Raises:
        StorageError: there is none that is complete.
    """
    steps = folder.steps_in(root)
    left, foreign = folders_of(root, StepKind.LEFT), folders_of(root, StepKind.FOREIGN)
    if asked is not None:
        if asked in steps:
            return asked, ()
        there = f"there are {', '.join(map(str, steps))}" if steps else "there is none"
        half = " (one was begun there, and never completed)" if asked in left else ""
        half = " (one is there that no Checkpointer saved)" if asked in foreign else half
        raise StorageError(f"{root}: no complete checkpoint of step {asked}{half}; {there}")
    if not steps:
        half = f"; step {left[-1]} was begun and never completed" if left else ""
        half += f"; that of step {foreign[-1]} was not saved by a Checkpointer" if foreign else ""
        raise StorageError(f"{root}: no complete checkpoint{half}; start the training anew, or pass another folder")
    newest = folder.newest_in(root)
    if newest is None:
        return steps[-1], ()  # of which it is told what is wrong
    return newest, tuple(step for step in steps if step > newest)


@collected_later()
def open_checkpoint(root: Path, step: int) -> Opened:
    """Read what a checkpoint says of itself, and see that its files are those it tells of. Runs no pickle.

    Raises:
        FormatError: the files contradict each other or their formats.
        StorageError: a file cannot be read.
    """
    place = root / folder.name_of(step)
    opened = open_folder(place)
    if opened.facts.step != step:
        raise FormatError(f"{place}/{FACTS}: tells of step {opened.facts.step}; the folder was renamed or mixed up")
    return opened


def open_folder(place: Path) -> Opened:
    """The same of one checkpoint's own folder, whatever its name is."""
    with LocalReader(place) as reader:
        facts = Facts.from_bytes(_small(reader, FACTS, MAX_FACTS_BYTES), f"{place}/{FACTS}")
        content = reader.read(METADATA, 0, reader.size(METADATA))
        if digest(content) != facts.metadata_sha256:
            raise FormatError(
                f"{place}/{METADATA}: is not the one that {FACTS} tells of; the folder mixes two checkpoints, or "
                "is damaged: restore another one"
            )
        for file, nbytes in facts.files.items():
            _require_size(reader, place, file, nbytes)
        metadata = parse_metadata(content, "", what=f"{place}/{METADATA}")
        index = open_state(reader, metadata=metadata)
    places = [(entry.file, entry.stop) for entry in index.entries.values()]
    places += [(item.file, item.bytes.stop) for item in metadata.objects.values()]
    for file, stop in places:
        if file not in facts.files or stop > facts.files[file]:
            raise FormatError(f"{place}/{METADATA}: names bytes of {file} that {FACTS} does not; it is damaged")
        if facts.checksums and stop > content_nbytes(facts.files[file]):
            raise FormatError(f"{place}/{METADATA}: names the checksums of {file}; it is damaged")
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
                f"{place}/{file}: is missing; copy it there too, or restore another checkpoint"
            ) from error
        raise
    if found != nbytes:
        raise FormatError(
            f"{place}/{file}: has {found} bytes, and {nbytes} were written; it is damaged: copy it again, or "
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
        raise FormatError(f"{what}: is missing; the checkpoint is damaged, restore another one")
    content = reader.read(place.file, place.bytes.start, place.bytes.stop)
    return loaded(content, what)
