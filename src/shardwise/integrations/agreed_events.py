"""Callbacks of a Trainer that all ranks follow alike."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import TrainerControl

from shardwise.errors import RankLostError, ShardwiseError
from shardwise.execution.world import World
from shardwise.models import torch_api

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


_MEETINGS = (
    "on_train_begin",
    "on_epoch_begin",
    "on_step_end",
    "on_epoch_end",
    "on_evaluate",
    "on_save",
    "on_train_end",
)


class AgreedEvents:
    """Stands for ``CallbackHandler.call_event``, which it calls.

    Args:
        call_event: the handler's own.
        world: the ranks.
        is_training: whether a training is in progress. At other times ranks may be elsewhere.
    """

    def __init__(
        self,
        call_event: Callable[..., TrainerControl],
        world: World,
        is_training: Callable[[], bool],
    ) -> None:
        self._call_event = call_event
        self._world = world
        self._is_training = is_training
        self._failure: Exception | None = None
        self.best: str | None = None
        """Where the best checkpoint is now: told to a training that goes on, once it has read its own state."""

    def __call__(self, event: str, args: Any, state: Any, control: TrainerControl, **others: Any) -> TrainerControl:
        """Collective: yes, for events at which ranks meet, while they train.

        Raises:
            Exception: on the rank whose callback raised it, and a CheckpointError with its message on the others.
        """
        if event == "on_train_begin" and self.best is not None:
            state.best_model_checkpoint = self.best
        if self._world.size == 1 or not self._is_training():
            return self._call_event(event, args, state, control, **others)
        try:
            control = self._call_event(event, args, state, control, **others)
        except Exception as error:
            self._failure = self._failure or error
        if event in _MEETINGS:
            self._meet(control)
        return control

    def _meet(self, control: TrainerControl) -> None:
        told = [self._failure is not None, *(getattr(control, flag) for flag in _FLAGS)]
        is_failed, *flags = self._any_of(told)
        for name, value in zip(_FLAGS, flags, strict=True):
            setattr(control, name, value)
        if is_failed:
            failure, self._failure = self._failure, None
            raise_together(self._world, failure)

    def _any_of(self, told: list[bool]) -> list[bool]:
        """Return which of these are true on any rank. The host never waits for an accelerator here."""
        if not torch_api.has_collectives(torch.device("cpu")):
            return self._world.all_reduce_object(told, _by_place)
        heard = torch.tensor(told, dtype=torch.int32, device="cpu")
        dist.all_reduce(heard, op=dist.ReduceOp.MAX)
        return [bool(value) for value in heard.tolist()]


def _by_place(told: Sequence[Sequence[bool]]) -> list[bool]:
    return [any(values) for values in zip(*told, strict=True)]


def raise_together(world: World, failure: Exception | None) -> None:
    """Raise on all ranks a failure of one rank. That rank raises it unchanged. Collective: yes."""

    def fail() -> None:
        if failure is not None:
            raise failure

    try:
        world.run_all(fail)
    except ShardwiseError as told:
        if failure is not None and not isinstance(told, RankLostError):
            raise failure from told
        raise
