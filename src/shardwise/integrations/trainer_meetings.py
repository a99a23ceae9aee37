"""Where the ranks of a Trainer meet within a step and at callbacks, so that none waits for one that failed.

[Note: A rank that fails alone] Within a step ranks work by themselves in two places: while the batches are
made, and in the loss, once the model has run. One that raises there leaves the training, and tells why ([Note:
Nobody waits in a collective] in ``execution/meetings.py``); the others would go on into a collective, and
wait for it. So they meet first, over the store, which takes about a millisecond. On an accelerator not behind
the loss: what a loss raises of numbers is known there only when the device has been waited for, and to wait in
each step costs more than that.

Whatever a rank raises elsewhere finds the others in a collective already. Those cannot be called back; a rank
that is still in one a quarter of a minute after another has left says so, and ends.

A tracker on the first rank fails, or a callback stops the training by what only its own rank sees: the others
go on into a collective, and wait. So what callbacks raise is kept until ranks meet anyway, at the end of each
step, of each evaluation and of each save, and what they have set in ``control`` is set on all ranks there. A
step costs one sum of a few numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl

from shardwise.errors import RankLostError, ShardwiseError
from shardwise.execution.world import World


class MeetingPlace:
    """Has functions of a Trainer end with a meeting of all ranks.

    Args:
        world: the ranks, which have met before.
        where: what they are doing, for messages.
    """

    def __init__(self, world: World, where: Callable[[], str]) -> None:
        self._world = world
        self._where = where

    def after(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function, and a meeting behind it."""

        @wraps(function)
        def call(*positional: Any, **keywords: Any) -> Any:
            done = function(*positional, **keywords)
            self._meet()
            return done

        return call

    def after_batches(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``get_batch_samples``, which makes batches, and then counts them together with the other ranks."""

        @wraps(function)
        def call(epoch_iterator: Iterable[Any], num_batches: int, *positional: Any, **keywords: Any) -> Any:
            batches = list(islice(epoch_iterator, num_batches))
            self._meet()
            return function(iter(batches), num_batches, *positional, **keywords)

        return call

    def _meet(self) -> None:
        """Collective: yes.

        Raises:
            RankLostError: naming the rank that has left, and what it has raised.
        """
        try:
            self._world.together(lambda: None)
        except RankLostError as lost:
            raise RankLostError(f"{self._where()}: {lost}") from lost


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
        device: where sums are made.
        is_training: whether ranks are in a training now; at other times they may not all be here.
    """

    def __init__(
        self,
        call_event: Callable[..., TrainerControl],
        world: World,
        device: torch.device,
        is_training: Callable[[], bool],
    ) -> None:
        self._call_event = call_event
        self._world = world
        self._device = device
        self._is_training = is_training
        self._failure: Exception | None = None

    def __call__(self, event: str, args: Any, state: Any, control: TrainerControl, **others: Any) -> TrainerControl:
        """Collective: yes, for events at which ranks meet, while they train.

        Raises:
            Exception: on the rank whose callback raised it, that; on the others a CheckpointError that tells it.
        """
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
        heard = torch.tensor(told, dtype=torch.int32, device=self._device)
        dist.all_reduce(heard, op=dist.ReduceOp.MAX)
        is_failed, *flags = (bool(value) for value in heard.tolist())
        for name, value in zip(_FLAGS, flags, strict=True):
            setattr(control, name, value)
        if is_failed:
            failure, self._failure = self._failure, None
            raise_together(self._world, failure)


def raise_together(world: World, failure: Exception | None) -> None:
    """Raise on all ranks a failure that one has met with; on that one, as it was. Collective: yes."""

    def fail() -> None:
        if failure is not None:
            raise failure

    try:
        world.together(fail)
    except ShardwiseError as told:
        if failure is not None and not isinstance(told, RankLostError):
            raise failure from told
        raise


class BestFound(TrainerCallback):
    """Tells a training that goes on where its best checkpoint is now, once the Trainer has read its own state.

    Attributes:
        folder: of the best checkpoint; None where there is none.
    """

    folder: str | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:  # noqa: ARG002
        """As the Trainer calls it."""
        if self.folder is not None:
            state.best_model_checkpoint = self.folder
