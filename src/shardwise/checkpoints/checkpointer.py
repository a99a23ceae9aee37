"""``Checkpointer``: the state of a training into a folder, and back on any number of ranks."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from shardwise.checkpoints import folder, write
from shardwise.checkpoints import restore as restoring
from shardwise.checkpoints.base_identity import BaseIdentity
from shardwise.checkpoints.facts import Facts
from shardwise.checkpoints.state import (
    CheckpointerOptions,
    CollectedState,
    Mode,
    StateContents,
    TrainState,
    adapter_settings,
    contents_of,
    describe_selection,
    key_of,
    look,
)
from shardwise.checkpoints.write import run_now
from shardwise.engines.arguments import hints_of, require_meant
from shardwise.errors import ConfigError, RankMismatchError, StorageError
from shardwise.execution.checksums import as_bytes
from shardwise.execution.distributed_chunks import ChunkStaging, TensorsPlan, Views, plan_tensors, views_of
from shardwise.execution.memory import collected_later
from shardwise.execution.replicas import Replicas, compare_replicas
from shardwise.execution.state_values import reject_meta
from shardwise.execution.tensor_facts import facts_by_name
from shardwise.execution.world import Clock, MismatchedRanks, World
from shardwise.models.optimizer_parsing import class_name
from shardwise.models.selection import AdapterOnly, Selection
from shardwise.planning.load_plan import OnDiffering
from shardwise.planning.matching import OnFault, Tolerance
from shardwise.planning.moves import in_common
from shardwise.report.save_reports import CheckpointReport, RestoreReport
from shardwise.tensors import Box

_MAX_STEP = 10**15

_BESIDE = "/checkpoint"
"""The purpose of meetings in the background."""


class Checkpointer:
    """Keeps the state of a training in a folder, in the format of ``torch.distributed.checkpoint``.

    A checkpoint is committed in one step and complete from then on. After a kill at any moment the earlier ones
    remain. It can be restored on any number of ranks and any mesh, bit for bit. See docs/checkpoints.md.

    A context manager: :meth:`close` is called at the end.

    Args:
        directory: a folder that all ranks see, for the checkpoints of one run alone.
        keep: number of newest complete checkpoints to keep. None keeps all.
        mode: ``"sync"``, or ``"async"``: the state is copied to host memory, and a thread writes it while the
            training continues. The next ``save`` waits for it.
        only: the stored part of the model: ``None`` for all, or ``AdapterOnly()`` for a PEFT adapter and all other
            trained parameters.
        on_differing_buffers: buffers that have other values on some ranks than on others, as running statistics
            have, are stored as the first rank has them, ``"first_rank"``, or are an error, ``"error"``.
        options: budget, process group, timeouts.

    Raises:
        ConfigError: an argument cannot be honored.
        StorageError: the folder is none.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        mode: Mode = "sync",
        only: Selection = None,
        on_differing_buffers: OnDiffering = "first_rank",
        options: CheckpointerOptions = CheckpointerOptions(),  # noqa: B008
    ) -> None:
        given = {"mode": mode, "only": only, "on_differing_buffers": on_differing_buffers, "options": options}
        require_meant(hints_of(Checkpointer.__init__), given)
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ConfigError(f"keep={keep!r}: pass the number of checkpoints to keep, 1 or more; None keeps all")
        self._root = folder.require_local(directory)
        self._keep = keep
        self._mode = mode
        self._only = only
        self._on_differing_buffers = on_differing_buffers
        self._options = options
        self._staging = ChunkStaging()
        self._looked: CollectedState | None = None
        self._executor = futures.ThreadPoolExecutor(1, thread_name_prefix="shardwise-checkpoint")
        self._on_its_way: tuple[int, futures.Future[CheckpointReport]] | None = None
        self._newest = folder.newest_in(self._root)

    @property
    def directory(self) -> Path:
        """The folder of the checkpoints."""
        return self._root

    def steps(self) -> list[int]:
        """The steps of which there is a complete checkpoint, in order. Collective: yes."""
        with self._world("steps") as world:
            return world.broadcast(folder.steps_in, self._root)

    def latest(self) -> int | None:
        """Return the step of the newest checkpoint with no missing or truncated file, or None.

        Collective: yes.
        """
        with self._world("latest") as world:
            return world.broadcast(folder.newest_in, self._root)

    @torch.no_grad()
    def save(self, step: int, state: TrainState) -> CheckpointReport:
        """Save a checkpoint. With ``"async"``, wait for the previous one and save in the background.

        Generators of random numbers are taken as they are. The training must not be in the middle of a step.

        Collective: yes, over ``options.process_group`` (default: all ranks). Memory: ``options.budget_bytes``. With
        ``"async"`` also this rank's part of the state, on the host.

        Args:
            step: optimizer steps done: more than at the newest checkpoint in the folder.
            state: the state to save.

        Raises:
            ConfigError: an argument is not supported, or a part has a value that is not plain data.
            ShardingError: tensors are on meta, or the shards of parameters or optimizer state cannot be
                determined.
            RankMismatchError: ranks have different models, optimizers or optimizer settings (learning rates, for
                example), made different calls, or hold different values of replicated parameters or optimizer
                state.
            StorageError: the folder cannot be written to, or somebody else writes there.
            RankLostError: a rank has been lost.
            CheckpointError: (or a subclass) with ``"async"``, whatever befell the checkpoint before: of this
                one the folder is looked at in the background, too.

        Every error is the same on every rank, and leaves all complete checkpoints as they are.
        """
        start = time.perf_counter()
        clock = Clock()
        with clock.phase("wait"):
            self.wait()
        with ExitStack() as stack:
            # Joined before the ranks meet for the first time: whoever is lost from then on is missed there, too.
            beside = None if self._mode == "sync" else stack.enter_context(self._world("save", _BESIDE))
            with self._world("save") as world:
                job = self._job(world, clock, step, state)
                if beside is None:
                    with clock.phase("write"), self._counting(step):
                        job = replace(job, report=write.carry_out(world, job))
                else:
                    with clock.phase("stage"):
                        job = replace(job, content=run_now(job.content))
            blocked_s, seconds = time.perf_counter() - start, dict(clock.seconds)
            job = replace(job, report=replace(job.report, blocked_s=blocked_s, seconds=seconds))
            if beside is not None:
                self._on_its_way = step, self._executor.submit(write.write_in_background, beside, job)
            stack.pop_all()
        return job.report

    def wait(self) -> CheckpointReport | None:
        """Wait for the checkpoint in progress, if any, and return its report.

        Collective: yes.

        Raises:
            CheckpointError: (or a subclass) its failure, the same on every rank.
        """
        if self._on_its_way is None:
            return None
        step, outcome = self._on_its_way
        futures.wait([outcome])  # interrupted here, it is still on its way
        self._on_its_way = None
        with self._counting(step):
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
        """Restore a training from a checkpoint, on these ranks.

        Values are put into the tensors that are there. A model on meta, as ``from_pretrained(load_weights=False)``
        makes it, is brought up from the checkpoint, and the optimizers are given its new parameters.

        Collective: yes, over ``options.process_group`` (default: all ranks). Memory: ``options.budget_bytes``, and
        new state: that of optimizers, and a model that was on meta.

        Args:
            state: with the same parts as the one that was saved.
            step: of the checkpoint. None restores the newest.
            on_missing: ``Ignore(only=...)`` for parts that the checkpoint may not have: FQNs, "FQN: entry" of
                optimizers, or "optimizers", "schedulers", "scaler", "data" for a whole part.
            on_unexpected: ``Ignore(only=...)`` for additional parts of the checkpoint.
            on_mismatched: ``Ignore(only=...)`` for parts of another shape or form.
            on_other_base: ``Ignore()`` allows an adapter to resume on a base other than its own.
                ``Ignore(only=...)`` allows differences in "config", "shapes" (and names) or "values".

        Raises:
            ConfigError: an argument is none of these.
            KeyMismatchError: the checkpoint is of another kind of tuning, of another base or adapter, or does not
                fit.
            FormatError: it is damaged, or another's.
            StorageError: there is none, or it cannot be read.
            RankMismatchError: ranks have different models or optimizers.
            ShardingError: tensors on meta that the checkpoint does not hold.
            RankLostError: a rank has been lost.

        Every error is the same on every rank. Mismatches are reported before anything is changed.
        """
        self.wait()
        tolerance = Tolerance(on_missing, on_unexpected, on_mismatched, on_other_base)
        given = {"on_missing": on_missing, "on_unexpected": on_unexpected}
        given |= {"on_mismatched": on_mismatched, "on_other_base": on_other_base}
        with self._world("restore") as world:
            world.run_all(require_meant, hints_of(Checkpointer.restore), given)
            asked = repr((step, tolerance, self._only))
            world.require_equal(asked, "what is asked to be restored (step, only, on_...)")
            report = restoring.restore(world, self._root, state, step, self._only, tolerance, self._options)
            self._newest = world.broadcast(folder.newest_in, self._root)
        return report

    def discard_after(self, step: int) -> list[int]:
        """Remove all checkpoints of later steps, to resume from this one. Return the removed steps.

        Collective: yes.

        Raises:
            StorageError: something cannot be removed.
        """
        self.wait()
        with self._world("discard_after") as world:

            def discard() -> list[int]:
                return folder.remove(self._root, [late for late in folder.steps_in(self._root) if late > step])

            removed = world.broadcast(discard)
            self._newest = world.broadcast(folder.newest_in, self._root)
        return removed

    def close(self) -> None:
        """Wait for the checkpoint that is on its way. Collective: yes.

        Raises:
            CheckpointError: (or a subclass) the failure of the checkpoint in progress.
        """
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    @contextmanager
    def _counting(self, step: int) -> Iterator[None]:
        """Record that the checkpoint of this step is complete if the block commits it, even if cleanup fails."""
        try:
            yield
        except BaseException:
            with suppress(StorageError):
                if step in folder.steps_in(self._root):
                    self._newest = step
            raise
        self._newest = step

    def _world(self, call: str, purpose: str = "") -> World:
        group, timeouts = self._options.process_group, self._options.timeouts
        return World.current(group, timeouts, purpose=purpose, call=f"Checkpointer.{call}")

    def _job(self, world: World, clock: Clock, step: int, state: TrainState) -> write.Job:
        """Agree with all ranks on the content of the checkpoint. Collective: yes."""
        with clock.phase("look"):
            contents, alike, data, base = self._agree(world, step, state)
        looked = contents.looked
        with clock.phase("plan"):
            plan, views, replicas = _plan(world, looked)
        with clock.phase("compare"):
            odd = compare_replicas(world, replicas, self._on_differing_buffers)
            differing = tuple(looked.buffers[key] for key in odd)
        facts = Facts(
            step=step,
            world_size=world.size,
            holds=describe_selection(self._only),
            adapter=adapter_settings(looked.model, self._only),
            others=looked.others,
            alike=alike,
            data=data,
            user=contents.user,
            optimizers=[[class_name(bound.optimizer), len(bound.groups)] for bound in looked.bounds],
            base=base,
        )
        report = CheckpointReport(
            rank=world.rank,
            world_size=world.size,
            directory=str(self._root / folder.name_of(step)),
            step=step,
            is_complete=False,
            tensors=len(plan.tensors),
            state_bytes=plan.state_bytes,
            written_bytes=plan.nbytes(world.rank),
            differing_buffers=differing,
        )
        stored = contents.stored(data, world.rank)
        return write.Job(
            self._root,
            step,
            self._newest,
            self._keep,
            plan,
            lambda: (self._views(views), stored),
            facts,
            self._options.budget_bytes,
            report,
        )

    @collected_later()
    def _views(self, views: Views) -> Views:
        """The tensors, or a copy of them if they may change while they are written."""
        return views if self._mode == "sync" else self._staging.copy(views)

    @collected_later()
    def _take_down(self, step: int, state: TrainState, rank: int) -> StateContents:
        if type(step) is not int or not 0 <= step < _MAX_STEP:
            raise ConfigError(f"step={step!r} is not a number of optimizer steps")
        write.require_after(self._root, step, self._newest)
        looked = look(state, self._only, self._looked)
        if looked is not self._looked:
            reject_meta({key_of(path): tensor for path, tensor in looked.tensors.items()}, "the state")
        self._looked = looked
        return contents_of(looked, state, rank)

    def _agree(
        self, world: World, step: int, state: TrainState
    ) -> tuple[StateContents, list[str], str, BaseIdentity | None]:
        """Collect the state, and compare the replicated part between ranks.

        The last is the identity of a base that is not stored, on the first rank.
        """
        call = repr((step, self._keep, self._mode, self._only))
        has_base = isinstance(self._only, AdapterOnly)
        taken: list[StateContents] = []
        bases: list[BaseIdentity] = []

        def tell() -> SaveWords:
            own = self._take_down(step, state, world.rank)
            taken.append(own)
            base = own.looked.base.taken() if has_base else {}
            return SaveWords(call, own.data, dict(own.random), base, own.settings, own.rates)

        def conclude(told: Sequence[SaveWords]) -> tuple[list[str], str]:
            agreed = agreed_of(told)
            if has_base:
                looked = taken[0].looked
                bases.append(looked.base.identity(looked.model, [item.base for item in told]))
            return agreed

        agreed = world.map_reduce(tell, conclude)
        return taken[0], *agreed, bases[0] if bases else None


def _plan(world: World, looked: CollectedState) -> tuple[TensorsPlan, Views, Replicas]:
    """Plan the writes of all ranks. Return also this rank's chunks, and its replicated tensors. Collective: yes."""
    tensors = {key_of(path): tensor for path, tensor in looked.tensors.items()}
    told = world.all_gather(facts_by_name, tensors)
    plan = world.run_all(plan_tensors, looked.tensors, told, looked.buffers, looked.others_of)
    views = world.run_all(views_of, plan.by_rank[world.rank], tensors, looked.local)
    common = in_common({key: tuple(facts[key].boxes for facts in told) for key in tensors}, world.rank)
    numbers = {name: as_bytes(value) for name, value in looked.numbers.items()}
    if world.size > 1:  # every rank has the numbers of optimizers
        common |= {name: ((Box.whole(value.shape), tuple(range(world.size))),) for name, value in numbers.items()}
    replicas = world.run_all(Replicas.among, {**tensors, **numbers}, common, looked.buffers)
    return plan, views, replicas


@dataclass(frozen=True, slots=True)
class SaveWords:
    """The arguments and the small state of a rank, which the ranks compare before a checkpoint."""

    call: str
    data: str
    random: dict[str, str]
    base: Mapping[tuple[str, Box], int]
    """Samples of the base; empty if the checkpoint holds everything."""
    settings: str
    rates: list[float]


def agreed_of(told: Sequence[SaveWords]) -> tuple[list[str], str]:
    """Return the generators of random numbers that are equal on all ranks, and whose the position in the data is.

    Raises:
        RankMismatchError: ranks were called differently, or have different settings.
    """
    if odd := MismatchedRanks.among([item.call for item in told]):
        raise RankMismatchError(
            f"the list of arguments (step, keep, mode, only) on rank {odd.shown} is not that of rank 0"
        )
    if odd := MismatchedRanks.among([item.settings for item in told]):
        own, those = (", ".join(map(str, told[rank].rates[:4])) or "none" for rank in (odd.first, 0))
        raise RankMismatchError(
            f"the settings of the optimizers on rank {odd.shown} are not those of rank 0 (learning rates {own} "
            f"against {those}); ranks have stepped with different schedules or settings: give all ranks the same"
        )
    first = told[0].random
    alike = [name for name in first if all(item.random.get(name) == first[name] for item in told)]
    positions = {item.data for item in told}
    data = "none" if positions == {""} else "one" if len(positions) == 1 else "each"
    if "" in positions and data != "none":
        raise RankMismatchError("some ranks have a position in the data and others none. Give all ranks theirs")
    return alike, data
