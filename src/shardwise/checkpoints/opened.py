"""Opens a checkpoint in a folder, reads parts of it, tells what it says of itself. Nothing is trusted, or run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.checkpoints import folder
from shardwise.checkpoints.facts import FACTS, FINGERPRINTS, MAX_FACTS_BYTES, Facts
from shardwise.checkpoints.fingerprints import (
    MAX_FINGERPRINTS_BYTES,
    FingerprintedRun,
    FingerprintsByFile,
    digest,
    from_bytes,
)
from shardwise.checkpoints.modes import AtStep, Latest, Which
from shardwise.checkpoints.state import KeyPath
from shardwise.conversion import Expression
from shardwise.errors import FormatError, StorageError
from shardwise.execution.memory.garbage import collected_later
from shardwise.execution.ranks.world import World
from shardwise.execution.writing.torch_out import loaded
from shardwise.formats.checkpoint_index import CheckpointIndex
from shardwise.formats.distributed import METADATA, ChunkPlace, parse_metadata
from shardwise.formats.torch_files import open_state
from shardwise.planning.loads.stored import stored_tensors
from shardwise.storage.contract import StorageReader
from shardwise.storage.reading.local import LocalReader


@dataclass(frozen=True)
class Opened:
    """A complete checkpoint whose files have been looked at. The same on every rank.

    Attributes:
        objects: where values lie that are no tensors.
        shapes: of tensors.
        marks: what was written into each file; None of a checkpoint of before they were taken down.
    """

    folder: Path
    facts: Facts
    index: CheckpointIndex
    objects: Mapping[KeyPath, ChunkPlace]
    shapes: Mapping[KeyPath, tuple[int, ...]]
    marks: FingerprintsByFile | None

    @cached_property
    def expressions(self) -> dict[str, Expression]:
        """What each tensor is made of, by key."""
        return stored_tensors(self.index)

    @cached_property
    def names(self) -> dict[tuple[str, int], str]:
        """What the runs of tensors are called, by file and first byte."""
        return {(entry.file, entry.start): key for key, entry in self.index.entries.items()}

    @cached_property
    def digests(self) -> dict[tuple[str, int], FingerprintedRun]:
        """Those of values, by file and first byte."""
        return {(file, run.start): run for file, item in (self.marks or {}).items() for run in item.values}

    @property
    def model(self) -> dict[str, str]:
        """The key of each tensor of the model, by FQN."""
        return {path[1]: ".".join(path) for path in self.shapes if path[0] == "model"}

    @property
    def parts(self) -> set[str]:
        """What it has beside the model."""
        found = {path[0] for path in [*self.objects, *self.shapes]} - {"model", "optimizer"}
        return found | ({"optimizers"} if ("optimizer", "param_groups") in self.objects else set())


def resolve(root: Path, which: Which) -> tuple[int, tuple[int, ...]]:
    """The step of the checkpoint that is asked for, and the later ones that were passed over for it.

    The latest is the newest of which no file is gone or cut.

    Raises:
        StorageError: there is none that is complete.
    """
    steps = folder.steps_in(root)
    if isinstance(which, AtStep):
        if which.step in steps:
            return which.step, ()
        there = f"there are {', '.join(map(str, steps))}" if steps else "there is none"
        half = " (one was begun there, and never completed)" if which.step in folder.leftovers_in(root) else ""
        half = " (one is there that no Checkpointer saved)" if which.step in folder.foreign_in(root) else half
        raise StorageError(f"{root}: no complete checkpoint of step {which.step}{half}; {there}")
    if not steps:
        left, foreign = folder.leftovers_in(root), folder.foreign_in(root)
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
        if hashlib.sha256(content).hexdigest() != facts.metadata_sha256:
            raise FormatError(
                f"{place}/{METADATA}: is not the one that {FACTS} tells of; the folder mixes two checkpoints, or "
                "is damaged: restore another one"
            )
        for file, nbytes in facts.files.items():
            _require_size(reader, place, file, nbytes)
        marks = _marks(reader, facts)
        metadata = parse_metadata(content, "", what=f"{place}/{METADATA}")
        index = open_state(reader, metadata=metadata)
        if strange := sorted(index.files.keys() - facts.files.keys()):
            raise FormatError(f"{place}/{METADATA}: names {strange[0]}, which {FACTS} does not; it is damaged")
    shapes = {path: tensor.shape for path, tensor in metadata.tensors.items()}
    if odd := [path for path in [*shapes, *metadata.objects] if not _is_known(path)]:
        raise FormatError(f"{place}/{METADATA}: has {'.'.join(odd[0])}, which no checkpoint of shardwise has")
    opened = Opened(place, facts, index, metadata.objects, shapes, marks)
    _require_told(opened)
    return opened


def _marks(reader: LocalReader, facts: Facts) -> FingerprintsByFile | None:
    what = f"{reader.root}/{FINGERPRINTS}"
    if not facts.fingerprints_sha256:
        if FINGERPRINTS in reader.list():
            raise FormatError(
                f"{what}: is there, and {FACTS} does not tell of it; the folder mixes two checkpoints"
            )
        return None
    content = _small(reader, FINGERPRINTS, MAX_FINGERPRINTS_BYTES)
    if digest(content) != facts.fingerprints_sha256:
        raise FormatError(
            f"{what}: is not the one that {FACTS} tells of; the folder mixes two checkpoints, or is damaged: "
            "restore another one"
        )
    return from_bytes(content, facts.files, what)


def _require_told(opened: Opened) -> None:
    """What was written down of the files is of the very bytes that tensors and values are read from."""
    if opened.marks is None:
        return
    runs = {(file, run.start, run.stop) for file, item in opened.marks.items() for run in item.tensors}
    places = {(entry.file, entry.start, entry.stop) for entry in opened.index.entries.values() if entry.nbytes}
    values = {(file, run.start, run.stop) for file, item in opened.marks.items() for run in item.values}
    objects = {(item.file, item.bytes.start, item.bytes.stop) for item in opened.objects.values()}
    for told, found in ((runs, places), (values, objects)):
        if odd := sorted(told ^ found):
            file, start, stop = odd[0]
            raise FormatError(
                f"{opened.folder}/{file}: bytes {start}..{stop} are not what {FINGERPRINTS} tells of; the file is "
                "damaged: restore another checkpoint"
            )


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
        FormatError: it is not there, is no plain data, or not what was written.
    """
    what = f"{'.'.join(path)} in {opened.folder}"
    place = opened.objects.get(path)
    if place is None:
        raise FormatError(f"{what}: is missing; the checkpoint is damaged, restore another one")
    content = reader.read(place.file, place.bytes.start, place.bytes.stop)
    run = opened.digests.get((place.file, place.bytes.start))
    if run is not None and digest(content) != run.mark:
        raise FormatError(
            f"{what}: is not what was written (bytes {run.start}..{run.stop} of {place.file}); the file is "
            "damaged: restore another checkpoint"
        )
    return loaded(content, what)


@dataclass(frozen=True, slots=True)
class CheckpointPreview:
    """Plain facts of a checkpoint.

    Attributes:
        folder: of this one checkpoint.
        step: optimizer steps done.
        holds: "everything", or "adapter NAME".
        adapter: the settings of the adapter's config that change what it computes; None without adapter.
        optimizers: their classes; None where it is not known.
        data: the position in the data, where it is one for all ranks.
        user: the user's own.
    """

    folder: str
    step: int
    holds: str
    adapter: Mapping[str, Any] | None
    optimizers: tuple[str, ...] | None
    data: Mapping[str, Any] | None
    user: Mapping[str, Any]


def preview(root: Path) -> CheckpointPreview:
    """The facts of the newest checkpoint in a folder that is whole.

    Collective: yes, over the default process group; one rank reads, no tensors.

    Raises:
        FormatError: it is damaged, or another's.
        StorageError: there is none, or it cannot be read.
    """
    return World.current().from_first(lambda: _look(root))


def _look(root: Path) -> CheckpointPreview:
    step, _ = resolve(root, Latest())
    opened = open_checkpoint(root, step)
    facts = opened.facts
    position = None
    if facts.data == "one":
        with LocalReader(opened.folder) as reader:
            position = value_of(reader, opened, ("data", "rank_0"))
    return CheckpointPreview(
        folder=str(opened.folder),
        step=step,
        holds=facts.holds,
        adapter=facts.adapter,
        optimizers=None if facts.optimizers is None else tuple(name for name, _ in facts.optimizers),
        data=position if isinstance(position, dict) else None,
        user=facts.user,
    )
