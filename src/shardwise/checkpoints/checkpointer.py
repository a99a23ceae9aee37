"""``Checkpointer``: the state of a training into a folder, and back on any number of ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from shardwise.checkpoints import folder, write
from shardwise.checkpoints import restore as restoring
from shardwise.checkpoints.agreed_save import (
    AgreedSave,
    OwnState,
    PlannedSave,
    SaveWords,
    agreed_of,
    layout_signature,
)
from shardwise.checkpoints.base_identity import BaseIdentity
from shardwise.checkpoints.facts import Facts, packed
from shardwise.checkpoints.modes import (
    Asynchronous,
    CheckpointerOptions,
    KeepAll,
    KeepLast,
    Latest,
    Mode,
    Retention,
    Synchronous,
    Which,
)
from shardwise.checkpoints.state import (
    Looked,
    TrainState,
    adapter_settings,
    contents_of,
    in_words,
    key_of,
    look,
)
from shardwise.checkpoints.write import Background, completed, done_now, promised
from shardwise.engines.arguments import hints_of, require_meant
from shardwise.errors import ConfigError, StorageError
from shardwise.execution.memory.garbage import collected_later
from shardwise.execution.moving.reshard import facts_of
from shardwise.execution.ranks.progress import Clock
from shardwise.execution.ranks.world import World
from shardwise.execution.states.agreed import refuse_meta
from shardwise.execution.states.replicas import odd_circles, require_mode, settle_odd
from shardwise.execution.states.replicas import tell as tell_of
from shardwise.execution.writing.chunk_plan import plan_tensors
from shardwise.execution.writing.chunk_stream import ChunkSource, ChunkStaging, InPlace, places_of
from shardwise.models.optimizers.optimizer_kind import class_name
from shardwise.models.selection import AdapterOnly, Everything, Selection
from shardwise.planning.loads.load_plan import OnDiffering, Refuse, TakeFirst
from shardwise.planning.moves.assembly import in_common
from shardwise.planning.states.matching import OnFault, Tolerance
from shardwise.report.checkpoint_report import CheckpointReport, RestoreReport

_MAX_STEP = 10**15

_BESIDE = "/checkpoint"
"""The purpose of meetings in the background."""


class Checkpointer:
    """Keeps the state of a training in a folder, in the format of ``torch.distributed.checkpoint``.

    A checkpoint counts from one step on, and is whole then; whatever is killed when, the ones before stay. It can
    be restored on any number of ranks and any mesh, bit for bit. See docs/checkpoints.md.

    A context manager: :meth:`close` is called at the end.

    Args:
        directory: a folder that all ranks see, for the checkpoints of one run alone.
        keep: ``KeepLast(3)``, or ``KeepAll()``.
        mode: ``Synchronous()``, or ``Asynchronous()``: written by a thread while the training goes on.
        only: what of the model is stored: ``Everything()``, or ``AdapterOnly()``: an adapter of PEFT's, and
            whatever else is trained.
        on_differing_buffers: buffers that have other values on some ranks than on others, as running statistics
            have, are stored as the first rank has them, ``TakeFirst()``, or are an error, ``Refuse()``.
        options: budget, process group, patience.

    Raises:
        ConfigError: an argument cannot be honoured.
        StorageError: the folder is none.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: Retention = KeepLast(),  # noqa: B008 - frozen
        mode: Mode = Synchronous(),  # noqa: B008
        only: Selection = Everything(),  # noqa: B008
        on_differing_buffers: OnDiffering = TakeFirst(),  # noqa: B008
        options: CheckpointerOptions = CheckpointerOptions(),  # noqa: B008
    ) -> None:
        _require_kinds(keep, mode, only)
        require_mode(on_differing_buffers)
        self._root = folder.require_local(directory)
        self._keep = keep
        self._mode = mode
        self._only = only
        self._on_differing_buffers = on_differing_buffers
        self._options = options
        self._staging = ChunkStaging()
        self._looked: Looked | None = None
        self._planned: PlannedSave | None = None
        self._on_its_way: Background | None = None
        self._newest = folder.newest_in(self._root)

    @property
    def directory(self) -> Path:
        """The folder of the checkpoints."""
        return self._root

    def steps(self) -> list[int]:
        """The steps of which there is a complete checkpoint, in order. Collective: yes."""
        with self._world("steps") as world:
            return world.from_first(lambda: folder.steps_in(self._root))

    def latest(self) -> int | None:
        """The step of the newest checkpoint of which no file is gone or cut; None where there is none.

        Collective: yes.
        """
        with self._world("latest") as world:
            return world.from_first(lambda: folder.newest_in(self._root))

    @torch.no_grad()
    def save(self, step: int, state: TrainState) -> CheckpointReport:
        """Save a checkpoint; in the background with ``Asynchronous()``, after waiting for the one before.

        Generators of random numbers are taken as they are. The training must not be in the middle of a step.

        Collective: yes, over ``options.process_group`` (default: all ranks).
        Memory: ``options.budget_bytes``; with ``Asynchronous()`` also this rank's part of the state, on the host.

        Args:
            step: optimizer steps done: more than at the newest checkpoint in the folder.
            state: what to save.

        Raises:
            ConfigError: an argument cannot be honoured; a part holds what is no plain data.
            PlacementError: tensors are on meta; parameters or state of optimizers whose shards cannot be told.
            DisagreementError: ranks have different models or optimizers (settings of these, such as learning
                rates, too), or were called differently; parameters,
                or state of optimizers, that several ranks hold have different values there.
            StorageError: the folder cannot be written to, or somebody else writes there.
            RankLostError: a rank has been lost.
            CheckpointError: (or a subclass) with ``Asynchronous()``, whatever befell the checkpoint before: of this
                one the folder is looked at in the background, too.

        Every error is the same on every rank, and leaves all complete checkpoints as they are.
        """
        start = time.perf_counter()
        clock = Clock()
        with clock.phase("wait"):
            self.wait()
        with ExitStack() as stack:
            # Joined before the ranks meet for the first time: whoever is lost from then on is missed there, too.
            beside = (
                None if isinstance(self._mode, Synchronous) else stack.enter_context(self._world("save", _BESIDE))
            )
            with self._world("save") as world:
                job, report = self._job(world, clock, step, state)
                if beside is None:
                    with clock.phase("write"), self._counting(step):
                        report = completed(report, write.carry_out(world, job))
                else:
                    with clock.phase("stage"):
                        job = replace(job, content=done_now(job.content))
            report = replace(report, blocked_s=time.perf_counter() - start, seconds=dict(clock.seconds))
            if beside is not None:
                self._on_its_way = Background(beside, job, report)
            stack.pop_all()
        return report

    def wait(self) -> CheckpointReport | None:
        """Wait for the checkpoint that is on its way, if there is one; its report.

        Collective: yes.

        Raises:
            CheckpointError: (or a subclass) what went wrong with it, the same on every rank.
        """
        pending = self._on_its_way
        if pending is None:
            return None
        pending.join()  # interrupted here, it is still on its way
        self._on_its_way = None
        with self._counting(pending.step):
            return pending.result()

    def restore(
        self,
        state: TrainState,
        which: Which = Latest(),  # noqa: B008
        *,
        on_missing: OnFault = Refuse(),  # noqa: B008
        on_unexpected: OnFault = Refuse(),  # noqa: B008
        on_mismatched: OnFault = Refuse(),  # noqa: B008
        on_other_base: OnFault = Refuse(),  # noqa: B008
    ) -> RestoreReport:
        """Bring a training back to where it was when a checkpoint was saved, on these ranks.

        Values are put into the tensors that are there. A model on meta, as ``from_pretrained(weights=Later())``
        makes it, is brought up from the checkpoint, and the optimizers are given its new parameters.

        Collective: yes, over ``options.process_group`` (default: all ranks).
        Memory: ``options.budget_bytes``, and what is made: the state of optimizers, a model that was on meta.

        Args:
            state: with the same parts as the one that was saved.
            which: ``Latest()``, or ``AtStep(step)``.
            on_missing: ``Ignore(only=...)`` for what the checkpoint may lack: FQNs, "FQN: entry" of optimizers,
                or "optimizers", "schedulers", "scaler", "data" for all of one.
            on_unexpected: ``Ignore(only=...)`` for what it may have beside.
            on_mismatched: ``Ignore(only=...)`` for what may have another shape or form.
            on_other_base: ``Ignore()`` where an adapter may go on on another base than it was saved with;
                ``Ignore(only=...)`` of "config", "shapes" (and names) and "values" for what may differ.

        Raises:
            ConfigError: an argument is none of these.
            CoverageError: the checkpoint is of another kind of tuning, of another base or adapter, or does not fit.
            FormatError: it is damaged, or another's.
            StorageError: there is none, or it cannot be read.
            DisagreementError: ranks have different models or optimizers.
            PlacementError: tensors on meta that the checkpoint does not hold.
            RankLostError: a rank has been lost.

        Every error is the same on every rank. What does not fit is told before anything is changed.
        """
        self.wait()
        tolerance = Tolerance(on_missing, on_unexpected, on_mismatched, on_other_base)
        given = {"on_missing": on_missing, "on_unexpected": on_unexpected}
        given |= {"on_mismatched": on_mismatched, "on_other_base": on_other_base}
        with self._world("restore") as world:
            world.together(lambda: require_meant(hints_of(Checkpointer.restore), given))
            asked = repr((which, tolerance, self._only))
            world.require_equal(asked, "what is asked to be restored (which, only, on_...)")
            report = restoring.restore(world, self._root, state, which, self._only, tolerance, self._options)
            self._newest = world.from_first(lambda: folder.newest_in(self._root))
        return report

    def discard_after(self, step: int) -> list[int]:
        """Remove all checkpoints of later steps, to go on from this one; the steps that were removed.

        Collective: yes.

        Raises:
            StorageError: something cannot be removed.
        """
        self.wait()
        with self._world("discard_after") as world:

            def discard() -> list[int]:
                return folder.remove(self._root, [late for late in folder.steps_in(self._root) if late > step])

            removed = world.from_first(discard)
            self._newest = world.from_first(lambda: folder.newest_in(self._root))
        return removed

    def close(self) -> None:
        """Wait for the checkpoint that is on its way. Collective: yes.

        Raises:
            CheckpointError: (or a subclass) what went wrong with it.
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
        """Know of the checkpoint of this step, if the block makes it count, even where it then fails to tidy up."""
        try:
            yield
        except BaseException:
            with suppress(StorageError):
                if step in folder.steps_in(self._root):
                    self._newest = step
            raise
        self._newest = step

    def _world(self, call: str, purpose: str = "") -> World:
        group, patience = self._options.process_group, self._options.patience
        return World.current(group, patience, purpose=purpose, call=f"Checkpointer.{call}")

    @collected_later()
    def _take_down(self, step: int, state: TrainState, rank: int) -> OwnState:
        if type(step) is not int or not 0 <= step < _MAX_STEP:
            raise ConfigError(f"step={step!r} is not a number of optimizer steps")
        write.require_after(self._root, step, self._newest)
        looked = look(state, self._only, self._looked)
        if looked is not self._looked:
            refuse_meta({key_of(path): tensor for path, tensor in looked.tensors.items()}, "the state")
        self._looked = looked
        contents = contents_of(looked, state, rank)
        values = contents.own if rank else {**contents.common, **contents.own}
        return OwnState(
            looked,
            self._still_planned(looked),
            contents,
            {path: packed(value, key_of(path)) for path, value in values.items()},
        )

    def _still_planned(self, looked: Looked) -> PlannedSave | None:
        before = self._planned
        if before is None or before.looked is looked:
            return before
        return replace(before, looked=looked) if before.layout == layout_signature(looked) else None

    def _job(self, world: World, clock: Clock, step: int, state: TrainState) -> tuple[write.Job, CheckpointReport]:
        """What is to be written, and what will be told of it, agreed on by all ranks. Collective: yes."""
        with clock.phase("look"):
            own, agreed, base = self._agree(world, step, state)
        with clock.phase("plan"):
            planned = self._planned = self._plan(world, own, agreed)
        with clock.phase("compare"):
            differing = self._compare(world, planned, agreed)

        def content() -> write.RankContent:
            return write.RankContent(self._source(planned), own.stored(agreed, world.rank))

        about = self._about(step, world.size, own, agreed, base)
        job = write.Job(self._root, step, self._newest, self._keep, planned.plan, content, about)
        return job, replace(promised(world, job), differing_buffers=differing)

    @collected_later()
    def _source(self, planned: PlannedSave) -> ChunkSource:
        """Where the bytes are taken from: the tensors, or, while these may change, a copy of them."""
        if isinstance(self._mode, Synchronous):
            return InPlace(planned.views, self._options.budget_bytes)
        return self._staging.copy(planned.views)

    def _about(
        self, step: int, world_size: int, own: OwnState, agreed: AgreedSave, base: BaseIdentity | None
    ) -> Facts:
        return Facts(
            step=step,
            world_size=world_size,
            holds=in_words(self._only),
            adapter=adapter_settings(own.looked.model, self._only),
            others=own.looked.others,
            alike=agreed.alike,
            data=agreed.data,
            user=own.contents.user,
            optimizers=[[class_name(bound.optimizer), len(bound.groups)] for bound in own.looked.bounds],
            base=base,
        )

    def _agree(
        self, world: World, step: int, state: TrainState
    ) -> tuple[OwnState, AgreedSave, BaseIdentity | None]:
        """What there is, what all ranks have in common, and whether the plan of the last checkpoint still holds.

        Beside these, on the first rank, the identity of a base that is not stored.
        """
        call = repr((step, self._keep, self._mode, self._only))
        has_base = isinstance(self._only, AdapterOnly)
        taken: list[OwnState] = []
        bases: list[BaseIdentity] = []

        def tell() -> SaveWords:
            own = self._take_down(step, state, world.rank)
            taken.append(own)
            replicas = None if own.planned is None else tell_of(own.planned.replicas, self._on_differing_buffers)
            base = own.looked.base.taken() if has_base else b""
            found = own.contents
            return SaveWords(call, replicas, found.data, dict(found.random), base, found.settings, found.rates)

        def conclude(told: Sequence[SaveWords]) -> AgreedSave:
            agreed = agreed_of(told)
            if has_base:
                looked = taken[0].looked
                sums = looked.base.sums([item.base for item in told])
                bases.append(looked.base.identity(looked.model, sums))
            return agreed

        agreed = world.all_reduce(tell, conclude)
        return taken[0], agreed, bases[0] if bases else None

    def _compare(self, world: World, planned: PlannedSave, agreed: AgreedSave) -> tuple[str, ...]:
        """Look at what several ranks hold; names of buffers that differ."""
        odd, mode = agreed.odd, self._on_differing_buffers
        if odd is None:
            odd = world.all_reduce(lambda: tell_of(planned.replicas, mode), odd_circles)
        return tuple(planned.looked.buffers[key] for key in settle_odd(world, planned.replicas, odd, mode))

    def _plan(self, world: World, own: OwnState, agreed: AgreedSave) -> PlannedSave:
        """Who writes what; that of the last checkpoint where every rank still has what it had then."""
        looked = own.looked
        if agreed.odd is not None and own.planned is not None:
            return own.planned
        tensors = {key_of(path): tensor for path, tensor in looked.tensors.items()}
        told = world.each(lambda: {key: facts_of(tensor, key) for key, tensor in tensors.items()})
        shapes = {path: (tuple(tensor.shape), tensor.dtype) for path, tensor in looked.tensors.items()}
        plan = world.together(lambda: plan_tensors(shapes, told, looked.buffers, looked.others_of))
        places = world.together(lambda: places_of(plan.by_rank[world.rank], tensors))
        held = {key: tuple(facts[key].boxes for facts in told) for key in tensors}
        return PlannedSave(looked, layout_signature(looked), plan, places, in_common(held, world.rank))


def _require_kinds(keep: object, mode: object, only: object) -> None:
    if not isinstance(keep, (KeepLast, KeepAll)):
        raise ConfigError(f"keep={keep!r}: pass KeepLast(...) or KeepAll()")
    if not isinstance(mode, (Synchronous, Asynchronous)):
        raise ConfigError(f"mode={mode!r}: pass Synchronous() or Asynchronous()")
    if not isinstance(only, (Everything, AdapterOnly)):
        raise ConfigError(f"only={only!r}: pass Everything() or AdapterOnly(...)")
