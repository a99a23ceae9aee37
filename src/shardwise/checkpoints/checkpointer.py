"""``Checkpointer``: saves the training state, and restores it on any number of ranks."""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from shardwise.checkpoints import restore as restoring
from shardwise.checkpoints import step_folders, write
from shardwise.checkpoints.checkpoint_plan import CheckpointPlan, plan_checkpoint
from shardwise.checkpoints.header import CheckpointHeader
from shardwise.checkpoints.summaries import Agreement, StateSummary, compare_summaries, require_same_calls
from shardwise.checkpoints.train_state import (
    Mode,
    StateContents,
    TrainState,
    adapter_settings,
    collect_contents,
    collect_state,
    describe_selection,
)
from shardwise.core.consents import Consent
from shardwise.core.errors import ConfigError, StorageError
from shardwise.core.save_reports import CheckpointReport, RestoreReport
from shardwise.fsdp.optimizer_states_by_name import class_name
from shardwise.models.selection import AdapterOnly, Selection
from shardwise.ranks.call_arguments import check_options, comparing_arguments, get_hints
from shardwise.ranks.world import Clock, World
from shardwise.state.base_identity import BaseSamples, base_config
from shardwise.state.state_values import StateOptions, require_values
from shardwise.transfer.distributed_chunks import ChunkStaging
from shardwise.transfer.matching import OnFault
from shardwise.transfer.memory import gc_disabled
from shardwise.transfer.replicas import compare_replicas
from shardwise.transfer.workers import renew_thread_pool

_MAX_STEP = 10**15


class Checkpointer:
    """Keeps the training state in a folder, in the format of ``torch.distributed.checkpoint``.

    A checkpoint is committed in one step and complete from then on. After a kill at any moment the earlier ones
    remain. It can be restored on any number of ranks and any mesh, bit for bit. See docs/checkpoints.md.

    A context manager: :meth:`close` is called at the end, unless the block raises. A checkpoint in progress is then
    completed before the process ends.

    A caller can expect the following sequence.

    1. ``Checkpointer(directory)``: the newest complete step is found. Nothing is created.
    2. :meth:`restore`, to resume: the values are copied into the training's tensors. :meth:`discard_after` before,
       to resume from an earlier step than the newest.
    3. :meth:`save`, between two steps of the training:

       a. It waits for the save before, if that is in progress, and raises its failure.
       b. Ranks collect their states and compare them. They plan who writes what, or take the last plan if it fits.
       c. With ``"async"`` the state is copied to host memory.
       d. The first rank locks the folder. Ranks write and sync their files. The checkpoint is incomplete.
       e. The first rank puts ``.metadata`` in place. The checkpoint is complete. Older ones are removed.

       With ``"async"``, :meth:`save` returns before d. Both steps then run on a thread, while the training
       continues, and one save at most is in progress.
    4. :meth:`wait`: the save in progress is complete, or its failure is raised. :meth:`restore`,
       :meth:`discard_after` and :meth:`close` begin with it.

    After a failure before e, the files of the step are removed, and earlier checkpoints are as they were. The next
    :meth:`save` may follow.

    Args:
        directory: a folder that all ranks see, for the checkpoints of one run alone.
        keep: number of newest complete checkpoints to keep. None keeps all.
        mode: ``"sync"``, or ``"async"``: the state is copied to host memory, and a thread writes it while the
            training continues. The next ``save`` waits for it.
        only: the stored part of the model: ``None`` for all, or ``AdapterOnly()`` for a PEFT adapter and all other
            trained parameters.
        options: budget, process group, timeouts.

    Raises:
        ConfigError: an argument is unknown or not supported.
        StorageError: ``directory`` is a file.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        mode: Mode = "sync",
        only: Selection = None,
        options: StateOptions = StateOptions(),  # noqa: B008
    ) -> None:
        arguments = {"mode": mode, "only": only, "options": options}
        check_options(get_hints(Checkpointer.__init__), arguments)
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ConfigError(f"keep={keep!r}: pass the number of checkpoints to keep, 1 or more; None keeps all")
        self._root = step_folders.require_local(directory)
        self._keep = keep
        self._mode = mode
        self._only = only
        self._options = options
        self._staging = ChunkStaging()
        self._plan: CheckpointPlan | None = None
        # One thread: a save waits for the one before, so that at most one is in progress.
        self._executor = futures.ThreadPoolExecutor(1, thread_name_prefix="shardwise-checkpoint")
        self._in_progress: tuple[int, futures.Future[CheckpointReport]] | None = None
        self._newest = step_folders.find_latest(self._root)

    @property
    def directory(self) -> Path:
        """The folder of the checkpoints."""
        return self._root

    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, in order. Collective: yes."""
        with self._world("steps") as world:
            with world.broadcast("list the checkpoints") as exchange:
                if world.rank == 0:
                    exchange.local = step_folders.steps_in(self._root)
            result: list[int] = exchange.result
            return result

    def latest(self) -> int | None:
        """Return the newest step whose checkpoint has no missing or truncated file, or None. Collective: yes."""
        with self._world("latest") as world:
            return self._find_latest(world)

    @torch.inference_mode(False)  # the thread of the next save writes to the copy of the state
    @torch.no_grad()
    def save(self, step: int, state: TrainState) -> CheckpointReport:
        """Save a checkpoint. With ``"async"``, wait for the previous one and save in the background.

        The states of random generators are stored as they are now. Call it between two steps of the training.

        Collective: yes, over ``options.process_group`` (default: all ranks). Memory: ``options.budget_bytes``. With
        ``"async"`` also a copy of this rank's part of the state, on the host.

        Args:
            step: optimizer steps done, more than at the newest checkpoint in the folder.
            state: the state to save.

        Raises:
            ConfigError: an argument is not supported, or a part has a value that is not plain data.
            ShardingError: tensors are on meta, or the shards of parameters or optimizer state cannot be
                determined.
            RankMismatchError: ranks have different models, optimizers or optimizer settings (learning rates, for
                example), made different calls, or hold different values of replicated parameters or optimizer
                state.
            StorageError: the folder cannot be written to, or another save is in progress there.
            RankLostError: a rank has been lost.
            CheckpointError: (or a subclass) with ``"async"``, the failure of the checkpoint before.

        Every error is the same on every rank, and leaves all complete checkpoints as they are.
        """
        start = time.perf_counter()
        clock = Clock()
        with clock.phase("wait"):
            self.wait()
        with ExitStack() as stack:
            background = None
            with self._world("save") as world:
                # Joined before the ranks meet for the first time, so that a rank lost from then on is missed there.
                if self._mode == "async":
                    background = self._world("save", world)
                    background.join()
                    # Only __exit__: if anything below raises, the threads of the other ranks learn that this one
                    # has left. The thread enters it.
                    stack.push(background)
                # In the caller's thread: ranks agree on the content, and with "async" the state is copied. What is
                # left is the writing.
                job = self._agree_on_job(world, clock, step, state)
                report = job.report
                if background is None:
                    with clock.phase("write"), self._recording_newest(step):
                        report = write.write_and_commit(world, job)
            blocked_s, seconds = time.perf_counter() - start, dict(clock.seconds)
            report = replace(report, blocked_s=blocked_s, seconds=seconds)
            if background is not None:
                renew_thread_pool()
                job = replace(job, report=report)
                self._in_progress = step, self._executor.submit(write.write_in_background, background, job)
            stack.pop_all()  # the thread closes its world
        return report

    def wait(self) -> CheckpointReport | None:
        """Wait for the checkpoint in progress, if any, and return its report.

        Collective: yes.

        Raises:
            CheckpointError: (or a subclass) its failure, the same on every rank.
        """
        if self._in_progress is None:
            return None
        step, outcome = self._in_progress
        futures.wait([outcome])  # interrupted here, it is still in progress
        self._in_progress = None
        with self._recording_newest(step):
            return outcome.result()

    def restore(
        self,
        state: TrainState,
        step: int | None = None,
        *,
        on_missing: OnFault = "error",
        on_unexpected: OnFault = "error",
        on_mismatched: OnFault = "error",
        on_other_base: OnFault = "error",
    ) -> RestoreReport:
        """Restore a training run from a checkpoint.

        Values are copied into the existing tensors. A model on meta, as ``from_pretrained(load_weights=False)``
        returns it, is materialized and filled in place.

        Collective: yes, over ``options.process_group`` (default: all ranks). Memory: ``options.budget_bytes``, and
        new state: that of optimizers, and a model that was on meta.

        Args:
            state: a state with the same components as the saved one.
            step: step of the checkpoint. None restores the newest.
            on_missing: ``Ignore(only=...)`` for entries that the checkpoint may not have: FQNs, "FQN: entry" of
                optimizers, or a component: "optimizers", "schedulers", "scaler", "data".
            on_unexpected: ``Ignore(only=...)`` for additional entries of the checkpoint.
            on_mismatched: ``Ignore(only=...)`` for entries of another shape or kind.
            on_other_base: ``Ignore()`` allows an adapter to resume on a base other than its own.
                ``Ignore(only=...)`` allows differences in "config", "shapes" (and names) or "values".

        Raises:
            ConfigError: an argument is not supported.
            KeyMismatchError: the checkpoint is of another tuning, base or adapter, or does not match the state.
            FormatError: the checkpoint is damaged, or was not saved by a Checkpointer.
            StorageError: there is no complete checkpoint, or it cannot be read.
            RankMismatchError: ranks have different models or optimizers.
            ShardingError: tensors are on meta that the checkpoint does not have.
            RankLostError: a rank has been lost.

        Every error is the same on every rank. Mismatches are reported before anything is changed.
        """
        self.wait()
        self._plan = None  # a restore may replace tensors, and the plan has views of the former ones
        consent = Consent(on_missing, on_mismatched, on_unexpected, on_other_base)
        kwargs = {"on_missing": on_missing, "on_unexpected": on_unexpected}
        kwargs |= {"on_mismatched": on_mismatched, "on_other_base": on_other_base}
        with self._world("restore") as world:
            with comparing_arguments(world) as exchange:
                check_options(get_hints(Checkpointer.restore), kwargs)
                _require_state(state)
                exchange.local = _describe_arguments(step=step, only=self._only, **kwargs)
            report = restoring.restore(world, self._root, state, step, self._only, consent, self._options)
            # Maybe a later step than the restored one. Until discard_after() removes it, saves up to it are
            # refused.
            self._newest = self._find_latest(world)
        return report

    def discard_after(self, step: int) -> list[int]:
        """Remove all checkpoints of later steps, to resume from this one. Return the removed steps.

        Collective: yes.

        Raises:
            ConfigError: the step is not a number of optimizer steps.
            RankMismatchError: ranks pass different steps.
            StorageError: something cannot be removed.
        """
        self.wait()
        with self._world("discard_after") as world:
            with comparing_arguments(world) as exchange:
                exchange.local = _comparable_step(step)
            with world.broadcast("remove later checkpoints") as exchange:
                if world.rank == 0:
                    later = [number for number in step_folders.steps_in(self._root) if number > step]
                    exchange.local = step_folders.remove(self._root, later)
            removed: list[int] = exchange.result
            self._newest = self._find_latest(world)
        return removed

    def close(self) -> None:
        """Wait for the checkpoint in progress, and release the copy of the state. Collective: yes.

        Raises:
            CheckpointError: (or a subclass) the failure of the checkpoint in progress.
        """
        try:
            self.wait()
        finally:
            self._plan = None  # it has views of the tensors; a save afterwards plans anew
            self._staging.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    @contextmanager
    def _recording_newest(self, step: int) -> Iterator[None]:
        """Record that the checkpoint of this step is complete if the block commits it, even if cleanup fails."""
        try:
            yield
        except BaseException:
            with suppress(StorageError):
                if step in step_folders.steps_in(self._root):
                    self._newest = step
            raise
        self._newest = step

    def _world(self, call: str, foreground: World | None = None) -> World:
        group, timeouts = self._options.process_group, self._options.timeouts
        return World.current(group, timeouts, call=f"Checkpointer.{call}", foreground=foreground)

    def _find_latest(self, world: World) -> int | None:
        """Return the newest step without missing or truncated files. Collective: yes."""
        with world.broadcast("find the latest checkpoint") as exchange:
            if world.rank == 0:
                exchange.local = step_folders.find_latest(self._root)
        step: int | None = exchange.result
        return step

    def _agree_on_job(self, world: World, clock: Clock, step: int, state: TrainState) -> write.Job:
        """Agree with all ranks on the content of the checkpoint. Collective: yes."""
        with clock.phase("collect"):
            contents, agreement = self._collect_and_compare(world, clock, step, state)
            collected = contents.collected
        with clock.phase("plan"), gc_disabled():
            # ``agreement.mismatched`` is None on all ranks or on none, so all of them plan anew, or none does. The
            # chunks of a plan that is still valid have been staged in _collect_local().
            if self._plan is None or agreement.mismatched is None:
                self._plan = plan_checkpoint(world, collected)
                with world.collective("stage the state"):
                    self._stage(clock, contents, self._plan)
            plan = self._plan.tensors
        with clock.phase("compare"):
            # Before anything is written: each replica writes a part, so that different ones would be mixed.
            differing = compare_replicas(world, contents.replicas, agreement.mismatched)
        header = CheckpointHeader(
            step=step,
            world_size=world.size,
            holds=describe_selection(self._only),
            adapter=adapter_settings(collected.model, self._only),
            others=collected.others[0],
            equal_generators=agreement.equal_generators,
            data=agreement.data,
            user=contents.user,
            optimizers=[[class_name(bound.optimizer), len(bound.groups)] for bound in collected.bounds],
            base=agreement.base,
        )
        report = CheckpointReport(
            rank=world.rank,
            world_size=world.size,
            directory=str(self._root / step_folders.step_folder_name(step)),
            step=step,
            is_complete=False,
            tensors=len(plan.tensors),
            state_bytes=plan.state_bytes,
            written_bytes=plan.nbytes(world.rank),
            differing_buffers=tuple(collected.buffers[key] for key in differing),
        )
        return write.Job(
            root=self._root,
            step=step,
            newest=self._newest,
            keep=self._keep,
            plan=plan,
            chunks=contents.chunks,
            values=contents.stored(agreement.data, world.rank),
            header=header,
            budget_bytes=self._options.budget_bytes,
            report=report,
        )

    def _collect_and_compare(
        self, world: World, clock: Clock, step: int, state: TrainState
    ) -> tuple[StateContents, Agreement]:
        """Check the call, collect this rank's state, and compare it with that of all ranks. Collective: yes."""
        with world.all_reduce("collect the state") as exchange:
            contents = self._collect_local(world, clock, step, state)
            exchange.local = contents.summary
            # The first rank samples the base that it has collected itself, so that ranks meet once.
            exchange.reduce_fun = partial(self._compare_on_first_rank, world, step, contents.base)
        return contents, exchange.result

    def _compare_on_first_rank(
        self, world: World, step: int, base: BaseSamples | None, summaries: Sequence[StateSummary]
    ) -> Agreement:
        """Check the call, and compare what the ranks have collected. Collective: no (on the first rank)."""
        require_same_calls(world, summaries)
        _comparable_step(step)
        write.require_after(self._root, step, self._newest)
        return compare_summaries(world, base, summaries)

    @gc_disabled()
    def _collect_local(self, world: World, clock: Clock, step: int, state: TrainState) -> StateContents:
        """Collect this rank's state. If the last plan is valid, also stage what it writes. Collective: no."""
        _require_state(state)
        plan = self._plan
        before = plan.collected if plan else None
        collected = collect_state(state, self._only, before)
        require_values(collected.by_key, "the state")
        contents = collect_contents(collected, state, world.rank)
        contents.summary.call = _describe_arguments(step=step, keep=self._keep, mode=self._mode, only=self._only)
        samples_of = collected
        # Before ranks meet, so that one meeting is enough if all of them can use their last plan.
        if plan and plan.is_for(world, collected):
            self._stage(clock, contents, plan)
            contents.summary.replicas = contents.replicas.digests()
            samples_of = plan.collected  # whose samples have been selected, of the same tensors
        if isinstance(self._only, AdapterOnly):
            contents.base = replace(samples_of.base, config=base_config(collected.model))
            contents.summary.base = contents.base.fingerprints()
        return contents

    def _stage(self, clock: Clock, contents: StateContents, plan: CheckpointPlan) -> None:
        """Find what a plan writes and compares. With ``"async"`` copy it, because the training may change it."""
        contents.replicas, contents.chunks = plan.replicas(contents.collected), plan.chunks
        if self._mode == "async":
            with clock.phase("stage"):
                contents.chunks = self._staging.copy(plan.chunks)


def _require_state(state: object) -> None:
    if not isinstance(state, TrainState):
        raise ConfigError(f"state: is a {type(state).__name__}. Pass TrainState(model, ...)")


def _comparable_step(step: object) -> dict[str, str]:
    """Check a step. Return it as text that ranks must have in common."""
    if type(step) is not int or not 0 <= step < _MAX_STEP:
        raise ConfigError(f"step={step!r} is not a number of optimizer steps")
    return {"step": str(step)}


def _describe_arguments(**arguments: object) -> dict[str, str]:
    """Return the arguments that ranks must have in common, as text by name."""
    return {name: repr(value) for name, value in arguments.items()}
