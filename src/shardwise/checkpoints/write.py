"""Writing of a checkpoint from each rank's memory while the training continues, and its commit.

Each rank creates, fills and syncs its own file. The ranks synchronize. The first one puts ``.metadata`` in place.
See [Note: When a checkpoint counts].
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

from shardwise.checkpoints import folder
from shardwise.checkpoints.facts import FACTS, BlockSums, Facts, digest, with_checksums
from shardwise.checkpoints.state import KeyPath
from shardwise.errors import StorageError
from shardwise.execution.committing import publish
from shardwise.execution.distributed_chunks import ChunkWriter, TensorsPlan, Views, data_file, metadata_of
from shardwise.execution.locked_folder import LockedFolder, Saving, locked_by_first_rank
from shardwise.execution.world import World
from shardwise.formats.joining import METADATA
from shardwise.planning.commit_plan import on_its_way
from shardwise.report.save_reports import CheckpointReport
from shardwise.storage.writing import open_writer

RankContent: TypeAlias = tuple[Views, Mapping[KeyPath, bytes]]
"""A rank's chunks of tensors, and its packed values that are no tensors."""


@dataclass(frozen=True, slots=True)
class Job:
    """A checkpoint that is to be written.

    Attributes:
        root: the folder of checkpoints.
        newest: the newest complete step of this run.
        plan: of the tensors.
        content: called once, after the lock is held. Raises if this rank cannot provide it.
        facts: all fields except those that are determined at the end.
        budget_bytes: of staging memory.
        report: of the checkpoint, not complete yet.
    """

    root: Path
    step: int
    newest: int | None
    keep: int | None
    plan: TensorsPlan
    content: Callable[[], RankContent]
    facts: Facts
    budget_bytes: int
    report: CheckpointReport

    @property
    def folder(self) -> Path:
        return self.root / folder.name_of(self.step)


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


def carry_out(world: World, job: Job) -> CheckpointReport:
    """Lock the folder, write, sync, commit, and remove old checkpoints. Return the completed report.

    Collective: yes.

    Raises:
        StorageError: another save holds the lock or has taken it over, or bytes could not be written. The
            checkpoint is not committed then, unless the message states otherwise.
        RankLostError: a rank has been lost.
    """
    with locked_by_first_rank(world, job.root, partial(_begin, job), partial(_undo, job)) as saving:
        contents: list[RankContent] = []
        sizes: list[Mapping[KeyPath, int]] = []  # of all ranks, on the first

        def sizes_of() -> dict[KeyPath, int]:
            contents.append(job.content())
            return {path: len(value) for path, value in contents[0][1].items()}

        def add_up(told: Sequence[Mapping[KeyPath, int]]) -> int:
            sizes.extend(told)
            return sum(with_checksums(_nbytes(job, rank, own.values())) for rank, own in enumerate(told))

        total = world.map_reduce(sizes_of, add_up)
        nbytes = _nbytes(job, world.rank, map(len, contents[0][1].values()))
        checksums: list[str] = []  # of all ranks, on the first
        world.map_reduce(_write_own, checksums.extend, world, job, saving, contents[0], nbytes)
        removed = world.broadcast(lambda: _commit(job, saving.locked, sizes, checksums))
    return replace(
        job.report,
        is_complete=True,
        written_bytes=with_checksums(nbytes),
        checkpoint_bytes=total,
        removed=tuple(removed),
    )


def _nbytes(job: Job, rank: int, values: Iterable[int]) -> int:
    """The content of a rank's file in bytes, with values of these sizes."""
    return job.plan.nbytes(rank) + sum(values)


def _begin(job: Job, marked: LockedFolder) -> None:  # noqa: ARG001 - as of any folder that is marked
    """Tidy up, and see that the step is a new one."""
    root, step, newest = job.root, job.step, job.newest
    folder.remove_left(root)  # before it is looked what counts; see [Note: Checked twice]
    present = folder.newest_in(root)
    if present is not None and present != newest and (newest is None or present > newest):
        raise StorageError(
            f"{root}: another run has saved step {present} there since this one began. Give every run a "
            "folder of its own"
        )
    require_after(root, step, present)
    if step in folder.steps_in(root):
        folder.remove(root, [step])  # it is not whole
    with open_writer(root / folder.name_of(step)) as inner:
        if there := inner.list():
            raise StorageError(
                f"{inner.root}: holds {there[0]}, which no Checkpointer put there. Move it elsewhere"
            )


def _commit(
    job: Job,
    marked: LockedFolder,
    sizes: Sequence[Mapping[KeyPath, int]],
    checksums: Sequence[str],
) -> list[int]:
    """Commit the checkpoint and remove old ones. Return the removed steps."""
    files = {data_file(rank): with_checksums(_nbytes(job, rank, own.values())) for rank, own in enumerate(sizes)}
    metadata = metadata_of(job.plan, sizes)
    facts = replace(
        job.facts,
        files=files,
        metadata_sha256=digest(metadata),
        checksums=dict(zip(files, checksums, strict=True)),
    )
    beside = {FACTS: facts.to_bytes()}
    with open_writer(job.folder) as writer:
        publish(writer, marked, METADATA, metadata, files, beside)
    removed: list[int] = []
    if job.keep is not None and marked.is_held():
        removed = folder.remove(job.root, folder.steps_in(job.root)[: -job.keep])
    marked.release()
    return removed


def _undo(job: Job, marked: LockedFolder) -> None:
    """Remove the files written for the step, unless it is committed or the folder belongs to another save."""
    if marked.is_held():
        folder.remove_own(job.root, job.step)
    elif job.folder.is_dir():
        with open_writer(job.folder) as inner:
            inner.remove(on_its_way(METADATA, marked.save_id))


def _write_own(world: World, job: Job, saving: Saving, content: RankContent, nbytes: int) -> str:
    """Write and sync this rank's file. Return the digest of its checksums."""
    saving.require()
    views, values = content
    file, sums = data_file(world.rank), BlockSums(nbytes)
    with open_writer(job.folder) as writer:
        writer.create(file, with_checksums(nbytes))
        chunks = ChunkWriter(writer, file, world.check, sums.add)
        chunks.write(job.plan.by_rank[world.rank], views, values.values(), job.budget_bytes)
        writer.write(file, nbytes, [memoryview(sums.to_bytes())])
        writer.sync(file)
        writer.sync_names()
    return digest(sums.to_bytes())


_T = TypeVar("_T")


def write_in_background(world: World, job: Job) -> CheckpointReport:
    """Do the same in a thread. The ranks' threads meet over the store, in no collective. Leaves ``world``."""
    start = time.perf_counter()
    with world:
        report = carry_out(world, job)
    return replace(report, seconds={**report.seconds, "write": time.perf_counter() - start})


def run_now(function: Callable[[], _T]) -> Callable[[], _T]:
    """Call the function now and return a callable that returns or raises its outcome later.

    So a rank that fails here stays in step.
    """
    outcome: Future[_T] = Future()
    try:
        outcome.set_result(function())
    except Exception as error:
        outcome.set_exception(error)
    return outcome.result
