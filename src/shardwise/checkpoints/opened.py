"""A checkpoint in a folder: found, looked at, and read in part. Nothing is trusted, and no pickle is run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoints import folder
from shardwise.checkpoints.facts import FACTS, MAX_FACTS_BYTES, Facts
from shardwise.checkpoints.modes import AtStep, Which
from shardwise.checkpoints.state import Keys
from shardwise.errors import FormatError, StorageError
from shardwise.execution.garbage import collected_later
from shardwise.execution.torch_out import loaded
from shardwise.formats import CheckpointIndex
from shardwise.formats.checkpoint_index import open_state
from shardwise.formats.distributed import METADATA, Place, parse_metadata
from shardwise.storage import LocalReader


@dataclass(frozen=True)
class Opened:
    """A complete checkpoint whose files have been looked at. The same on every rank."""

    folder: Path
    facts: Facts
    index: CheckpointIndex
    objects: Mapping[Keys, Place]
    shapes: Mapping[Keys, tuple[int, ...]]

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
    with LocalReader(place) as reader:
        facts = Facts.from_bytes(_small(reader, FACTS, MAX_FACTS_BYTES), f"{place}/{FACTS}")
        if facts.step != step:
            raise FormatError(f"{place}/{FACTS}: tells of step {facts.step}; the folder was renamed or mixed up")
        content = reader.read(METADATA, 0, reader.size(METADATA))
        if hashlib.sha256(content).hexdigest() != facts.metadata_sha256:
            raise FormatError(
                f"{place}/{METADATA}: is not the one that {FACTS} tells of; the folder mixes two checkpoints, or "
                "is damaged: restore another one"
            )
        for file, nbytes in facts.files.items():
            _require_size(reader, place, file, nbytes)
        metadata = parse_metadata(content, "", what=f"{place}/{METADATA}")
        index = open_state(reader)
        if strange := sorted(index.files.keys() - facts.files.keys()):
            raise FormatError(f"{place}/{METADATA}: names {strange[0]}, which {FACTS} does not; it is damaged")
    shapes = {path: tensor.shape for path, tensor in metadata.tensors.items()}
    if odd := [path for path in [*shapes, *metadata.objects] if not _is_known(path)]:
        raise FormatError(f"{place}/{METADATA}: has {'.'.join(odd[0])}, which no checkpoint of shardwise has")
    return Opened(place, facts, index, metadata.objects, shapes)


def _is_known(path: Keys) -> bool:
    match path:
        case ("model", _) | ("optimizer", "state", _, _) | ("optimizer", "param_groups"):
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


def value_of(reader: LocalReader, opened: Opened, path: Keys) -> Any:
    """A value that is no tensor: plain data, read as such.

    Raises:
        FormatError: it is not there, or is no plain data.
    """
    what = f"{'.'.join(path)} in {opened.folder}"
    place = opened.objects.get(path)
    if place is None:
        raise FormatError(f"{what}: is missing; the checkpoint is damaged, restore another one")
    return loaded(reader.read(place.file, place.bytes.start, place.bytes.stop), what)
