"""Callbacks of a Trainer whose requests and exceptions apply to all ranks."""

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerControl
from transformers.trainer_callback import ExportableState

from shardwise.core.errors import RankLostError, ShardwiseError, TrainingError
from shardwise.core.phases import busy_with
from shardwise.fsdp import torch_private
from shardwise.fsdp.named_tensors import reshard
from shardwise.ranks.outcomes import describe_out_of_memory, is_out_of_memory
from shardwise.ranks.world import World

_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
_MEETINGS = frozenset(
    [
        *("on_train_begin", "on_epoch_begin", "on_step_end", "on_epoch_end", "on_train_end"),
        *("on_prediction_step", "on_evaluate", "on_save"),
    ]
)
"""Events at which ranks synchronize."""


class AgreedEvents:
    """Replaces ``CallbackHandler.call_event``, and calls it.

    Args:
        call_event: the handler's method.
        trainer: the Trainer. When it does not train, ranks may call different methods.

    Attributes:
        world: the ranks of a training, which sets it. One world for all its meetings: a rank that fails alone is
            announced in it.
    """

    def __init__(self, call_event: Callable[..., TrainerControl], trainer: Any) -> None:
        self._call_event = call_event
        self.world = World(0, 1)
        self._trainer = trainer
        self._failure: Exception | None = None
        self.best: str | None = None
        """Current place of the best checkpoint of a training run that resumes, or None, also if it is gone."""

    def __call__(self, event: str, args: Any, state: Any, control: TrainerControl, **others: Any) -> TrainerControl:
        """Collective: yes, for events at which ranks synchronize, in a training run.

        Raises:
            Exception: on the rank whose callback raised it, and a CheckpointError with its message on the others.
        """
        if event == "on_train_begin":
            self._complete(args, state)
        if self.world.size == 1 or not self._trainer.is_in_train:
            return self._run(event, args, state, control, **others)
        if event == "on_evaluate":  # before callbacks, as of early stopping, read them
            self.share_metrics(others["metrics"])
        try:
            with busy_with(f"the callbacks of {event}"):
                control = self._run(event, args, state, control, **others)
        except Exception as error:
            # Not raised here: the other ranks would wait for this one in their next collective. The first failure
            # counts, because later ones may follow from it.
            self._failure = self._failure or error  # raised at the next event of _MEETINGS, on all ranks
        if event in _MEETINGS:
            self._synchronize(control)
        return control

    def _run(self, event: str, args: Any, state: Any, control: TrainerControl, **others: Any) -> TrainerControl:
        control = self._call_event(event, args, state, control, **others)
        # A callback that runs the model leaves its root group gathered. The Trainer's zero_grad() would not clear
        # the gradients of the shards then. Not in the midst of an evaluation, or of accumulation.
        if event not in ("on_prediction_step", "on_substep_end"):
            reshard(self._trainer.model)
        return control

    def share_metrics(self, metrics: dict[str, Any]) -> None:
        """Set the numbers among the metrics to those of the first rank, as they may be random, or times.

        Collective: yes.
        """
        with self.world.broadcast("compare the metrics") as exchange:
            if self.world.rank == 0:
                exchange.local = {name: float(each) for name, each in metrics.items() if isinstance(each, Real)}
        metrics.update(exchange.result)

    def _complete(self, args: Any, state: Any) -> None:
        """Give the state of a training run that resumes what its configuration and place are today."""
        state.best_model_checkpoint = self.best
        state.compute_steps(args, state.max_steps)
        # The Trainer saves the state of callbacks under names that it expects to be there.
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, ExportableState):
                state.stateful_callbacks.setdefault(type(callback).__name__, callback.state())

    def _synchronize(self, control: TrainerControl) -> None:
        # Whether this rank has failed, whether it is to stop, and its flags, in the order of _FLAGS.
        flags = [getattr(control, flag) for flag in _FLAGS]
        local = [self._failure is not None, self._trainer.is_stop_requested, *flags]
        is_failed, self._trainer.is_stop_requested, *flags = self._reduce_any(local)
        for name, value in zip(_FLAGS, flags, strict=True):
            setattr(control, name, value)
        if is_failed:
            failure, self._failure = self._failure, None
            raise_together(self.world, failure)

    def _reduce_any(self, local: list[bool]) -> list[bool]:
        """Return which of these are true on any rank, without waiting for an accelerator. Collective: yes."""
        # A process group of NCCL alone has no collectives on the host. Then the store carries the values.
        if not torch_private.has_collectives(torch.device("cpu")):
            return self.world.all_reduce_object(local, _any_by_place)
        flags = torch.tensor(local, dtype=torch.int32, device="cpu")
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return [bool(value) for value in flags.tolist()]


def _any_by_place(by_rank: Sequence[Sequence[bool]]) -> list[bool]:
    return [any(values) for values in zip(*by_rank, strict=True)]


def raise_together(world: World, failure: Exception | None) -> None:
    """Raise the failure of one rank on all ranks. That rank raises it unchanged. Collective: yes.

    Raises:
        TrainingError: a rank has run out of memory. The same on every rank.
    """
    try:
        with world.collective("run callbacks"):
            if failure is not None and is_out_of_memory(failure):
                raise TrainingError(describe_out_of_memory(failure)) from failure
            if failure is not None:
                raise failure
    except ShardwiseError as error:
        # This rank raises its own error, with the traceback of the callback, unless a rank is lost.
        if failure is not None and not is_out_of_memory(failure) and not isinstance(error, RankLostError):
            raise failure from error
        raise
