"""Writes a checkpoint while the training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

from shardwise.checkpoints import write
from shardwise.execution.ranks.world import World
from shardwise.report.checkpoint_report import CheckpointReport

_T = TypeVar("_T")


class Background:
    """A checkpoint that a thread of its own writes. The ranks' threads meet over the store, in no collective.

    Args:
        world: for these meetings alone, and joined by all ranks; it is left when the thread ends.
        job: what is written.
        report: of the checkpoint, which is not complete yet.
    """

    def __init__(self, world: World, job: write.Job, report: CheckpointReport) -> None:
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
                written = write.carry_out(self._world, self._job)
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


def promised(world: World, job: write.Job) -> CheckpointReport:
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


def completed(report: CheckpointReport, written: write.WrittenCheckpoint) -> CheckpointReport:
    """The same, now that it is."""
    return replace(
        report,
        is_complete=True,
        written_bytes=written.own_nbytes,
        checkpoint_bytes=written.nbytes,
        removed=written.removed,
    )
