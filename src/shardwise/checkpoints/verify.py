"""``verify``: opens again whatever has been saved, and compares every byte with what was written."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from shardwise.checkpoints import folder
from shardwise.checkpoints.facts import FACTS
from shardwise.checkpoints.fingerprint_check import BLOCK_BYTES, Witness, mark_of
from shardwise.checkpoints.fingerprints import FingerprintedRun, digest
from shardwise.checkpoints.modes import AtStep
from shardwise.checkpoints.opened import Opened, open_checkpoint, open_folder, resolve
from shardwise.engines.verifying import verify_files
from shardwise.errors import FormatError
from shardwise.execution.reading.workers import Workers
from shardwise.formats.distributed import METADATA
from shardwise.report.verify_report import ReopenReport
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
    damaged = [] if opened.marks is None else _damaged(opened)
    facts = opened.facts
    parts = ", ".join(["model", *sorted(opened.parts)])
    runs = [len(item.tensors) + len(item.values) + 1 for item in (opened.marks or {}).values()]
    return ReopenReport(
        checkpoint=str(opened.folder),
        files=len(facts.files),
        tensors=len(opened.shapes),
        nbytes=opened.index.nbytes,
        model_class="",
        compared=sum(runs),
        damaged=tuple(damaged),
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
    if not (steps := folder.steps_in(place) or folder.leftovers_in(place)):
        return None
    # The newest, whether a restore would pass it over for what it has lost or not: that is what is asked.
    return open_checkpoint(place, resolve(place, AtStep(steps[-1]))[0])


def _damaged(opened: Opened) -> list[str]:
    """What is not what was written, in words."""
    assert opened.marks is not None
    paths = {(item.file, item.bytes.start): ".".join(path) for path, item in opened.objects.items()}
    found: list[tuple[str, int, str]] = []
    lock = threading.Lock()
    with Witness(opened.folder, opened.marks) as reader:

        def compare(task: tuple[str, FingerprintedRun | None], memory: bytearray) -> None:
            file, run = task
            if run is None:
                try:
                    reader.require_around([file])
                except FormatError:
                    fault = -1, f"what lies around the tensors of {file}"
                else:
                    return
            else:
                name = opened.names.get((file, run.start)) or paths.get((file, run.start), "a value")
                is_tensor = (file, run.start) not in opened.digests
                mark = (
                    mark_of(reader, file, run, memory)
                    if is_tensor
                    else digest(reader.read(file, run.start, run.stop))
                )
                if mark == run.mark:
                    return
                fault = run.start, f"{name} (bytes {run.start}..{run.stop} of {file})"
            with lock:
                found.append((file, *fault))

        tasks: list[tuple[str, FingerprintedRun | None]] = [
            (file, run) for file, item in opened.marks.items() for run in (None, *item.tensors, *item.values)
        ]
        memories = [bytearray(BLOCK_BYTES) for _ in range(reader.policy.concurrency)]
        Workers(compare, memories, lambda: None).run(tasks)
    return [text for _, _, text in sorted(found)]
