"""Writing of a checkpoint from each rank's memory while the training continues, and its commit.

Each rank creates, fills and syncs its own file. The ranks synchronize. The first one puts ``.metadata`` in place.
See [Note: When a checkpoint is complete] in ``checkpoints/step_folders.py``.
"""

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.checkpoints import step_folders
from shardwise.checkpoints.header import HEADER, BlockSums, CheckpointHeader, with_checksums
from shardwise.core.errors import StorageError
from shardwise.core.save_reports import CheckpointReport
from shardwise.files.join_entries import METADATA
from shardwise.files.local_writer import open_writer
from shardwise.ranks.world import World
from shardwise.saving.commit import publish
from shardwise.saving.commit_plan import pending_name
from shardwise.saving.locked_folder import LockedFolder, Saving, lock_on_first_rank
from shardwise.transfer.distributed_chunks import (
    ChunkWriter,
    StatePath,
    TensorsPlan,
    Views,
    build_metadata,
    data_file,
)
from shardwise.transfer.fingerprints import digest

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """A checkpoint to write, as one rank holds it.

    Attributes:
        root: folder of all checkpoints.
        step: optimizer steps done.
        newest: newest complete step of this run.
        keep: number of checkpoints to keep. None keeps all.
        plan: plan of the tensors: of all ranks on the first one, else of this rank.
        chunks: this rank's chunks of tensors.
        values: this rank's pickled values that are not tensors.
        header: header, without the files and their checksums.
        budget_bytes: staging memory.
        report: report of the checkpoint, not complete yet.
    """

    root: Path
    step: int
    newest: int | None
    keep: int | None
    plan: TensorsPlan
    chunks: Views
    values: Mapping[StatePath, bytes]
    header: CheckpointHeader
    budget_bytes: int
    report: CheckpointReport

    @property
    def folder(self) -> Path:
        return self.root / step_folders.step_folder_name(self.step)


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """The data file of a rank.

    Attributes:
        nbytes: its size, checksums included.
        digest: digest of its checksums.
    """

    nbytes: int
    digest: str


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


def write_and_commit(world: World, job: Job) -> CheckpointReport:
    """Lock the folder, write, sync, commit, and remove old checkpoints. Return the completed report.

    Collective: yes.

    Raises:
        StorageError: another save holds the lock or has taken it over, or bytes could not be written. The
            checkpoint is not committed then.
        ShardingError: ``.metadata`` would be larger than readers accept. Nothing is written then.
        RankLostError: a rank has been lost.
    """
    with lock_on_first_rank(world, job.root) as saving:
        try:
            # Before any rank creates its file, since this removes what is in the folder of the step.
            # The reduction runs on the first rank, for which the others wait.
            metadata: list[bytes] = []  # on the first rank; empty on the others
            with world.all_reduce("begin the save", lambda sizes: metadata.append(_begin(job, sizes))) as exchange:
                exchange.local = {path: len(value) for path, value in job.values.items()}
            files: list[WrittenFile] = []  # of all ranks, by rank, on the first; empty on the others
            # Each rank syncs its file in this phase. So all of them are durable before one is named in
            # ``.metadata``.
            with world.all_reduce("write local files", files.extend) as exchange:
                exchange.local = _write_local(world, job, saving)
            with world.broadcast("commit the checkpoint") as exchange:
                if world.rank == 0:
                    exchange.local = _commit(job, saving, files, metadata[0])
            removed, checkpoint_bytes = exchange.result
        except BaseException:
            # While the lock is held, which lock_on_first_rank() then releases. The first error is the one to raise.
            with contextlib.suppress(StorageError):
                if saving.is_locked_here:
                    _undo(job, saving.locked)
            raise
    return replace(
        job.report,
        is_complete=True,
        written_bytes=with_checksums(_content_nbytes(job, world.rank)),
        checkpoint_bytes=checkpoint_bytes,
        removed=tuple(removed),
    )


def _content_nbytes(job: Job, rank: int) -> int:
    """Return the size in bytes of this rank's data file, without checksums."""
    return job.plan.nbytes(rank) + sum(map(len, job.values.values()))


def _begin(job: Job, sizes: Sequence[Mapping[StatePath, int]]) -> bytes:
    """Remove remains of earlier saves, and check that the step is a new one. Return the content of ``.metadata``.

    ``sizes`` are those in bytes of each rank's values that are not tensors.
    """
    metadata = build_metadata(job.plan, sizes)
    root, step, newest = job.root, job.step, job.newest
    # Before the steps are listed. See [Note: Checked twice] in ``saving/commit.py``.
    step_folders.remove_incomplete_steps(root)
    present = step_folders.find_latest(root)
    # A step that this run has neither saved nor seen when it began.
    if present is not None and (newest is None or present > newest):
        raise StorageError(
            f"{root}: another run has saved step {present} there since this one began. Give every run a "
            "folder of its own"
        )
    if step in step_folders.steps_in(root):
        step_folders.remove(root, [step])  # incomplete: find_latest has skipped it
    with open_writer(job.folder) as writer:
        if names := writer.list():
            raise StorageError(
                f"{writer.root}: holds {names[0]}, which no Checkpointer put there. Move it elsewhere"
            )
    return metadata


def _commit(job: Job, saving: Saving, written: Sequence[WrittenFile], metadata: bytes) -> tuple[list[int], int]:
    """Commit the checkpoint and remove old ones. Return the removed steps, and the size of all data files."""
    locked = saving.locked
    # The header has the digests of all other files. It is put in place before ``.metadata``, which commits.
    files = {data_file(rank): file.nbytes for rank, file in enumerate(written)}
    header = replace(
        job.header,
        files=files,
        metadata_sha256=digest(metadata),
        checksums={data_file(rank): file.digest for rank, file in enumerate(written)},
    )
    with open_writer(job.folder) as writer:
        publish(writer, locked, METADATA, metadata, files, {HEADER: header.to_bytes()})
    # Checkpoints are removed by the holder of the lock alone.
    removed: list[int] = []
    if job.keep is not None and locked.is_held():
        # Damaged ones do not count: neither later steps, which a resumed run has skipped, nor earlier ones.
        earlier = [step for step in step_folders.steps_in(job.root) if step < job.step]
        folders = {step: job.root / step_folders.step_folder_name(step) for step in earlier}
        complete = [*(step for step in earlier if step_folders.is_complete_folder(folders[step])), job.step]
        oldest = complete[-job.keep :][0]  # of those that stay
        for step in earlier:
            if step < oldest:
                try:
                    removed += step_folders.remove(job.root, [step])
                except StorageError as error:  # this save has been committed, and says what is left of another
                    _log.warning("%s. Step %d is complete: remove step %d yourself", error, job.step, step)
    locked.release()
    return removed, sum(files.values())


def _undo(job: Job, locked: LockedFolder) -> None:
    """Remove the files written for the step, unless it is committed or the folder belongs to another save."""
    if locked.is_held():
        step_folders.remove_incomplete(job.root, job.step)
    # The files may be another save's. Only the one that would commit this save has its id in its name.
    elif job.folder.is_dir():
        with open_writer(job.folder) as writer:
            writer.remove(pending_name(METADATA, locked.save_id))


def _write_local(world: World, job: Job, saving: Saving) -> WrittenFile:
    """Write and sync this rank's file."""
    saving.require()
    # All sizes are known, so the checksums' place is, too: right after chunks and values.
    nbytes = _content_nbytes(job, world.rank)
    file, sums = data_file(world.rank), BlockSums(nbytes)
    with open_writer(job.folder) as writer:
        writer.create(file, with_checksums(nbytes))
        chunks = ChunkWriter(writer, file, world.check, sums.add)
        chunks.write(job.plan.by_rank[world.rank], job.chunks, job.values.values(), job.budget_bytes)
        writer.write(file, nbytes, [memoryview(sums.to_bytes())])
        # The content, then the name in the folder: after a crash, a file that is there is whole.
        writer.sync(file)
        writer.sync_names()
    return WrittenFile(with_checksums(nbytes), digest(sums.to_bytes()))


def write_in_background(world: World, job: Job) -> CheckpointReport:
    """Write the checkpoint on a background thread. Ranks meet over the store. Closes ``world``.

    A failure is also logged, because the process may end before a later call raises it.
    """
    start = time.perf_counter()
    try:
        with world:
            report = write_and_commit(world, job)
    except Exception as error:
        _log.warning("%s: the save in the background failed, %s", job.folder, error)
        raise
    return replace(report, seconds={**report.seconds, "write": time.perf_counter() - start})
