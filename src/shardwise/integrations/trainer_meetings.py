"""Where the ranks of a Trainer meet within a step, so that nobody waits for one that has failed alone.

[Note: A rank that fails alone] Within a step ranks work by themselves in two places: while the batches are
made, and in the loss, once the model has run. One that raises there leaves the training, and tells why ([Note:
Nobody waits in a collective] in ``execution/ranks/line.py``); the others would go on into a collective, and
wait for it. So they meet first, over the store, which takes about a millisecond. On an accelerator not behind
the loss: what a loss raises of numbers is known there only when the device has been waited for, and to wait in
each step costs more than that.

Whatever a rank raises elsewhere finds the others in a collective already. Those cannot be called back; a rank
that is still in one a quarter of a minute after another has left says so, and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from itertools import islice
from typing import Any

from shardwise.errors import RankLostError
from shardwise.execution.ranks.world import World


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
