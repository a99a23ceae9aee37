"""Runs ``shardwise train`` on one rank: a sharded model in one of TRL's trainers."""

from __future__ import annotations

import logging
import math
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState

from shardwise.core.errors import ConfigError, TrainingError
from shardwise.files.urls import without_secrets
from shardwise.fsdp.torch_private import accelerator
from shardwise.integrations.trainer import ShardwiseTrainer
from shardwise.integrations.trainer_checkpoints import complete_steps
from shardwise.ranks.stop_signals import StopRequest
from shardwise.ranks.timeouts import Timeouts
from shardwise.ranks.world import World
from shardwise.training import trl_objects
from shardwise.training.curves import MemoryCallback, device_peak_bytes, draw_curves
from shardwise.training.dataset_preparation import find_image_column, get_tokenizer
from shardwise.training.image_rows import ROW, ImageCollator, ImageRows, TowerCallback
from shardwise.training.run_config import RunConfig
from shardwise.training.run_estimate import plan_run
from shardwise.training.run_inputs import SINGLE, TrainingRecord, honor_timeout, open_inputs
from shardwise.training.run_outcome import TrlOutcome

_log = logging.getLogger(__name__)


def train(config: RunConfig, local_rank: int) -> TrlOutcome:
    """Train from a configuration. Collective: yes, over the default process group.

    Raises:
        ShardwiseError: the same on every rank, if the configuration, the data or the model cannot be used.
    """
    with open_inputs(config, local_rank) as inputs:
        arguments, data, processor = inputs.arguments[SINGLE], inputs.data[SINGLE], inputs.processor
        output, record, request = inputs.output, inputs.record, inputs.request
        functions = trl_objects.import_reward_functions(arguments)  # before any model, so that errors come early
        model = trl_objects.load_model(arguments)
        require_pad_token(model, processor)
        # Reference, teacher and reward models, each sharded as well.
        frozen = trl_objects.load_frozen(arguments, functions)
        honor_timeout(config, arguments)  # again, for the process groups of the models' meshes, which are new
        trainer = trl_objects.make_trainer(arguments, model, frozen, processor, data, local_rank)
        callback = RunCallback(request, record, trainer)
        trainer.add_callback(callback)
        if (column := find_image_column(data[0])) is not None:
            for name in ("train_dataset", "eval_dataset"):
                if isinstance(rows := getattr(trainer, name), datasets.Dataset):
                    setattr(trainer, name, ImageRows(rows, column, processor))
            max_length = arguments.training.max_length
            if max_length is not None and isinstance(trainer.train_dataset, ImageRows):
                trainer.keep_column(ROW)
                trainer.data_collator = ImageCollator(trainer.data_collator, max_length)
            checkpointing = arguments.training.gradient_checkpointing_kwargs or {}
            is_reentrant = bool(checkpointing.get("use_reentrant"))
            trainer.add_callback(TowerCallback(trainer.model, is_reentrant=is_reentrant))
        trackers = guard_trackers(trainer)
        # First: it is collective, and a callback before it could raise on one rank alone.
        trainer.callback_handler.callbacks.insert(0, MemoryCallback(trackers))
        result = trainer.train(resume_from_checkpoint=_resume_from(arguments.training, output))
        state = trainer.state
        has_stopped = trainer.is_stop_requested
        # A training run that was stopped has a checkpoint, which it resumes from, and no model yet. It ends at
        # once, since a scheduler may kill this process: the run that resumes draws the curves of the whole log.
        if not has_stopped:
            with World.current(call="train") as world:
                record.require_on_first_rank(world)
            trainer.save_model(str(output), _internal_call=True)  # which is not uploaded yet
            # The other ranks wait here, without a limit: an estimate may take longer than ddp_timeout.
            unlimited = Timeouts(join_timeout_s=math.inf)
            with World.current(None, unlimited, call="train") as world, world.broadcast("draw the curves"):
                if world.rank == 0:
                    estimated_bytes = _estimate_peak(config, world.size)
                    draw_curves(output, {SINGLE: state.log_history}, state.log_history, estimated_bytes)
            require_finite_loss(state, output)  # after the picture, which shows where it began
            if arguments.training.push_to_hub:
                trainer.push_to_hub(dataset_name=without_secrets(arguments.script.dataset_name or ""))
        tokens = trainer.num_tokens - callback.resumed_tokens
        summary = summary_lines(state, callback.resumed_steps, result.metrics["train_runtime"], tokens)
        trainer.end()
    return TrlOutcome(
        output_dir=str(output),
        steps=int(state.global_step),
        has_stopped=has_stopped,
        metrics=dict(result.metrics),
        history=tuple(state.log_history),
        summary=tuple(summary),
    )


def require_pad_token(model: PreTrainedModel, processor: Any) -> None:
    """Check that the embeddings have a row for the padding token.

    Raises:
        ConfigError: they do not.
    """
    tokenizer = get_tokenizer(processor)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    embeddings: Any = model.get_input_embeddings()
    rows = int(embeddings.weight.shape[0])
    if pad is not None and pad >= rows:
        raise ConfigError(
            f"pad_token: has the id {pad}, and the model has embeddings for 0 to {rows - 1}. Set pad_token to a "
            "token of the model"
        )


def _resume_from(training: Any, output: Path) -> Any:
    """Return the requested checkpoint, otherwise the newest in the output folder, or None. Collective: yes.

    Raises:
        ConfigError: ``resume_from_checkpoint`` is false, and the folder has checkpoints, which would be replaced.
    """
    if training.resume_from_checkpoint:
        return training.resume_from_checkpoint
    # By the first rank alone, so that all ranks decide the same.
    with World.current(call="train") as world, world.broadcast("list files") as exchange:
        if world.rank == 0:
            exchange.local = complete_steps(output)
    if not exchange.result:
        return None
    if training.resume_from_checkpoint is False:
        raise ConfigError(
            f"resume_from_checkpoint: is false, and {output} has checkpoints of this training. Remove that key to "
            "resume, or the folder to begin again"
        )
    return True


def peak_line() -> str:
    """Format the peak memory of this rank: of its accelerator, otherwise of the process."""
    nbytes = device_peak_bytes()
    if nbytes is None:
        nbytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return f"peak memory of a rank: {nbytes / 2**30:.2f} GiB"


def _estimate_peak(config: RunConfig, ranks: int) -> int | None:
    """Return the estimated peak of a rank on its accelerator in bytes, or None. Collective: no.

    There is none on the CPU, where the peak of a process includes its libraries, none of methods that generate or
    have a reference model, and none with Liger's kernels, which this process has put into classes of transformers.
    """
    kind = accelerator()
    if kind is None or config.method not in ("sft", "reward") or config.values.get("use_liger_kernel"):
        return None
    try:
        estimate = plan_run(config, ranks, {"device": kind.type})
    except Exception as error:  # the training has succeeded
        _log.warning("no estimate: %s", error)
        return None
    has_activations = estimate.training is not None and estimate.training.batch_size > 0
    return estimate.peak_bytes if has_activations else None


class RunCallback(TrainerCallback):
    """Ends a training run after the step, or the batch of an evaluation, in which a signal arrived.

    Before each checkpoint it checks the run's folder.

    ``ShardwiseTrainer`` makes ranks agree on ``control`` and on exceptions after each step. So a signal to one rank
    stops all of them.

    Args:
        request: of a signal to stop.
        record: of the training.
        trainer: whose tokens are counted, and which is asked to stop.
    """

    def __init__(self, request: StopRequest, record: TrainingRecord, trainer: ShardwiseTrainer) -> None:
        self.resumed_steps = 0
        """Steps of the checkpoint that is resumed."""
        self.resumed_tokens = 0
        """Tokens that the checkpoint has counted."""
        self._request = request
        self._record = record
        self._trainer = trainer
        self._has_warned = False

    def on_train_begin(self, *positional: Any, **_: Any) -> None:
        """Note where the training begins."""
        state: TrainerState = positional[1]
        self.resumed_steps, self.resumed_tokens = state.global_step, self._trainer.num_tokens

    def on_step_end(self, *positional: Any, **_: Any) -> TrainerControl:
        """Request a checkpoint and the end after a signal."""
        state: TrainerState = positional[1]
        control: TrainerControl = positional[2]
        if self._request.is_made:
            control.should_save = True
            control.should_training_stop = True
            # After the last step the training is complete.
            self._trainer.is_stop_requested = state.global_step < state.max_steps
        if control.should_save and state.is_world_process_zero:
            self._record.require()
        return control

    def on_prediction_step(self, *positional: Any, **_: Any) -> None:
        """Request the same during an evaluation, also that of the last step, which the resume makes up."""
        state: TrainerState = positional[1]
        control: TrainerControl = positional[2]
        if self._trainer.is_evaluating and self._request.is_made:
            control.should_save = True
            control.should_training_stop = True
            self._trainer.is_stop_requested = True
            if state.is_world_process_zero:
                self._record.require()

    def on_log(self, *positional: Any, **keywords: Any) -> None:
        """Warn of the first loss that is not finite."""
        state: TrainerState = positional[1]
        loss = (keywords.get("logs") or {}).get("loss")
        if loss is None or self._has_warned or math.isfinite(float(loss)) or not state.is_world_process_zero:
            return
        self._has_warned = True
        _log.warning("step %d: the loss is %s. Check learning_rate and the rows", state.global_step, loss)


def require_finite_loss(state: TrainerState, output: Path) -> None:
    """Require that a finite loss was logged since the last one that was not. The same on every rank.

    Raises:
        TrainingError: none was.
    """
    # (step, loss). Of losses 2.0, NaN, 1.5, NaN, NaN in steps 1 to 5, the last finite one is of step 3, and those
    # from step 4 on are not finite.
    losses = [(entry["step"], float(entry["loss"])) for entry in state.log_history if "loss" in entry]
    if not losses or math.isfinite(losses[-1][1]):
        return
    last_finite = max((step for step, loss in losses if math.isfinite(loss)), default=0)
    first = min(step for step, _ in losses if step > last_finite)
    raise TrainingError(
        f"the loss is {losses[-1][1]} from step {first} to the end. The model was saved in {output}, and is "
        "probably useless. Lower learning_rate, or check the rows, and train in another output_dir"
    )


def guard_trackers(trainer: Any) -> list[TrainerCallback]:
    """Disable an experiment tracker (``WandbCallback``, ...) that raises an error, instead of ending the training.

    Returns the trackers.
    """
    callbacks: list[TrainerCallback] = trainer.callback_handler.callbacks
    trackers = [one for one in callbacks if type(one).__module__.startswith("transformers.integrations")]
    for tracker in trackers:
        events = [name for name in dir(tracker) if name.startswith("on_")]
        # On the instance: the class may be shared with a Trainer of the user's in this process.
        vars(tracker).update({name: _guard(tracker, getattr(tracker, name), events) for name in events})
    return trackers


def _guard(tracker: TrainerCallback, call: Callable[..., Any], events: Sequence[str]) -> Callable[..., Any]:
    def guarded(*positional: Any, **keywords: Any) -> Any:
        try:
            return call(*positional, **keywords)
        except Exception as error:
            _log.warning("%s: failed, %s. The training continues without it.", type(tracker).__name__, error)
            # Its other events, too: a tracker that could not begin a run cannot log to it.
            vars(tracker).update(dict.fromkeys(events, lambda *_, **__: None))
            return None

    return guarded


def summary_lines(state: TrainerState, resumed_steps: int, seconds: float, tokens: int) -> Sequence[str]:
    """Return the lines that summarize the steps of this process.

    Args:
        state: state at the end.
        resumed_steps: steps of the checkpoint that was resumed.
        seconds: duration, since the checkpoint was resumed.
        tokens: tokens of all ranks in that time, 0 if unknown.
    """
    losses = [float(entry["loss"]) for entry in state.log_history if "loss" in entry]
    eval_losses = [float(entry["eval_loss"]) for entry in state.log_history if "eval_loss" in entry]
    steps = state.global_step - resumed_steps
    resumed = f" after step {resumed_steps}" if resumed_steps else ""
    lines = [f"trained {steps} step{'s' * (steps != 1)}{resumed} in {seconds:.1f} s"]
    if losses:
        lines.append(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f}, best {min_finite(losses):.4f}")
    if eval_losses:
        lines.append(f"best evaluation loss: {min_finite(eval_losses):.4f}")
    if tokens:
        lines.append(f"{tokens:,} tokens, {tokens / max(seconds, 1e-9):,.0f} tokens/s")
    return [*lines, peak_line()]


def min_finite(losses: Sequence[float]) -> float:
    """Return the least finite loss, NaN if there is none."""
    return min(filter(math.isfinite, losses), default=math.nan)
