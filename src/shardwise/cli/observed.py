"""Whether a training is observed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.observing.sampler import RankObserver
    from shardwise.training.config_sections import TrainConfig


def observed(config: TrainConfig, directory: str) -> AbstractContextManager[RankObserver | None]:
    """What writes down memory and phases of this rank, where that is asked for. Collective: yes, on entering."""
    if config.observe is False:
        return nullcontext()
    from shardwise.verbs.observe import observe

    return observe(directory) if config.observe is True else observe(directory, samples_per_second=config.observe)
