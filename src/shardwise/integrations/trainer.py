"""``ShardwiseTrainer``: the Hugging Face Trainer, or one of TRL's, whose checkpoints are ours.

[Note: A rank that fails alone] Within a step ranks work by themselves in two places: while the batches are made,
and in the loss, once the model has run. A rank that raises there leaves the training and announces its error
([Note: Nobody waits in a collective] in ``execution/control_channel.py``). The others would enter a collective and
wait for it. So they meet first, over the store, which takes about a millisecond. On an accelerator, not after the
loss: numerical errors of a loss appear only after synchronizing with the device, which is too slow for each step.

Whatever a rank raises elsewhere finds the others in a collective already. Those cannot be interrupted. A rank that
is still in one a quarter of a minute after another has left reports it and exits.

If a tracker on the first rank fails, or a callback stops the training because of local data, the others would enter
a collective and wait. So exceptions of callbacks are kept until the next synchronization (the end of each step,
evaluation and save), and changes of ``control`` are set on all ranks there. A step costs one sum of a few numbers,
on the host: on an accelerator it would be there only after the whole step.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeAlias
from unittest.mock import patch

import torch.distributed as dist
from torch import nn

from shardwise.checkpoints.checkpointer import Checkpointer
from shardwise.checkpoints.state import TrainState, describe_selection, generator_states, restore_generators
from shardwise.errors import ConfigError, KeyMismatchError, RankLostError
from shardwise.execution.collective_errors import translate_collective_errors
from shardwise.execution.locked_folder import LockedFolder
from shardwise.execution.world import World
from shardwise.integrations import trainer_compat as compat
from shardwise.integrations import trainer_runs as folders
from shardwise.integrations.agreed_events import AgreedEvents, raise_together
from shardwise.integrations.trainer_marks import (
    already_sharded,
    given_arguments,
    require_data_parallel,
    require_trainable,
)
from shardwise.integrations.trainer_runs import MODEL_ALONE, TrainerFacts
from shardwise.interchange.trainer_restoring import load_trainer_checkpoint
from shardwise.models.rebind import plain_optimizer, require_made_for_shards
from shardwise.models.selection import AdapterOnly, Selection, has_adapters
from shardwise.planning.matching import OnFault

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

Meet: TypeAlias = Callable[[], None]
"""A meeting of all ranks."""


P = ParamSpec("P")

_log = logging.getLogger(__name__)


class ShardwiseTrainer(_Trainer):
    """Mixin for a Trainer class whose checkpoints resume on any number of ranks. List it before the Trainer.

    ::

        class MyTrainer(ShardwiseTrainer, SFTTrainer): ...

        trainer = MyTrainer(model=for_trainer(model), args=SFTConfig(...), ...)
        trainer.train(resume_from_checkpoint=True)

    Arguments keep their meaning (``save_steps``, ``save_total_limit``, ``save_only_model``,
    ``load_best_model_at_end``). Differences, see docs/trainer.md: every rank writes its own bytes. A checkpoint is
    committed in one step, and a kill loses no committed one. An output folder of another run is an error. An
    exception of a callback on one rank is raised on all.

    Raises:
        ConfigError: the model has not been to :func:`~shardwise.integrations.trainer_marks.for_trainer`, or the
            arguments would have it sharded again, or trained by each rank alone.
    """

    def __init_subclass__(cls, **others: Any) -> None:
        super().__init_subclass__(**others)
        compat.require_before_trainer(cls, ShardwiseTrainer)

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        after = type(self).__mro__[type(self).__mro__.index(ShardwiseTrainer) + 1 :]
        given = given_arguments(after, positional, keywords)
        with World.current(call="ShardwiseTrainer") as world:
            world.run_all(lambda: require_trainable(type(self), given, world))
        self._asked_for: list[bool] = []
        """``save_only_model``, as it was."""
        try:
            super().__init__(*positional, **keywords)
        finally:
            for value in self._asked_for:
                self.args.save_only_model = value
        world = World.current(call="the Trainer's callbacks")
        self._events = AgreedEvents(self.callback_handler.call_event, world, lambda: bool(self.is_in_train))
        vars(self.callback_handler)["call_event"] = self._events
        self._saved_step: int | None = None
        self._on_other_base: OnFault = "error"
        self._numbers: dict[str, Any] | None = None
        """States of generators of random numbers, to be set once the data are where they were."""

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator like the Trainer, and reject settings that would shard the model again."""
        if self.args.dataloader_pin_memory:  # else each batch waits until the device has done all before it
            settings: Any = self.args.accelerator_config
            settings.non_blocking = True
        super().create_accelerator_and_postprocess()
        size = dist.get_world_size() if dist.is_initialized() else 1
        if self.args.world_size != size:
            raise ConfigError(
                f"accelerate counts {self.args.world_size} processes, and the model's process group has {size} "
                "ranks, so that all ranks would train on the same rows. Launch by torchrun or accelerate launch, "
                "and on CPUs pass use_cpu=True"
            )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise already_sharded(
                "ACCELERATE_USE_FSDP, or accelerate's configuration," if self.is_fsdp_enabled else "deepspeed"
            )
        if self.accelerator.parallelism_config is not None:
            require_data_parallel(self.accelerator.parallelism_config)
        # The Trainer refuses resumable checkpoints of models that are sharded already; these here are. What was
        # asked for is put back once it has been made.
        self._asked_for.append(self.args.save_only_model)
        self.args.save_only_model = True

    def create_optimizer(self, *positional: Any, **keywords: Any) -> Any:
        """Create the optimizer like the Trainer, and reject one that cannot step shards."""
        made = super().create_optimizer(*positional, **keywords)
        require_made_for_shards(plain_optimizer(made), dict(self._trained.named_parameters()))
        return made

    # Training

    def train(
        self, resume_from_checkpoint: Any = None, *others: Any, on_other_base: OnFault = "error", **keywords: Any
    ) -> Any:
        """Train like the Trainer. Collective: yes.

        Args:
            resume_from_checkpoint: True resumes from the newest complete checkpoint in ``output_dir``.
            *others: as of the Trainer's.
            on_other_base: ``Ignore()`` allows an adapter to resume on a base other than its own. See
                :meth:`~shardwise.checkpoints.checkpointer.Checkpointer.restore`.
            **keywords: as of the Trainer's.

        Raises:
            ConfigError: there is no checkpoint, checkpoints of another run are in the folder, or the checkpoint is
                of another kind of tuning or another number of rows per step.
            RankLostError: a rank is lost, or has run out of memory.

        These are the same on every rank. Other errors of one rank, in its data loader or its loss, are raised
        there. The others raise a RankLostError with its message.
        """
        run, asked = self._run, _checkpoint_asked_for(resume_from_checkpoint)
        with World.current(call="Trainer.train") as world:
            world.require_equal((str(run), asked), "resume_from_checkpoint, or output_dir,")
            source, has_leftovers = world.broadcast(folders.beginning_of, run, asked)
            self._events.best = None
            if source is not None:
                facts = world.broadcast(folders.whole_facts_of, source)
                world.run_all(self._require_same, facts, source)
                self._events.best = world.broadcast(folders.best_of, source)
            if has_leftovers:
                world.broadcast(folders.remove_left, run)
        self._saved_step, self._on_other_base = None, on_other_base
        watched = World.current(call="the Trainer's steps")
        if watched.size > 1:
            watched.all_gather_object(None)
        try:
            named = translate_collective_errors(watched, self._where, _end_stuck)
            with named, self._meeting(watched):
                return super().train(None if source is None else str(source), *others, **keywords)
        finally:
            self.is_in_train = False

    def _meeting(self, world: World) -> ExitStack:
        """Synchronize the ranks around a block in which each works alone. See [Note: A rank that fails alone]."""
        stack = ExitStack()

        def meet() -> None:
            try:
                world.run_all(lambda: None)
            except RankLostError as lost:
                raise RankLostError(f"{self._where()}: {lost}") from lost

        if world.size > 1:
            batches = _met_after_batches(self.get_batch_samples, meet)
            stack.enter_context(patch.object(self, "get_batch_samples", batches))
            if self.args.device.type == "cpu":
                stack.enter_context(patch.object(self, "compute_loss", _met_after(self.compute_loss, meet)))
        return stack

    def _where(self) -> str:
        return f"in step {self.state.global_step + 1}"

    @property
    def _run(self) -> Path:
        assert self.args.output_dir is not None, "the Trainer's arguments have a default"
        return Path(self.args.output_dir)

    @property
    def _trained(self) -> nn.Module:
        assert isinstance(self.model, nn.Module), "it has been looked at"
        return self.model

    def _require_same(self, facts: TrainerFacts, source: Path) -> None:
        what = f"resume_from_checkpoint={str(source)!r}"
        own = describe_selection(self._only())
        if facts.holds not in (own, MODEL_ALONE):
            raise KeyMismatchError(
                f"{what}: holds the state of {facts.holds}, and this training has {own}. Resume it with the tuning "
                "that it was saved with (Full, Freeze, Lora, and the adapter's name)"
            )
        rows = self.get_total_train_batch_size(self.args)
        if rows != facts.rows_per_step and not self.args.ignore_data_skip:
            raise ConfigError(
                f"{what}: was saved with {facts.rows_per_step} rows in a step, and this training has {rows} "
                "(per_device_train_batch_size * gradient_accumulation_steps * ranks; then there were "
                f"{facts.world_size} ranks), so that its place in the data cannot be found. Keep the number of "
                "rows in a step, or pass ignore_data_skip=True"
            )

    # Saving

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        step = self.state.global_step
        if step == self._saved_step:  # at the end of a step, and again at the end of the epoch
            return
        run = Path(self._get_output_dir(trial=trial))
        folder = folders.folder_of(run, step)
        with (
            World.current(call="Trainer._save_checkpoint") as world,
            folders.locked_for(world, run, step) as saving,
        ):
            with self._keeping_all() as limit:  # what is older goes when the new one counts
                failure = _failure_of(super()._save_checkpoint, model, trial)
            if failure is not None:
                failure = saving.cause_of(failure)
            raise_together(world, failure)
            holds = MODEL_ALONE if self.args.save_only_model else describe_selection(self._only())
            rows = self.get_total_train_batch_size(self.args)
            facts = TrainerFacts(step, holds, rows, world.size)
            world.broadcast(lambda: folders.complete(saving.locked, folder, facts))
            self._saved_step = step
            world.broadcast(lambda: self._end_save(run, limit, saving.locked))

    def _finalize_training(self, trial: Any, *given: Any) -> Any:
        with self._keeping_all() as limit:
            done = super()._finalize_training(trial, *given)  # type: ignore[no-untyped-call]
        run = Path(self._get_output_dir(trial=trial))
        best = folders.step_in(run, self.state.best_model_checkpoint)
        if limit == 1 and best is not None:
            with World.current(call="Trainer.train") as world:
                world.broadcast(folders.remove_but, run, best)
        return done

    @contextmanager
    def _keeping_all(self) -> Iterator[int | None]:
        """The Trainer removes no checkpoints meanwhile, because the file that commits one must be removed first.

        The limit.
        """
        limit = self.args.save_total_limit
        self.args.save_total_limit = None
        try:
            yield limit
        finally:
            self.args.save_total_limit = limit

    def _end_save(self, run: Path, limit: int | None, marked: LockedFolder) -> None:
        """Remove checkpoints above the limit, and release the lock."""
        kinds = folders.checkpoints_in(run)
        complete = [step for step, kind in kinds.items() if kind is folders.FolderKind.COMPLETE]
        kept = folders.step_in(run, self.state.best_model_checkpoint)
        folders.remove_under(marked, run, folders.steps_to_remove(complete, limit, kept))
        marked.release()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:  # noqa: FBT001, FBT002
        """Save the model on all ranks, and the other files on the first. Collective: yes, for adapters as well."""
        self._save(output_dir or self.args.output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        failure = _failure_of(super()._save, output_dir, state_dict)
        with World.current(call="Trainer.save_model") as world:
            raise_together(world, failure)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with Checkpointer(Path(output_dir) / folders.STATE_FOLDER, keep=None, only=self._only()) as keeper:
            keeper.save(self.state.global_step, self._training_state())

    def _save_scaler(self, output_dir: str) -> None:
        """It is in the state."""

    def _save_rng_state(self, output_dir: str) -> None:
        """It is in the state."""

    # Going on

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:  # noqa: ARG002
        folder = Path(resume_from_checkpoint)
        with World.current(call="Trainer.train") as world:
            facts = world.broadcast(folders.facts_of, folder)
        if facts.holds == MODEL_ALONE:
            _log.warning("%s: holds the model alone (save_only_model). The optimizer starts from zero", folder)
            load_trainer_checkpoint(self._trained, folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / folders.STATE_FOLDER).is_dir():
            return
        with Checkpointer(Path(checkpoint) / folders.STATE_FOLDER, keep=None, only=self._only()) as keeper:
            report = keeper.restore(self._training_state(), on_other_base=self._on_other_base)
        self._numbers = generator_states()
        _log.info("%s", report)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """It is in the state."""

    def _load_rng_state(self, checkpoint: str | None) -> None:  # noqa: ARG002
        """Now that batches have been passed over, which draws."""
        if self._numbers is not None:
            restore_generators(self._numbers, "random numbers")
            self._numbers = None

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        assert best is not None
        load_trainer_checkpoint(self._trained, best, adapter=self._adapter() or "default")

    # What of the training is kept

    def _adapter(self) -> str | None:
        """Return the trained adapter, if there is one."""
        model: Any = self._trained
        return str(model.active_adapters[0]) if has_adapters(model) else None

    def _only(self) -> Selection:
        adapter = self._adapter()
        return None if adapter is None else AdapterOnly(adapter)

    def _training_state(self) -> TrainState:
        schedule: Any = self.lr_scheduler
        scaler = getattr(self.accelerator, "scaler", None)
        return TrainState(
            self._trained,
            plain_optimizer(self.optimizer),
            () if schedule is None else schedule,
            scaler=scaler,
            user={"global_step": self.state.global_step},
        )


def _checkpoint_asked_for(resume_from_checkpoint: Any) -> Path | Literal["newest"] | None:
    if resume_from_checkpoint is True:
        return "newest"
    return Path(resume_from_checkpoint) if resume_from_checkpoint else None


def _failure_of(action: Callable[P, object], *args: P.args, **keywords: P.kwargs) -> Exception | None:
    try:
        action(*args, **keywords)
    except Exception as error:
        return error
    return None


def _end_stuck(lost: RankLostError) -> None:
    """End this process, which waits for a lost rank in a collective that nobody can call back."""
    _log.error("%s. This rank waits for it in a collective, and ends", lost)
    logging.shutdown()
    os._exit(2)


def _met_after(function: Callable[..., Any], meet: Meet) -> Callable[..., Any]:
    """A function, and a meeting of all ranks behind it."""

    @wraps(function)
    def call(*positional: Any, **keywords: Any) -> Any:
        done = function(*positional, **keywords)
        meet()
        return done

    return call


def _met_after_batches(function: Callable[..., Any], meet: Meet) -> Callable[..., Any]:
    """``get_batch_samples``, which makes batches, and then counts them together with the other ranks."""

    @wraps(function)
    def call(epoch_iterator: Iterable[Any], num_batches: int, *positional: Any, **keywords: Any) -> Any:
        batches = list(islice(epoch_iterator, num_batches))
        meet()
        return function(iter(batches), num_batches, *positional, **keywords)

    return call
