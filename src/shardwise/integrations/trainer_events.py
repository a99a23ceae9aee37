"""Callbacks of the Trainer's on several ranks: what one raises, or asks for, all ranks learn.

A tracker on the first rank fails, or a callback stops the training by what only its own rank sees: the others
go on into a collective, and wait. So what callbacks raise is kept until ranks meet anyway, at the end of each
step, of each evaluation and of each save, and what they have set in ``control`` is set on all ranks there. A
step costs one sum of a few numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl

from shardwise.execution.ranks.world import World

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
            self._raise_failure()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None

        def fail() -> None:
            if failure is not None:
                raise failure

        try:
            self._world.together(fail)
        except Exception as told:
            if failure is not None:
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
