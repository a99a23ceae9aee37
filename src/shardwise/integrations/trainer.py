"""``ShardwiseTrainer``: the Hugging Face Trainer, or one of TRL, with shardwise's checkpoints.

[Note: A rank that fails alone] Within a step ranks work by themselves in two places: while the batches are made,
and in the loss, once the model has run. A rank that raises there leaves the training and announces its error
([Note: No rank waits in a collective] in ``ranks/control_channel.py``). The others would enter a collective and
wait for it. So they synchronize first, over the store, which takes about a millisecond. On an accelerator they do
not after the loss: its numerical errors appear only after synchronizing with the device, too slow for each step.

If a rank raises elsewhere, the others are in a collective already, which cannot be interrupted. A rank that is
still in one some seconds after another has left reports it and exits. So it is in an evaluation outside of a
training, at whose begin and end the ranks synchronize.

If a tracker on the first rank fails, or a callback stops the training because of local data, the others would enter
a collective and wait. So exceptions of callbacks are kept until the next synchronization (the end of each step,
evaluation and save), and changes of ``control`` are set on all ranks there. A step costs one all-reduce of a few
numbers, on the host, because an accelerator would return it only after the whole step. So does a batch of an
evaluation, which ends after a batch if a stop is requested.
"""

import inspect
import logging
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock

import accelerate
import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderDispatcher
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import DefaultFlowCallback, ExportableState

from shardwise.checkpoints.checkpointer import Checkpointer
from shardwise.checkpoints.train_state import TrainState, describe_selection, generator_states, restore_generators
from shardwise.checkpoints.trainer_folders import MODEL_ALONE, STATE_FOLDER, TrainerHeader
from shardwise.core.errors import (
    ConfigError,
    FormatError,
    RankLostError,
    RankMismatchError,
    ShardwiseError,
    StorageError,
    TrainingError,
)
from shardwise.core.phases import busy_with
from shardwise.files.urls import redact
from shardwise.fsdp.named_tensors import collect_tensors, computing_device, reshard
from shardwise.fsdp.rebind import bind_optimizers, plain_optimizer, require_sharded_parameters
from shardwise.integrations import accelerate_compat, trainer_checkpoints, trainer_marks
from shardwise.integrations import trainer_compat as compat
from shardwise.integrations.agreed_events import AgreedEvents, raise_together
from shardwise.integrations.streamed_rows import split_by_row
from shardwise.integrations.trainer_restoring import load_trainer_checkpoint
from shardwise.integrations.trainer_rows import describe_order, describe_rows, require_resumable
from shardwise.integrations.trl_engine import engine_class
from shardwise.models.selection import AdapterOnly, Selection, has_adapters
from shardwise.ranks.collective_errors import translate_collective_errors
from shardwise.ranks.outcomes import Failure
from shardwise.ranks.stop_signals import shield_data_workers
from shardwise.ranks.timeouts import Timeouts
from shardwise.ranks.world import MismatchedRanks, World
from shardwise.saving.locked_folder import Saving
from shardwise.transfer.matching import OnFault

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

_log = logging.getLogger(__name__)

_UNTIL_UPLOADED = Timeouts(join_timeout_s=math.inf)
"""For the ranks that wait while the first one uploads. One that is lost is noticed all the same."""


class _EvaluationLeftOut(Exception):
    """Ends an evaluation in which a stop has been requested. On all ranks, in the same batch."""


class ShardwiseTrainer(_Trainer):
    """Mixin for a Trainer class whose checkpoints resume on any number of ranks. List it before the Trainer.

    ::

        class MyTrainer(ShardwiseTrainer, SFTTrainer): ...

        trainer = MyTrainer(model=for_trainer(model), args=SFTConfig(...), ...)
        trainer.train(resume_from_checkpoint=True)

    Arguments keep their meaning (``save_steps``, ``save_total_limit``, ``save_only_model``,
    ``load_best_model_at_end``). Differences, see docs/trainer.md: every rank writes its own bytes. A checkpoint is
    committed atomically, and a kill loses no committed one. Checkpoints of another run in the folder are an error.
    An exception of a callback on one rank is raised on all.

    Raises:
        ConfigError: the model is not marked by :func:`~shardwise.integrations.trainer_marks.for_trainer`, or the
            arguments would shard it again, or train it on each rank alone.
    """

    _save_only_model: bool | None = None
    """``save_only_model`` of the arguments while the Trainer's constructor runs."""

    def __init_subclass__(cls, **others: Any) -> None:
        super().__init_subclass__(**others)
        compat.require_before_trainer(cls, ShardwiseTrainer)

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        # Trainers that load their reference by the model's name (GRPO, RLOO) take no ref_model. It is taken out
        # here, and handed to them below in place of what they would load.
        reference: Any = None
        if compat.loads_reference(type(self)):
            reference = keywords.pop("ref_model", None)
        names = inspect.signature(super().__init__).parameters
        kwargs = {**dict(zip(names, positional, strict=False)), **keywords}
        if reference is not None:  # for the check alone
            kwargs = {**kwargs, "ref_model": reference}
        with World.current(call="ShardwiseTrainer") as world, world.collective("check the arguments"):
            trainer_marks.require_trainable(type(self), kwargs, world)
        try:
            replacements: dict[str, Any] = {}
            if reference is not None:  # loaded here, sharded, where TRL would load it whole by its name
                replacements["create_model_from_path"] = lambda *_args, **_kwargs: reference
            if compat.is_trl_trainer(type(self)) and getattr(kwargs.get("args"), "use_vllm", False):
                replacements["VLLMGeneration"] = engine_class()
            with compat.replaced_in_trl(type(self), **replacements):
                super().__init__(*positional, **keywords)
        finally:
            # create_accelerator_and_postprocess, which the constructor calls, has replaced it.
            if self._save_only_model is not None:
                self.args.save_only_model = self._save_only_model
        compat.redirect_through_root(self)
        self._events = AgreedEvents(self.callback_handler.call_event, self)
        # On the instance, over the handler's method: on_step_end and all others go through it.
        vars(self.callback_handler)["call_event"] = self._events
        self.is_stop_requested = False
        """Whether the training ends after this step to be resumed, without an evaluation or loading the best model.

        A callback that sets it on one rank in ``on_step_end``, with ``control.should_training_stop`` and
        ``control.should_save``, sets it on all. In ``on_prediction_step``, too, if ``is_evaluating``.
        """
        self.is_evaluating = False
        """Whether an evaluation of the training is in progress, which is left out if a stop is requested."""
        self._is_announced = False
        """Whether this rank is in :meth:`_announced`."""
        self._saved_step: int | None = None
        self._header: TrainerHeader | None = None
        """Header of the checkpoint that a training run resumes from."""
        self._position: tuple[int, float] | None = None
        """Passes, and optimizer steps of the pass, after which a training run resumes in a stream."""
        self._unevaluated: str | None = None
        """The checkpoint that a training run resumes from, if a stop may have left out its evaluation."""
        # Other models than the trained one, which compute no gradients.
        frozen = [getattr(self, "ref_model", None)]
        if (teacher := getattr(self, "teacher_model", None)) is not None:
            parameter = next(teacher.parameters())
            # TRL reads a teacher's head after its forward pass. If it is offloaded, it must stay on the device.
            if parameter.device == computing_device(parameter):
                frozen.append(teacher)
        rewards: list[Any] = [one for one in getattr(self, "reward_funcs", ()) if isinstance(one, FSDPModule)]
        for reward in rewards:
            compat.ComputesInNormalMode(reward)
        for other in [*frozen, *rewards]:
            if isinstance(other, FSDPModule):
                other.set_reshard_after_forward(True, recurse=False)  # no backward pass frees its root group
        self._sampler: Any = None
        """Sampler of the rows to train on. None of a stream."""
        self._on_other_base: OnFault = "error"
        self._generators: dict[str, Any] | None = None
        """States of random generators, to be set once the position in the data is restored."""

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator like the Trainer, and reject settings that do not fit a sharded model."""
        if self.args.dataloader_pin_memory:  # otherwise each batch waits for all earlier work of the device
            settings: Any = self.args.accelerator_config
            settings.non_blocking = True
        # accelerate takes cp_size only with a plugin of FSDP2, by which the Trainer would shard the model again. On
        # CPUs it takes no other size either, and they change nothing: each rank has rows of its own.
        with mock.patch.object(self.args, "parallelism_config", None):
            super().create_accelerator_and_postprocess()
        if accelerate_compat.is_context_parallel(self.accelerator):
            raise ConfigError(
                "accelerate's configuration has cp_size. Pass TrainingArguments(parallelism_config="
                "ParallelismConfig(cp_size=...)) instead, which splits whole sequences"
            )
        if self._cp_size > 1:
            accelerate_compat.split_sequences(self.accelerator, self.args.parallelism_config, self._trained)
        size = dist.get_world_size() if dist.is_initialized() else 1
        accelerate_compat.require_ranks(self.args.world_size, size)
        if self.is_fsdp_enabled:
            raise trainer_marks.double_sharding_error("ACCELERATE_USE_FSDP, or accelerate's configuration,")
        if self.is_deepspeed_enabled:
            raise trainer_marks.double_sharding_error("deepspeed")
        if self.accelerator.parallelism_config is not None:
            trainer_marks.require_rows_or_sequences(self.accelerator.parallelism_config)
        # The Trainer refuses resumable checkpoints of models that are sharded already. Those of this class are.
        self._save_only_model, self.args.save_only_model = self.args.save_only_model, True

    def evaluation_loop(self, *positional: Any, **keywords: Any) -> Any:
        """Evaluate like the Trainer. Raises ConfigError with ``cp_size``, whose mean could leave out parts."""
        if self._cp_size > 1:
            raise ConfigError(
                f"evaluate, predict: with cp_size={self._cp_size} each rank would evaluate a part of each "
                "sequence. Evaluate a saved checkpoint without it"
            )
        try:
            with busy_with("evaluation data and metrics"):
                return super().evaluation_loop(*positional, **keywords)
        finally:
            reshard(self._trained)

    def prediction_step(self, *positional: Any, **keywords: Any) -> Any:
        """Evaluate a batch like the Trainer, by all ranks together."""
        if self.is_evaluating and self.is_stop_requested:
            raise _EvaluationLeftOut
        with busy_with(""):
            return super().prediction_step(*positional, **keywords)

    def _calculate_rewards(self, *positional: Any, **keywords: Any) -> Any:
        """Compute rewards like TRL: in functions, which are work of this rank alone, and with the other ranks."""
        trainer: Any = super()
        if not compat.loads_reference(type(self)):  # trainers that gather in another way
            return trainer._calculate_rewards(*positional, **keywords)
        names = ", ".join(getattr(self, "reward_func_names", ()))
        gather = busy_with("")(accelerate.utils.gather)
        with busy_with(f"the reward functions {names}"), compat.replaced_in_trl(type(self), gather=gather):
            return trainer._calculate_rewards(*positional, **keywords)

    def _get_dataloader(self, dataset: Any, *positional: Any, **keywords: Any) -> Any:
        loader = super()._get_dataloader(split_by_row(dataset), *positional, **keywords)
        shield_data_workers(loader)
        return loader

    def keep_column(self, name: str) -> None:
        """Hand a column of the datasets to the collator, also with ``remove_unused_columns``."""
        trainer: Any = self
        trainer._set_signature_columns_if_needed()
        trainer._signature_columns.append(name)

    def _get_train_sampler(self, *positional: Any, **keywords: Any) -> Any:
        self._sampler = super()._get_train_sampler(*positional, **keywords)
        return self._sampler

    @property
    def _cp_size(self) -> int:
        config: Any = self.args.parallelism_config
        return 1 if config is None else int(config.cp_size)

    def create_optimizer(self, *positional: Any, **keywords: Any) -> Any:
        """Create the optimizer like the Trainer, and reject one that cannot step the model's shards."""
        tensors = collect_tensors(self._trained)  # before super(), which takes the parameters: it reshards
        optimizer = super().create_optimizer(*positional, **keywords)
        require_sharded_parameters(plain_optimizer(optimizer), dict(self._trained.named_parameters()))
        bind_optimizers([optimizer], tensors, by_rank=True)
        return optimizer

    def evaluate(self, *positional: Any, **keywords: Any) -> dict[str, float]:
        """Evaluate like the Trainer. Collective: yes.

        Raises:
            RankLostError: a rank is lost, or another one has left the evaluation by an error of its own.
            TrainingError: a rank has run out of memory. The same on every rank.
        """
        with self._announced("evaluate"):
            return super().evaluate(*positional, **keywords)

    def predict(self, *positional: Any, **keywords: Any) -> Any:
        """Predict like the Trainer. Collective: yes. Errors: as of :meth:`evaluate`."""
        with self._announced("predict"):
            return super().predict(*positional, **keywords)

    @contextmanager
    def _announced(self, name: str) -> Iterator[None]:
        """Announce this rank's error to the others, which may be stuck in a collective of the block.

        Within a training or another such block, that one does. See [Note: A rank that fails alone].
        """
        if self.is_in_train or self._is_announced:
            yield
            return
        self._is_announced = True
        try:
            with World.current(call=f"Trainer.{name}") as world:
                world.all_gather_object(None)  # translate_collective_errors needs ranks that have met
                with translate_collective_errors(world, lambda: f"in {name}", _end_stuck):
                    yield
                    # A rank that fails after the last collective, as in compute_metrics, fails all.
                    world.all_gather_object(None)
        finally:
            self._is_announced = False

    # Training

    def train(
        self, resume_from_checkpoint: Any = None, *others: Any, on_other_base: OnFault = "error", **keywords: Any
    ) -> Any:
        """Train like the Trainer. Collective: yes.

        Args:
            resume_from_checkpoint: True resumes from the newest complete checkpoint in ``output_dir``.
            *others: arguments of the Trainer's method.
            on_other_base: ``Ignore()`` allows an adapter to resume on a base other than its own. See
                :meth:`~shardwise.checkpoints.checkpointer.Checkpointer.restore`.
            **keywords: arguments of the Trainer's method.

        Raises:
            ConfigError: there is no checkpoint, checkpoints of another run are in the folder, the checkpoint is of
                other rows, another seed, number of rows per step, or order of rows, a tracker would save the model,
                or an image of a row cannot be read.
            KeyMismatchError: the checkpoint is of another tuning.
            FormatError: the checkpoint is damaged.
            StorageError: it cannot be read.
            RankLostError: a rank is lost.
            TrainingError: a rank has run out of memory.

        These are the same on every rank. Other errors of one rank, in its data loader or its loss, are raised
        there. The others raise a RankLostError with its message, or exit if they are stuck in a collective.
        """
        run, requested = self._output_dir, _requested_checkpoint(resume_from_checkpoint)
        with World.current(call="Trainer.train") as world:
            world.require_equal((str(run), requested), "resume_from_checkpoint, or output_dir,")
            with world.collective("check the callbacks"):
                trainer_marks.require_trackers_that_save_nothing(self.callback_handler.callbacks)
            # The first rank alone looks for checkpoints, so that all ranks resume from the same one.
            with world.broadcast("find the checkpoint to resume") as exchange:
                if world.rank == 0:
                    folder, has_leftovers = trainer_checkpoints.resume_source(run, requested)
                    resumed: Any = (None, None, None, True)
                    if folder is not None:
                        resumed = trainer_checkpoints.read_checkpoint(folder)
                    exchange.local = (folder, has_leftovers, resumed)
            # None without a checkpoint: what an earlier call of train() resumed from must not apply to this one.
            source, has_incomplete, (header, self._events.best, self._position, is_evaluated) = exchange.result
            if source is not None:
                with world.collective("compare with the run"):
                    require_resumable(header, self._describe(world.size), self.args, source)
            self._header = header
            # After all checks, so that a training run that is refused leaves the folder as it was.
            if has_incomplete:
                with world.broadcast("remove what a stopped save left"):
                    if world.rank == 0:
                        trainer_checkpoints.remove_incomplete_checkpoints(run)
        self._saved_step, self._on_other_base, self.is_stop_requested = None, on_other_base, False
        self._unevaluated = None if is_evaluated else str(source)
        # Not entered: it lasts as long as the training.
        step_world = World.current(call="the Trainer's steps")
        # translate_collective_errors needs ranks that have met over the control channel.
        if step_world.size > 1:
            step_world.all_gather_object(None)
        self._events.world = step_world
        try:
            translated = translate_collective_errors(step_world, self._where, _end_stuck)
            with translated, self._synchronized(step_world):
                return super().train(None if source is None else str(source), *others, **keywords)
        finally:
            # An error leaves it set, and AgreedEvents would go on to wait for the other ranks.
            self.is_in_train = False

    @contextmanager
    def _synchronized(self, world: World) -> Iterator[None]:
        """Synchronize the ranks in each step within the block. See [Note: A rank that fails alone]."""
        if world.size == 1:
            yield
            return
        # Within the block only: outside a training nothing is synchronized here. On the instance, over methods of
        # subclasses, too, which may raise after they have called this class's.
        methods: dict[str, Any] = {
            "get_batch_samples": partial(self._make_batches, world, self.get_batch_samples),
            "evaluate": partial(self._evaluate_alike, self.evaluate),
        }
        if self.args.device.type == "cpu":
            methods["compute_loss"] = partial(self._make_loss, world, self.compute_loss)
        with mock.patch.multiple(self, **methods):
            yield

    def _evaluate_alike(self, original: Any, *positional: Any, **keywords: Any) -> Any:
        metrics = original(*positional, **keywords)
        # The best metric and the schedule of a plateau are of these, to which subclasses and callbacks may add.
        self._events.share_metrics(metrics if isinstance(metrics, dict) else {})
        return metrics

    def set_initial_training_values(self, args: Any, dataloader: Any, *others: Any) -> Any:
        """Count steps like the Trainer. Raises ConfigError if there is no batch, on every rank."""
        batches: Any = dataloader
        if compat.has_length(dataloader) and len(batches) == 0:
            rows = self.num_examples(batches)
            raise ConfigError(
                f"the dataset to train on: has fewer rows ({rows}) than a batch of all ranks. "
                "Add rows, train on fewer ranks or with a smaller batch, or do not set dataloader_drop_last"
            )
        return super().set_initial_training_values(args, dataloader, *others)

    def _make_batches(
        self,
        world: World,
        original: Any,
        epoch_iterator: Iterable[Any],
        num_batches: int,
        *others: Any,
        **keywords: Any,
    ) -> Any:
        """Make batches, synchronize, then call ``get_batch_samples``, which counts them with the other ranks.

        Raises:
            RankMismatchError: a rank has fewer batches: its rows or its settings differ.
            ConfigError: a row cannot be used. The same on every rank, except in a stream.
        """
        # ``num_batches`` is the number of micro-batches of one optimizer step.
        # A stream is read by the first rank, which sends its batches to the others.
        is_stream = isinstance(self.callback_handler.train_dataloader, DataLoaderDispatcher)
        batches: list[Any] = []
        state: Any = None
        try:
            with busy_with("" if is_stream and world.rank > 0 else "the next batch"):
                batches = list(islice(epoch_iterator, num_batches))
            # A full step has None to compare, so that the synchronization stays small.
            state = len(batches) if len(batches) < num_batches else None
        except ConfigError as error:
            if is_stream:
                raise  # the others wait for the batch
            # A worker's error has its trace before its text.
            text = str(error).rpartition("ConfigError: ")[2].strip()
            state = Failure.from_error(error if text == str(error) else ConfigError(text))
        if mismatched := self._synchronize(world, state):
            raise RankMismatchError(
                f"{self._where()}: rank {mismatched.text} has another number of batches left than rank 0. Give "
                "every rank the same rows and settings"
            )
        return original(iter(batches), num_batches, *others, **keywords)

    def _make_loss(self, world: World, original: Any, *positional: Any, **keywords: Any) -> Any:
        loss = original(*positional, **keywords)
        self._synchronize(world)
        return loss

    def _synchronize(self, world: World, value: object = None) -> MismatchedRanks | None:
        """Meet the other ranks. Return those whose value is not the first rank's, None if all are equal."""
        try:
            return world.all_reduce_object(value, world.find_mismatched)
        except (RankLostError, TrainingError) as lost:
            raise type(lost)(f"{self._where()}: {lost}") from lost

    def _where(self) -> str:
        return f"in step {self.state.global_step + 1}"

    @property
    def num_tokens(self) -> int:
        """Tokens of all ranks since the first step, as TRL or else the Trainer counts them. 0 if neither does."""
        return int(getattr(self, compat.TOKENS, 0) or self.state.num_input_tokens_seen)

    @property
    def _output_dir(self) -> Path:
        assert self.args.output_dir is not None, "the Trainer's arguments have a default"
        return Path(self.args.output_dir)

    @property
    def _trained(self) -> nn.Module:
        assert isinstance(self.model, nn.Module), "the constructor has checked it"
        return self.model

    def _describe(self, world_size: int) -> TrainerHeader:
        """Return the header that a checkpoint of this step has."""
        rows = self.get_total_train_batch_size(self.args)
        return TrainerHeader(
            self.state.global_step,
            describe_selection(self._only()),
            rows,
            world_size,
            order=describe_order(self.args, self.train_dataset, rows),
            rows=describe_rows(self.args, self.train_dataset),
            is_stop=self.is_stop_requested,
        )

    # Saving

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        step, run = self.state.global_step, Path(self._get_output_dir(trial=trial))
        folder = trainer_checkpoints.checkpoint_folder(run, step)
        if step == self._saved_step:  # at the end of a step, and again at the end of the epoch
            self._record_evaluation(run, folder)
            return
        # Locked from the first file until older checkpoints are removed.
        with (
            World.current(call="Trainer._save_checkpoint") as world,
            trainer_checkpoints.locked_for(world, run, step) as saving,
        ):
            # Older checkpoints are removed after the commit, and not by the Trainer.
            limit = self.args.save_total_limit
            failure: Exception | None = None
            try:
                with mock.patch.object(self.args, "save_total_limit", None):
                    super()._save_checkpoint(model, trial)
            except Exception as error:
                failure = saving.find_cause(error)
            # Before the commit: a checkpoint must not count if any rank has failed to write its part.
            raise_together(world, failure)
            header = self._describe(world.size)
            if self.args.save_only_model:
                header = replace(header, holds=MODEL_ALONE)
            with world.broadcast("complete the save"):
                if world.rank == 0:
                    trainer_checkpoints.complete(saving, folder, header)
            self._saved_step = step
            with world.broadcast("end the save"):
                if world.rank == 0:
                    self._end_save(run, limit, saving)
            if self.args.push_to_hub and not self.is_stop_requested:
                with world.broadcast("push the checkpoint"):
                    if world.rank == 0:
                        self._push(folder)

    def _record_evaluation(self, run: Path, folder: Path) -> None:
        """Record an evaluation, or that a stop has left it out, in the checkpoint of its step. Collective: yes."""
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder)
        callbacks = [*self.callback_handler.callbacks, self.control]
        stateful: Any = [callback for callback in callbacks if isinstance(callback, ExportableState)]
        self.state.stateful_callbacks = TrainerState(stateful_callbacks=stateful).stateful_callbacks
        with World.current(call="Trainer._save_checkpoint") as world, world.broadcast("record the evaluation"):
            if world.rank == 0:
                is_stop = self.is_stop_requested
                trainer_checkpoints.replace_state(run, folder, asdict(self.state), is_stop=is_stop)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Do nothing. ``_save_checkpoint`` pushes the checkpoint after its commit."""

    def _push(self, folder: Path) -> None:
        """Push a complete checkpoint like the Trainer, which copies its model into ``output_dir``. On one rank."""
        push: Any = self.push_in_progress
        is_idle = push is None or push.is_done()  # an upload in progress reads the older shards
        if is_idle and self.args.hub_strategy != "end":  # with which no checkpoint is pushed
            trainer_checkpoints.remove_older_shards(self._output_dir, folder)
        with trainer_checkpoints.replacing_uploads():
            super()._push_from_checkpoint(str(folder))

    def _finish_current_push(self) -> None:
        """Wait for uploads like the Trainer. At a stop, cancel those that have not begun, and wait for none."""
        if not (self.is_stop_requested and self.is_in_train):
            super()._finish_current_push()
        elif (push := getattr(self, "push_in_progress", None)) is not None:
            push.cancel()

    def push_to_hub(self, *positional: Any, **keywords: Any) -> Any:
        """Push like the Trainer, without the record of the run. Collective: yes.

        Raises:
            StorageError: the upload by the first rank has failed. The same on every rank.
        """
        failure: StorageError | None = None
        pushed: Any = None
        try:
            with trainer_checkpoints.replacing_uploads():
                pushed = super().push_to_hub(*positional, **keywords)
        except Exception as error:
            if isinstance(error, ShardwiseError) or isinstance(error.__cause__, ShardwiseError):
                raise  # raised on all ranks, by save_model
            reason = redact(f"{type(error).__name__}: {error}", "", {"token": self.args.hub_token})
            failure = StorageError(f"push_to_hub: failed, {reason}. Upload the folder {self.args.output_dir} again")
            failure.__cause__ = error
        try:
            pushing = World.current(None, _UNTIL_UPLOADED, call="Trainer.push_to_hub")
            with pushing as world, world.collective("push the model"):
                if failure is not None:
                    raise failure
        except RankMismatchError:
            if failure is not None:  # before the model was saved, where the others are
                raise failure from failure.__cause__
            raise
        return pushed

    def create_model_card(self, *positional: Any, **keywords: Any) -> None:
        """Write the card like the Trainer. A failure is logged, because the first rank alone writes."""
        try:
            super().create_model_card(*positional, **keywords)
        except Exception as error:
            _log.warning("README.md: the model card is not written, %s", error)

    def _run_epoch(self, **keywords: Any) -> None:  # type: ignore[override]
        """Train an epoch, unless the training that is resumed was at its end: the Trainer would add a step.

        Of a stream, whose length it does not know, the Trainer takes all steps as the first pass. The pass is that
        in which the checkpoint was saved, and the earlier ones are left out.
        """
        # Before the first step, and before early stopping is looked at.
        self._evaluate_resumed(keywords["trial"], keywords["ignore_keys_for_eval"])
        if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True  # passes over a stream have no end
            return
        if self._position is not None and not compat.has_length(keywords["train_dataloader"]):
            # With gradient_accumulation_steps=4, the position (1, 25.0) is 100 batches into the second pass.
            epoch, steps = self._position
            if keywords["epoch"] < epoch:
                return
            # Rounded first: steps come from the Trainer's fraction of a pass, with a rounding error.
            batches = math.ceil(round(steps * self.args.gradient_accumulation_steps, 3))
            skipped = 0 if self.args.ignore_data_skip else batches
            keywords |= {"epochs_trained": epoch, "steps_trained_in_current_epoch": skipped}
        is_resumed = keywords["epoch"] == keywords["epochs_trained"]
        compat.sample_anew(self, keywords["steps_trained_in_current_epoch"] if is_resumed else 0)
        # Without a seed for each epoch, an epoch that is resumed would have another order.
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(keywords["epoch"])
        elif hasattr(self._sampler, "generator"):
            self._sampler.generator = self._sampler.generator or torch.Generator()
            self._sampler.generator.manual_seed(self.args.seed + keywords["epoch"])
        super()._run_epoch(**keywords)  # type: ignore[no-untyped-call]

    def _maybe_log_save_evaluate(self, *positional: Any, **keywords: Any) -> None:
        if self.is_stop_requested:  # a scheduler may kill this process before an evaluation ends
            self.control.should_evaluate = False
        super()._maybe_log_save_evaluate(*positional, **keywords)

    def _evaluate(self, *positional: Any, **keywords: Any) -> dict[str, float]:
        """Evaluate like the Trainer. Return no metrics, and leave no trace, if a stop is requested meanwhile."""
        generators, entries = generator_states(), len(self.state.log_history)
        self.is_evaluating = True
        try:
            metrics: dict[str, float] = super()._evaluate(*positional, **keywords)
        except _EvaluationLeftOut:
            restore_generators(generators, "random numbers")
            del self.state.log_history[entries:]  # of other datasets
            self._trained.train()  # TRL logs what it has counted by this mode
            return {}
        finally:
            self.is_evaluating = False
        return metrics

    def _evaluate_resumed(self, trial: Any, ignored_keys: list[str] | None = None) -> None:
        """Evaluate the checkpoint that is resumed, once, if a stop has left that out. Collective: yes.

        Nothing is recorded in the checkpoint: the schedule that is saved there has not seen the evaluation.
        """
        checkpoint, self._unevaluated = self._unevaluated, None
        if checkpoint is None:
            return
        due = TrainerControl()
        flow: Any = DefaultFlowCallback()
        flow.on_step_end(self.args, self.state, due)
        if float(self.state.epoch or 0).is_integer():
            flow.on_epoch_end(self.args, self.state, due)
        if not due.should_evaluate:
            return
        # The evaluation draws random numbers after the save and before the next step, as without a stop.
        if self._generators is not None:
            restore_generators(self._generators, "random numbers")
        metrics = self._evaluate(trial, ignored_keys)
        if self._generators is not None:
            self._generators = generator_states()
        self._determine_best_metric(metrics=metrics, trial=trial)
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = checkpoint

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Determine it like the Trainer. With ``save_strategy="best"`` a save that a callback requested stays."""
        is_left_out = self.is_stop_requested and not metrics
        is_best = not is_left_out and super()._determine_best_metric(metrics, trial)
        return bool(is_best or self.control.should_save)

    def _finalize_training(self, trial: Any, *others: Any) -> Any:
        if not self.is_stop_requested:  # if all epochs were trained by then, none is run
            self._evaluate_resumed(trial)
        limit, run = self.args.save_total_limit, Path(self._get_output_dir(trial=trial))
        # With a limit of 1 the Trainer would remove all checkpoints but the best, their files in any order.
        with mock.patch.object(self.args, "save_total_limit", None):
            output = super()._finalize_training(trial, *others)  # type: ignore[no-untyped-call]
        if self.args.push_to_hub and not self.is_stop_requested:  # the first rank has ended the last upload
            with World.current(None, _UNTIL_UPLOADED, call="Trainer.train") as world:
                world.all_gather_object(None)
        if limit == 1 and not self.is_stop_requested:
            with World.current(call="Trainer.train") as world, world.broadcast("keep the best checkpoint"):
                # None if the best is in another folder, of the run that was resumed.
                best = trainer_checkpoints.step_in(run, self.state.best_model_checkpoint)
                if world.rank == 0 and best is not None:
                    trainer_checkpoints.remove_others(run, best)
        return output

    def _end_save(self, run: Path, limit: int | None, saving: Saving) -> None:
        """Remove checkpoints above the limit, and release the lock."""
        best = trainer_checkpoints.step_in(run, self.state.best_model_checkpoint)
        removed = trainer_checkpoints.steps_to_remove(trainer_checkpoints.complete_steps(run), limit, best)
        trainer_checkpoints.remove_under(saving.locked, run, removed)
        saving.locked.release()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:  # noqa: FBT001, FBT002
        """Save the model by all ranks, and other files by the first. Collective: yes, also for adapters."""
        self._save(os.path.expanduser(output_dir) if output_dir else self.args.output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        # All ranks write the model, and then the first one the tokenizer and the arguments. It may fail alone.
        failure: Exception | None = None
        try:
            super()._save(output_dir, state_dict)
        except RankMismatchError:  # on all ranks, of which none may make one more call
            raise
        except Exception as error:
            failure = error
        # A call after super(), and not around it: if a rank fails alone before save() begins, the ranks are in
        # different calls, and all raise a RankMismatchError.
        with World.current(call="Trainer.save_model") as world:
            raise_together(world, failure)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with Checkpointer(Path(output_dir) / STATE_FOLDER, keep=None, only=self._only()) as checkpointer:
            checkpointer.save(self.state.global_step, self._training_state())

    def _save_scaler(self, output_dir: str) -> None:
        """Do nothing. The Checkpointer saves the scaler."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing. The Checkpointer saves random generators."""

    # Resuming

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:  # noqa: ARG002
        folder, header = Path(resume_from_checkpoint), self._header
        assert header is not None, "train has read it"
        if header.holds == MODEL_ALONE:  # otherwise the Checkpointer restores the model, too
            _log.warning(
                "%s: holds the model alone (save_only_model). The optimizer and the learning-rate schedule start "
                "from the beginning, with its warm-up, though steps are counted from %d. Train without "
                "save_only_model to resume both",
                folder,
                header.step,
            )
            load_trainer_checkpoint(self._trained, folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._header is None:
            return
        # TRL's own state. The Trainer finds no files of its optimizer.
        super()._load_optimizer_and_scheduler(checkpoint)
        # Decided by the header: whether there is a folder may differ between ranks, on a network file system.
        if self._header.holds == MODEL_ALONE:
            return
        if getattr(self.args, "sync_ref_model", False):
            _log.warning(
                "%s: has no reference model. The reference begins with its first values again and follows from "
                "there (sync_ref_model), as in TRL. Set sync_ref_model: false to keep it as it is",
                checkpoint,
            )
        requested = self._optimizer_settings()
        with Checkpointer(Path(checkpoint) / STATE_FOLDER, keep=None, only=self._only()) as checkpointer:
            state, step = self._training_state(), self._header.step
            try:
                report = checkpointer.restore(state, step, on_other_base=self._on_other_base)
            except FormatError as error:
                error.args = (f"{error}. To resume from the checkpoint before it, remove {checkpoint}",)
                raise
        if self._optimizer_settings() != requested:
            _log.warning(
                "%s: learning_rate and weight_decay stay those of the checkpoint, not those of the arguments. To "
                "change them, begin in another output_dir",
                checkpoint,
            )
        setattr(self, compat.TOKENS, report.user.get("num_tokens", 0))
        # The Trainer skips batches after this, which draws random numbers.
        self._generators = generator_states()
        _log.info("%s", report)

    def _optimizer_settings(self) -> list[tuple[Any, ...]]:
        """Return the first learning rate and the weight decay of each parameter group, as far as it has them."""
        groups = plain_optimizer(self.optimizer).param_groups
        return [(group.get("initial_lr"), group.get("weight_decay")) for group in groups]

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Do nothing. The Checkpointer has restored the scaler."""

    def _load_rng_state(self, checkpoint: str | None) -> None:  # noqa: ARG002
        """Restore the generators again, because skipping batches has drawn random numbers."""
        if self._generators is not None:
            restore_generators(self._generators, "random numbers")
            self._generators = None

    def _load_best_model(self) -> None:
        if self.is_stop_requested:
            return
        best = self.state.best_model_checkpoint
        assert best is not None
        load_trainer_checkpoint(self._trained, best, adapter=self._adapter() or "default")

    # The saved state

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
            user={"global_step": self.state.global_step, "num_tokens": getattr(self, compat.TOKENS, 0)},
        )


def _requested_checkpoint(resume_from_checkpoint: Any) -> Path | Literal["newest"] | None:
    if resume_from_checkpoint is True:
        return "newest"
    return Path(os.path.expanduser(resume_from_checkpoint)) if resume_from_checkpoint else None


def _end_stuck(lost: ShardwiseError) -> None:
    """Exit this process, which waits for a lost rank in a collective that cannot be interrupted."""
    _log.error("%s. This rank waits for it in a collective, and exits", lost)
    logging.shutdown()
    os._exit(2)
