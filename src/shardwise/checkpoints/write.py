"""Writes a checkpoint from each rank's memory, while the training goes on, and commits it in one step.

Each rank creates, fills and syncs its own file; the ranks meet; the first one puts ``.metadata`` in place. See
[Note: When a checkpoint counts].
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from shardwise.checkpoints import folder
from shardwise.checkpoints.facts import FACTS, FINGERPRINTS, Facts
from shardwise.checkpoints.fingerprints import Fingerprinted, Fingerprinter, digest, told_to_first
from shardwise.checkpoints.fingerprints import to_bytes as fingerprints_file
from shardwise.checkpoints.modes import KeepLast, Retention
from shardwise.checkpoints.state import KeyPath
from shardwise.errors import StorageError
from shardwise.execution.ranks.world import World
from shardwise.execution.writing.chunk_plan import TensorsPlan, data_file, metadata_of
from shardwise.execution.writing.chunk_stream import ChunkSource, ChunkStream
from shardwise.execution.writing.committing import let_count
from shardwise.execution.writing.marked_folder import Marked, Saving, marked_by_first
from shardwise.execution.writing.saving_lock import Whose, require_lock
from shardwise.formats.distributed import METADATA
from shardwise.planning.saves.commit import Commit, Publish, on_its_way
from shardwise.report.checkpoint_report import CheckpointReport
from shardwise.storage.writing.opening import open_writer


@dataclass(frozen=True, slots=True)
class RankContent:
    """What this rank writes: its chunks of tensors, and what is no tensor, packed, by the keys that lead to it."""

    source: ChunkSource
    values: Mapping[KeyPath, bytes]


@dataclass(frozen=True, slots=True)
class Job:
    """A checkpoint that is to be written.

    Attributes:
        root: the folder of checkpoints.
        newest: the newest complete step that this run knows of.
        plan: of the tensors.
        content: asked for once, when the folder has been marked; raises what kept this rank from having it.
        facts: all but what is known only at the end.
    """

    root: Path
    step: int
    newest: int | None
    keep: Retention
    plan: TensorsPlan
    content: Callable[[], RankContent]
    facts: Facts

    @property
    def folder(self) -> Path:
        return self.root / folder.name_of(self.step)


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """What became of a job: bytes of all files and of this rank's, and the steps that were removed."""

    nbytes: int
    own_nbytes: int
    removed: tuple[int, ...]


def require_after(root: Path, step: int, newest: int | None) -> None:
    """Refuse a step that a resumed run would not take for the latest.

    Raises:
        StorageError: the newest checkpoint is of this step or a later one.
    """
    if newest is not None and newest >= step:
        raise StorageError(
            f"{root}: step {step} is not after {newest}, the newest checkpoint there, which a resumed run would "
            f"take for the latest; discard_after({step - 1}) removes what came after, or save to another folder"
        )


def carry_out(world: World, job: Job) -> WrittenCheckpoint:
    """Mark the folder, write, sync, commit, and remove what is not kept; the same steps in both modes.

    Collective: yes.

    Raises:
        StorageError: somebody else writes there, or has since; or bytes could not be written. The checkpoint does
            not count then, unless it says otherwise.
        RankLostError: a rank has been lost.
    """
    with marked_by_first(world, job.root, partial(_begin, job), partial(_undo, job)) as saving:
        return _carried_out(world, job, saving)


def _begin(job: Job, marked: Marked) -> None:  # noqa: ARG001 - as of any folder that is marked
    """Tidy up, and see that the step is a new one."""
    root, step, newest = job.root, job.step, job.newest
    folder.remove_left(root)  # before it is looked what counts; see [Note: Asked again]
    present = folder.newest_in(root)
    if present is not None and present != newest and (newest is None or present > newest):
        raise StorageError(
            f"{root}: another run has saved step {present} there since this one began; give every run a "
            "folder of its own"
        )
    require_after(root, step, present)
    if step in folder.steps_in(root):
        folder.remove(root, [step])  # it is not whole
    with open_writer(root / folder.name_of(step)) as inner:
        if there := inner.list():
            raise StorageError(
                f"{inner.root}: holds {there[0]}, which no Checkpointer put there; move it elsewhere"
            )


def _commit(
    job: Job,
    marked: Marked,
    sizes: Sequence[Mapping[KeyPath, int]],
    told: Sequence[Fingerprinted],
) -> list[int]:
    """Let the checkpoint count, and remove what is not to be kept; the steps that were removed."""
    files = {data_file(rank): job.plan.nbytes(rank) + sum(own.values()) for rank, own in enumerate(sizes)}
    metadata = metadata_of(job.plan, sizes)
    marks = {
        data_file(rank): own.marks(job.plan.by_rank[rank], job.plan.nbytes(rank), list(sizes[rank].values()))
        for rank, own in enumerate(told)
    }
    fingerprints = fingerprints_file(marks)
    facts = replace(
        job.facts,
        files=dict(files),
        metadata_sha256=digest(metadata),
        fingerprints_sha256=digest(fingerprints),
    )
    beside = {FINGERPRINTS: fingerprints, FACTS: facts.to_bytes()}
    ready = on_its_way(METADATA, marked.token)
    with open_writer(job.folder) as writer:
        let_count(
            writer,
            marked.held,
            Commit(
                files,
                steps=(Publish(ready, METADATA),),
                then=files,
                ready={ready: metadata},
                says={**beside, METADATA: metadata},
                without=frozenset({ready}),
            ),
            beside,
        )
    removed: list[int] = []
    if isinstance(job.keep, KeepLast) and marked.held.whose() is Whose.OURS:
        removed = folder.remove(job.root, folder.steps_in(job.root)[: -job.keep.count])
    marked.release()
    return removed


def _undo(job: Job, marked: Marked) -> None:
    """Remove what was written for the step, unless it counts by now or the folder is another's."""
    if marked.held.whose() is Whose.OURS:
        folder.remove_own(job.root, job.step)
    elif job.folder.is_dir():
        with open_writer(job.folder) as inner:
            inner.remove(on_its_way(METADATA, marked.token))


def _carried_out(world: World, job: Job, saving: Saving) -> WrittenCheckpoint:
    contents: list[RankContent] = []

    def ask() -> dict[KeyPath, int]:
        contents.append(job.content())
        return {path: len(value) for path, value in contents[0].values.items()}

    sizes: list[Mapping[KeyPath, int]] = []

    def add_up(told: Sequence[Mapping[KeyPath, int]]) -> int:
        sizes.extend(told)
        return sum(job.plan.nbytes(rank) + sum(own.values()) for rank, own in enumerate(told))

    total = world.all_reduce(ask, add_up)
    [content] = contents
    nbytes = job.plan.nbytes(world.rank) + sum(map(len, content.values.values()))
    own = world.together(lambda: _write_own(world, job, saving.token, content, nbytes))
    told = told_to_first(world, own)
    removed = world.from_first(lambda: _commit(job, saving.marked, sizes, told))
    return WrittenCheckpoint(total, nbytes, tuple(removed))


def _write_own(world: World, job: Job, token: str, content: RankContent, nbytes: int) -> Fingerprinted:
    with open_writer(job.root) as writer:
        require_lock(writer, token)
    file = data_file(world.rank)
    marker = Fingerprinter()
    with open_writer(job.folder) as writer:
        writer.create(file, nbytes)
        stream = ChunkStream(writer, file, world.check, marker)
        stream.write(job.plan.by_rank[world.rank], content.source, list(content.values.values()))
        writer.sync(file)
        writer.sync_names()
    return marker.told()


_T = TypeVar("_T")


class Background:
    """A checkpoint that a thread of its own writes. The ranks' threads meet over the store, in no collective.

    Args:
        world: for these meetings alone, and joined by all ranks; it is left when the thread ends.
        job: what is written.
        report: of the checkpoint, which is not complete yet.
    """

    def __init__(self, world: World, job: Job, report: CheckpointReport) -> None:
        self.step = job.step
        self._world = world
        self._job = job
        self._report = report
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="shardwise-checkpoint")
        self._thread.start()

    def join(self) -> None:
        """Wait for the end, whatever that is."""
        self._thread.join()

    def result(self) -> CheckpointReport:
        """After the end: the report.

        Raises:
            CheckpointError: (or a subclass) what went wrong, the same on every rank.
        """
        if self._failure is not None:
            raise self._failure
        return self._report

    def _work(self) -> None:
        start = time.perf_counter()
        try:
            with self._world:
                written = carry_out(self._world, self._job)
        except BaseException as error:
            self._failure = error
            return
        seconds = {**self._report.seconds, "write": time.perf_counter() - start}
        self._report = replace(completed(self._report, written), seconds=seconds)


def done_now(function: Callable[[], _T]) -> Callable[[], _T]:
    """What the function returns or raises now, to be had later: so a rank that fails here stays in step."""
    outcome: Future[_T] = Future()
    try:
        outcome.set_result(function())
    except Exception as error:
        outcome.set_exception(error)
    return outcome.result


def promised(world: World, job: Job) -> CheckpointReport:
    """The report of a checkpoint that is not complete yet."""
    return CheckpointReport(
        rank=world.rank,
        world_size=world.size,
        directory=str(job.folder),
        step=job.step,
        is_complete=False,
        tensors=len(job.plan.tensors),
        state_bytes=job.plan.state_bytes,
        written_bytes=job.plan.nbytes(world.rank),
    )


def completed(report: CheckpointReport, written: WrittenCheckpoint) -> CheckpointReport:
    """The same, now that it is."""
    return replace(
        report,
        is_complete=True,
        written_bytes=written.own_nbytes,
        checkpoint_bytes=written.nbytes,
        removed=written.removed,
    )
