"""``verify``: opens again whatever has been saved, and compares every byte with what was written."""

from __future__ import annotations

import os
import time
from pathlib import Path

from shardwise.checkpoints import folder
from shardwise.checkpoints.facts import FACTS
from shardwise.checkpoints.folder import StepKind, folders_of
from shardwise.checkpoints.opened import Opened, open_checkpoint, open_folder, resolve
from shardwise.engines.verifying import verify_files
from shardwise.execution.memory import Workers
from shardwise.formats.joining import METADATA
from shardwise.report.save_reports import ReopenReport
from shardwise.storage.names import is_url


def verify(directory: str | os.PathLike[str]) -> ReopenReport:
    """Open a checkpoint again, and compare it with what was recorded when it was saved.

    Of a model or an adapter, as :func:`save` and :func:`save_adapter` write them: the headers and the index must
    agree, every tensor that the model of ``config.json`` needs must be there, and the fingerprints of the bytes of
    tensors must be those that were recorded. Small files beside that are not what was saved are told as changed.

    Of a training, as a :class:`Checkpointer` writes them: a folder ``step-N``, or the folder of all, of which the
    newest is taken; all bytes of all its files are compared.

    Collective: no. Memory: a few blocks of 8 MiB.

    Raises:
        FormatError: the files contradict their format or each other.
        CoverageError: the model needs other tensors.
        StorageError: bytes could not be read; there is no complete checkpoint.
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
    if not (steps := folder.steps_in(place) or folders_of(place, StepKind.LEFT)):
        return None
    # The newest, whether a restore would pass it over for what it has lost or not: that is what is asked.
    return open_checkpoint(place, resolve(place, steps[-1])[0])


def _damaged(opened: Opened) -> list[str]:
    """Describe the blocks that are not what was written."""
    found: list[tuple[str, int]] = []
    with opened.reader() as reader:

        def compare(block: tuple[str, int], _: None) -> None:
            if not reader.is_sound(*block):
                found.append(block)

        Workers(compare, [None] * reader.policy.concurrency, lambda: None).run(reader.blocks)
        return [reader.told(*block) for block in sorted(found)]
