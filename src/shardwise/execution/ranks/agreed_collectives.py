"""A phase with collectives of torch's own in which no rank waits for one that has failed."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.errors import DisagreementError
from shardwise.execution.ranks.messages import OddRanks
from shardwise.execution.ranks.world import World
from shardwise.models.before_collectives import BeforeCollectives

_END = "no collective"


def in_agreed_collectives(world: World, action: Callable[[], object]) -> None:
    """Run ``action``, which may ask for collectives, on every rank; all meet before each, and at the end.

    So a rank that fails, or goes another way than the others, is heard of where these would begin to wait for it.
    Each collective costs a meeting: this is for what is small and of others' making.

    Collective: yes.

    Raises:
        CheckpointError: (or a subclass) the same on every rank, when it raised on any.
        DisagreementError: ranks ask for different collectives, or some for none.
        RankLostError: a rank has been lost.
    """
    if world.size == 1:
        world.together(action)
        return
    settled: list[Exception] = []
    failure: Exception | None = None

    def ask(name: str) -> None:
        if settled:  # whoever asks has passed over it
            raise settled[0]
        try:
            world.all_reduce(lambda: name, _require_one)
        except Exception as error:
            settled.append(error)
            raise

    def end() -> str:
        if failure is not None:
            raise failure
        return _END

    try:
        with BeforeCollectives(ask):
            action()
    except Exception as error:
        failure = error
    if settled:
        raise settled[0]
    world.all_reduce(end, _require_one)


def _require_one(told: list[str]) -> None:
    if odd := OddRanks.among(told):
        raise DisagreementError(
            f"rank {odd.shown} asks for {told[odd.first]} where rank 0 asks for {told[0]}, so that each would wait "
            "for the other"
        )
